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
    state           |       9      |             bytes; to a rank from `state_source`

    payload of a chunk: layer by layer, unit by unit, without gaps

The heads of a group are divided evenly over the ranks. With more ranks than heads, several ranks hold each head; in a
replicated group every rank holds all heads:

    6 heads   tp 2   rank 0: 0 1 2   rank 1: 3 4 5
              tp 3   rank 0: 0 1     rank 1: 2 3     rank 2: 4 5
    2 heads   tp 4   ranks 0, 1: 0   ranks 2, 3: 1
    3 heads   tp 2   ranks 0, 1: 0 1 2                          (replicated)

A source rank sends a destination rank the heads that both hold. If several source ranks hold a head, one of them sends
it, and destinations alternate between these ranks (the rule of vLLM's `tp_mapping`; MLA, one head for all ranks,
is the same case).

Every rank has the whole states. A destination rank receives them from the first rank that sends it heads. If none does,
they come from the rank with its own number, modulo the number of source ranks.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.blocks import HASH_BLOCK
from baton.errors import ConfigError
from baton.kv_layout import GroupLayout, KvLayout, StateLayout
from engine.core.runner import DTYPE_BYTES, KVSpec, LayerGroup, PageOrder, StateSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.messages import Ticket


EVERY_LAYER: Final = 1 << 30
"""More layers than any model has. Stands for the end of the step, after which the cache does not change."""
SCALE_BYTES: Final = 4
"""Size of the float32 scale of one int8 page."""
AUTO = "auto"
"""Wire data type that is chosen from the two pools' types."""
CONVERTIBLE = ("float32", "bfloat16", "float16")
"""Pool data types between which values may be converted; other types travel unchanged."""
WIRE_DTYPES = (AUTO, *CONVERTIBLE, "int8")
MAX_BLOCK_TOKENS = 2**20
"""Upper bound, above any real block size."""
MAX_RANKS = 64
"""Upper bound, above any real tensor-parallel degree: a transfer has a connection for each receiving rank."""


def layout_of(spec: KVSpec, tp_size: int = 1, num_kv_heads: Sequence[int] = ()) -> KvLayout:
    """Return the layout of a worker from the cache of one of its ranks.

    Args:
        num_kv_heads: heads of the whole model, one number per group. They cannot be derived from a rank's cache if
            there are more ranks than heads; by default no head is replicated.

    Raises:
        ConfigError: KV of this shape cannot be transferred.
    """
    for group in spec.groups:
        if any(group.strides):
            raise ConfigError(f"KV transfer needs blocks without gaps; the blocks of group {group.name!r} have gaps")
    totals = num_kv_heads or tuple(g.num_kv_heads * (1 if g.is_replicated else tp_size) for g in spec.groups)
    is_mixed = len({group.block_size for group in spec.groups}) > 1
    return KvLayout(
        spec.block_size,
        tp_size,
        tuple(
            GroupLayout(
                name=g.name,
                layers=g.layers,
                num_kv_heads=total,
                k_dim=g.k_dim,
                v_dim=g.v_dim,
                dtype=g.dtype,
                block_size=g.block_size if is_mixed else 0,
                page_order="" if g.page_order is PageOrder.K_THEN_V else g.page_order.value,
                tag=g.tag,
                window=g.window,
                is_replicated=g.is_replicated,
            )
            for g, total in zip(spec.groups, totals, strict=True)
        ),
        tuple(StateLayout(s.name, s.shape, s.dtype) for s in spec.states),
    )


def block_size_of(layout: KvLayout, group: int) -> int:
    """Return the number of tokens in a block of a group."""
    return layout.groups[group].block_size or layout.block_size


def window_begins(layout: KvLayout, num_tokens: int) -> tuple[int, ...]:
    """Return, by group, the start of the first block that is in the group's window after `num_tokens` tokens."""
    return tuple(group.first_block(num_tokens) * group.block_size for group in rank_spec(layout, 0).groups)


def begins_of(ticket: Ticket, num_tokens: int) -> tuple[int, ...]:
    """Return, by group, the first token whose KV an untrusted ticket requests, for a sender with `num_tokens` tokens.

    A window starts earlier if the sender has fewer tokens. In each group, the receiver has blocks from the ticket's
    begin or from the start of the window after all of the ticket's tokens, whichever is earlier.

    Raises:
        ValueError: the receiver cannot take so few tokens, or the ticket contradicts itself.
    """
    layout = ticket.layout
    begins = ticket.begins or (ticket.skip_tokens,) * len(layout.groups)
    if len(begins) != len(layout.groups):
        raise ValueError(f"a ticket for {len(layout.groups)} layer groups has {len(begins)} begins")
    if num_tokens < ticket.skip_tokens:
        raise ValueError(f"the receiver has more than {num_tokens} tokens already: {ticket.skip_tokens}")
    if not all(0 <= begin <= ticket.num_tokens for begin in begins):
        raise ValueError(f"KV must begin within the ticket's {ticket.num_tokens} tokens, got {list(begins)}")
    starts = zip(window_begins(layout, num_tokens), window_begins(layout, ticket.num_tokens), begins, strict=True)
    if any(start < min(reserved, begin) for start, reserved, begin in starts):
        raise ValueError(
            f"{num_tokens} of {ticket.num_tokens} tokens need blocks before the windows, which are not reserved"
        )
    return begins


