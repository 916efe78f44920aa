"""Copies between a cache's scattered blocks and the contiguous payload of a chunk, on either side of a transfer.

    gather:  cache  ->  payload      (source)            scatter:  payload  ->  cache      (destination)

A unit lies in a cache's row in a few pieces. Here two heads of three, and the second half of a block twice the unit:

    row     | head 0: K K' V V' | head 1: K K' V V' | head 2: K K' V V' |
    unit                               `-    `-            `-    `-            four runs

Every piece is a whole number of runs of one length, the greatest that divides all pieces and their places. So one
index, of runs instead of blocks, moves them whatever the layouts: a whole row is one run where both sides hold the
same, and then this is a gather of blocks. Values are converted on the way where the wire's data type is another.

On a CPU rows of bytes move by numpy's `take` and by an assignment of numpy rows, twice as fast as `index_copy_`, and a
layer is checked while it is in the processor's cache, which halves what the checksum costs.

Each call returns only once the bytes have moved, on a GPU too.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from baton.engine.core.kv_spec import EMPTY_PLACE
from baton.engine.model.kv_cache import movable, movable_dtype, torch_dtype
from kvstore.transfer.copy import int8
from kvstore.transfer.device import gpu_of
from kvstore.transfer.protocol.layout import heads_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from baton.engine.core.kv_spec import BlockTables, KVSpec, LayerGroup
    from baton.engine.core.runner import Fence
    from baton.kv_layout import KvLayout
    from kvstore.transfer.copy.checksum import Checksum
    from kvstore.transfer.protocol.plan import Chunk, TransferPlan


class RankCache(Protocol):
    """One rank's KV cache, as the hand-over reads and writes it. `KVCache` is one, and an engine may have its own."""

    @property
    def spec(self) -> KVSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def groups(self) -> Sequence[torch.Tensor]:
        """One contiguous tensor a layer group, `[layers, blocks, row_numel]`."""
        ...

    @property
    def states(self) -> Mapping[str, torch.Tensor]:
        """One tensor a named state, its first dimension the blocks of the states' table."""
        ...

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Blocks for each block table of a sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Runs:
    """How the units of one layer group lie in the rows of a cache."""

    numel: int
    """Elements of one run."""
    per_row: int
    """Runs of one row of the cache."""
    of_unit: NDArray[np.int64]
    """The runs of each unit of a block, in wire order: `[units per block, runs per unit]`."""


