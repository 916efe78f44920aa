"""What there is several of: ways to compute the attention of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.core.runner import OnLayerDone, StepPart
from engine.uploads import StepNumbers


class AttentionStep(Protocol):
    """A step as its layers see it."""

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
        """Writes one layer's K and V, `[kv_heads, T, dim]`, into its pages, reports that they are there, and attends
        its queries, `[heads, T, dim]`.

        Returns:
            `[T, heads, v_dim]`.
        """
        ...


class Attention(Protocol):
    """A way to compute the attention of steps."""

    name: str
    """See `baton.cluster.Computes.attention`."""
    needs_numbers: bool
    """Whether the places behind a sequence's last token, in its last block, must hold numbers. Others' tokens are
    masked everywhere; but a masked NaN or infinity, which another request may have left, would spoil a sum of all.
    """

    def step(self, parts: Sequence[StepPart], on_layer_done: OnLayerDone, numbers: StepNumbers) -> AttentionStep:
        """Makes the index tensors of a step. They are there when the numbers have been sent.

        Args:
            parts: in packed order.
            on_layer_done: see `Runner.execute`.
            numbers: the step's.
        """
        ...
