"""The weights of a step's tokens: probabilities but for a factor, and the same in rising order.

Every truncation keeps the weights between two bounds. So it needs the sorted weights alone, without their tokens, which
vector instructions sort in a thirtieth of the time, and what it keeps depends on no order of the vocabulary: tokens of
equal weight stay or go together. The memory of large arrays is kept: new pages cost more than the arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.uploads import uploaded


class WeightBounds(NamedTuple):
    """The least and the greatest weight that stays in each row, `[rows]`; None: there is no such bound."""

    least: torch.Tensor | None = None
    most: torch.Tensor | None = None

    def within(self, other: WeightBounds) -> WeightBounds:
        """Returns the bounds of what stays within both."""
        least = [bound for bound in (self.least, other.least) if bound is not None]
        most = [bound for bound in (self.most, other.most) if bound is not None]
        return WeightBounds(
            functools.reduce(torch.maximum, least) if least else None,
            functools.reduce(torch.minimum, most) if most else None,
        )


EVERYTHING = WeightBounds()


class Buffers:
    """Memory that is kept from step to step."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the memory of a name in a tensor's shape, in float32; its contents are what was left there."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < tensor.numel() or kept.device != tensor.device:
            kept = self._kept[name] = torch.empty(tensor.numel(), device=tensor.device)
        return kept[: tensor.numel()].view(tensor.shape)


class TokenWeights:
    """The weights of the rows that draw from logits.

    Attributes:
        all: `[rows, vocab_size]` in float32.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._scaled = torch.empty(0)

    def fill(self, logits: torch.Tensor, temperatures: Sequence[float]) -> None:
        """Takes the logits `[rows, vocab_size]` of other rows."""
        divisors = uploaded(torch.tensor(temperatures), logits.device)[:, None]
        self._scaled = self._buffers.like("scaled", logits)
        best = logits.amax(-1, keepdim=True)
        # In float32 whatever the logits' type is: beside a row whose logits are adjusted they have become that.
        torch.sub(logits.float(), best.float(), out=self._scaled).div_(divisors)  # so that the best one stays finite
        self.all = self._buffers.like("all", logits)
        torch.softmax(self._scaled, -1, out=self.all)

    def rising(self, rows: Sequence[int]) -> torch.Tensor:
        """Returns the weights of some rows in rising order, `[rows, vocab_size]`; valid until the next call."""
        rising = self._scaled[: len(rows)]
        rising.copy_(self._of(rows))
        if rising.device.type == "cpu":
            rising.numpy().sort(axis=-1)
            return rising
        return rising.sort(dim=-1).values

    def narrow(self, weights: torch.Tensor, bounds: WeightBounds) -> None:
        """Sets what the bounds exclude to 0."""
        inside = self._buffers.like("inside", weights)  # 1.0 or 0.0: vector instructions multiply no truth values
        if bounds.least is not None:
            weights.mul_(torch.ge(weights, bounds.least[:, None], out=inside))
        if bounds.most is not None:
            weights.mul_(torch.le(weights, bounds.most[:, None], out=inside))

    def truncate(self, rows: Sequence[int], bounds: WeightBounds) -> None:
        """Sets what the bounds of these rows exclude to 0."""
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
