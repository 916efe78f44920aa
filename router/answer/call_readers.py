"""Reads calls written as JSON in one part of an answer, whose mark has been found.

Arguments are given out as they come. What is valid JSON in them stays as it is written, so a mark in one of their
strings is no mark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from router.answer.lenient_json import HEX, SPACE, MendedJson, NotJson

_OUTSIDE_STRINGS = SPACE | frozenset('{}[]:,"0123456789+-.eEtrufalsn')
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
    has_calls: bool = True
    """Whether a call has begun in the part, so that the mark behind calls may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonKeys:
    """Where an object has what makes it a call."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """Any of them."""
    needs_arguments: bool = False
    """Whether an object without arguments is no call: only its keys tell that it is one."""
    no_calls: frozenset[str] = frozenset()
    """Names of what is no tool: with them a model says that it calls none."""
    is_loose: bool = False
    """Whether other ways in which models write the object are read, too."""
    is_bare: bool = False
    """Whether an object is a call without a mark: it has no keys but a call's."""


@dataclass(slots=True, kw_only=True)
class _JsonCall:
    """What has come of the object of a call."""

    name: str = ""
    early: list[str] = field(default_factory=list)
    """Arguments that come before the name."""
    has_arguments: bool = False
    is_null: bool = False
    """Whether its arguments are null."""
    holds_calls: bool = False
    """Whether it is an object around calls."""


_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
MAX_LEVELS = 2
"""Objects that may stand around that of a call."""
_BESIDE = frozenset(("function", "id", "tool_call_id", "tool_calls", "type"))
"""Keys that a call without a mark may have in addition to its name and its arguments."""


class JsonCalls:
    """Reads a call, or a list of calls.

    Args:
        raw: the mark with which the part begins: text, if no call follows.
        tool_of: returns the tool that a name means; None: none. A call of another one is text.
        keys: those of an object with name and arguments.
        name: the tool's, if the mark has it: the arguments follow alone.
    """

    def __init__(self, raw: str, tool_of: Callable[[str], str | None], keys: JsonKeys, name: str = "") -> None:
        self._raw: list[str] | None = [raw]
        """What has come since the last call; None: within one that has begun."""
        self._tool_of = tool_of
        self._keys = keys
        self._new: list[tuple[str, list[str]]] = []
        self._has_begun = False
        """Whether a call has begun."""
        self._is_call = True
        """Whether what has begun is a call, and not the word that there is none."""
        self._fixed: MendedJson | None = None
        """The arguments in which the text is."""
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
            except NotJson:
                self._close()
                return self._taken("".join((self._raw or ())[:-1]), text[place:])
        return self._taken()

    def flush(self, *, is_whole: bool = False) -> Taken:
        """Returns what has come of a call that has not begun, now that the answer has ended.

        Args:
            is_whole: whether arguments that are open are closed; else they were cut off.
        """
        if is_whole:
            self._close()
        return self._taken("".join(self._raw or ()))

    def _taken(self, text: str = "", rest: str | None = None) -> Taken:
        new, self._new = self._new, []
        return Taken([(name, "".join(arguments)) for name, arguments in new], text, rest, self._has_begun)

    def _begin(self, name: str, arguments: str = "") -> None:
        self._has_begun = True
        self._is_call = name not in self._keys.no_calls
        if self._is_call:
            self._new.append((name, [arguments]))
        self._raw = None

    def _give(self, letters: str) -> None:
        """Gives out letters of the arguments of the call that has begun."""
        if not self._is_call:
            return
        if not self._new:
            self._new.append(("", []))
        self._new[-1][1].append(letters)

    def _close(self) -> None:
        """Closes the arguments in which the text is, if their call has begun."""
        if self._fixed is not None and self._raw is None:
            self._give(self._fixed.close())

    def _named(self, name: str) -> _Reading:
        letter = yield from _space()
        if letter != "{":
            raise NotJson
        yield from self._arguments(letter, _JsonCall(name=name))

    def _part(self) -> _Reading:
        letter = yield from _space()
        yield from self._list() if letter == "[" else self._object(letter)

    def _list(self, levels: int = MAX_LEVELS) -> _Reading:
        """Reads calls behind the begin of a list, up to its end."""
        letter = ""
        while letter != "]":
            letter = yield from _space()
            yield from self._object(letter, levels)
            self._raw = []
            letter = yield from _space()
            if letter not in ",]":
                raise NotJson

    def _object(self, letter: str, levels: int = MAX_LEVELS) -> _Reading:
        """Reads a call, from its first letter to its last one.

        Args:
            levels: objects that may stand around it.
        """
        if letter != "{":
            raise NotJson
        call = _JsonCall()
        letter = yield from _space()
        while self._keys.is_loose and letter == "{":  # doubled, as in a template
            letter = yield from _space()
        while letter != "}":
            key, letter = yield from _key(letter)
            letter = yield from self._member(key, letter, call, levels)
            letter = yield from self._behind(letter)
        if call.holds_calls:
            return
        is_null = call.is_null and self._keys.is_loose
        if not call.name or (self._keys.needs_arguments and not (call.has_arguments or is_null)):
            raise NotJson
        if not call.has_arguments:
            self._begin(call.name, "{}")

    def _member(self, key: str, letter: str, call: _JsonCall, levels: int) -> _Letter:
        """Reads the value of a member of a call, and returns the first letter behind it that is no space.

        Args:
            letter: the value's first.
            call: what has come of the call.
            levels: see `_object`.
        """
        keys = self._keys
        if keys.is_bare and key not in (keys.name, *keys.arguments, *_BESIDE):
            raise NotJson
        if keys.is_loose and levels and not call.name and (key, letter) in (("function", "{"), ("tool_calls", "[")):
            call.holds_calls = True
            yield from self._list(levels - 1) if letter == "[" else self._object(letter, levels - 1)
        elif not call.name and (key == keys.name or (keys.is_loose and (key, letter) == ("function", '"'))):
            call.name = yield from self._name(letter)
            if call.early:
                self._begin(call.name, "".join(call.early))
        elif key in keys.arguments and not call.has_arguments and letter != "n":
            call.has_arguments = True
            yield from self._arguments(letter, call)
        else:
            call.is_null = call.is_null or (key in keys.arguments and letter == "n")
            return (yield from _other(letter))
        return (yield from _space())

    def _arguments(self, letter: str, call: _JsonCall) -> _Reading:
        """Reads arguments from their first letter to their last one.

        Args:
            call: keeps them if its name has not come.
        """
        is_text = self._keys.is_loose and letter == '"'
        while is_text and (letter := (yield from _text_letter())) in SPACE:
            pass
        if letter and letter != "{":
            raise NotJson
        if call.name:
            self._begin(call.name)
        give = self._give if call.name else call.early.append
        self._fixed = MendedJson()
        for each in letter or "{":
            give(self._fixed.take(each))
        while letter and not self._fixed.has_ended:
            letter = (yield from _text_letter()) if is_text else (yield)
            for each in letter:
                give(self._fixed.take(each))
        give("" if self._fixed.has_ended else self._fixed.close())
        self._fixed = None
        while is_text and letter:
            letter = yield from _text_letter()

    def _name(self, letter: str) -> _Letter:
        name = self._tool_of((yield from _string(letter)))
        if name is None:
            raise NotJson
        return name

    @staticmethod
    def _behind(letter: str) -> _Letter:
        """Reads what is between two members of an object, and returns the first letter of the next; or its end."""
        if letter == "}":
            return letter
        if letter != "," or (letter := (yield from _space())) != '"':
            raise NotJson
        return letter


