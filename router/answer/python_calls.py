"""Reads tool calls written in Python's syntax, in the part of an answer that follows an opening mark.

The arguments of each call are given out as a JSON object of its keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from router.answer.call_readers import JsonCalls, JsonKeys
from router.answer.lenient_json import SPACE, MendedJson, NotJson

_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class PythonCalls(JsonCalls):
    """Reader of a call, or of a list of calls.

    Args:
        raw: the opening mark of the part; it becomes text if no call follows.
        tool_of: see `JsonCalls`.
        is_list: whether the mark has opened a list.
    """

    def __init__(self, raw: str, tool_of: Callable[[str], str | None], *, is_list: bool) -> None:
        self._is_list = is_list
        super().__init__(raw, tool_of, JsonKeys())

    def _part(self) -> Generator[None, str, None]:
        while True:
            name, char = yield from _word("")
            tool = self._tool_of(name) or self._tool_of(name.removesuffix(".call"))
            if tool is None or char != "(":
                raise NotJson
            yield from self._keywords(tool)
            if not self._is_list:
                return
            self._raw = []
            char = yield
            while char in SPACE:
                char = yield
            if char == "]":
                return
            if char != ",":
                raise NotJson

    def _keywords(self, tool: str) -> Generator[None, str, None]:
        """Read the arguments of a call whose opening bracket has been read, up to the closing bracket."""
        key, char = yield from _word("")
        if (key, char) != ("", ")") and (not key or char != "="):
            raise NotJson
        self._begin(tool)
        self._fixed = fixed = MendedJson()
        for each in f"{{{key}{char}":
            self._give(fixed.take(_IN_JSON.get(each, each)))
        while not fixed.has_ended:
            char = yield
            self._give(fixed.take(_IN_JSON.get(char, char) if fixed.is_at_top else char))
        self._fixed = None


_IN_JSON = {"=": ":", ")": "}"}
"""JSON's counterparts of the characters around and between arguments."""


def _word(word: str) -> Generator[None, str, tuple[str, str]]:
    """Read the rest of a word, and return (the word, the first character behind it that is not white space)."""
    char = yield
    while char in _NAME or (char in SPACE and not word):
        word += "" if char in SPACE else char
        char = yield
    while char in SPACE:
        char = yield
    return word, char
