"""Interface of the attention implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.core.runner import OnLayerDone, StepPart
from engine.uploads import StepNumbers


class AttentionStep(Protocol):
    """Attention of one step, as its layers use it."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Write one layer's K and V, `[kv_heads, T, dim]`, into its pages, report them, and attend its queries.

        Queries are `[heads, T, dim]`.

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
