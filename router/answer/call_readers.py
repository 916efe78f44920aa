"""Reads tool calls written as JSON, in the part of an answer that follows an opening mark.

Arguments are given out as they come. Valid JSON in them stays as it is written, so a mark inside one of their strings
does not count as a mark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from router.answer.lenient_json import HEX, SPACE, MendedJson, NotJson

_OUTSIDE_STRINGS = SPACE | frozenset('{}[]:,"0123456789+-.eEtrufalsn')
"""Characters that JSON has outside of its strings."""
_Reading = Generator[None, str, None]
"""Coroutine that is sent one character at a time."""
_Letter = Generator[None, str, str]
"""Coroutine that is sent one character at a time, and returns the next character or the text that it has read."""


class Taken(NamedTuple):
    """Result of a reader for new text."""

    calls: list[tuple[str, str]]
    """New arguments, each with the tool's name if they start a call, else with an empty name."""
    text: str = ""
    """Text that has turned out not to be a call, and so is content."""
    rest: str | None = None
    """Text behind the part; None: the part has not ended."""
    has_calls: bool = True
    """Whether a call has started in the part, so that a closing mark may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonKeys:
    """Keys of an object that is a call."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """Alternative keys of the arguments."""
    needs_arguments: bool = False
    """Whether an object without arguments is not a call, because no mark but its keys identifies it as one."""
    no_calls: frozenset[str] = frozenset()
    """Names that are not tools; a model writes them to say that it calls none."""
    is_loose: bool = False
    """Whether other spellings of the object, as models write them, are read as well."""
    is_bare: bool = False
    """Whether the object has no mark. Then it is a call only if it has no other keys than a call's."""


@dataclass(slots=True, kw_only=True)
class _JsonCall:
    """State of an object that may be a call, as far as it has come."""

    name: str = ""
    early: list[str] = field(default_factory=list)
    """Arguments that come before the name."""
    has_arguments: bool = False
    is_null: bool = False
    """Whether the arguments are null."""
    holds_calls: bool = False
    """Whether the object wraps calls."""


_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
MAX_LEVELS = 2
"""Maximum number of objects that may wrap that of a call."""
_BESIDE = frozenset(("function", "id", "tool_call_id", "tool_calls", "type"))
"""Keys that a call without a mark may have in addition to its name and its arguments."""


class JsonCalls:
    """Reader of a call, or of a list of calls.

    Args:
        raw: the opening mark of the part; it becomes text if no call follows.
        tool_of: returns the tool for a name, or None. A call of an unknown tool is text.
        keys: keys of an object with name and arguments.
        name: the tool's name if the mark has it; then only the arguments follow.
    """

    def __init__(self, raw: str, tool_of: Callable[[str], str | None], keys: JsonKeys, name: str = "") -> None:
        self._raw: list[str] | None = [raw]
        """Text since the last call; None: inside a call that has started."""
        self._tool_of = tool_of
        self._keys = keys
        self._new: list[tuple[str, list[str]]] = []
        self._has_begun = False
        """Whether a call has started."""
        self._is_call = True
        """Whether the call that has started names a tool, and not one of `no_calls`."""
        self._fixed: MendedJson | None = None
        """State of the arguments that are being read."""
        self._letters = self._named(name) if name else self._part()
        next(self._letters)

    def take(self, text: str) -> Taken:
        """Read more text of the part."""
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
        """Return the text of a call that has not started, after the end of the answer.

        Args:
            is_whole: whether to close open arguments; else they were cut off.
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
        """Give out characters of the arguments of the current call."""
        if not self._is_call:
            return
        if not self._new:
            self._new.append(("", []))
        self._new[-1][1].append(letters)

    def _close(self) -> None:
        """Close the arguments that are being read, if their call has started."""
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
        """Read the calls of a list whose opening bracket has been read, up to its end."""
        letter = ""
        while letter != "]":
            letter = yield from _space()
            yield from self._object(letter, levels)
            self._raw = []
            letter = yield from _space()
            if letter not in ",]":
                raise NotJson

    def _object(self, letter: str, levels: int = MAX_LEVELS) -> _Reading:
        """Read a call from its first character to its last.

        Args:
            letter: the first character.
            levels: number of wrapping objects that are still allowed.
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
        """Read the value of a member of a call, and return the first character behind it that is not white space.

        Args:
            letter: the first character of the value.
            call: state of the call.
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
        """Read arguments from their first character to their last.

        Args:
            letter: the first character.
            call: keeps the arguments if its name has not come yet.
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
        """Read the separator behind a member, and return the next member's first character, or the brace."""
        if letter == "}":
            return letter
        if letter != "," or (letter := (yield from _space())) != '"':
            raise NotJson
        return letter


def _space() -> _Letter:
    """Return the next character that is not white space."""
    while (letter := (yield)) in SPACE:
        pass
    return letter


def _string(letter: str) -> _Letter:
    """Read a JSON string from its first character to its last, and return its value."""
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
    """Read one character of JSON text that is encoded in a string, and return it; empty: the string has ended.

    The escape of a character outside ASCII stays an escape, because the decoded text is JSON as well.
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
    """Read a key and its colon, and return the key with the first character of the value."""
    key = yield from _string(letter)
    if (yield from _space()) != ":":
        raise NotJson
    return key, (yield from _space())


def _nested(letter: str, take: Callable[[str], object]) -> _Reading:
    """Read an object or a list from its first character to its last.

    Args:
        letter: the first character.
        take: receives each character.
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
    """Skip a value, and return the first character behind it that is not white space."""
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
    """Finds the end of a JSON object or list in growing text."""

    def __init__(self) -> None:
        self._letters: _Reading | None = None
        self._num_taken = 0
        self._length: int | None = None

    def length(self, text: str) -> int | None:
        """Return the length of the value in characters: 0 if the text does not start with one, None while incomplete.

        Args:
            text: the text of the previous call and all that has come since.
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