def _space() -> _Letter:
    """Returns the next letter that is no white space."""
    while (letter := (yield)) in SPACE:
        pass
    return letter


def _string(letter: str) -> _Letter:
    """Reads a string from its first letter to its last one, and returns what it stands for."""
    letters = [letter]
    if letter != '"':
        raise NotJson
    is_escaped = False
    while is_escaped or letters[-1] != '"' or len(letters) == 1:
        is_escaped = letters[-1] == "\\" and not is_escaped
        letters.append((yield))
    try:
        return str(json.loads("".join(letters), strict=False))
    except ValueError:
        raise NotJson from None


def _text_letter() -> _Letter:
    """Reads what is one letter of a text that stands in a string, and returns it; empty: the string has ended.

    An escape of a letter that is no ASCII stays one: the text is JSON.
    """
    letter = yield
    if letter == '"':
        return ""
    if letter != "\\":
        return letter
    letter = yield
    if letter != "u":
        return _ESCAPED.get(letter, letter)
    digits = (yield) + (yield) + (yield) + (yield)
    if not set(digits) <= HEX:
        raise NotJson
    return chr(int(digits, 16)) if int(digits, 16) < 0x80 else f"\\u{digits}"


def _key(letter: str) -> Generator[None, str, tuple[str, str]]:
    """Reads a key and its colon, and returns it with the first letter of the value."""
    key = yield from _string(letter)
    if (yield from _space()) != ":":
        raise NotJson
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
            raise NotJson
        else:
            in_string = letter == '"'
            depth += (letter in "{[") - (letter in "}]")
        take(letter)


def _other(letter: str) -> _Letter:
    """Reads a value that is of no use, and returns the letter behind it that is no white space."""
    if letter in "{[":
        yield from _nested(letter, SPACE.issuperset)
        return (yield from _space())
    if letter == '"':
        yield from _string(letter)
        return (yield from _space())
    while letter not in ",}":
        if letter not in _OUTSIDE_STRINGS or letter in '{[]":':
            raise NotJson
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
                    self._letters = _nested(letter, SPACE.issuperset)
                    next(self._letters)
                else:
                    raise NotJson
            except StopIteration:
                self._length = self._num_taken
                break
            except NotJson:
                self._length = 0
                break
        return self._length
