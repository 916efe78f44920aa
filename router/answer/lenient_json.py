"""Fixes small defects in a JSON object that a model writes, one character at a time."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

SPACE = frozenset(" \t\r\n")
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-._")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
HEX = frozenset("0123456789abcdefABCDEF")


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
        """Whether the current string or word is a key."""
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
