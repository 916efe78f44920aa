"""Weights of a step's tokens: probabilities up to a common factor per row, also in ascending order.

Every truncation keeps the weights between two bounds. So it needs only the sorted weights without their tokens, which
vector instructions sort in a thirtieth of the time. The result does not depend on the order of the vocabulary: tokens
of equal weight are kept or excluded together. The memory of large arrays is reused, because new pages cost more than
the arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.uploads import uploaded


class WeightBounds(NamedTuple):
    """Least and greatest weight that remain in each row, `[rows]`; None: no such bound."""

    least: torch.Tensor | None = None
    most: torch.Tensor | None = None

    def within(self, other: WeightBounds) -> WeightBounds:
        """Return the intersection of both bounds."""
        least = [bound for bound in (self.least, other.least) if bound is not None]
        most = [bound for bound in (self.most, other.most) if bound is not None]
        return WeightBounds(
            functools.reduce(torch.maximum, least) if least else None,
            functools.reduce(torch.minimum, most) if most else None,
        )


EVERYTHING = WeightBounds()


class Buffers:
    """Memory that is reused from step to step."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the named memory in a tensor's shape, in float32, with its previous contents."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < tensor.numel() or kept.device != tensor.device:
            kept = self._kept[name] = torch.empty(tensor.numel(), device=tensor.device)
        return kept[: tensor.numel()].view(tensor.shape)


class TokenWeights:
    """Weights of the rows that draw from logits.

    Attributes:
        all: `[rows, vocab_size]` in float32.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._scaled = torch.empty(0)

    def fill(self, logits: torch.Tensor, temperatures: Sequence[float]) -> None:
        """Compute the weights of new rows with logits `[rows, vocab_size]`."""
        divisors = uploaded(torch.tensor(temperatures), logits.device)[:, None]
        self._scaled = self._buffers.like("scaled", logits)
        best = logits.amax(-1, keepdim=True)
        # In float32 for any type of logits: together with a row of adjusted logits they are float32 already.
        torch.sub(logits.float(), best.float(), out=self._scaled).div_(divisors)  # keeps the maximum finite
        self.all = self._buffers.like("all", logits)
        torch.softmax(self._scaled, -1, out=self.all)

    def rising(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the weights of some rows in ascending order, `[rows, vocab_size]`; valid until the next call."""
        rising = self._scaled[: len(rows)]
        rising.copy_(self._of(rows))
        if rising.device.type == "cpu":
            rising.numpy().sort(axis=-1)
            return rising
        return rising.sort(dim=-1).values

    def narrow(self, weights: torch.Tensor, bounds: WeightBounds) -> None:
        """Set weights outside the bounds to 0."""
        inside = self._buffers.like("inside", weights)  # 1.0 or 0.0: vector instructions cannot multiply booleans
        if bounds.least is not None:
            weights.mul_(torch.ge(weights, bounds.least[:, None], out=inside))
        if bounds.most is not None:
            weights.mul_(torch.le(weights, bounds.most[:, None], out=inside))

    def truncate(self, rows: Sequence[int], bounds: WeightBounds) -> None:
        """Set weights of these rows outside their bounds to 0."""
        if len(rows) == len(self.all):
            self.narrow(self.all, bounds)
            return
        places = self._places(rows)
        chosen = self.all.index_select(0, places)
        self.narrow(chosen, bounds)
        self.all.index_copy_(0, places, chosen)

    def _of(self, rows: Sequence[int]) -> torch.Tensor:
        return self.all if len(rows) == len(self.all) else self.all.index_select(0, self._places(rows))

    def _places(self, rows: Sequence[int]) -> torch.Tensor:
        return uploaded(torch.tensor(rows), self.all.device)
