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
from torch.nn import functional

from engine.uploads import uploaded

BLOCK = 64


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


class PrefixSums:
    """Running sums of the weights of rows, and the index at which they exceed a share of the total.

    Sums are in float64 and in two levels, blocks of weights and the weights of one block, which costs a fortieth of a
    running sum over all. The result of a row depends only on that row.

    Args:
        weights: `[rows, n]`, none negative, at least one positive in each row.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        padding = -weights.shape[-1] % BLOCK
        padded = functional.pad(weights, (0, padding)) if padding else weights
        self._blocks = padded.view(len(weights), -1, BLOCK)
        self._sums = self._blocks.sum(-1, dtype=torch.float64).cumsum(-1)
        self._rows = torch.arange(len(weights), device=weights.device)

    @property
    def total(self) -> torch.Tensor:
        """Sum of all weights, `[rows]`."""
        return self._sums[:, -1]

    def until(self, count: torch.Tensor) -> torch.Tensor:
        """Return the sums of the first `count` weights, `[rows, counts]`."""
        block = (count // BLOCK).clamp(max=self._sums.shape[-1] - 1)
        num_within = (count - block * BLOCK).float()[..., None]
        is_counted = (num_within - torch.arange(BLOCK, device=count.device)).clamp_(0, 1)
        within = self._blocks[self._rows[:, None], block].mul_(is_counted)
        before = torch.where(block > 0, self._sums.gather(1, (block - 1).clamp(min=0)), 0.0)
        return before + within.sum(-1, dtype=torch.float64)

    def first_beyond(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return the index of the first weight at which the running sum exceeds `wanted`, `[rows]` each.

        If rounding prevents that, it is the index of the last positive weight.
        """
        block = _first_beyond(self._sums, wanted)
        before = torch.where(block > 0, self._sums[self._rows, block - 1], 0.0)
        within = before[:, None] + self._blocks[self._rows, block].double().cumsum(-1)
        return block * BLOCK + _first_beyond(within, wanted)


def first_beyond(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the index of the first weight at which the running sum exceeds a share of the row's sum.

    This is the inverse of the distribution function. A weight of 0 is never found.

    Args:
        weights: `[rows, n]`, none negative, at least one positive in each row.
        shares: `[rows]` in float64, at least 0 and less than 1.
    """
    sums = PrefixSums(weights)
    return sums.first_beyond(shares * sums.total)


def _first_beyond(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.minimum((sums <= wanted[:, None]).sum(-1), (sums < sums[:, -1:]).sum(-1))
