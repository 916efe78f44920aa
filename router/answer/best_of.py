"""Selects the answers of a request that its client gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton.api import GenerateChunk, PromptScores
from baton.sampling import SamplingParams
from baton.scores import NO_SCORES, TokenScores
from baton.tools import joined_calls


class AnswerSelection:
    """Filter of the chunks of a request's answers.

    If more answers are generated than the client wants, all chunks are kept until the answers have ended. Then the best
    answers are returned whole, with the first indices. The best have the highest mean log probability of their tokens
    in the model's own distribution; ties go to the first.

    Args:
        params: sampling parameters of the client.
        resume_from: choice index -> number of tokens that the client already has from a broken stream.
    """

    def __init__(self, params: SamplingParams, resume_from: Mapping[int, int]) -> None:
        self._params = params
        self._resume_from = resume_from
        self._kept: dict[int, list[GenerateChunk]] = {}
        self._prompt_scores: PromptScores | None = None
        self._num_ended = 0

    def take(self, chunk: GenerateChunk) -> list[GenerateChunk]:
        """Add a chunk of an answer, and return the chunks that the client gets now."""
        if not self._params.is_selected:
            return [chunk]
        self._prompt_scores = self._prompt_scores or chunk.prompt_scores
        self._kept.setdefault(chunk.choice_index, []).append(chunk)
        self._num_ended += chunk.finish_reason is not None
        return self._best() if self._num_ended == self._params.num_answers else []

    def _best(self) -> list[GenerateChunk]:
        answers = [_joined(chunks) for _, chunks in sorted(self._kept.items())]
        best = sorted(answers, key=lambda answer: -_mean(answer.scores))[: self._params.n]
        told = [self._told(replace(answer, choice_index=index)) for index, answer in enumerate(best)]
        return [replace(told[0], prompt_scores=self._prompt_scores), *told[1:]]

    def _told(self, answer: GenerateChunk) -> GenerateChunk:
        """Return the part of an answer that the client lacks. If it has any tokens of it, it has them all."""
        if not self._params.wants_scores:
            answer = replace(answer, scores=NO_SCORES)
        if self._resume_from.get(answer.choice_index):
            return replace(answer, text="", reasoning="", tool_calls=(), token_ids=(), scores=NO_SCORES)
        return answer


def _joined(chunks: list[GenerateChunk]) -> GenerateChunk:
    return replace(
        chunks[-1],
        prompt_scores=None,
        text="".join(chunk.text for chunk in chunks),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=joined_calls(call for chunk in chunks for call in chunk.tool_calls),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        scores=TokenScores.joined(chunk.scores for chunk in chunks),
    )


def _mean(scores: TokenScores) -> float:
    return sum(scores.logprobs) / len(scores) if scores else 0.0
