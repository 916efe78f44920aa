"""Reads a call whose arguments are tags, in one part of an answer, whose mark has been found.

The arguments come one after the other, made JSON of the type that the tool's schema says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from router.answer.call_readers import JsonEnd, Taken
from router.answer.marks import Mark

_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?P<more>(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")


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
        self._json = JsonEnd()
        """Follows the next argument, if that is JSON."""
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
            masked = self._masked(is_end=is_end)
            tag = self._tags.tag.search(masked)
            closed = self._tags.closes.find(masked, is_end=is_end or self._tags.endings != ("",))
            if tag is not None and (closed.end is None or tag.end() <= closed.end):
                self._words += self._held[: tag.start()].strip()
                value = typed_text(self._held[slice(*tag.span("value"))], self._schemas.get(tag["key"]))
                begin = ", " if self._num_given else "{"
                self._new.append(("", f"{begin}{json.dumps(tag['key'], ensure_ascii=False)}: {value}"))
                self._num_given += 1
                self._held, self._json = self._held[tag.end() :], JsonEnd()
            elif closed.end is not None:
                words = self._words + self._held[: closed.begin].strip()
                self._new.append(("", "}" if self._num_given else "{}"))
                return self._taken(words, self._held[closed.end :])
            else:
                return self._taken()

    def _masked(self, *, is_end: bool) -> str:
        """Returns what is held, without the letters of the next argument if that is JSON: in its strings is no mark.

        Args:
            is_end: whether JSON that has no end yet has none at all.
        """
        text = self._held
        tag = self._tags.tag.search(text, partial=True)
        if tag is None or tag["value"] is None or not {"object", "array"} & {*_types(self._schemas.get(tag["key"]))}:
            return text
        value = text[tag.start("value") :].lstrip()
        begin = len(text) - len(value)
        if (length := self._json.length(value)) is None:
            length = 0 if is_end else len(value)
        return f"{text[:begin]}{'x' * length}{value[length:]}"

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
            if (found := _JSON_NUMBER.fullmatch(bare)) and not (kind == "integer" and found["more"]):
                return bare  # of any size
            number = float(text)
            if not math.isfinite(number) or (kind == "integer" and not number.is_integer()):
                return None
            is_whole = number.is_integer() and (kind == "integer" or "." not in text)
            return str(int(number) if is_whole else number)
        case "boolean" if bare.lower() in ("true", "1", "false", "0"):
            return "true" if bare.lower() in ("true", "1") else "false"
        case "null" if bare in ("null", "None"):
            return "null"
        case "object" | "array":
            read = json.loads(bare, parse_int=str, parse_constant=_no_constant)
            return bare if isinstance(read, _CLASSES[kind]) else None
    return None


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_CLASSES = {"object": dict, "array": list}
