"""One row of a step's logits, as the sampling steps see it."""

from __future__ import annotations

from typing import NamedTuple

from baton.sampling import SamplingParams


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
