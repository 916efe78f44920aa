"""The marks around the parts of an answer, found in text of which more may come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from baton.errors import ModelLoadError

MAX_HELD = 1024
"""Characters of what may be a mark that are held back: white space before one may be any length."""


BEGIN, BEHIND_CALL = "\x02", "\x1e"
"""Stand for the letter before a text that nothing precedes, and before one that a call does."""
START = r"(?:(?<=\x02)\s*(?:```(?:json)?\s*)?|(?<=\x1e)[\s;,]*(?:```(?:json)?\s*)?|(?<=\n))"
"""Pattern of where a line begins that may be a call without a mark: there may be a fence if no text is before it."""


class CodeBlock(NamedTuple):
    """Where a text ends: within a fence of Markdown or outside of all."""

    is_open: bool = False
    line: str = ""
    """The begin of the line in which it ends, up to three characters."""

    def behind(self, text: str) -> CodeBlock:
        """Returns where it ends with more text."""
        *lines, last = (self.line + text).split("\n")
        num_marks = sum(line.lstrip().startswith("```") for line in lines)
        return CodeBlock(self.is_open ^ bool(num_marks % 2), last.lstrip()[:3])


class Found(NamedTuple):
    """Where a mark is in a text."""

    begin: int
    """Where it begins, or may begin; else the text's length."""
    end: int | None = None
    """None: what is there of it may become one."""
    name: str = ""
    """What its group `name` has; empty: nothing."""
    is_bare: bool = False
    """Whether it has its group `bare`: there is no mark, and what follows may be a call."""
    is_python: bool = False
    """Whether it has its group `python`: calls follow as Python's."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A text that stands before or behind a part of an answer."""

    pattern: regex.Pattern[str]
    text: str = ""
    """The mark, where it is always the same; else empty."""

    @staticmethod
    def of(field: Mapping[str, Any], name: str) -> Mark:
        """Reads a mark of a response template: one text, several, or a regular expression.

        Args:
            name: `open` or `close`.

        Raises:
            ModelLoadError: there is none of them.
        """
        literal, source = field.get(name), field.get(f"{name}_pattern")
        texts = [literal] if isinstance(literal, str) else literal
        if source is None and isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts):
            longest_first = sorted(texts, key=len, reverse=True)
            source = "|".join(regex.escape(each) for each in longest_first)
        elif texts is not None or not isinstance(source, str):
            raise ModelLoadError(f"The model's response_template has a field without one {name} or {name}_pattern.")
        try:
            pattern = regex.compile(source, regex.DOTALL)
        except regex.error as error:
            raise ModelLoadError(f"The model's response_template has an invalid {name}_pattern: {error}.") from error
        if pattern.fullmatch(""):
            raise ModelLoadError(f"The model's response_template has a field whose {name} may be no text at all.")
        return Mark(pattern, texts[0] if texts and len(texts) == 1 else "")

    def find(self, text: str, *, is_end: bool, begin: int = 0) -> Found:
        """Looks for the first one in a text.

        Args:
            is_end: whether no more text comes.
            begin: where it may begin first; what is before it is only looked at.
        """
        found = self.pattern.search(text, begin, partial=True)
        if found is None:
            return Found(len(text))
        if found.partial:
            return Found(found.start())
        if not (self.text or is_end):
            # An earlier one may be coming, or this one may get longer.
            for place in range(begin, found.start() + 1):
                if self.pattern.fullmatch(text, place, partial=True):
                    return Found(place)
        groups = {name: text for name, text in found.groupdict().items() if text is not None}
        name = groups.get("name", "").strip()
        return Found(found.start(), found.end(), name, "bare" in groups, "python" in groups)

    def ends(self, text: str) -> bool:
        """Returns whether a text ends with the mark. White space at the end of either does not count."""
        return any(not text[found.end() :].strip() for found in self.pattern.finditer(f"{text}\n"))

    def names(self, text: str) -> bool:
        """Returns whether the mark is spelled with this text."""
        return text in regex.sub(r"\\(.)", r"\1", self.pattern.pattern)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around a reasoning, with which an answer may begin."""

    opens: Mark
    closes: Mark
    begin_id: int | None = None
    """The one token that begins it; None: it has several, or may begin in different ways."""
    end_ids: tuple[int, ...] = ()
    """The tokens that end it; empty: it may end in different ways."""

    def is_open_in(self, text: str) -> bool:
        """Returns whether a text has begun a reasoning and not ended it."""
        begins = [found.end() for found in self.opens.pattern.finditer(text)]
        return bool(begins) and self.closes.pattern.search(text, begins[-1]) is None
