"""The answers among which a beam search looks: a worker reports them, and another one goes on from them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.sampling import FinishReason
from baton.scores import NO_SCORES, TokenScores


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """An answer of a beam search, or the begin of one."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """The sum of its tokens' log probabilities."""
    finish_reason: FinishReason | None = None
    """None: it has not ended."""
    scores: TokenScores = NO_SCORES
    """Log probabilities of the tokens, where the request asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypotheses:
    """A beam search between two steps: all that it goes on from."""

    running: tuple[Beam, ...] = ()
    """The beams, the likeliest first; all are equally long. Empty: there is no search, or it is at its begin."""
    finished: tuple[Beam, ...] = ()
    """The answers so far, the best first."""

    @property
    def num_computed(self) -> int:
        """Tokens of the running beams."""
        return sum(len(beam.token_ids) for beam in self.running)

    def shared_token_ids(self) -> tuple[int, ...]:
        """Returns the tokens with which every beam begins."""
        num_shared = 0
        for in_place in zip(*(beam.token_ids for beam in self.running), strict=True):
            if len(set(in_place)) > 1:
                break
            num_shared += 1
        return self.running[0].token_ids[:num_shared] if self.running else ()


NO_HYPOTHESES = Hypotheses()
