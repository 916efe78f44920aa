"""An answer's text into its channels: content, reasoning and calls of tools.

Plain state, fed text as it comes. What the channels have after so many tokens depends on these alone, so that a resumed
stream can be replayed, and the whole answer is the sum of its increments. Where marks come from says
`router.answer.format`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.tools import ToolCallDelta, joined_calls
from router.answer.calls import Calls
from router.answer.reasoning import ReasoningReader


class Delta(NamedTuple):
    """What new text adds to the channels of an answer."""

    text: str = ""
    """Content."""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """Returns what several add together, each call in one delta."""
        if len(deltas) == 1 and len(deltas[0].calls) < 2:
            return deltas[0]
        calls = [call for delta in deltas for call in delta.calls]
        return Delta(
            "".join([delta.text for delta in deltas]),
            "".join([delta.reasoning for delta in deltas]),
            joined_calls(calls) if len(calls) > 1 else tuple(calls),
        )


class Channels:
    """The channels of one answer.

    Args:
        reasoning: reads the reasoning; None: there is none.
        calls: reads the calls in the content; None: there are none.
        shown_ids: special tokens that marks are made of.
    """

    def __init__(
        self, reasoning: ReasoningReader | None, calls: Calls | None = None, shown_ids: frozenset[int] = frozenset()
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self.shown_ids = shown_ids
        """Special tokens whose text has to come here."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._calls is not None and self._calls.num_calls > 0

    def push(self, text: str) -> Delta:
        """Takes more text, and returns what it adds."""
        content, reasoning = (text, "") if self._reasoning is None else self._reasoning.push(text)
        if self._calls is None:
            return Delta(content, reasoning)
        found = self._calls.push(content)
        return Delta(found.text, reasoning, found.calls)

    def flush(self, *, is_whole: bool = False) -> Delta:
        """Returns what was held back, now that the answer has ended.

        Args:
            is_whole: whether the model ended it; else it was cut off.
        """
        content, reasoning = ("", "") if self._reasoning is None else self._reasoning.flush()
        if self._calls is None:
            return Delta(content, reasoning)
        found, rest = self._calls.push(content), self._calls.flush(is_whole=is_whole)
        return Delta(found.text + rest.text, reasoning, found.calls + rest.calls)
