"""Index of a sequence's units in the rows of a cache, as runs to be copied: on the host and on a GPU.

On a GPU, the index of a whole transfer is uploaded once, as far as its block table is known; each chunk uses a slice of
it. When the table grows, only the new part is uploaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.blocks import HASH_BLOCK
from baton.errors import TransferError
from engine.core.kv_spec import EMPTY_PLACE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.core.kv_spec import LayerGroup
    from kvstore.transfer.device import GpuDevice


def least_run(group: LayerGroup) -> int:
    """Return a number of elements that divides every run of a group, whatever heads and units a plan has."""
    return math.gcd(HASH_BLOCK, group.block_size) * math.gcd(*group.page_dims)


@dataclass(frozen=True, slots=True)
class Runs:
    """Positions of one layer group's units in the rows of a cache."""

    numel: int
    """Elements of one run."""
    per_row: int
    """Runs of one row of the cache."""
    of_unit: NDArray[np.int64]
    """Runs of each unit of a block, in wire order: `[units per block, runs per unit]`."""

    def of_units(self, table: NDArray[np.int64], unit_lo: int, unit_hi: int) -> NDArray[np.int64]:
        """Return the runs of a sequence's units in wire order, counted from the start of a layer.

        Args:
            table: the sequence's blocks.
            unit_lo, unit_hi: units, counted from the sequence's start.

        Raises:
            TransferError: a block has left the window.
        """
        places, units_of_block = np.divmod(np.arange(unit_lo, unit_hi), len(self.of_unit))
        blocks = table[places]
        if (blocks == EMPTY_PLACE).any():
            raise TransferError("a block has left the window before it was sent")
        return (blocks[:, None] * self.per_row + self.of_unit[units_of_block]).ravel()


def runs_of(group: LayerGroup, unit_tokens: int, head_lo: int, head_hi: int) -> Runs:
    """Compute the runs of the heads `head_lo:head_hi` (the cache's own numbers) in units of `unit_tokens`."""
    pieces, block_size = [], group.block_size
    for unit in range(block_size // unit_tokens):
        at: list[tuple[int, int]] = []
        for head in range(head_lo, head_hi):
            page = head * group.page_numel
            for dim in group.page_dims:
                at.append((page + unit * unit_tokens * dim, unit_tokens * dim))
                page += block_size * dim
        pieces.append(_joined(at))
    row_numel = group.row_numel
    numel = math.gcd(row_numel, *(number for at in pieces for piece in at for number in piece)) or 1
    of_unit = [[run for start, size in at for run in range(start // numel, (start + size) // numel)] for at in pieces]
    return Runs(numel, row_numel // numel, np.array(of_unit, dtype=np.int64))


def _joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join pieces `(start, size)` that follow each other without a gap."""
    joined: list[tuple[int, int]] = []
    for start, size in pieces:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


class GpuIndex:
    """Runs of the units of one transfer and layer group, on a GPU. For one thread, on its stream.

    Args:
        first_unit: the first unit of the transfer, counted from the sequence's start.
        num_units: number of units that it needs, including those after the sequence's end in its last block.
    """

    def __init__(self, gpu: GpuDevice, runs: Runs, first_unit: int, num_units: int) -> None:
        self._gpu = gpu
        self._runs = runs
        self._first_unit = first_unit
        self._num_units = num_units
        self._num_known = 0
        self._table = np.empty(0, dtype=np.int64)
        """The table from which the index was uploaded."""
        self._index: torch.Tensor | None = None

    def until(self, table: NDArray[np.int64], unit_hi: int) -> torch.Tensor:
        """Return the index, `int64`, whose first `unit_hi` units are those of a block table.

        The upload is in the calling thread's stream, before later work.
        """
        if self._index is None:
            self._index = self._gpu.buffer(8 * self._num_units * self._runs.of_unit.shape[1]).view(torch.int64)
        if table is not self._table and not np.array_equal(table[: len(self._table)], self._table):
            self._num_known = 0  # a window has advanced: a former block is an empty place now
        self._table = table
        if unit_hi > self._num_known:
            known = min(self._num_units, len(table) * len(self._runs.of_unit) - self._first_unit)
            assert known >= unit_hi, "the block table does not reach so far yet"
            self._upload(self._index, known)
        return self._index

    def _upload(self, index: torch.Tensor, until: int) -> None:
        lo, self._num_known = self._num_known, until
        runs = self._runs.of_units(self._table, self._first_unit + lo, self._first_unit + until)
        pinned = self._gpu.pinned_buffer(runs.nbytes).view(torch.int64)
        pinned.copy_(torch.from_numpy(runs))
        start = lo * self._runs.of_unit.shape[1]
        index[start : start + len(runs)].copy_(pinned, non_blocking=True)
