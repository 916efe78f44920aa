"""Running sums of weights, and the index at which they exceed a share of the total.

Sums are in float64 and in two levels, blocks of weights and the weights of one block, which costs a fortieth of a
running sum over all. The result of a row depends only on that row.
"""

from __future__ import annotations

import torch
from torch.nn import functional

BLOCK = 64


class PrefixSums:
    """Prefix sums of the weights of rows.

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
