"""Reads tool calls whose arguments are tags, from models that omit the closing tags of an argument or of the call."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import regex

from router.answer.call_readers import Taken
from router.answer.tag_calls import TagCalls, Tags


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
            return Taken(taken.calls, self._words + self._tags.said_in(self._held).strip())
        last = super().flush(is_whole=True)
        return last._replace(calls=[*taken.calls, *last.calls])

    def _read(self, *, is_end: bool) -> Taken:
        ends = self._last_ends if is_end else self._ends
        while True:
            masked = self._masked(is_end=is_end)
            begin = self._begins.search(masked)
            if begin is None:
                return self._taken()
            if begin["key"] is None:
                return self._closed(self._held[: begin.start()], self._held[begin.end() :])
            is_inline = not masked.startswith("\n", begin.end())
            value = begin.end() + (not is_inline)
            found = ends.finditer(masked, begin.end())
            end = next((each for each in found if self._is_end(each, is_inline=is_inline)), None)
            if end is None:
                return self._taken()
            self._give(begin["key"], begin.start(), (value, max(value, end.start())), end.end())

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
