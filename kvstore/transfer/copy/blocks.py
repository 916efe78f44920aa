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
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from baton.blocks import HASH_BLOCK
from baton.errors import TransferError
from engine.core.runner import EMPTY_PLACE
from engine.model.kv_cache import movable, movable_dtype, torch_dtype
from kvstore.transfer.copy.checksum import digest_of, word_sum
from kvstore.transfer.copy.kernel_choice import choose_kernels, kernels_of
from kvstore.transfer.device import gpu_of
from kvstore.transfer.protocol.plan import SCALE_BYTES, heads_of, page_dims

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from baton.kv_layout import KvLayout
    from engine.core.runner import BlockTables, Fence, KVSpec, LayerGroup
    from kvstore.transfer.copy.checksum import Checksum
    from kvstore.transfer.device import GpuDevice, StreamEvent
    from kvstore.transfer.protocol.plan import Chunk, TransferPlan


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

    The index of a whole transfer is uploaded once, as far as its block table is known; each chunk uses a slice of it.
    When the table grows, only the new part is uploaded.

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
        self._gpu = None if cache.device.type == "cpu" else gpu_of(cache.device)
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
                out.copy_(quantized(self.plan, chunk, layer[index]), non_blocking=True)
            else:
                out.view(dtype).copy_(layer[index].to(dtype).view(-1), non_blocking=True)

    def _scatter_blocks(self, chunk: Chunk, payload: torch.Tensor) -> None:
        wire, runs, layers = self.plan.groups[chunk.part], self._runs[chunk.part], self._layers(chunk)
        payload = payload.to(layers.device, non_blocking=True)
        dtype = movable_dtype(torch_dtype(wire.dtype))
        is_quantized = dtype == torch.int8 and layers.dtype != torch.int8
        values = dequantized(self.plan, chunk, payload) if is_quantized else payload.view(dtype)
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


INT8_MAX = 127


def quantized(plan: TransferPlan, chunk: Chunk, values: torch.Tensor) -> torch.Tensor:
    """Quantize one layer's units, in wire order, to int8 units: `uint8`. May change `values`.

    Pages of K and V have a float32 scale each: their wire format if the wire's data type is int8.
    Values after the last token are zeroed first: they are undefined, and would widen the scale of their page without
    limit, or make it NaN.
    """
    wire = plan.groups[chunk.part]
    num_units, num_heads = chunk.unit_hi - chunk.unit_lo, wire.head_hi - wire.head_lo
    num_valid = plan.num_tokens - plan.begins[chunk.part] - (chunk.unit_hi - 1) * wire.unit_tokens
    out = torch.empty(num_units, wire.unit_bytes, dtype=torch.uint8, device=values.device)
    scales, pages_out = _parts(plan, chunk, out)
    widths = _page_widths(plan, chunk)
    pages = torch.split(values.view(num_units, num_heads, -1).float(), widths, 2)
    for number, (page, to) in enumerate(zip(pages, torch.split(pages_out, widths, 2), strict=True)):
        page[-1].view(num_heads, wire.unit_tokens, -1)[:, num_valid:] = 0
        # Neither 0 for a page of zeros, nor subnormal: a quotient could leave the range.
        scale = (page.abs().amax(2) / INT8_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
        scales[:, :, number] = scale
        to.copy_((page / scale[:, :, None]).round_())
    return out.view(-1)


def dequantized(plan: TransferPlan, chunk: Chunk, payload: torch.Tensor) -> torch.Tensor:
    """Return the units of all layers of an int8 payload, in wire order, as `float32`."""
    scales, pages = _parts(plan, chunk, payload.view(-1, plan.groups[chunk.part].unit_bytes))
    values = pages.float()
    for number, page in enumerate(torch.split(values, _page_widths(plan, chunk), 2)):
        page.mul_(scales[:, :, number, None])
    return values.view(-1)


def _parts(plan: TransferPlan, chunk: Chunk, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View int8 units `uint8[units, unit_bytes]` as their two parts.

    Returns:
        Scales, `float32[units, heads, pages]`, and values, `int8[units, heads, numel]`.
    """
    wire = plan.groups[chunk.part]
    num_heads, num_pages = wire.head_hi - wire.head_lo, len(_page_widths(plan, chunk))
    end = num_heads * num_pages * SCALE_BYTES
    scales = units[:, :end].view(torch.float32).view(-1, num_heads, num_pages)
    return scales, units[:, end:].view(torch.int8).view(len(units), num_heads, -1)


def _page_widths(plan: TransferPlan, chunk: Chunk) -> list[int]:
    """Return the number of elements of each page of a head of a unit."""
    unit_tokens = plan.groups[chunk.part].unit_tokens
    return [unit_tokens * dim for dim in page_dims(plan.src.groups[chunk.part])]


MAX_SUMS = 1024
"""Maximum number of partial sums in which a GPU leaves the checksum of one chunk."""


class Move(Protocol):
    """A started copy between blocks and a payload. Call `end` once."""

    def end(self) -> int:
        """Wait until the bytes are copied, and return the checksum of the payload; 0 if none was requested."""


class DoneMove:
    """A copy that was complete when it was requested."""

    def __init__(self, checksum: int) -> None:
        self._checksum = checksum

    def end(self) -> int:
        """See `Move.end`."""
        return self._checksum


class SumBuffers:
    """Main memory that a GPU accesses directly, for the sums of chunks in progress. Thread-safe."""

    def __init__(self, gpu: GpuDevice) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """Return a buffer, `int64[MAX_SUMS]`, with undefined contents."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._gpu.pinned_buffer(8 * MAX_SUMS).view(torch.int64)

    def give(self, sums: torch.Tensor) -> None:
        """Take back a buffer that the GPU no longer writes."""
        with self._lock:
            self._free.append(sums)


class GpuMove:
    """A copy that is in a stream of a GPU. The host waits for its completion and reads the checksum.

        thread   launch copy n   launch copy n + 1   end copy n   launch copy n + 2   end copy n + 1
        stream   | fence | copy n, sums -> main memory | event | copy n + 1 ... | event |

    No copy waits for the host, and the host waits for one event, not for all work in the stream.

    Args:
        done: is recorded after the copy and its sums.
        sums: has `num_sums` sums then, 0 if no checksum was requested; it is returned to `buffers`.
    """

    def __init__(self, done: StreamEvent, buffers: SumBuffers, sums: torch.Tensor, num_sums: int) -> None:
        self._done = done
        self._buffers = buffers
        self._sums = sums
        self._num_sums = num_sums

    def end(self) -> int:
        """See `Move.end`."""
        self._done.synchronize()
        checksum = digest_of(self._sums[: self._num_sums].numpy())
        self._buffers.give(self._sums)
        return checksum


_BUFFERS: dict[GpuDevice, SumBuffers] = {}
_LOCK = threading.Lock()


def sum_buffers_of(gpu: GpuDevice) -> SumBuffers:
    """Return the buffers of a GPU."""
    with _LOCK:
        if gpu not in _BUFFERS:
            _BUFFERS[gpu] = SumBuffers(gpu)
        return _BUFFERS[gpu]
