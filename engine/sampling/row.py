"""One row of a step's logits, as the sampling stages use it, and its random numbers: functions of its request alone."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from baton.sampling import SamplingParams

MIN_TEMPERATURE = 1e-30
"""Minimum temperature; lower ones are treated as this one, because of float32's range."""
DRAW = 0
XTC = 1


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


def uniform(seed: int, choice_index: int, position: int, purpose: int = DRAW) -> float:
    """Return the random number in [0, 1) that decides the token at `position` of a choice.

    Each purpose has its own numbers, so other random decisions are independent of the draw. The number is a pure
    function of its arguments, so a stream that is resumed on another worker draws the same numbers.
    """
    counter = (seed % 2**64).to_bytes(8, "little") + choice_index.to_bytes(4, "little") + position.to_bytes(8, "little")
    if purpose != DRAW:
        counter += purpose.to_bytes(1, "little")
    bits = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53
