"""Splits an answer's text into its channels: content, reasoning and tool calls.

Plain state, fed text as it comes. The state after a number of tokens depends on these tokens alone, so a resumed stream
can be replayed, and the whole answer is the sum of its increments. `router.answer.format` finds a model's marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.tools import ToolCallDelta, joined_calls
from router.answer.calls import Calls
from router.answer.reasoning import ReasoningReader


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
