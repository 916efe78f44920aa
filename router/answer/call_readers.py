"""Reads tool calls written as JSON or in Python's syntax, in the part of an answer that follows an opening mark.

Arguments are given out as they come. Valid JSON in them stays as it is written, so a mark inside one of their strings
does not count as a mark. The arguments of a call in Python's syntax are given out as a JSON object of its keyword
arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

SPACE = frozenset(" \t\r\n")
_OUTSIDE_STRINGS = SPACE | frozenset('{}[]:,"0123456789+-.eEtrufalsn')
"""Characters that JSON has outside of its strings."""
_Reading = Generator[None, str, None]
"""Coroutine that is sent one character at a time."""
_Char = Generator[None, str, str]
"""Coroutine that is sent one character at a time, and returns the next character or the text that it has read."""
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-._")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
HEX = frozenset("0123456789abcdefABCDEF")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class NotJson(Exception):
    """A character is not allowed at its position."""


class _Expects(Enum):
    FIRST = auto()
    """First member of an object or a list, or its end."""
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()
    """A comma, or the end of the object or the list."""


class MendedJson:
    """Converter of one object, fed one character at a time, to valid JSON.

    Valid JSON is returned unchanged. Raw control characters in strings are escaped, backslashes of invalid escapes are
    doubled, and single quotes become double quotes. Python's True, False and None become JSON's literals, other bare
    words become strings, and a trailing comma is dropped. Text that may start a defect is held back until it is known.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._expects = _Expects.VALUE
        self._quote = ""
        """Closing quote of the current string; empty: outside of strings."""
        self._is_key = False
        """True if the current string or word is a key."""
        self._escape = ""
        self._word = ""
        self._ready = ""
        """A word that has ended before a character that is not allowed."""
        self._comma = ""
        """A held comma and the white space behind it."""

    @property
    def has_ended(self) -> bool:
        """True if the object is complete."""
        return self._expects is _Expects.NEXT and not self._closers

    @property
    def is_at_top(self) -> bool:
        """True if the next character belongs to the object itself, not to a string or a nested value."""
        return len(self._closers) == 1 and not self._quote

    def take(self, char: str) -> str:
        """Process a character, and return the text that is ready.

        Raises:
            NotJson: the character is not allowed here; it is not consumed.
        """
        if self._quote:
            return self._in_string(char)
        if char in _WORD and self._word:
            self._word += char
            return ""
        self._ready += self._ended_word()
        self._ready, shown = "", self._ready + self._outside(char)
        return shown

    def close(self) -> str:
        """Return the text that completes the object, when no more of it comes."""
        closed = self._ready + (self._ended_string() if self._quote else self._ended_word())
        if self._expects is _Expects.COLON:
            closed += ": null"
        elif self._expects is _Expects.VALUE and not self._comma:
            closed += "null"
        return closed + "".join(reversed(self._closers))

    def _outside(self, char: str) -> str:
        """Process a character outside of strings."""
        if char in SPACE:
            self._comma += char if self._comma else ""
            return "" if self._comma else char
        if char == "," and self._expects is _Expects.NEXT and self._closers:
            self._comma, self._expects = ",", _Expects.KEY if self._closers[-1] == "}" else _Expects.VALUE
            return ""
        if char == ":" and self._expects is _Expects.COLON:
            self._expects = _Expects.VALUE
            return ":"
        if char in "}]":
            return self._ended(char)
        return self._begun(char)

    def _ended(self, char: str) -> str:
        is_last = self._comma or self._expects in (_Expects.FIRST, _Expects.NEXT)
        if not is_last or not self._closers or self._closers[-1] != char:
            raise NotJson
        self._closers.pop()
        space, self._comma, self._expects = self._comma[1:], "", _Expects.NEXT
        return space + char

    def _begun(self, char: str) -> str:
        """Process the first character of a key or a value."""
        if self._expects in (_Expects.COLON, _Expects.NEXT):
            raise NotJson
        in_object = bool(self._closers) and self._closers[-1] == "}"
        self._is_key = in_object and self._expects is not _Expects.VALUE
        if char in "\"'":
            self._quote, shown = char, '"'
        elif char in _WORD:
            self._word, shown = char, ""
        elif char in "{[" and not self._is_key:
            self._closers.append("}" if char == "{" else "]")
            self._expects, shown = _Expects.FIRST, char
        else:
            raise NotJson
        comma, self._comma = self._comma, ""
        return comma + shown

    def _in_string(self, char: str) -> str:
        if self._escape:
            return self._escaped(char)
        if char == "\\":
            self._escape = char
            return ""
        if char == self._quote:
            return self._ended_string()
        return _in_quotes(char)

    def _escaped(self, char: str) -> str:
        """Process a character of an escape."""
        escape, self._escape = self._escape + char, ""
        if escape == "\\u" or (len(escape) < 6 and escape.startswith("\\u") and char in HEX):
            self._escape = escape
            return ""
        if (char in '"\\/bfnrt' and len(escape) == 2) or (len(escape) == 6 and char in HEX):
            return escape
        if char == "'" and len(escape) == 2:
            return char
        return f"\\\\{escape[1:-1]}{self._in_string(char)}"

    def _ended_string(self) -> str:
        self._quote, self._escape = "", ""
        self._expects = _Expects.COLON if self._is_key else _Expects.NEXT
        return '"'

    def _ended_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        self._expects = _Expects.COLON if self._is_key else _Expects.NEXT
        if not self._is_key and (word in _LITERALS or _NUMBER.fullmatch(word)):
            return _LITERALS.get(word, word)
        return json.dumps(word)


