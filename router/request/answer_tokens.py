"""The tokens of a request's answers: what was computed, what was drawn of them, and what has left for the client."""

from __future__ import annotations

from collections.abc import Mapping

from baton.api import GenerateChunk, Usage
from baton.sampling import SamplingParams
from router.dispatch.choice import ChoiceGroup


class AnswerTokens:
    """Counts the tokens of one call, from chunk to chunk.

    Args:
        group: all answers, those included that the client does not get.
        params: as the client asked for them.
        delivered: tokens that the client had before this call, by choice.
    """

    def __init__(self, group: ChoiceGroup, params: SamplingParams, delivered: Mapping[int, int]) -> None:
        self._group = group
        self._comes_at_once = params.comes_at_once
        self._num_drawn = 0
        """Tokens of all answers, before the best of them are selected."""
        self.delivered = delivered
        self.sent = [0] * params.n
        """Tokens that left, by choice."""
        self._num_reasoning: dict[int, int] = {}
        """Tokens of the reasoning, by choice, those included that left before."""

    def drawn(self, chunk: GenerateChunk) -> GenerateChunk:
        """Count a chunk of an answer, whether the client gets it or not."""
        self._num_drawn += len(chunk.token_ids)
        return chunk

    def left(self, chunk: GenerateChunk) -> None:
        """Count a chunk that leaves for the client."""
        self.sent[chunk.choice_index] += len(chunk.token_ids)
        if chunk.num_reasoning_tokens:
            self._num_reasoning[chunk.choice_index] = chunk.num_reasoning_tokens

    @property
    def num_computed(self) -> int:
        """Tokens that workers have computed in this call: those after a stop string, those that a moderation held back,
        and those that the client claims to have and that no router has recorded are among them.
        """
        return self._group.num_computed

    @property
    def num_sent(self) -> int:
        """Tokens that left in this call."""
        return sum(self.sent)

    @property
    def num_reasoning_sent(self) -> int:
        """Tokens of the reasoning that left in this call. A reasoning begins its answer, so what the client had of a
        choice was that first.
        """
        return sum(max(0, num - self.delivered.get(index, 0)) for index, num in self._num_reasoning.items())

    def usage(self, num_prompt_tokens: int, num_cached_tokens: int) -> Usage:
        """Return the usage of the whole answer, with what the client had of it before, and with what was drawn for it:
        all of `best_of` answers, and the beams of a search.
        """
        if self._group.is_search:
            num_tokens = self.num_computed
        elif self._comes_at_once:
            num_tokens = self._num_drawn
        else:
            num_tokens = sum(self.delivered.values()) + self.num_sent
        return Usage(num_prompt_tokens, num_tokens, num_cached_tokens, sum(self._num_reasoning.values()))


NO_TOKENS = AnswerTokens(ChoiceGroup(choices=()), SamplingParams(), {})
"""The counts of a request that has not begun."""
