"""Splits an answer's text into its channels: content, reasoning and tool calls.

Plain state, fed text as it comes. The state after a number of tokens depends on these tokens alone, so a resumed stream
can be replayed, and the whole answer is the sum of its increments. `router.answer.format` finds a model's marks.

Separates the reasoning at the start of an answer from its content.

Plain state, fed text as it comes: the result is the same however it is split. Text that may start a mark is held back
until it is known. Marks, and white space next to them, belong to neither part.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from baton.tools import ToolCallDelta, joined_calls
from router.answer.calls import Calls
from router.answer.marks import MAX_HELD, Reasoning


class Split(NamedTuple):
    """Increment of an answer's content and reasoning."""

    content: str = ""
    reasoning: str = ""


class _At(Enum):
    BEFORE = auto()
    """Only white space has come, or a part of the opening mark."""
    INSIDE = auto()
    """The reasoning is open."""
    BEHIND = auto()
    """The reasoning has ended, and no content has come."""
    CONTENT = auto()


class ReasoningReader:
    """Reader of one answer, which starts with a reasoning or has none.

    Args:
        reasoning: marks of the reasoning.
        is_open: whether the answer starts inside the reasoning.
    """

    def __init__(self, reasoning: Reasoning, *, is_open: bool = False) -> None:
        self._reasoning = reasoning
        self._place = _At.INSIDE if is_open else _At.BEFORE
        self._held = ""
        """Text that may be part of a mark."""
        self._space = ""
        """White space that belongs to the reasoning if more of it follows."""
        self._has_reasoned = False

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside the reasoning."""
        return self._place is _At.INSIDE

    def push(self, text: str) -> Split:
        """Add text, and return its increment."""
        return self._take(text, is_end=False)

    def flush(self) -> Split:
        """Return the held text after the end of the answer."""
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
        """Look for the start of the reasoning, and return (text behind the mark, content of an answer without one)."""
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
        """Look for the end of the reasoning, and return (text behind the mark, text of the reasoning)."""
        found = self._reasoning.closes.find(text, is_end=is_end)
        if found.end is not None:
            self._place = _At.BEHIND
            return text[found.end :], self._reasoned(text[: found.begin])
        end = len(text) if is_end else max(found.begin, len(text) - MAX_HELD)
        self._held = text[end:]
        return "", self._reasoned(text[:end])

    def _reasoned(self, text: str) -> str:
        """Return the part of a reasoning's text that can be given out, without white space at its start and end."""
        text = self._space + text
        if not self._has_reasoned:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._has_reasoned = self._has_reasoned or bool(shown)
        return shown


class Delta(NamedTuple):
    """Increment of an answer's channels."""

    text: str = ""
    """Content."""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """Return the sum of several increments, with one delta per call."""
        if len(deltas) == 1 and len(deltas[0].calls) < 2:
            return deltas[0]
        calls = [call for delta in deltas for call in delta.calls]
        return Delta(
            "".join([delta.text for delta in deltas]),
            "".join([delta.reasoning for delta in deltas]),
            joined_calls(calls) if len(calls) > 1 else tuple(calls),
        )


class Channels:
    """Channels of one answer.

    Args:
        reasoning: reads the reasoning; None: the answer has none.
        calls: reads the calls in the content; None: the answer has none.
        shown_ids: special tokens in the model's marks.
    """

    def __init__(
        self, reasoning: ReasoningReader | None, calls: Calls | None = None, shown_ids: frozenset[int] = frozenset()
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self.shown_ids = shown_ids
        """Special tokens whose text must be passed to `push`."""

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def has_calls(self) -> bool:
        """True if a call has started."""
        return self._calls is not None and self._calls.num_calls > 0

    def push(self, text: str) -> Delta:
        """Add text, and return its increment."""
        content, reasoning = (text, "") if self._reasoning is None else self._reasoning.push(text)
        if self._calls is None:
            return Delta(content, reasoning)
        found = self._calls.push(content)
        return Delta(found.text, reasoning, found.calls)

    def flush(self, *, is_whole: bool = False) -> Delta:
        """Return the held text after the end of the answer.

        Args:
            is_whole: whether the model ended the answer; else it was cut off.
        """
        content, reasoning = ("", "") if self._reasoning is None else self._reasoning.flush()
        if self._calls is None:
            return Delta(content, reasoning)
        found, rest = self._calls.push(content), self._calls.flush(is_whole=is_whole)
        return Delta(found.text + rest.text, reasoning, found.calls + rest.calls)
