"""Read the calls in one part of an answer, whose mark has been found: as JSON, or as tags.

Arguments are given out as they come. As JSON they come as they are written; what is inside of them is only followed to
its end, so that a mark in one of their strings is no mark. As tags they come one after the other, made JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from router.answer.marks import Mark

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


@dataclass(frozen=True, slots=True)
class Tags:
    """How arguments are written as tags."""

    tag: regex.Pattern[str]
    """One argument; its groups are `key` and `value`."""
    closes: Mark
    """Stands behind the last one."""

    endings: tuple[str, ...] = ("",)
    """Texts of which each tag and the mark end with one; an empty one: nothing is known of their ends."""


class TagCalls:
    """Reads a call whose arguments are tags.

    Args:
        tags: says how they are written.
        name: the tool's, which the mark before them has.
        parameters: JSON schema of the arguments, which says of what type they are.
    """

    def __init__(self, tags: Tags, name: str, parameters: Mapping[str, Any]) -> None:
        properties = parameters.get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        self._tags = tags
        self._held = ""
        self._words = ""
        """Text between the arguments: it stands behind the call."""
        self._num_given = 0
        self._new: list[tuple[str, str]] = [(name, "")]

    def take(self, text: str) -> Taken:
        """Takes more text of the part."""
        self._held += text
        tail = self._held[-len(text) - max(map(len, self._tags.endings)) :]  # all is searched when one has come
        return self._read(is_end=False) if any(end in tail for end in self._tags.endings) else self._taken()

    def flush(self) -> Taken:
        """Returns what was held back, now that the answer has ended: the begin of an argument is text."""
        taken = self._read(is_end=True)
        return taken if taken.rest is not None else taken._replace(text=self._words + self._held.strip())

    def _read(self, *, is_end: bool) -> Taken:
        while True:
            tag = self._tags.tag.search(self._held)
            closed = self._tags.closes.find(self._held, is_end=is_end or self._tags.endings != ("",))
            if tag is not None and (closed.end is None or tag.end() <= closed.end):
                self._words += self._held[: tag.start()].strip()
                value = typed_text(tag["value"], self._schemas.get(tag["key"]))
                begin = ", " if self._num_given else "{"
                self._new.append(("", f"{begin}{json.dumps(tag['key'], ensure_ascii=False)}: {value}"))
                self._num_given += 1
                self._held = self._held[tag.end() :]
            elif closed.end is not None:
                words = self._words + self._held[: closed.begin].strip()
                self._new.append(("", "}" if self._num_given else "{}"))
                return self._taken(words, self._held[closed.end :])
            else:
                return self._taken()

    def _taken(self, text: str = "", rest: str | None = None) -> Taken:
        new, self._new = self._new, []
        return Taken(new, text, rest)


def typed_text(text: str, schema: Any) -> str:
    """Returns a value that is written as text as JSON: of the first of its types as which it can be read, else a
    string, as transformers reads it (utils/chat_parsing/response_parser.py, `_coerce`).

    Args:
        schema: the value's, a JSON schema; None: it is a string.
    """
    for kind in dict.fromkeys(_types(schema)):
        try:
            if (found := _as_type(text, kind)) is not None:
                return found
        except (ValueError, RecursionError, OverflowError):
            continue
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    said = schema.get("type")
    types = [each for each in (said if isinstance(said, list) else [said]) if isinstance(each, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += _types(choice)
    return types + ["null"] * bool(schema.get("nullable"))


def _as_type(text: str, kind: str) -> str | None:
    """Returns JSON of a text that is of a type; None: it is of another. Raises ValueError, too, if it is of another."""
    bare = text.strip()
    match kind:
        case "integer" | "number":
            number = float(text)
            if not math.isfinite(number) or (kind == "integer" and not number.is_integer()):
                return None
            is_whole = number.is_integer() and (kind == "integer" or "." not in text)
            return str(int(bare) if is_whole and bare.lstrip("+-").isdigit() else int(number) if is_whole else number)
        case "boolean" if bare.lower() in ("true", "1", "false", "0"):
            return "true" if bare.lower() in ("true", "1") else "false"
        case "null" if bare in ("null", "None"):
            return "null"
        case "object" | "array":
            return bare if isinstance(json.loads(bare, parse_constant=_no_constant), _CLASSES[kind]) else None
    return None


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_CLASSES = {"object": dict, "array": list}