def rank_spec(layout: KvLayout, rank: int) -> KVSpec:
    """Return the cache specification of one rank."""
    return KVSpec(
        tuple(
            LayerGroup(
                name=g.name,
                layers=g.layers,
                block_size=block_size_of(layout, index),
                num_kv_heads=len(heads_of(g, layout.tp_size, rank)),
                k_dim=g.k_dim,
                v_dim=g.v_dim,
                dtype=g.dtype,
                page_order=PageOrder(g.page_order or PageOrder.K_THEN_V),
                tag=g.tag,
                window=g.window,
                is_replicated=g.is_replicated,
            )
            for index, g in enumerate(layout.groups)
        ),
        tuple(StateSpec(s.name, s.shape, s.dtype) for s in layout.states),
    )


def heads_of(group: GroupLayout, tp_size: int, rank: int) -> range:
    """Return the model's heads that a rank holds.

    If they are divided, one of their number and `tp_size` divides the other.
    """
    num_heads = group.num_kv_heads
    if group.is_replicated:
        return range(num_heads)
    first = rank * num_heads // tp_size
    return range(first, first + max(1, num_heads // tp_size))


def shared_heads(src: KvLayout, src_rank: int, dst: KvLayout, dst_rank: int, group: int) -> range:
    """Return the heads of a group that `src_rank` sends to `dst_rank`; empty if another rank or no rank sends them."""
    if not src.groups[group].layers:
        return range(0)
    of_src = src.groups[group]
    ours, theirs = heads_of(of_src, src.tp_size, src_rank), heads_of(dst.groups[group], dst.tp_size, dst_rank)
    replicas = src.tp_size if of_src.is_replicated else max(1, src.tp_size // of_src.num_kv_heads)
    if src_rank % replicas != dst_rank % replicas:
        return range(0)
    first = max(ours.start, theirs.start)
    return range(first, max(first, min(ours.stop, theirs.stop)))


def state_source(src: KvLayout, dst: KvLayout, dst_rank: int) -> int:
    """Return the rank from which `dst_rank` receives the states."""
    senders = (rank for rank in range(src.tp_size) if _share_heads(src, rank, dst, dst_rank))
    return next(senders, dst_rank % src.tp_size)


def source_ranks(src: KvLayout, dst: KvLayout, dst_rank: int) -> tuple[int, ...]:
    """Return the ranks from which `dst_rank` receives, in order; each of them sends something."""
    return tuple(rank for rank in range(src.tp_size) if _is_pair(src, rank, dst, dst_rank))


def destination_ranks(src: KvLayout, dst: KvLayout, src_rank: int) -> tuple[int, ...]:
    """Return the ranks to which `src_rank` sends, in order; none for a surplus replica."""
    return tuple(rank for rank in range(dst.tp_size) if _is_pair(src, src_rank, dst, rank))


def wire_dtype(src_dtype: str, dst_dtype: str, wanted: str) -> str:
    """Return the data type in which a group travels.

    Args:
        wanted: one of WIRE_DTYPES. "auto" means the narrower of the two pools' types, so that equal pools exchange
            their exact bits. A type that cannot be converted travels unchanged in any case.

    Raises:
        ValueError: the two types differ and one of them cannot be converted.
    """
    if src_dtype not in CONVERTIBLE or dst_dtype not in CONVERTIBLE:
        if src_dtype != dst_dtype:
            raise ValueError(f"{src_dtype} cannot be converted to {dst_dtype}")
        return src_dtype
    if wanted != AUTO:
        return wanted
    return min(src_dtype, dst_dtype, key=lambda name: DTYPE_BYTES[name])


def wire_dtype_of(src: GroupLayout, dst: GroupLayout, wanted: str) -> str:
    """Return the data type in which a group travels. Opaque blocks always keep their bits.

    Raises:
        ValueError: the two types differ and one of them cannot be converted.
    """
    return src.dtype if src.page_order == PageOrder.OPAQUE else wire_dtype(src.dtype, dst.dtype, wanted)


def mismatch(src: KvLayout, dst: KvLayout, wanted: str) -> str:
    """Return, in one sentence, why KV of `src` cannot become KV of `dst`; "" if it can. Layouts are untrusted."""
    if broken := _broken(src) or _broken(dst):
        return broken
    names = [[group.name for group in layout.groups] for layout in (src, dst)]
    if names[0] != names[1]:
        return f"the source has the layer groups {names[0]}, the destination {names[1]}"
    for index, (ours, theirs) in enumerate(zip(src.groups, dst.groups, strict=True)):
        try:
            wire_dtype_of(ours, theirs, wanted)
        except ValueError as error:
            return f"in group {ours.name!r}, {error}"
        for what, one, other in (
            ("layers", ours.layers, theirs.layers),
            ("window", ours.window, theirs.window),
            ("KV heads", ours.num_kv_heads, theirs.num_kv_heads),
            ("K and V dimensions", (ours.k_dim, ours.v_dim), (theirs.k_dim, theirs.v_dim)),
            ("page order", _page_order(ours), _page_order(theirs)),
        ):
            if one != other and (ours.layers or theirs.layers):
                return f"group {ours.name!r} has {what} {one} at the source and {other} at the destination"
        if not ours.layers:
            continue
        sizes = block_size_of(src, index), block_size_of(dst, index)
        if ours.page_order == PageOrder.OPAQUE:
            here, there = _opaque_block(src, index), _opaque_block(dst, index)
            if here != there:
                return f"group {ours.name!r} is opaque and has {here} at the source and {there} at the destination"
        if max(sizes) % min(sizes):
            return (
                f"in group {ours.name!r}, of the block sizes {sizes[0]} (source) and {sizes[1]} (destination) "
                "neither divides the other"
            )
        if ours.window and sizes[0] < sizes[1]:
            return (
                f"in group {ours.name!r}, which has a window, the destination's blocks of {sizes[1]} tokens are larger "
                f"than those of {sizes[0]} of the source, which may have dropped the start of the first one"
            )
        for group, tp_size in ((ours, src.tp_size), (theirs, dst.tp_size)):
            is_uneven = max(group.num_kv_heads, tp_size) % min(group.num_kv_heads, tp_size)
            if is_uneven and not group.is_replicated:
                return f"the {ours.num_kv_heads} KV heads of group {ours.name!r} cannot be spread over {tp_size} ranks"
    if src.states != dst.states:
        return f"the states are {_describe(src)} at the source and {_describe(dst)} at the destination"
    return ""


def _is_pair(src: KvLayout, src_rank: int, dst: KvLayout, dst_rank: int) -> bool:
    is_state_source = bool(src.states) and state_source(src, dst, dst_rank) == src_rank
    return is_state_source or _share_heads(src, src_rank, dst, dst_rank)


def _share_heads(src: KvLayout, src_rank: int, dst: KvLayout, dst_rank: int) -> bool:
    return any(shared_heads(src, src_rank, dst, dst_rank, group) for group in range(len(src.groups)))


def _broken(layout: KvLayout) -> str:
    """Return, in one sentence, what is wrong with the numbers of a layout; "" if they are valid."""
    if not 1 <= layout.tp_size <= MAX_RANKS:
        return f"a layout has {layout.tp_size} ranks, and must have 1 to {MAX_RANKS}"
    for size in (layout.block_size, *(group.block_size or layout.block_size for group in layout.groups)):
        if not 0 < size <= MAX_BLOCK_TOKENS or size % HASH_BLOCK:
            return (
                f"a layout has blocks of {size} tokens, and must have multiples of {HASH_BLOCK} to {MAX_BLOCK_TOKENS}"
            )
        if layout.block_size % size:
            return f"a layout has blocks of {size} tokens, of which {layout.block_size} are no multiple"
    return ""


def _page_order(group: GroupLayout) -> str:
    return f"{group.page_order or PageOrder.K_THEN_V.value} {group.tag}".rstrip()


def _opaque_block(layout: KvLayout, index: int) -> str:
    """Return all properties that two sides must share to copy blocks whole."""
    group = layout.groups[index]
    num_heads = len(heads_of(group, layout.tp_size, 0))
    numel = num_heads * (group.k_dim + group.v_dim) * block_size_of(layout, index)
    return f"blocks of {numel} x {group.dtype} for {block_size_of(layout, index)} tokens on {layout.tp_size} ranks"


def _describe(layout: KvLayout) -> str:
    return ", ".join(f"{s.name}{list(s.shape)} {s.dtype}" for s in layout.states) or "none"


@dataclass(frozen=True, slots=True)
class WireOptions:
    """Options on which both sides must agree."""

    chunk_bytes: int
    """Largest payload of a chunk; at most the size of a slot."""
    span_tokens: int
    """Tokens per span, rounded down to whole units of every group, at least one unit."""
    wire_dtype: str
    """Data type on the wire, one of `WIRE_DTYPES`."""


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

    The two layouts must be compatible: `mismatch` returns "".

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
        wanted: the wire data type, one of `WIRE_DTYPES`.
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
