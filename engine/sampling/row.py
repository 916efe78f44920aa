"""One row of a step's logits, as the sampling steps see it."""

from __future__ import annotations

from typing import NamedTuple

from baton.sampling import SamplingParams
from engine.sampling.random import uniform

MIN_TEMPERATURE = 1e-30
"""Lower ones draw as this one does: float32 has not much below it."""


class Row(NamedTuple):
    """What decides the token that is taken from a row of logits, beside the logits."""

    sampling: SamplingParams
    choice_index: int
    position: int
    """Position of the token to sample, counted from the first prompt token."""
    num_prompt_tokens: int = 0
    history: tuple[int, ...] = ()
    """All tokens before it, where the sampling needs them."""
    sequence_key: int = -1
    """Identifies the sequence within its engine: the history of a key only grows."""

    @property
    def draws(self) -> bool:
        """Whether a random number decides the token; else it is the likeliest."""
        return self.sampling.temperature > 0

    @property
    def divisor(self) -> float:
        """What the logits of a row that draws are divided by."""
        return max(self.sampling.temperature, MIN_TEMPERATURE)

    @property
    def number(self) -> float:
        """The random number of a row that draws."""
        assert self.sampling.seed is not None
        return uniform(self.sampling.seed, self.choice_index, self.position)
