"""Beam search: selects the beams to continue, their next tokens, and the finished hypotheses.

The rules are those of transformers' `GenerationMixin._beam_search` for one prompt. The likeliest next tokens over all
beams are ranked. A candidate that ends its beam becomes a hypothesis if it is among the first `width`; the first
`width` candidates that do not end are the next beams.

Pure: takes the likeliest next tokens, returns the next state. The state holds only beams, tokens and a number for each.
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
    """State of a beam search between two steps."""

    width: int
    length_penalty: float
    early_stopping: str
    max_tokens: int
    """Maximum number of tokens of a hypothesis."""
    end_token_ids: frozenset[int]
    """Tokens that end a hypothesis."""
    running: tuple[Beam, ...]
    """The running beams, likeliest first; all have the same length."""
    finished: tuple[Beam, ...]
    """The finished hypotheses, best first, at most `width`."""

    @staticmethod
    def of(spec: SequenceSpec, eos_token_ids: frozenset[int], max_model_len: int) -> BeamSearch:
        """Return the search that a sequence asks for: a new one, or one that continues another worker's."""
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
        """Return the search after one more token of its beams.

        Args:
            found: the candidates of each running beam, in the beams' order.
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
        """True if no beam is left, or if no running beam is expected to give a better hypothesis."""
        if not self.running:
            return True
        if len(self.finished) < self.width:
            return False
        return self.early_stopping == EarlyStopping.TRUE or not self._can_improve()

    def score(self, beam: Beam) -> float:
        """Return the score by which hypotheses are compared."""
        return self._penalized(beam.logprob, len(beam.token_ids))

    @property
    def hypotheses(self) -> Hypotheses:
        """The state from which another worker can continue the search."""
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
        """Return whether the likeliest beam is expected to beat the worst hypothesis.

        With a length penalty above 0 an unlikely beam can still win by its length. Only `never` takes that into
        account.
        """
        best = self.running[0]
        num_tokens = len(best.token_ids)
        if self.early_stopping == EarlyStopping.NEVER and self.length_penalty > 0:
            num_tokens = self.max_tokens
        return self._penalized(best.logprob, num_tokens) > self.score(self.finished[-1])


class Advance(NamedTuple):
    """Result of one step of a search."""

    search: BeamSearch
    parents: tuple[int, ...]
    """Indices, in the list before the step, of the beams that the running ones continue."""
