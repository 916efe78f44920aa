"""Marks around the parts of an answer, and their search in growing text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from baton.errors import ModelLoadError

MAX_HELD = 1024
"""Maximum length of a possible mark that is held back, because the white space before a mark is unlimited."""


BEGIN, BEHIND_CALL = "\x02", "\x1e"
"""Placeholders for the character before a text: at the start of the content, and behind a call."""
START = r"(?:(?<=\x02)\s*(?:```(?:json)?\s*)?|(?<=\x1e)[\s;,]*(?:```(?:json)?\s*)?|(?<=\n))"
"""Pattern of the start of a line that may be a call without a mark. It allows a fence if no text precedes it."""


class CodeBlock(NamedTuple):
    """Markdown state at the end of a text: inside a fence or not."""

    is_open: bool = False
    line: str = ""
    """First characters of the last line, at most three."""

    def behind(self, text: str) -> CodeBlock:
        """Return the state after more text."""
        *lines, last = (self.line + text).split("\n")
        num_marks = sum(line.lstrip().startswith("```") for line in lines)
        return CodeBlock(self.is_open ^ bool(num_marks % 2), last.lstrip()[:3])


class Found(NamedTuple):
    """Result of the search for a mark in a text."""

    begin: int
    """Start of the mark or of a possible mark; else the length of the text."""
    end: int | None = None
    """End of the mark; None: there is no complete mark."""
    name: str = ""
    """Text of the group `name`; empty if the group did not match."""
    is_bare: bool = False
    """Whether the group `bare` matched: there is no real mark, but a call may follow."""
    is_python: bool = False
    """Whether the group `python` matched: calls in Python's syntax follow."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Text that opens or closes a part of an answer."""

    pattern: regex.Pattern[str]
    text: str = ""
    """The mark, if it has only one spelling; else empty."""

    @staticmethod
    def of(field: Mapping[str, Any], name: str) -> Mark:
        """Read a mark of a response template: one text, several texts, or a regular expression.

        Args:
            field: the field of the template.
            name: `open` or `close`.

        Raises:
            ModelLoadError: the field has no such mark, or an invalid one.
        """
        literal, source = field.get(name), field.get(f"{name}_pattern")
        texts = [literal] if isinstance(literal, str) else literal
        if source is None and isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts):
            longest_first = sorted(texts, key=len, reverse=True)
            source = "|".join(regex.escape(each) for each in longest_first)
        elif texts is not None or not isinstance(source, str):
            raise ModelLoadError(f"the model's response_template has a field without one {name} or {name}_pattern")
        try:
            pattern = regex.compile(source, regex.DOTALL)
        except regex.error as error:
            raise ModelLoadError(f"the model's response_template has an invalid {name}_pattern: {error}") from error
        if pattern.fullmatch(""):
            raise ModelLoadError(f"the model's response_template has a field whose {name} matches an empty text")
        return Mark(pattern, texts[0] if texts and len(texts) == 1 else "")

    def find(self, text: str, *, is_end: bool, begin: int = 0) -> Found:
        """Find the first occurrence in a text.

        Args:
            text: the text so far.
            is_end: whether no more text comes.
            begin: first possible start of the mark. Earlier text serves as context only.
        """
        found = self.pattern.search(text, begin, partial=True)
        if found is None:
            return Found(len(text))
        if found.partial:
            return Found(found.start())
        if not (self.text or is_end):
            # More text may complete an earlier match, or extend this one.
            for place in range(begin, found.start() + 1):
                if self.pattern.fullmatch(text, place, partial=True):
                    return Found(place)
        groups = {name: text for name, text in found.groupdict().items() if text is not None}
        name = groups.get("name", "").strip()
        return Found(found.start(), found.end(), name, "bare" in groups, "python" in groups)

    def ends(self, text: str) -> bool:
        """Return whether a text ends with the mark, ignoring white space at the end of either."""
        return any(not text[found.end() :].strip() for found in self.pattern.finditer(f"{text}\n"))

    def names(self, text: str) -> bool:
        """Return whether the pattern of the mark contains this text."""
        return text in regex.sub(r"\\(.)", r"\1", self.pattern.pattern)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Marks around the reasoning at the start of an answer."""

    opens: Mark
    closes: Mark
    begin_id: int | None = None
    """The single token of the opening mark; None: the mark has several tokens or several spellings."""
    end_ids: tuple[int, ...] = ()
    """The tokens of the closing mark; empty: it has several spellings."""

    def is_open_in(self, text: str) -> bool:
        """Return whether a text opens a reasoning and does not close it."""
        begins = [found.end() for found in self.opens.pattern.finditer(text)]
        return bool(begins) and self.closes.pattern.search(text, begins[-1]) is None
