"""Token counts of a request's answers: computed, drawn, and sent to the client."""

from __future__ import annotations

from collections.abc import Mapping

from baton.api import GenerateChunk, Usage
from baton.sampling import SamplingParams
from router.serve.choice import ChoiceGroup


class AnswerTokens:
    """Counter of the tokens of one call.

    Args:
        group: all choices, including those that the client does not get.
        params: the parameters of the request.
        delivered: number of tokens that the client had before this call, by choice.
    """

    def __init__(self, group: ChoiceGroup, params: SamplingParams, delivered: Mapping[int, int]) -> None:
        self._group = group
        self._comes_at_once = params.comes_at_once
        self._num_drawn = 0
        """Tokens of all choices, before the best are selected."""
        self.delivered = delivered
        self.sent = [0] * params.n
        """Tokens sent in this call, by choice."""
        self._num_reasoning: dict[int, int] = {}
        """Reasoning tokens by choice, including those that were sent before this call."""

    def drawn(self, chunk: GenerateChunk) -> GenerateChunk:
        """Count a chunk of a choice, even if the client does not get it, and return it."""
        self._num_drawn += len(chunk.token_ids)
        return chunk

    def left(self, chunk: GenerateChunk) -> None:
        """Count a chunk that is sent to the client."""
        self.sent[chunk.choice_index] += len(chunk.token_ids)
        if chunk.num_reasoning_tokens:
            self._num_reasoning[chunk.choice_index] = chunk.num_reasoning_tokens

    @property
    def num_computed(self) -> int:
        """Tokens that workers have computed in this call.

        This includes tokens after a stop string, tokens that moderation held back, and tokens that the client claims to
        have although no router has recorded them.
        """
        return self._group.num_computed

    @property
    def num_sent(self) -> int:
        """Tokens sent in this call."""
        return sum(self.sent)

    @property
    def num_reasoning_sent(self) -> int:
        """Reasoning tokens sent in this call.

        Reasoning comes first in an answer, so the tokens that the client had before are reasoning tokens first.
        """
        return sum(max(0, num - self.delivered.get(index, 0)) for index, num in self._num_reasoning.items())

    def usage(self, num_prompt_tokens: int, num_cached_tokens: int) -> Usage:
        """Return the usage of the whole answer, including the tokens that the client had before this call.

        All `best_of` answers and all beams of a search count, although the client gets only some of them.
        """
        if self._group.is_search:
            num_tokens = self.num_computed
        elif self._comes_at_once:
            num_tokens = self._num_drawn
        else:
            num_tokens = sum(self.delivered.values()) + self.num_sent
        return Usage(num_prompt_tokens, num_tokens, num_cached_tokens, sum(self._num_reasoning.values()))


NO_TOKENS = AnswerTokens(ChoiceGroup(choices=()), SamplingParams(), {})
"""Counts of a request that has no choices yet."""
