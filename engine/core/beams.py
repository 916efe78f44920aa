"""Beam search: which beams go on with which tokens, and which of them are answers.

The rules are those of transformers' `GenerationMixin._beam_search` for one prompt: of all next tokens of all beams the
likeliest are looked at; what ends there is an answer if it is among the first `width`, and the first `width` that do
not end are the next beams.

Pure: the likeliest next tokens in, the next state out. The state is beams, tokens and a number each, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from baton.hypotheses import Beam, Hypotheses
from baton.messages import SequenceSpec
from baton.sampling import EarlyStopping, FinishReason
from baton.scores import Candidates, TokenScores


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """A search between two steps."""

    width: int
    length_penalty: float
    early_stopping: str
    max_tokens: int
    """Tokens with which an answer ends at the latest."""
    end_token_ids: frozenset[int]
    """Tokens that end an answer."""
    running: tuple[Beam, ...]
    """The beams, the likeliest first; all are equally long."""
    finished: tuple[Beam, ...]
    """The answers so far, the best first, at most `width`."""

    @staticmethod
    def of(spec: SequenceSpec, eos_token_ids: frozenset[int], max_model_len: int) -> BeamSearch:
        """Returns the search that a sequence asks for, at its begin or where another worker has left it."""
        params, begun = spec.sampling, spec.hypotheses
        ends = frozenset(params.stop_token_ids)
        return BeamSearch(
            width=params.num_beams,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_tokens=min(spec.max_tokens, max_model_len - spec.num_prompt_tokens),
            end_token_ids=ends if params.ignore_eos else ends | eos_token_ids,
            running=begun.running or (Beam(),),
            finished=begun.finished,
        )

    def advance(self, found: Sequence[Candidates]) -> Advance:
        """Returns what becomes of the search with the next tokens of its beams.

        Args:
            found: of each running beam, in their order.
        """
        ranked = sorted(
            (
                (beam.logprob + logprob, row, place)
                for row, (beam, candidates) in enumerate(zip(self.running, found, strict=True))
                for place, logprob in enumerate(candidates.logprobs)
            ),
            key=lambda each: (-each[0], each[1], each[2]),
        )
        running: list[Beam] = []
        parents: list[int] = []
        finished = list(self.finished)
        for rank, (logprob, row, place) in enumerate(ranked):
            if len(running) == self.width and rank >= self.width:
                break
            grown = self._grown(self.running[row], found[row], place, logprob)
            if grown.finish_reason is None and len(running) < self.width:
                running.append(grown)
                parents.append(row)
            elif grown.finish_reason is not None and rank < self.width:
                finished.append(grown)
        best = sorted(finished, key=self.score, reverse=True)[: self.width]
        return Advance(replace(self, running=tuple(running), finished=tuple(best)), tuple(parents))

    @property
    def is_over(self) -> bool:
        """Whether no beam is left, or none is expected to give a better answer."""
        if not self.running:
            return True
        if len(self.finished) < self.width:
            return False
        return self.early_stopping == EarlyStopping.TRUE or not self._can_improve()

    def score(self, beam: Beam) -> float:
        """Returns by what answers are compared."""
        return self._penalized(beam.logprob, len(beam.token_ids))

    @property
    def hypotheses(self) -> Hypotheses:
        """What another worker goes on from."""
        return Hypotheses(running=self.running, finished=self.finished)

    def _penalized(self, logprob: float, num_tokens: int) -> float:
        return float(logprob / num_tokens**self.length_penalty)

    def _grown(self, beam: Beam, candidates: Candidates, place: int, logprob: float) -> Beam:
        token_id = candidates.token_ids[place]
        token_ids, reason = (*beam.token_ids, token_id), None
        if token_id in self.end_token_ids:
            reason = FinishReason.STOP
        elif len(token_ids) >= self.max_tokens:
            reason = FinishReason.LENGTH
        scores = beam.scores
        if candidates.scores:
            scores = TokenScores.joined((scores, candidates.scores[place]))
        return Beam(token_ids=token_ids, logprob=logprob, finish_reason=reason, scores=scores)

    def _can_improve(self) -> bool:
        """Returns whether the likeliest beam is expected to beat the worst answer.

        With a length penalty above 0 an unlikely beam can still win by its length. Only `never` takes that into
        account.
        """
        best = self.running[0]
        num_tokens = len(best.token_ids)
        if self.early_stopping == EarlyStopping.NEVER and self.length_penalty > 0:
            num_tokens = self.max_tokens
        return self._penalized(best.logprob, num_tokens) > self.score(self.finished[-1])


class Advance(NamedTuple):
    """What a step has done to a search."""

    search: BeamSearch
    parents: tuple[int, ...]
    """The beam that each running one continues, by its place before the step."""
