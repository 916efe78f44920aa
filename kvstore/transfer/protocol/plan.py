"""Plan of a transfer: which bytes of a sequence's cache travel in which chunk. Pure, and the same on both sides.

A plan describes one source rank and one destination rank. A wire unit of a layer group is one block of the smaller of
the two sides' block sizes, of the heads that the two ranks share, in one layer:

    sequence      | held by the destination, or before its window | unit 0 | unit 1 | ...      unit u starts at token
                  0                                             begin                          begin + u * unit_tokens
    unit          | head 0: K page, V page | head 1: K page, V page | ...                 in the wire data type
    unit in int8  | float32 scale per page: head 0 K, V; head 1 K, V; ... | the pages as above |
    by token      one page per head, of K and V of each token         opaque: a whole block, bits unchanged

Each group has its own begin: the start of the first block that the destination lacks, or of the first block of the
group's window after the transferred tokens, whichever is later.

Chunks are ordered so that KV that is computed first is sent first. The sequence is cut into consecutive spans at
multiples of `span_tokens`. Within a span, the layers follow the order of the model. The states come last, since they
are final only with the last token:

                    span 0    span 1
    part 0  layer 0 |  0  |  |  4  |             part = index into groups + states
            layer 1 |     |  |     |             a layer fits a slot: a chunk takes as many whole layers as fit,
            layer 2 |  1  |  |  5  |             but at most half of the rest of its span: when the last layer
            layer 3 |  2  |  |  6  |             is computed, only that one remains to be sent
    part 1  layer 4 | 3 | 4| | 7 | 8             it does not fit: a chunk is a run of units of one layer
    state           |       9      |             bytes; to a rank from `layout.state_source`

    payload of a chunk: layer by layer, unit by unit, without gaps
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError
from engine.core.kv_spec import DTYPE_BYTES
from kvstore.transfer.protocol.layout import (
    AUTO,
    block_size_of,
    heads_of,
    mismatch,
    shared_heads,
    state_source,
    window_begins,
    wire_dtype_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.kv_layout import GroupLayout, KvLayout

EVERY_LAYER: Final = 1 << 30
"""More layers than any model has. Stands for the end of the step, after which the cache does not change."""
SCALE_BYTES: Final = 4
"""Size of the float32 scale of one int8 page."""


@dataclass(frozen=True, slots=True)
class WireOptions:
    """Options on which both sides must agree."""

    chunk_bytes: int
    """Largest payload of a chunk; at most the size of a slot."""
    span_tokens: int
    """Tokens per span, rounded down to whole units of every group, at least one unit."""
    wire_dtype: str
    """Data type on the wire, one of `layout.WIRE_DTYPES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One message of a transfer. Layers count within the part; units are wire units, or bytes of a state."""

    part: int
    layer_lo: int
    layer_hi: int
    unit_lo: int
    unit_hi: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WireGroup:
    """Wire format of one layer group between the two ranks."""

    head_lo: int
    head_hi: int
    """Heads of the model, `head_lo:head_hi`; empty if the two ranks share none of this group."""
    dtype: str
    unit_tokens: int
    """Tokens of one unit."""
    unit_bytes: int
    """Bytes of one unit of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Chunks of one transfer between two ranks."""

    src: KvLayout
    src_rank: int
    dst: KvLayout
    dst_rank: int
    num_tokens: int
    begins: tuple[int, ...]
    """First token whose KV is transferred, by layer group. A group has no chunks if this is `num_tokens` or more."""
    options: WireOptions
    groups: tuple[WireGroup, ...]
    chunks: tuple[Chunk, ...]
    """Chunks in the order in which they are sent."""

    def num_units(self, part: int) -> int:
        """Return the number of units that are transferred for one layer of a group."""
        return max(0, -(-(self.num_tokens - self.begins[part]) // self.groups[part].unit_tokens))

    @property
    def num_bytes(self) -> int:
        """Total payload of all chunks, in bytes."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    def digest(self, checksum: str) -> bytes:
        """Return a digest of the plan: if both sides' digests are equal, every send meets a receive of its size."""
        text = repr(self).removeprefix("Transfer")  # the wire protocol fixes this text, independent of the class name
        return hashlib.blake2b(f"{text}|{checksum}".encode(), digest_size=16).digest()

    def ready_at(self, chunk: Chunk) -> tuple[int, int]:
        """Return `(num_tokens, num_layers)`, the progress at which a chunk may be gathered.

        The sequence's first `num_tokens` tokens must be computed in the model's first `num_layers` layers. A state
        needs the whole step that computes the last token: its number of layers, EVERY_LAYER, is never reached within a
        step. Layers without KV may follow the last one that a layout knows.
        """
        if chunk.part >= len(self.groups):
            return self.num_tokens, EVERY_LAYER
        unit_tokens = self.groups[chunk.part].unit_tokens
        tokens = min(self.begins[chunk.part] + chunk.unit_hi * unit_tokens, self.num_tokens)
        return tokens, max(self.src.groups[chunk.part].layers[chunk.layer_lo : chunk.layer_hi]) + 1


def plan(
    src: KvLayout,
    src_rank: int,
    dst: KvLayout,
    dst_rank: int,
    num_tokens: int,
    begins: Sequence[int],
    options: WireOptions,
) -> TransferPlan:
    """Plan the transfer of a sequence's first `num_tokens` tokens from one rank to another.

    The two layouts must be compatible: `layout.mismatch` returns "".

    Args:
        begins: number of leading tokens that the destination has, by group. Blocks before a group's window are not
            transferred either.

    Raises:
        ConfigError: one unit of one layer is larger than a chunk may be.
        ValueError: a begin is not a multiple of the destination's block size.
    """
    assert not mismatch(src, dst, options.wire_dtype)
    for index, begin in enumerate(begins):
        if begin < 0 or begin % block_size_of(dst, index):
            raise ValueError(
                f"KV of group {dst.groups[index].name!r} must begin at a multiple of the block size "
                f"{block_size_of(dst, index)}, got {begin}"
            )
    begins = tuple(max(begin, first) for begin, first in zip(begins, window_begins(dst, num_tokens), strict=True))
    heads = [shared_heads(src, src_rank, dst, dst_rank, index) for index in range(len(src.groups))]
    groups = [_wire_group(src, dst, index, shared, options) for index, shared in enumerate(heads)]
    chunks = [*_group_chunks(src, groups, begins, num_tokens, options)]
    if src.states and state_source(src, dst, dst_rank) == src_rank:
        chunks += _state_chunks(src, options.chunk_bytes)
    return TransferPlan(
        src=src,
        src_rank=src_rank,
        dst=dst,
        dst_rank=dst_rank,
        num_tokens=num_tokens,
        begins=begins,
        options=options,
        groups=tuple(groups),
        chunks=tuple(chunks),
    )


def _wire_group(src: KvLayout, dst: KvLayout, index: int, heads: range, options: WireOptions) -> WireGroup:
    ours, theirs = src.groups[index], dst.groups[index]
    dtype = wire_dtype_of(ours, theirs, options.wire_dtype)
    unit_tokens = min(block_size_of(src, index), block_size_of(dst, index))
    num_bytes = _unit_bytes(ours, len(heads), unit_tokens, dtype)
    _require_fitting(ours, num_bytes, options.chunk_bytes)
    return WireGroup(
        head_lo=heads.start, head_hi=heads.stop, dtype=dtype, unit_tokens=unit_tokens, unit_bytes=num_bytes
    )


def require_fitting_slots(layout: KvLayout, slot_bytes: int, wanted: str = AUTO) -> None:
    """Raise ConfigError unless one block of one layer fits a slot, so that no later transfer fails for this reason.

    Args:
        wanted: the wire data type, one of `layout.WIRE_DTYPES`.
    """
    for index, group in enumerate(layout.groups):
        _require_fitting(group, _largest_unit(layout, index, wanted), slot_bytes)


def least_chunk_bytes(layout: KvLayout, wanted: str) -> int:
    """Return the smallest `chunk_bytes` that suffices for a rank's cache, whatever the peer's layout."""
    return max(1, *(_largest_unit(layout, index, wanted) for index in range(len(layout.groups))))


def _largest_unit(layout: KvLayout, index: int, wanted: str) -> int:
    """Return the bytes of a whole block with all heads of a rank, which no peer's layout can exceed."""
    group = layout.groups[index]
    num_heads = len(heads_of(group, layout.tp_size, 0))
    return _unit_bytes(group, num_heads, block_size_of(layout, index), wire_dtype_of(group, group, wanted))


def page_dims(group: GroupLayout) -> tuple[int, ...]:
    """Return the width of each page of a head: K and V, K alone if there is no V, or their sum if they lie by token."""
    if group.page_order:
        return (group.k_dim + group.v_dim,)
    return tuple(dim for dim in (group.k_dim, group.v_dim) if dim)


def _require_fitting(group: GroupLayout, unit_bytes: int, slot_bytes: int) -> None:
    if unit_bytes > slot_bytes:
        raise ConfigError(
            f"one block of one layer of group {group.name!r} is {unit_bytes} bytes and does not fit a slot of "
            f"{slot_bytes}; raise transfer.slot_bytes"
        )


def _unit_bytes(group: GroupLayout, num_heads: int, unit_tokens: int, dtype: str) -> int:
    scales = SCALE_BYTES * len(page_dims(group)) if dtype == "int8" and group.dtype != "int8" else 0
    return num_heads * (scales + unit_tokens * (group.k_dim + group.v_dim) * DTYPE_BYTES[dtype])


def _group_chunks(
    src: KvLayout, groups: Sequence[WireGroup], begins: Sequence[int], num_tokens: int, options: WireOptions
) -> Iterator[Chunk]:
    """Yield the chunks of the layer groups: span by span, and within a span in the order of the layers."""
    sent = [part for part, group in enumerate(groups) if group.head_lo < group.head_hi]
    unit_tokens = [group.unit_tokens for group, layout in zip(groups, src.groups, strict=True) if layout.layers]
    begin = min((begins[part] for part in sent), default=num_tokens)
    for lo, hi in _spans(begin, num_tokens, options.span_tokens, unit_tokens):
        span = [
            chunk
            for part in sent
            if hi > begins[part]
            for chunk in _span_chunks(
                part,
                len(src.groups[part].layers),
                _units(groups[part], max(lo - begins[part], 0), hi - begins[part]),
                groups[part].unit_bytes,
                options.chunk_bytes,
            )
        ]
        yield from sorted(span, key=lambda chunk: src.groups[chunk.part].layers[chunk.layer_hi - 1])


def _state_chunks(src: KvLayout, chunk_bytes: int) -> Iterator[Chunk]:
    for part, state in enumerate(src.states, start=len(src.groups)):
        total = math.prod(state.shape) * DTYPE_BYTES[state.dtype]
        for lo, hi in _cut(0, total, chunk_bytes):
            yield Chunk(part=part, layer_lo=0, layer_hi=1, unit_lo=lo, unit_hi=hi, num_bytes=hi - lo)


def _spans(begin: int, end: int, span_tokens: int, unit_tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut a sequence's tokens into spans, from the span with `begin` on, at multiples of whole units of every group."""
    whole_units = math.lcm(*unit_tokens)
    step = max(1, span_tokens // whole_units) * whole_units
    return _cut(begin // step * step, end, step)


def _units(group: WireGroup, lo: int, hi: int) -> tuple[int, int]:
    """Return the units `unit_lo:unit_hi` that hold the tokens `lo:hi`, both counted from the group's begin."""
    return lo // group.unit_tokens, -(-hi // group.unit_tokens)


def _span_chunks(
    part: int, num_layers: int, units: tuple[int, int], unit_bytes: int, chunk_bytes: int
) -> Iterator[Chunk]:
    unit_lo, unit_hi = units
    units_a_chunk = chunk_bytes // unit_bytes
    layers_a_chunk = max(1, units_a_chunk // (unit_hi - unit_lo))
    lo = 0
    while lo < num_layers:
        hi = lo + min(layers_a_chunk, -(-(num_layers - lo) // 2))
        for first, last in _cut(unit_lo, unit_hi, units_a_chunk):
            yield Chunk(
                part=part,
                layer_lo=lo,
                layer_hi=hi,
                unit_lo=first,
                unit_hi=last,
                num_bytes=(hi - lo) * (last - first) * unit_bytes,
            )
        lo = hi


def _cut(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    return ((lo, min(lo + step, end)) for lo in range(start, end, step))
