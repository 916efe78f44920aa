"""Reads a tool call whose arguments are tags, in the part of an answer that follows an opening mark.

The arguments come one after the other. Each becomes JSON of the type in the tool's schema.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from router.answer.call_readers import JsonEnd, Taken
from router.answer.marks import Mark

SEARCHED_AT_ONCE = 1024
"""Length up to which the held text is searched with each new piece. Longer text is searched whenever it has grown by an
eighth, because each search scans all of it, and a client can make an argument contain any number of possible ends."""
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?P<more>(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Format of arguments that are written as tags."""

    tag: regex.Pattern[str]
    """Pattern of one argument; its groups are `key` and `value`."""
    closes: Mark
    """Mark behind the last argument."""

    endings: tuple[str, ...] = ("",)
    """Texts with which every tag and the closing mark end; ("",): unknown."""
    begin: str = ""
    """Text with which every tag starts."""
    end: str = ""
    """Text that ends the arguments if no tag has started before it, with or without the closing mark; empty: none."""
    mark: str = ""
    """Name of the mark around calls; empty: unknown."""

    def said_in(self, text: str) -> str:
        """Return the part of a text behind the arguments that does not belong to a call."""
        if not self.begin:
            return text
        text = text.partition(self.begin)[0]
        ends = (self.begin, self.end, f"</{self.mark}>")
        begun = max(n for end in ends for n in range(len(end)) if text.endswith(end[:n]))
        return text[: len(text) - begun]


