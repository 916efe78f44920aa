"""Copies between a cache's scattered blocks and the contiguous payload of a chunk, on either side of a transfer.

    gather:  cache  ->  payload      (source)            scatter:  payload  ->  cache      (destination)

A unit occupies a few pieces of a cache's row. Here two heads of three, and the second half of a block twice the unit:

    row     | head 0: K K' V V' | head 1: K K' V V' | head 2: K K' V V' |
    unit                               `-    `-            `-    `-            four runs

Every piece is a whole number of runs of one length, the greatest that divides all pieces and their offsets. So one
index, of runs instead of blocks, copies them for any two layouts. A whole row is one run if both sides hold the same,
and then this is a gather of blocks. Values are converted during the copy if the wire's data type differs.

On a CPU, numpy's `take` and an assignment of numpy rows copy rows of bytes, twice as fast as `index_copy_`. A layer is
checked while it is in the processor's cache, which halves the cost of the checksum.

`gather` and `scatter` return only once the bytes are copied, on a GPU too. Between a GPU's cache and slots on the GPU,
`begin_gather` and `begin_scatter` only put the copy into the calling thread's stream, where a kernel copies the runs of
all layers and computes the checksum in one pass. torch does so in several passes if the kernels do not run, if values
are converted, and for states.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from baton.errors import TransferError
from engine.core.kv_spec import EMPTY_PLACE
from engine.model.kv_cache import movable, movable_dtype, torch_dtype
from kvstore.transfer.copy import int8
from kvstore.transfer.copy.checksum import word_sum
from kvstore.transfer.copy.kernel_choice import choose_kernels, kernels_of
from kvstore.transfer.copy.moves import GpuMove, sum_buffers_of
from kvstore.transfer.copy.run_index import GpuIndex, Runs, least_run, runs_of
from kvstore.transfer.device import gpu_of
from kvstore.transfer.protocol.layout import heads_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from baton.kv_layout import KvLayout
    from engine.core.kv_spec import BlockTables, KVSpec
    from engine.core.runner import Fence
    from kvstore.transfer.copy.checksum import Checksum
    from kvstore.transfer.copy.moves import Move
    from kvstore.transfer.device import GpuDevice
    from kvstore.transfer.protocol.plan import Chunk, TransferPlan


class RankCache(Protocol):
    """KV cache of one rank, as the KV transfer reads and writes it. `KVCache` is one; an engine may provide another."""

    @property
    def spec(self) -> KVSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def groups(self) -> Sequence[torch.Tensor]:
        """One contiguous tensor per layer group, `[layers, blocks, row_numel]`."""
        ...

    @property
    def states(self) -> Mapping[str, torch.Tensor]:
        """One tensor per named state; its first dimension is the blocks of the states' table."""
        ...

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Number of blocks for each block table of a sequence."""
        ...


def choose_copies(caches: Sequence[RankCache]) -> None:
    """Choose the copy implementation for these caches before a connection waits for it; takes seconds on a GPU."""
    for cache in caches:
        pages = zip(cache.spec.groups, cache.groups, strict=True)
        least_bytes = math.gcd(*(least_run(ours) * tensor.itemsize for ours, tensor in pages if ours.layers))
        choose_kernels(cache.device, max(1, least_bytes // 8))


class BlockCopier:
    """Copier of the chunks of one transfer out of one rank's cache, or into it.

    Args:
        layout: the layout of `cache`'s side: the plan's source or its destination.
        rank: the rank of that side.
        block_ids: the sequence's block tables on this side; the first block of a table holds token 0. The first entry
            of the states' table is the row that is copied.
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
        self._first_units = [begin // wire.unit_tokens for begin, wire in zip(plan.begins, plan.groups, strict=True)]
        self._indices: dict[tuple[int, int, int], torch.Tensor] = {}
        """Run indices by part and units, on a CPU: the chunks of a span share one."""
        self._runs: list[Runs] = []
        for ours, model, wire in zip(cache.spec.groups, layout.groups, plan.groups, strict=True):
            first = heads_of(model, layout.tp_size, rank).start
            self._runs.append(runs_of(ours, wire.unit_tokens, wire.head_lo - first, wire.head_hi - first))
        self._bytes = {
            part: group.view(len(group), -1, runs.numel).view(torch.uint8).numpy()
            for part, (group, runs, wire) in enumerate(zip(cache.groups, self._runs, plan.groups, strict=True))
            if self._gpu is None and len(group) and group.dtype == torch_dtype(wire.dtype)
        }
        """Groups that travel without conversion, as bytes, `uint8[layers, runs, bytes]`; shares memory."""
        self._gpu_indices = [
            GpuIndex(self._gpu, runs, first, plan.num_units(part) + self._num_behind(part))
            for part, (runs, first) in enumerate(zip(self._runs, self._first_units, strict=True))
            if self._gpu is not None
        ]

    def extend(self, block_ids: BlockTables) -> None:
        """Set the sequence's block tables, which have grown. Any thread may call it.

        Raises:
            ValueError: the cache does not have these blocks, or the number of tables differs.
        """
        if len(block_ids) != self._cache.spec.num_tables:
            raise ValueError(f"a sequence has {self._cache.spec.num_tables} block tables here, got {len(block_ids)}")
        for table, num_blocks in zip(block_ids, self._cache.table_sizes, strict=True):
            if not all(block == EMPTY_PLACE or 0 <= block < num_blocks for block in table):
                raise ValueError(f"a cache of {num_blocks} blocks does not have all of {list(table)}")
        # An engine may drop blocks although its groups declare no window. The receiver never uses what is sent for
        # their places, but it must not be garbage that spoils a sum.
        tables = [np.array(table, dtype=np.int64) for table in block_ids]
        for blocks, group in zip(tables, self._cache.spec.groups, strict=False):
            if not group.window:
                blocks[blocks == EMPTY_PLACE] = blocks[-1:]
        self._tables = tables

    def gather(
        self,
        chunk: Chunk,
        payload: torch.Tensor,
        fence: Fence | None = None,
        checksum: Checksum | None = None,
    ) -> None:
        """Fill `payload`, `uint8[chunk.num_bytes]`, once `fence` has been reached; update `checksum` with it.

        This and `begin_gather` are the only places that wait for a fence.
        """
        if fence is not None:
            fence.wait(self._gpu.current_stream() if self._gpu is not None else None)
        if self._is_bytewise(chunk):
            self._gather_bytes(chunk, payload, checksum)
            return
        with self._awaited():
            self._read(chunk, payload)
        if checksum is not None:
            checksum.update(payload)

    def scatter(self, chunk: Chunk, payload: torch.Tensor, checksum: Checksum | None = None) -> None:
        """Write `payload`, `uint8[chunk.num_bytes]`, into the blocks, and update `checksum` with it.

        With the sequence's last unit, the rest of its block is zeroed: attention masks the positions after the last
        token, but a masked NaN that another request left there would still spoil the sum.
        """
        if self._is_bytewise(chunk):
            self._scatter_bytes(chunk, payload, checksum)
            return
        if checksum is not None:
            checksum.update(payload)
        with self._awaited():
            self._write(chunk, payload)

    # -- on a GPU, between its cache and its slots -------------------------------------------------------------------

    def begin_gather(self, chunk: Chunk, payload: torch.Tensor, fence: Fence | None, checked: bool) -> Move:
        """Start to fill `payload`, `uint8[chunk.num_bytes]` on the cache's GPU, once `fence` has been reached."""
        gpu = self._on_gpu()
        if fence is not None:
            fence.wait(gpu.current_stream())
        return self._begin("gather", chunk, payload, checked)

    def begin_scatter(self, chunk: Chunk, payload: torch.Tensor, checked: bool) -> Move:
        """Start to write `payload`, `uint8[chunk.num_bytes]` on the cache's GPU, into the blocks, like `scatter`.

        The copy reads `payload` as of its position in the calling thread's stream.
        """
        return self._begin("scatter", chunk, payload, checked)

    def _begin(self, name: str, chunk: Chunk, payload: torch.Tensor, checked: bool) -> Move:
        gpu = self._on_gpu()
        buffers = sum_buffers_of(gpu)
        sums, num_sums = buffers.take(), 1
        kernels = kernels_of(self._cache.device)
        if kernels is not None and self._is_as_it_is(chunk):
            num_sums = self._launch(kernels, name, chunk, payload, sums)
            if name == "scatter":
                self._zero_behind_the_end(chunk, self._layers(chunk))
        else:
            self._move_by_torch(name, chunk, payload, sums if checked else None)
        done = gpu.event()
        done.record(gpu.current_stream())
        return GpuMove(done, buffers, sums, num_sums if checked else 0)

    def _on_gpu(self) -> GpuDevice:
        assert self._gpu is not None, "a cache in main memory"
        return self._gpu

    def _is_as_it_is(self, chunk: Chunk) -> bool:
        """Return whether a chunk is KV that is not converted.

        Its runs then consist of whole words: a unit has 16 tokens or more.
        """
        is_kv = chunk.part < len(self._runs)
        return is_kv and self._cache.groups[chunk.part].dtype == torch_dtype(self.plan.groups[chunk.part].dtype)

    def _launch(self, kernels: Any, name: str, chunk: Chunk, payload: torch.Tensor, sums: torch.Tensor) -> int:
        runs, pages = self._runs[chunk.part], self._cache.groups[chunk.part]
        runs_a_unit = runs.of_unit.shape[1]
        span = kernels.ChunkRuns(
            pages=pages,
            run_bytes=runs.numel * pages.itemsize,
            places=self._gpu_indices[chunk.part].until(self._tables[chunk.part], chunk.unit_hi),
            first=chunk.unit_lo * runs_a_unit,
            num_runs=(chunk.unit_hi - chunk.unit_lo) * runs_a_unit,
            layer_lo=chunk.layer_lo,
        )
        num_sums: int = kernels.launch(getattr(kernels, name), span, payload.view(torch.int64), sums)
        return num_sums

    def _move_by_torch(self, name: str, chunk: Chunk, payload: torch.Tensor, sums: torch.Tensor | None) -> None:
        if name == "gather":
            self._read(chunk, payload)
        else:
            self._write(chunk, payload)
        if sums is not None:
            sums[0].copy_(word_sum(payload), non_blocking=True)

    # -- unconverted bytes, on a CPU ---------------------------------------------------------------------------------

    def _is_bytewise(self, chunk: Chunk) -> bool:
        return chunk.part in self._bytes

    def _gather_bytes(self, chunk: Chunk, payload: torch.Tensor, checksum: Checksum | None) -> None:
        index = self._index(chunk.part, chunk.unit_lo, chunk.unit_hi).numpy()
        layers = self._bytes[chunk.part][chunk.layer_lo : chunk.layer_hi]
        for layer, out in zip(layers, payload.numpy().reshape(len(layers), len(index), -1), strict=True):
            # "clip" writes straight to `out`; nothing is clipped, since the index has only blocks that exist
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

    def _read(self, chunk: Chunk, payload: torch.Tensor) -> None:
        if chunk.part < len(self._runs):
            self._gather_blocks(chunk, payload)
        else:
            payload.copy_(self._state(chunk)[chunk.unit_lo : chunk.unit_hi], non_blocking=True)

    def _write(self, chunk: Chunk, payload: torch.Tensor) -> None:
        if chunk.part < len(self._runs):
            self._scatter_blocks(chunk, payload)
        else:
            self._state(chunk)[chunk.unit_lo : chunk.unit_hi].copy_(payload, non_blocking=True)

    def _gather_blocks(self, chunk: Chunk, payload: torch.Tensor) -> None:
        wire, runs, layers = self.plan.groups[chunk.part], self._runs[chunk.part], self._layers(chunk)
        index = self._index(chunk.part, chunk.unit_lo, chunk.unit_hi)
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
            layers.index_copy_(1, index, values)
        self._zero_behind_the_end(chunk, layers)

    def _zero_behind_the_end(self, chunk: Chunk, layers: torch.Tensor) -> None:
        if (left := self._behind_the_end(chunk)) is not None:
            layers.index_fill_(1, left, 0)

    def _behind_the_end(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the runs after the sequence's end in its last block, for the chunk that has the last unit."""
        num_left = self._num_behind(chunk.part)
        if not num_left or chunk.unit_hi != self.plan.num_units(chunk.part):
            return None
        return self._index(chunk.part, chunk.unit_hi, chunk.unit_hi + num_left)

    def _num_behind(self, part: int) -> int:
        """Return the number of units of the sequence's last block that lie after the sequence's end."""
        return -(self._first_units[part] + self.plan.num_units(part)) % len(self._runs[part].of_unit)

    def _index(self, part: int, unit_lo: int, unit_hi: int) -> torch.Tensor:
        """Return the runs of units in wire order, counted from the start of a layer; on the cache's device."""
        runs = self._runs[part]
        if self._gpu is not None:
            runs_a_unit = runs.of_unit.shape[1]
            index = self._gpu_indices[part].until(self._tables[part], unit_hi)
            return index[unit_lo * runs_a_unit : unit_hi * runs_a_unit]
        key = part, unit_lo, unit_hi
        if key not in self._indices:
            first = self._first_units[part]
            found = runs.of_units(self._tables[part], first + unit_lo, first + unit_hi)
            self._indices[key] = torch.from_numpy(found)
        return self._indices[key]

    def _layers(self, chunk: Chunk) -> torch.Tensor:
        """Return the chunk's layers as runs that can be copied, `[layers, runs, numel]`; shares memory."""
        layers = movable(self._cache.groups[chunk.part][chunk.layer_lo : chunk.layer_hi])
        return layers.view(len(layers), -1, self._runs[chunk.part].numel)

    def _state(self, chunk: Chunk) -> torch.Tensor:
        """Return the bytes of the sequence's state; shares memory.

        Raises:
            TransferError: the sequence has none.
        """
        name = self._cache.spec.states[chunk.part - len(self._runs)].name
        row = next(iter(self._tables[-1]), EMPTY_PLACE)
        if row == EMPTY_PLACE:
            raise TransferError("the sequence has no row with its states")
        return self._cache.states[name][int(row)].view(-1).view(torch.uint8)

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[None]:
        """Context manager: on exit, waits for the copies that it has put into the calling thread's stream on a GPU."""
        yield
        if self._gpu is not None:
            self._gpu.current_stream().synchronize()
