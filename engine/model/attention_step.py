"""Interface of the attention implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from engine.core.runner import OnLayerDone, StepPart
from engine.uploads import StepNumbers


class AttentionTerms(NamedTuple):
    """Terms by which one layer computes its scores, and the places that they cover."""

    scaling: float | None = None
    """Factor of scores; None: the inverse square root of the width of a key."""
    sliding_window: int | None = None
    """Number of last tokens that a token sees, including itself; None: all."""
    softcap: float | None = None
    """Scores are limited to this magnitude by a hyperbolic tangent (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """`[heads]`: score of a place without a value, which takes part in the softmax (gpt-oss)."""
    is_latent: bool = False
    """True if a key is a token's K and V side by side, and its value is K (multi-head latent attention)."""

    @property
    def is_plain(self) -> bool:
        """True if scores are products of queries and keys alone."""
        return self.softcap is None and self.sinks is None

    def given(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values to attend over, given what the layer keeps, `[..., tokens, dim]`."""
        return (torch.cat([keys, values], dim=-1), keys) if self.is_latent else (keys, values)


class AttentionStep(Protocol):
    """Attention of one step, as its layers use it."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """Write one layer's K and V, `[kv_heads, T, dim]`, into its pages, report them, and attend its queries.

        A layer that keeps no KV of its own writes and reports nothing. Queries are `[heads, T, dim]`.

        Returns:
            `[T, heads, v_dim]`.
        """
        ...


class Attention(Protocol):
    """Implementation of a step's attention."""

    name: str
    """See `baton.cluster.Computes.attention`."""
    needs_numbers: bool
    """True if the places after a sequence's last token, in its last block, must hold numbers. These places are always
    masked, but a masked NaN or infinity, left by another request, would spoil a sum over all places.
    """

    def step(self, parts: Sequence[StepPart], on_layer_done: OnLayerDone, numbers: StepNumbers) -> AttentionStep:
        """Create the index tensors of a step. They are valid once the numbers have been sent.

        Args:
            parts: the parts in packed order.
            on_layer_done: see `Runner.execute`.
            numbers: the step's numbers.
        """
        ...