class TagCalls:
    """Reader of a call whose arguments are tags.

    Args:
        tags: format of the tags.
        name: the tool's name, which the opening mark contains.
        parameters: JSON schema of the arguments, which gives their types.
    """

    def __init__(self, tags: Tags, name: str, parameters: Mapping[str, Any]) -> None:
        properties = parameters.get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        self._tags = tags
        self._held = ""
        self._searched_at = SEARCHED_AT_ONCE
        """Length of the held text at which all of it is searched again."""
        self._json = JsonEnd()
        """Finds the end of the next argument if that is JSON."""
        self._words = ""
        """Text between the arguments; it is given out behind the call."""
        self._num_given = 0
        self._new: list[tuple[str, str]] = [(name, "")]

    def take(self, text: str) -> Taken:
        """Read more text of the part.

        The positions at which it searches depend on the text alone, and not on the pieces in which the text comes.
        """
        calls: list[tuple[str, str]] = []
        while True:
            room = self._searched_at - len(self._held)
            self._held += text[:room]
            text = text[room:]
            if len(self._held) <= SEARCHED_AT_ONCE or len(self._held) == self._searched_at:
                if any(end in self._held for end in self._tags.endings):
                    taken = self._read(is_end=False)
                    calls += taken.calls
                    if taken.rest is not None:
                        return taken._replace(calls=calls, rest=taken.rest + text)
                num_held = len(self._held)
                self._searched_at = SEARCHED_AT_ONCE if num_held < SEARCHED_AT_ONCE else num_held * 9 // 8 + 1
            if not text:
                return Taken(calls + self._taken().calls)

    def flush(self, *, is_whole: bool = False) -> Taken:
        """Return the held text after the end of the answer. An incomplete argument is dropped.

        Args:
            is_whole: whether to close the open arguments; else they were cut off.
        """
        taken = self._read(is_end=True)
        if taken.rest is not None:
            return taken
        closed = [("", self._end())] if is_whole else []
        return Taken([*taken.calls, *closed], self._rest())

    def _read(self, *, is_end: bool) -> Taken:
        while True:
            words, end, rest = self._held.partition(self._tags.end) if self._tags.end else (self._held, "", "")
            if end and self._tags.begin not in words:
                return self._closed(words, rest)
            masked = self._masked(is_end=is_end)
            tag = self._tag_in(masked)
            closed = self._tags.closes.find(masked, is_end=is_end or self._tags.endings != ("",))
            if tag is not None and (closed.end is None or tag.end() <= closed.end):
                self._give(tag["key"], tag.start(), tag.span("value"), tag.end())
            elif closed.end is not None:
                return self._closed(self._held[: closed.begin], self._held[closed.end :])
            else:
                return self._taken()

    def _begun_in(self, text: str) -> regex.Match[str] | None:
        """Return the first argument that starts in a text, whether or not it ends there."""
        begin = self._tags.begin
        at = text.find(begin)
        while at >= 0:
            following = text.find(begin, at + 1) if begin else -1
            end = following if following >= 0 else len(text)
            if (found := self._tags.tag.search(text, at, end, partial=True)) is not None:
                return found
            at = following
        return None

    def _tag_in(self, text: str) -> regex.Match[str] | None:
        """Return the first complete argument in a text. Skips the search if the text has no closing tag."""
        begin, end = self._tags.begin, self._tags.endings[0]
        if end and end not in text[max(0, text.find(begin)) :]:
            return None
        return self._tags.tag.search(text)

    def _give(self, key: str, begin: int, value: tuple[int, int], end: int) -> None:
        """Give out an argument.

        Args:
            key: name of the argument.
            begin: start of its tag in the held text.
            value: start and end of its value there.
            end: end of its tag there.
        """
        self._words += self._held[:begin].strip()
        text = typed_text(self._held[slice(*value)], self._schemas.get(key))
        self._new.append(("", f"{', ' if self._num_given else '{'}{json.dumps(key, ensure_ascii=False)}: {text}"))
        self._num_given += 1
        self._held, self._json = self._held[end:], JsonEnd()

    def _rest(self) -> str:
        """Return the text between and behind the arguments, once the answer has ended."""
        return self._words + self._tags.said_in(self._held).strip()

    def _end(self) -> str:
        return "}" if self._num_given else "{}"

    def _closed(self, words: str, rest: str) -> Taken:
        self._new.append(("", self._end()))
        words = self._words + words.strip()
        return self._taken(words, rest)

    def _masked(self, *, is_end: bool) -> str:
        """Return the held text with the next argument masked if that is JSON, so that no mark is found in its strings.

        Args:
            is_end: whether no more text comes, so that incomplete JSON is not masked.
        """
        text = self._held
        tag = self._begun_in(text)
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
    """Return a value that is written as text as JSON, as transformers does.

    The result has the first type of the schema that fits the text, else it is a string. See
    utils/chat_parsing/response_parser.py, `_coerce`.

    Args:
        schema: JSON schema of the value; None: the value is a string.
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
    """Return the text as JSON of a type. If it does not fit the type, return None or raise ValueError."""
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
    raise ValueError(f"{text} is not JSON")


_CLASSES = {"object": dict, "array": list}


class LooseTagCalls(TagCalls):
    """Reader of a call whose marks may be missing.

    An argument ends with its closing tag, or before the opening tag of the next argument on a new line. It also ends
    with `</function>` or the closing mark of the call, if another mark or nothing follows. If the value starts on the
    line of its opening tag, the next opening tag may be on the same line, too.

    Args:
        tags, name, parameters: see `TagCalls`.
    """

    def __init__(self, tags: Tags, name: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(tags, name, parameters)
        self._begins, self._ends, self._last_ends = _patterns(tags.mark)

    def flush(self, *, is_whole: bool = False) -> Taken:
        """See `TagCalls.flush`."""
        taken = self._read(is_end=False)
        if taken.rest is not None:
            return taken
        if not is_whole:
            return Taken(taken.calls, self._rest())
        last = super().flush(is_whole=True)
        return last._replace(calls=[*taken.calls, *last.calls])

    def _read(self, *, is_end: bool) -> Taken:
        ends = self._last_ends if is_end else self._ends
        while True:
            text = self._masked(is_end=is_end)
            begin = self._begins.search(text)
            if begin is None:
                break
            if begin["key"] is None:
                return self._closed(self._held[: begin.start()], self._held[begin.end() :])
            is_inline = not text.startswith("\n", begin.end())
            value = begin.end() + (not is_inline)
            found = ends.finditer(text, begin.end())
            end = next((each for each in found if self._is_end(each, is_inline=is_inline)), None)
            if end is None:
                break
            self._give(begin["key"], begin.start(), (value, max(value, end.start())), end.end())
        return self._taken()

    def _is_end(self, found: regex.Match[str], *, is_inline: bool) -> bool:
        """Return whether an argument ends at a match, and the match is not a mere mention of a tag."""
        if found["next"] is None:
            return True
        is_argument = found["next"] in self._schemas if self._schemas else True
        return is_argument and (is_inline or found[0].startswith("\n"))


@functools.cache
def _patterns(mark: str) -> tuple[regex.Pattern[str], regex.Pattern[str], regex.Pattern[str]]:
    """Return patterns of an argument's start or the call's end, of an argument's end, and of its end in a whole answer.

    Args:
        mark: name of the mark around calls.
    """
    next_call = rf"<{mark}>|<function="
    begins = rf"<parameter=(?P<key>[^>\n]{{1,256}})>|</function>|(?=</{mark}>|{next_call})"
    closed = rf"\n?(?=</function>\s*(?:</{mark}>|{next_call})|</{mark}>\s*(?:{next_call}))"
    ends = rf"\n?</parameter>|(?:\n[ \t]*)?(?=<parameter=(?P<next>[^>\n]{{1,256}})>)|{closed}"
    last = rf"{ends}|\n?(?=</function>|</{mark}>)|\n?\Z"
    return regex.compile(begins), regex.compile(ends), regex.compile(last)
