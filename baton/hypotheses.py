"""State of a beam search: a worker reports it, and another worker continues from it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.sampling import FinishReason
from baton.scores import NO_SCORES, TokenScores


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A sequence of a beam search, complete or not."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """Sum of its tokens' log probabilities."""
    finish_reason: FinishReason | None = None
    """None: it has not finished."""
    scores: TokenScores = NO_SCORES
    """Log probabilities of the tokens, if the request asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypotheses:
    """Beam search between two steps: all state that is needed to continue it."""

    running: tuple[Beam, ...] = ()
    """Beams, the likeliest first, all of the same length. Empty: there is no search, or it has not started."""
    finished: tuple[Beam, ...] = ()
    """Finished sequences so far, the best first."""

    def shared_token_ids(self) -> tuple[int, ...]:
        """Return the common prefix of all beams."""
        num_shared = 0
        for in_place in zip(*(beam.token_ids for beam in self.running), strict=True):
            if len(set(in_place)) > 1:
                break
            num_shared += 1
        return self.running[0].token_ids[:num_shared] if self.running else ()


NO_HYPOTHESES = Hypotheses()
