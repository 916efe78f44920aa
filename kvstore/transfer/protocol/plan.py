"""Plan of a transfer: which bytes of a sequence's cache travel in which chunk. Pure, and the same on both sides.

A plan describes one source rank and one destination rank. A wire unit of a layer group is one block of the smaller of
the two sides' block sizes, of the heads that the two ranks share, in one layer:

    sequence      | held by the destination | unit 0 | unit 1 | ...       unit u starts at token
                  0                    skip_tokens                        skip_tokens + u * unit_tokens
    unit          | head 0: K page, V page | head 1: K page, V page | ...                 in the wire data type
    unit in int8  | float32 scale per page: head 0 K, V; head 1 K, V; ... | the pages as above |
    by token      one page per head, of K and V of each token         opaque: a whole block, bits unchanged

Chunks are ordered so that KV that is computed first is sent first. The sequence is cut into consecutive spans at
multiples of `span_tokens`. Within a span, the layers follow the order of the model. The states come last, since they
are final only with the last token:

                    span 0    span 1
    part 0  layer 0 |  0  |  |  4  |             part = index into groups + states
            layer 1 |     |  |     |             a layer fits a slot: a chunk takes as many whole layers as fit,
            layer 2 |  1  |  |  5  |             but at most half of the rest of its span: when the last layer
            layer 3 |  2  |  |  6  |             is computed, only that one remains to be sent
    part 1  layer 4 | 3 | 4| | 7 | 8             it does not fit: a chunk is a run of units of one layer
    state           |       9      |             bytes; between equal ranks only

    payload of a chunk: layer by layer, unit by unit, without gaps
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError
from engine.core.kv_spec import DTYPE_BYTES
from kvstore.transfer.protocol.layout import AUTO, block_size_of, heads_of, mismatch, shared_heads, wire_dtype_of

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
    skip_tokens: int
    options: WireOptions
    groups: tuple[WireGroup, ...]
    chunks: tuple[Chunk, ...]
    """Chunks in the order in which they are sent."""

    def num_units(self, part: int) -> int:
        """Return the number of units that are transferred for one layer of a group."""
        return -(-(self.num_tokens - self.skip_tokens) // self.groups[part].unit_tokens)

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
        tokens = min(self.skip_tokens + chunk.unit_hi * unit_tokens, self.num_tokens)
        return tokens, max(self.src.groups[chunk.part].layers[chunk.layer_lo : chunk.layer_hi]) + 1


def plan(
    src: KvLayout,
    src_rank: int,
    dst: KvLayout,
    dst_rank: int,
    num_tokens: int,
    skip_tokens: int,
    options: WireOptions,
) -> TransferPlan:
    """Plan the transfer of a sequence's first `num_tokens` tokens, less `skip_tokens`, from one rank to another.

    The two layouts must be compatible: `layout.mismatch` returns "".

    Raises:
        ConfigError: one unit of one layer is larger than a chunk may be.
        ValueError: `skip_tokens` is not a multiple of the destination's block size, or exceeds `num_tokens`.
    """
    assert not mismatch(src, dst, options.wire_dtype)
    if skip_tokens % dst.block_size or not 0 <= skip_tokens <= num_tokens:
        raise ValueError(
            f"skip_tokens must be a multiple of the block size {dst.block_size} up to num_tokens {num_tokens}, "
            f"got {skip_tokens}"
        )
    groups = []
    for index in range(len(src.groups)):
        heads = shared_heads(src, src_rank, dst, dst_rank, index)
        groups.append(_wire_group(src, dst, index, heads, options))
    chunks: list[Chunk] = []
    for lo, hi in _spans(num_tokens, skip_tokens, options.span_tokens, groups):
        span = [
            chunk
            for part, (layout, group) in enumerate(zip(src.groups, groups, strict=True))
            if group.head_lo < group.head_hi
            for chunk in _span_chunks(
                part,
                len(layout.layers),
                ((lo - skip_tokens) // group.unit_tokens, -(-(hi - skip_tokens) // group.unit_tokens)),
                group.unit_bytes,
                options.chunk_bytes,
            )
        ]
        chunks += sorted(span, key=lambda chunk: src.groups[chunk.part].layers[chunk.layer_hi - 1])
    if src_rank == dst_rank:
        for part, state in enumerate(src.states, start=len(groups)):
            total = math.prod(state.shape) * DTYPE_BYTES[state.dtype]
            chunks += (
                Chunk(part=part, layer_lo=0, layer_hi=1, unit_lo=lo, unit_hi=hi, num_bytes=hi - lo)
                for lo, hi in _cut(0, total, options.chunk_bytes)
            )
    return TransferPlan(
        src=src,
        src_rank=src_rank,
        dst=dst,
        dst_rank=dst_rank,
        num_tokens=num_tokens,
        skip_tokens=skip_tokens,
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
    return max(_largest_unit(layout, index, wanted) for index in range(len(layout.groups)))


def _largest_unit(layout: KvLayout, index: int, wanted: str) -> int:
    """Return the bytes of a whole block with all heads of a rank, which no peer's layout can exceed."""
    group = layout.groups[index]
    num_heads = len(heads_of(group.num_kv_heads, layout.tp_size, 0))
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


def _spans(
    num_tokens: int, skip_tokens: int, span_tokens: int, groups: Sequence[WireGroup]
) -> Iterator[tuple[int, int]]:
    """Cut the sequence's tokens after `skip_tokens` into spans, at multiples of whole units of every group."""
    whole_units = math.lcm(*(group.unit_tokens for group in groups))
    step = max(1, span_tokens // whole_units) * whole_units
    cuts = _cut(skip_tokens // step * step, num_tokens, step)
    return ((max(lo, skip_tokens), hi) for lo, hi in cuts if hi > skip_tokens)


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