def _in_quotes(char: str) -> str:
    """Return a character as it is written in a JSON string."""
    return char if char >= " " and char != '"' else json.dumps(char)[1:-1]


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
        self._chars = self._named(name) if name else self._part()
        next(self._chars)

    def take(self, text: str) -> Taken:
        """Read more text of the part."""
        for place, char in enumerate(text):
            if self._raw is not None:
                self._raw.append(char)
            try:
                self._chars.send(char)
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

    def _give(self, chars: str) -> None:
        """Give out characters of the arguments of the current call."""
        if not self._is_call:
            return
        if not self._new:
            self._new.append(("", []))
        self._new[-1][1].append(chars)

    def _close(self) -> None:
        """Close the arguments that are being read, if their call has started."""
        if self._fixed is not None and self._raw is None:
            self._give(self._fixed.close())

    def _named(self, name: str) -> _Reading:
        char = yield from _space()
        if char != "{":
            raise NotJson
        yield from self._arguments(char, _JsonCall(name=name))

    def _part(self) -> _Reading:
        char = yield from _space()
        yield from self._list() if char == "[" else self._object(char)

    def _await_next(self) -> None:
        """Note that a call is complete: what follows becomes text if it is no call."""
        self._raw = []

    def _list(self, levels: int = MAX_LEVELS) -> _Reading:
        """Read the calls of a list whose opening bracket has been read, up to its end."""
        char = ""
        while char != "]":
            char = yield from _space()
            yield from self._object(char, levels)
            self._await_next()
            char = yield from _space()
            if char not in ",]":
                raise NotJson

    def _object(self, char: str, levels: int = MAX_LEVELS) -> _Reading:
        """Read a call from its first character to its last.

        Args:
            char: the first character.
            levels: number of wrapping objects that are still allowed.
        """
        if char != "{":
            raise NotJson
        call = _JsonCall()
        char = yield from _space()
        while self._keys.is_loose and char == "{":  # doubled braces, as in a template
            char = yield from _space()
        while char != "}":
            key, char = yield from _key(char)
            char = yield from self._member(key, char, call, levels)
            char = yield from self._behind(char)
        if call.holds_calls:
            return
        is_null = call.is_null and self._keys.is_loose
        if not call.name or (self._keys.needs_arguments and not (call.has_arguments or is_null)):
            raise NotJson
        if not call.has_arguments:
            self._begin(call.name, "{}")

    def _member(self, key: str, char: str, call: _JsonCall, levels: int) -> _Char:
        """Read the value of a member of a call, and return the first character behind it that is not white space.

        Args:
            char: the first character of the value.
            call: state of the call.
            levels: see `_object`.
        """
        keys = self._keys
        if keys.is_bare and key not in (keys.name, *keys.arguments, *_BESIDE):
            raise NotJson
        if keys.is_loose and levels and not call.name and (key, char) in (("function", "{"), ("tool_calls", "[")):
            call.holds_calls = True
            yield from self._list(levels - 1) if char == "[" else self._object(char, levels - 1)
        elif not call.name and (key == keys.name or (keys.is_loose and (key, char) == ("function", '"'))):
            call.name = yield from self._name(char)
            if call.early:
                self._begin(call.name, "".join(call.early))
        elif key in keys.arguments and not call.has_arguments and char != "n":
            call.has_arguments = True
            yield from self._arguments(char, call)
        else:
            call.is_null = call.is_null or (key in keys.arguments and char == "n")
            return (yield from _other(char))
        return (yield from _space())

    def _arguments(self, char: str, call: _JsonCall) -> _Reading:
        """Read arguments from their first character to their last.

        Args:
            char: the first character.
            call: keeps the arguments if its name has not come yet.
        """
        is_text = self._keys.is_loose and char == '"'
        while is_text and (char := (yield from _text_char())) in SPACE:
            pass
        if char and char != "{":
            raise NotJson
        if call.name:
            self._begin(call.name)
        give = self._give if call.name else call.early.append
        self._fixed = MendedJson()
        for each in char or "{":
            give(self._fixed.take(each))
        while char and not self._fixed.has_ended:
            char = (yield from _text_char()) if is_text else (yield)
            for each in char:
                give(self._fixed.take(each))
        give("" if self._fixed.has_ended else self._fixed.close())
        self._fixed = None
        while is_text and char:
            char = yield from _text_char()

    def _name(self, char: str) -> _Char:
        name = self._tool_of((yield from _string(char)))
        if name is None:
            raise NotJson
        return name

    @staticmethod
    def _behind(char: str) -> _Char:
        """Read the separator behind a member, and return the next member's first character, or the brace."""
        if char == "}":
            return char
        if char != "," or (char := (yield from _space())) != '"':
            raise NotJson
        return char


