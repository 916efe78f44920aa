"""Reads calls written as JSON in one part of an answer, whose mark has been found.

Arguments are given out as they come and as they are written; what is inside of them is only followed to its end, so
that a mark in one of their strings is no mark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

_SPACE = frozenset(" \t\r\n")
_OUTSIDE_STRINGS = _SPACE | frozenset('{}[]:,"0123456789+-.eEtrufalsn')
"""Letters that JSON has outside of its strings."""
_Reading = Generator[None, str, None]
"""Takes letter by letter what it reads."""
_Letter = Generator[None, str, str]
"""Takes letter by letter what it reads, and returns a letter or what it has read."""


class Taken(NamedTuple):
    """What a reader has found in new text."""

    calls: list[tuple[str, str]]
    """New arguments, each with the tool's name if a call begins with them, else with an empty one."""
    text: str = ""
    """What has turned out to be no call: content."""
    rest: str | None = None
    """What is behind the part; None: it goes on."""


class _NotJson(Exception):
    """A letter cannot come where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonKeys:
    """Where an object has what makes it a call."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """Any of them."""
    needs_arguments: bool = False
    """Whether an object without arguments is no call: only its keys tell that it is one."""


class JsonCalls:
    """Reads a call, or a list of calls.

    Args:
        raw: the mark with which the part begins: text, if no call follows.
        is_tool: says whether a name is that of a tool; a call of another one is text.
        keys: those of an object with name and arguments.
        name: the tool's, if the mark has it: the arguments follow alone.
    """

    def __init__(self, raw: str, is_tool: Callable[[str], bool], keys: JsonKeys, name: str = "") -> None:
        self._raw: list[str] | None = [raw]
        """What has come since the last call; None: within one that has begun."""
        self._is_tool = is_tool
        self._keys = keys
        self._new: list[tuple[str, list[str]]] = []
        self._letters = self._named(name) if name else self._part()
        next(self._letters)

    def take(self, text: str) -> Taken:
        """Takes more text of the part."""
        for place, letter in enumerate(text):
            if self._raw is not None:
                self._raw.append(letter)
            try:
                self._letters.send(letter)
            except StopIteration:
                return self._taken(rest=text[place + 1 :])
            except _NotJson:
                return self._taken("".join((self._raw or ())[:-1]), text[place:])
        return self._taken()

    def flush(self) -> Taken:
        """Returns what has come of a call that has not begun, now that the answer has ended."""
        return self._taken("".join(self._raw or ()))

    def _taken(self, text: str = "", rest: str | None = None) -> Taken:
        new, self._new = self._new, []
        return Taken([(name, "".join(arguments)) for name, arguments in new], text, rest)

    def _begin(self, name: str, arguments: str = "") -> None:
        self._new.append((name, [arguments]))
        self._raw = None

    def _give(self, letter: str) -> None:
        """Gives out a letter of the arguments of the call that has begun."""
        if not self._new:
            self._new.append(("", []))
        self._new[-1][1].append(letter)

    def _named(self, name: str) -> _Reading:
        letter = yield from _space()
        if letter != "{":
            raise _NotJson
        self._begin(name)
        yield from _nested(letter, self._give)

    def _part(self) -> _Reading:
        letter = yield from _space()
        if letter != "[":
            yield from self._object(letter)
            return
        while letter != "]":
            letter = yield from _space()
            yield from self._object(letter)
            self._raw = []
            letter = yield from _space()
            if letter not in ",]":
                raise _NotJson

    def _object(self, letter: str) -> _Reading:
        """Reads a call, from its first letter to its last one."""
        if letter != "{":
            raise _NotJson
        name, early = "", list[str]()  # arguments that come before the name
        has_arguments = False
        letter = yield from _space()
        while letter != "}":
            key, letter = yield from _key(letter)
            if key == self._keys.name and not name:
                name = yield from self._name(letter)
                if early:
                    self._begin(name, "".join(early))
                letter = yield from _space()
            elif key in self._keys.arguments and not has_arguments and letter != "n":
                if letter != "{":
                    raise _NotJson
                has_arguments = True
                if name:
                    self._begin(name)
                yield from _nested(letter, self._give if name else early.append)
                letter = yield from _space()
            else:
                letter = yield from _other(letter)
            letter = yield from self._behind(letter)
        if not name or (self._keys.needs_arguments and not has_arguments):
            raise _NotJson
        if not has_arguments:
            self._begin(name, "{}")

    def _name(self, letter: str) -> _Letter:
        name = yield from _string(letter)
        if not self._is_tool(name):
            raise _NotJson
        return name

    @staticmethod
    def _behind(letter: str) -> _Letter:
        """Reads what is between two members of an object, and returns the first letter of the next; or its end."""
        if letter == "}":
            return letter
        if letter != "," or (letter := (yield from _space())) != '"':
            raise _NotJson
        return letter


def _space() -> _Letter:
    """Returns the next letter that is no white space."""
    while (letter := (yield)) in _SPACE:
        pass
    return letter


def _string(letter: str) -> _Letter:
    """Reads a string from its first letter to its last one, and returns what it stands for."""
    letters = [letter]
    if letter != '"':
        raise _NotJson
    is_escaped = False
    while is_escaped or letters[-1] != '"' or len(letters) == 1:
        is_escaped = letters[-1] == "\\" and not is_escaped
        letters.append((yield))
    try:
        return str(json.loads("".join(letters), strict=False))
    except ValueError:
        raise _NotJson from None


def _key(letter: str) -> Generator[None, str, tuple[str, str]]:
    """Reads a key and its colon, and returns it with the first letter of the value."""
    key = yield from _string(letter)
    if (yield from _space()) != ":":
        raise _NotJson
    return key, (yield from _space())


def _nested(letter: str, take: Callable[[str], object]) -> _Reading:
    """Reads an object or a list from its first letter to its last one.

    Args:
        take: gets each letter.
    """
    take(letter)
    depth, in_string, is_escaped = 1, False, False
    while depth:
        letter = yield
        if in_string:
            in_string = is_escaped or letter != '"'
            is_escaped = letter == "\\" and not is_escaped
        elif letter not in _OUTSIDE_STRINGS:
            raise _NotJson
        else:
            in_string = letter == '"'
            depth += (letter in "{[") - (letter in "}]")
        take(letter)


def _other(letter: str) -> _Letter:
    """Reads a value that is of no use, and returns the letter behind it that is no white space."""
    if letter in "{[":
        yield from _nested(letter, _SPACE.issuperset)
        return (yield from _space())
    if letter == '"':
        yield from _string(letter)
        return (yield from _space())
    while letter not in ",}":
        if letter not in _OUTSIDE_STRINGS or letter in '{[]":':
            raise _NotJson
        letter = yield
    return letter


class JsonEnd:
    """Follows an object or a list to its end, in text that grows."""

    def __init__(self) -> None:
        self._letters: _Reading | None = None
        self._num_taken = 0
        self._length: int | None = None

    def length(self, text: str) -> int | None:
        """Returns how many characters it has: 0 if the text does not begin with one, None if it goes on.

        Args:
            text: that of the call before, and what has come since.
        """
        for letter in text[self._num_taken :] if self._length is None else "":
            self._num_taken += 1
            try:
                if self._letters is not None:
                    self._letters.send(letter)
                elif letter in "{[":
                    self._letters = _nested(letter, _SPACE.issuperset)
                    next(self._letters)
                else:
                    raise _NotJson
            except StopIteration:
                self._length = self._num_taken
                break
            except _NotJson:
                self._length = 0
                break
        return self._length
