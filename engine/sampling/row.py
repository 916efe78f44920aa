"""One row of a step's logits, as the sampling stages use it."""

from __future__ import annotations

from typing import NamedTuple

from baton.sampling import SamplingParams
from engine.sampling.random import uniform

MIN_TEMPERATURE = 1e-30
"""Minimum temperature; lower ones are treated as this one, because of float32's range."""


class Row(NamedTuple):
    """Inputs, other than the logits, that decide the token of a row."""

    sampling: SamplingParams
    choice_index: int
    position: int
    """Position of the token to sample, counted from the first prompt token."""
    num_prompt_tokens: int = 0
    history: tuple[int, ...] = ()
    """All tokens before it, if the sampling needs them."""
    sequence_key: int = -1
    """Identifies the sequence within its engine. The history of a key only grows."""

    @property
    def draws(self) -> bool:
        """True if a random number decides the token; otherwise the likeliest token is taken."""
        return self.sampling.temperature > 0

    @property
    def divisor(self) -> float:
        """Number by which the logits of a row that draws are divided."""
        return max(self.sampling.temperature, MIN_TEMPERATURE)

    @property
    def number(self) -> float:
        """The random number of a row that draws."""
        assert self.sampling.seed is not None
        return uniform(self.sampling.seed, self.choice_index, self.position)