def _space() -> _Char:
    """Return the next character that is not white space."""
    while (char := (yield)) in SPACE:
        pass
    return char


def _string(char: str) -> _Char:
    """Read a JSON string from its first character to its last, and return its value."""
    chars = [char]
    if char != '"':
        raise NotJson
    is_escaped = False
    while is_escaped or chars[-1] != '"' or len(chars) == 1:
        is_escaped = chars[-1] == "\\" and not is_escaped
        chars.append((yield))
    try:
        return str(json.loads("".join(chars), strict=False))
    except ValueError:
        raise NotJson from None


def _text_char() -> _Char:
    """Read one character of JSON text that is encoded in a string, and return it; empty: the string has ended.

    The escape of a character outside ASCII stays an escape, because the decoded text is JSON as well.
    """
    char = yield
    if char == '"':
        return ""
    if char != "\\":
        return char
    char = yield
    if char != "u":
        return _ESCAPED.get(char, char)
    digits = (yield) + (yield) + (yield) + (yield)
    if not set(digits) <= HEX:
        raise NotJson
    return chr(int(digits, 16)) if int(digits, 16) < 0x80 else f"\\u{digits}"


def _key(char: str) -> Generator[None, str, tuple[str, str]]:
    """Read a key and its colon, and return the key with the first character of the value."""
    key = yield from _string(char)
    if (yield from _space()) != ":":
        raise NotJson
    return key, (yield from _space())


def _nested(char: str, take: Callable[[str], object]) -> _Reading:
    """Read an object or a list from its first character to its last.

    Args:
        char: the first character.
        take: receives each character.
    """
    take(char)
    depth, in_string, is_escaped = 1, False, False
    while depth:
        char = yield
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char not in _OUTSIDE_STRINGS:
            raise NotJson
        else:
            in_string = char == '"'
            depth += (char in "{[") - (char in "}]")
        take(char)


def _other(char: str) -> _Char:
    """Skip a value, and return the first character behind it that is not white space."""
    if char in "{[":
        yield from _nested(char, SPACE.issuperset)
        return (yield from _space())
    if char == '"':
        yield from _string(char)
        return (yield from _space())
    while char not in ",}":
        if char not in _OUTSIDE_STRINGS or char in '{[]":':
            raise NotJson
        char = yield
    return char


class JsonEnd:
    """Finds the end of a JSON object or list in growing text."""

    def __init__(self) -> None:
        self._chars: _Reading | None = None
        self._num_taken = 0
        self._length: int | None = None

    def length(self, text: str) -> int | None:
        """Return the length of the value in characters: 0 if the text does not start with one, None while incomplete.

        Args:
            text: the text of the previous call and all that has come since.
        """
        for char in text[self._num_taken :] if self._length is None else "":
            self._num_taken += 1
            try:
                if self._chars is not None:
                    self._chars.send(char)
                elif char in "{[":
                    self._chars = _nested(char, SPACE.issuperset)
                    next(self._chars)
                else:
                    raise NotJson
            except StopIteration:
                self._length = self._num_taken
                break
            except NotJson:
                self._length = 0
                break
        return self._length


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
            self._await_next()
            char = yield from _space()
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
