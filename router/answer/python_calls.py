"""Reads calls written as Python's, in one part of an answer, whose mark has been found.

Each is given out as an object of its keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from router.answer.call_readers import JsonCalls, JsonKeys
from router.answer.lenient_json import SPACE, MendedJson, NotJson

_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class PythonCalls(JsonCalls):
    """Reads a list of calls, or one.

    Args:
        raw: the mark with which the part begins: text, if no call follows.
        tool_of: see `JsonCalls`.
        is_list: whether the mark has begun a list.
    """

    def __init__(self, raw: str, tool_of: Callable[[str], str | None], *, is_list: bool) -> None:
        self._is_list = is_list
        super().__init__(raw, tool_of, JsonKeys())

    def _part(self) -> Generator[None, str, None]:
        while True:
            name, letter = yield from _word("")
            tool = self._tool_of(name) or self._tool_of(name.removesuffix(".call"))
            if tool is None or letter != "(":
                raise NotJson
            yield from self._keywords(tool)
            if not self._is_list:
                return
            self._raw = []
            letter = yield
            while letter in SPACE:
                letter = yield
            if letter == "]":
                return
            if letter != ",":
                raise NotJson

    def _keywords(self, tool: str) -> Generator[None, str, None]:
        """Reads what is behind the bracket that begins arguments, up to the one that ends them."""
        key, letter = yield from _word("")
        if (key, letter) != ("", ")") and (not key or letter != "="):
            raise NotJson
        self._begin(tool)
        self._fixed = fixed = MendedJson()
        for each in f"{{{key}{letter}":
            self._give(fixed.take(_IN_JSON.get(each, each)))
        while not fixed.has_ended:
            letter = yield
            self._give(fixed.take(_IN_JSON.get(letter, letter) if fixed.is_at_top else letter))
        self._fixed = None


_IN_JSON = {"=": ":", ")": "}"}
"""What stands in JSON for the letters around and between arguments."""


def _word(word: str) -> Generator[None, str, tuple[str, str]]:
    """Reads a word -> (it, the letter behind it that is no white space)."""
    letter = yield
    while letter in _NAME or (letter in SPACE and not word):
        word += "" if letter in SPACE else letter
        letter = yield
    while letter in SPACE:
        letter = yield
    return word, letter
