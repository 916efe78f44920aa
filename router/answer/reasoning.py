"""The reasoning with which an answer may begin, apart from its content.

Plain state, fed text as it comes: however that is split, the two are the same. What may be the begin of a mark is held
back until it is known. Marks, and white space next to them, belong to neither.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from router.answer.marks import MAX_HELD, Reasoning


class Split(NamedTuple):
    """What new text adds to the two parts of an answer."""

    content: str = ""
    reasoning: str = ""


class _At(Enum):
    BEFORE = auto()
    """Only white space has come, or a part of the mark that opens a reasoning."""
    INSIDE = auto()
    """The reasoning is open."""
    BEHIND = auto()
    """The reasoning is over, and no content has come."""
    CONTENT = auto()


class ReasoningReader:
    """Reads one answer, which begins with a reasoning or has none.

    Args:
        reasoning: its marks.
        is_open: whether the answer begins inside of a reasoning.
    """

    def __init__(self, reasoning: Reasoning, *, is_open: bool = False) -> None:
        self._reasoning = reasoning
        self._place = _At.INSIDE if is_open else _At.BEFORE
        self._held = ""
        """What may be a part of a mark."""
        self._space = ""
        """White space in the reasoning, which belongs to it if more follows."""
        self._has_reasoned = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in the reasoning."""
        return self._place is _At.INSIDE

    def push(self, text: str) -> Split:
        """Takes more text, and returns what it adds."""
        return self._take(text, is_end=False)

    def flush(self) -> Split:
        """Returns what was held back, now that the answer has ended."""
        return self._take("", is_end=True)

    def _take(self, text: str, *, is_end: bool) -> Split:
        content, reasoning = "", ""
        text = self._held + text
        self._held = ""
        if self._place is _At.BEFORE:
            text, content = self._opened(text, is_end=is_end)
        if self._place is _At.INSIDE:
            text, reasoning = self._closed(text, is_end=is_end)
        if self._place is _At.BEHIND and (text := text.lstrip()):
            self._place = _At.CONTENT
        return Split(content + text, reasoning) if self._place is _At.CONTENT else Split("", reasoning)

    def _opened(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """Looks for the begin of the reasoning: text -> (what is behind it, content that precedes it)."""
        found = self._reasoning.opens.find(text, is_end=is_end)
        if text[: found.begin].strip() or ((is_end or len(text) > MAX_HELD) and found.end is None):
            self._place = _At.CONTENT
            return "", text
        if found.end is None:
            self._held = text
            return "", ""
        self._place = _At.INSIDE
        return text[found.end :], ""

    def _closed(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """Looks for the end of the reasoning: text -> (what is behind it, what of it is reasoning)."""
        found = self._reasoning.closes.find(text, is_end=is_end)
        if found.end is not None:
            self._place = _At.BEHIND
            return text[found.end :], self._reasoned(text[: found.begin])
        end = len(text) if is_end else max(found.begin, len(text) - MAX_HELD)
        self._held = text[end:]
        return "", self._reasoned(text[:end])

    def _reasoned(self, text: str) -> str:
        """Returns what is given out of a text of the reasoning: no white space at its begin and its end."""
        text = self._space + text
        if not self._has_reasoned:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._has_reasoned = self._has_reasoned or bool(shown)
        return shown