def runs_of(group: LayerGroup, unit_tokens: int, head_lo: int, head_hi: int) -> Runs:
    """Computes the runs of the heads `head_lo:head_hi` (the cache's own numbers) in units of `unit_tokens`."""
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
    numel = math.gcd(row_numel, *(number for at in pieces for piece in at for number in piece))
    of_unit = [[run for start, size in at for run in range(start // numel, (start + size) // numel)] for at in pieces]
    return Runs(numel, row_numel // numel, np.array(of_unit, dtype=np.int64))


def _joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins pieces `(start, size)` that follow each other without a gap."""
    joined: list[tuple[int, int]] = []
    for start, size in pieces:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


class BlockCopier:
    """Copies the chunks of one transfer out of one rank's cache, or into it.

    Args:
        layout: the layout of the side that `cache` belongs to: the plan's source or its destination.
        rank: the rank of that side.
        block_ids: the sequence's block tables on this side; the first block of a table holds token 0.
    """

    def __init__(
        self,
        cache: RankCache,
        plan: TransferPlan,
        layout: KvLayout,
        rank: int,
        block_ids: BlockTables,
    ) -> None:
        self.plan = plan
        self._cache = cache
        self._tables: list[NDArray[np.int64]] = []
        self.extend(block_ids)
        self._gpu = gpu_of(cache.device)
        self._first_units = [plan.skip_tokens // wire.unit_tokens for wire in plan.groups]
        self._indices: dict[tuple[int, int, int], torch.Tensor] = {}
        """Run indices by part and units: the chunks of a span share one."""
        self._runs: list[Runs] = []
        for ours, model, wire in zip(cache.spec.groups, layout.groups, plan.groups, strict=True):
            first = heads_of(model.num_kv_heads, layout.tp_size, rank).start
            self._runs.append(runs_of(ours, wire.unit_tokens, wire.head_lo - first, wire.head_hi - first))
        self._bytes = {
            part: group.view(len(group), -1, runs.numel).view(torch.uint8).numpy()
            for part, (group, runs, wire) in enumerate(zip(cache.groups, self._runs, plan.groups, strict=True))
            if self._gpu is None and group.dtype == torch_dtype(wire.dtype)
        }
        """The groups that travel without conversion, as bytes, `uint8[layers, runs, bytes]`; shares memory."""

    def extend(self, block_ids: BlockTables) -> None:
        """Takes the sequence's block tables, which have grown. Any thread may call it.

        Raises:
            ValueError: the cache has no such blocks, or another number of tables.
        """
        if len(block_ids) != self._cache.spec.num_tables:
            raise ValueError(f"a sequence has {self._cache.spec.num_tables} block tables here, got {len(block_ids)}")
        for table, num_blocks in zip(block_ids, self._cache.table_sizes, strict=True):
            if not all(block == EMPTY_PLACE or 0 <= block < num_blocks for block in table):
                raise ValueError(f"a cache of {num_blocks} blocks does not have all of {list(table)}")
        # What stands in an empty place is never read at the other side, but it must not be junk that spoils a sum.
        tables = ([table[-1] if block == EMPTY_PLACE else block for block in table] for table in block_ids)
        self._tables = [np.array(list(table), dtype=np.int64) for table in tables]

    def gather(
        self,
        chunk: Chunk,
        payload: torch.Tensor,
        fence: Fence | None = None,
        checksum: Checksum | None = None,
    ) -> None:
        """Fills `payload`, `uint8[chunk.num_bytes]`, once `fence` has been reached; updates `checksum` with it.

        This is the only place where a fence is waited for.
        """
        if fence is not None:
            fence.wait(self._gpu.current_stream() if self._gpu is not None else None)
        if self._is_bytewise(chunk):
            self._gather_bytes(chunk, payload, checksum)
            return
        with self._awaited():
            if chunk.part < len(self._runs):
                self._gather_blocks(chunk, payload)
            else:
                payload.copy_(self._state(chunk)[chunk.unit_lo : chunk.unit_hi], non_blocking=True)
        if checksum is not None:
            checksum.update(payload)

    def scatter(self, chunk: Chunk, payload: torch.Tensor, checksum: Checksum | None = None) -> None:
        """Writes `payload`, `uint8[chunk.num_bytes]`, into the blocks, and updates `checksum` with it.

        With the sequence's last unit, the rest of its block is zeroed: attention masks the places behind the last
        token, but a masked NaN that another request left there would still spoil the sum.
        """
        if self._is_bytewise(chunk):
            self._scatter_bytes(chunk, payload, checksum)
            return
        if checksum is not None:
            checksum.update(payload)
        with self._awaited():
            if chunk.part < len(self._runs):
                self._scatter_blocks(chunk, payload)
            else:
                self._state(chunk)[chunk.unit_lo : chunk.unit_hi] = payload

    # -- bytes as they are, on a CPU ---------------------------------------------------------------------------------

    def _is_bytewise(self, chunk: Chunk) -> bool:
        return chunk.part in self._bytes

    def _gather_bytes(self, chunk: Chunk, payload: torch.Tensor, checksum: Checksum | None) -> None:
        index = self._index(chunk.part, chunk.unit_lo, chunk.unit_hi).numpy()
        layers = self._bytes[chunk.part][chunk.layer_lo : chunk.layer_hi]
        for layer, out in zip(layers, payload.numpy().reshape(len(layers), len(index), -1), strict=True):
            # "clip" writes straight to `out`; there is nothing to clip, the index is of blocks that exist
            layer.take(index, axis=0, out=out, mode="clip")
            if checksum is not None:
                checksum.update(out)

    def _scatter_bytes(self, chunk: Chunk, payload: torch.Tensor, checksum: Checksum | None) -> None:
        index = self._index(chunk.part, chunk.unit_lo, chunk.unit_hi).numpy()
        left = self._behind_the_end(chunk)
        layers = self._bytes[chunk.part][chunk.layer_lo : chunk.layer_hi]
        for layer, values in zip(layers, payload.numpy().reshape(len(layers), len(index), -1), strict=True):
            layer[index] = values
            if checksum is not None:
                checksum.update(values)
            if left is not None:
                layer[left.numpy()] = 0

    # -- converted, or on a GPU --------------------------------------------------------------------------------------

    def _gather_blocks(self, chunk: Chunk, payload: torch.Tensor) -> None:
        wire, runs, layers = self.plan.groups[chunk.part], self._runs[chunk.part], self._layers(chunk)
        index = self._index(chunk.part, chunk.unit_lo, chunk.unit_hi).to(layers.device)
        dtype = movable_dtype(torch_dtype(wire.dtype))
        for layer, out in zip(layers, payload.view(len(layers), -1), strict=True):
            if layer.dtype == dtype and layer.device == out.device:
                torch.index_select(layer, 0, index, out=out.view(dtype).view(-1, runs.numel))
            elif dtype == torch.int8 and layer.dtype != torch.int8:
                out.copy_(int8.quantized(self.plan, chunk, layer[index]), non_blocking=True)
            else:
                out.view(dtype).copy_(layer[index].to(dtype).view(-1), non_blocking=True)

    def _scatter_blocks(self, chunk: Chunk, payload: torch.Tensor) -> None:
        wire, runs, layers = self.plan.groups[chunk.part], self._runs[chunk.part], self._layers(chunk)
        payload = payload.to(layers.device, non_blocking=True)
        dtype = movable_dtype(torch_dtype(wire.dtype))
        is_quantized = dtype == torch.int8 and layers.dtype != torch.int8
        values = int8.dequantized(self.plan, chunk, payload) if is_quantized else payload.view(dtype)
        values = values.to(layers.dtype).view(len(layers), -1, runs.numel)
        index = self._index(chunk.part, chunk.unit_lo, chunk.unit_hi)
        if self._gpu is None:
            layers.view(torch.uint8).numpy()[:, index.numpy()] = values.view(torch.uint8).numpy()
        else:
            layers.index_copy_(1, index.to(layers.device), values)
        if (left := self._behind_the_end(chunk)) is not None:
            layers.index_fill_(1, left.to(layers.device), 0)

    def _behind_the_end(self, chunk: Chunk) -> torch.Tensor | None:
        """Returns the runs behind the sequence's end in its last block, for the chunk that has the last unit."""
        num_left = -(self._first_units[chunk.part] + chunk.unit_hi) % len(self._runs[chunk.part].of_unit)
        if not num_left or chunk.unit_hi != self.plan.num_units(chunk.part):
            return None
        return self._index(chunk.part, chunk.unit_hi, chunk.unit_hi + num_left)

    def _index(self, part: int, unit_lo: int, unit_hi: int) -> torch.Tensor:
        """Returns the runs of units in wire order, counted from the start of a layer; on the CPU."""
        key = part, unit_lo, unit_hi
        if key not in self._indices:
            runs = self._runs[part]
            units = self._first_units[part] + np.arange(unit_lo, unit_hi)
            blocks, units_of_block = np.divmod(units, len(runs.of_unit))
            index = self._tables[part][blocks][:, None] * runs.per_row + runs.of_unit[units_of_block]
            self._indices[key] = torch.from_numpy(index.ravel())
        return self._indices[key]

    def _layers(self, chunk: Chunk) -> torch.Tensor:
        """Returns the chunk's layers as runs that can be moved, `[layers, runs, numel]`; shares memory."""
        layers = movable(self._cache.groups[chunk.part][chunk.layer_lo : chunk.layer_hi])
        return layers.view(len(layers), -1, self._runs[chunk.part].numel)

    def _state(self, chunk: Chunk) -> torch.Tensor:
        """Returns the bytes of the sequence's state; shares memory."""
        name = self._cache.spec.states[chunk.part - len(self._runs)].name
        return self._cache.states[name][int(self._tables[-1][0])].view(-1).view(torch.uint8)

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[None]:
        """Waits, at the end of the block, for the copies that it puts into the calling thread's stream on a GPU."""
        yield
        if self._gpu is not None:
            self._gpu.current_stream().synchronize()
