"""Which bytes of a sequence's cache travel in which chunk: pure, and the same on both sides.

A transfer moves `num_units` blocks, those behind the prefix that the decode worker already holds, and the sequence's
named states. Chunks come in layer-major order, so that the first layers can leave while later ones are computed:

                    unit 0 .. num_units          (unit u is the sequence's block skip_tokens / block_size + u)
    part 0  layer 0 |  chunk 0  |                part = index into spec.groups + spec.states
            layer 1 |           |                all units of a layer fit a slot: a chunk takes as many whole
            layer 2 |  chunk 1  |                layers as fit
    part 1  layer 0 |  2  |  3  |                they do not fit: a chunk is a run of units of one layer
    state           |  chunk 4  |                layer span 0:1, units are bytes

    payload of a chunk: layer by layer, unit by unit, one row each, without gaps
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.engine.kv_cache import KVSpec


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a transfer. Layers count within the part; units are blocks, or bytes of a state."""

    part: int
    layer_lo: int
    layer_hi: int
    unit_lo: int
    unit_hi: int
    num_bytes: int


def num_units(spec: KVSpec, num_tokens: int, skip_tokens: int) -> int:
    """Blocks that travel.

    Raises:
        ValueError: `skip_tokens` is no multiple of the block size, or more than there are.
    """
    if skip_tokens % spec.block_size or not 0 <= skip_tokens <= num_tokens:
        raise ValueError(
            f"skip_tokens must be a multiple of the block size {spec.block_size} up to num_tokens {num_tokens}, "
            f"got {skip_tokens}"
        )
    return -(-num_tokens // spec.block_size) - skip_tokens // spec.block_size


def plan(spec: KVSpec, num_tokens: int, skip_tokens: int, slot_bytes: int) -> tuple[Chunk, ...]:
    """The chunks of one transfer, in the order in which they are sent; each fits into `slot_bytes`.

    Raises:
        ConfigError: one block of one layer is larger than a slot.
        ValueError: `skip_tokens` is not block-aligned.
    """
    require_fitting_slots(spec, slot_bytes)
    units = num_units(spec, num_tokens, skip_tokens)
    chunks: list[Chunk] = []
    for part, group in enumerate(spec.groups):
        if units:
            chunks += _group_chunks(part, len(group.layers), units, group.row_bytes(spec.block_size), slot_bytes)
    for index, state in enumerate(spec.states):
        chunks += (
            Chunk(len(spec.groups) + index, 0, 1, lo, hi, hi - lo) for lo, hi in _spans(state.num_bytes, slot_bytes)
        )
    return tuple(chunks)


def require_fitting_slots(spec: KVSpec, slot_bytes: int) -> None:
    """Raises ConfigError unless one block of one layer fits a slot, so that no transfer fails for it later."""
    for group in spec.groups:
        row_bytes = group.row_bytes(spec.block_size)
        if row_bytes > slot_bytes:
            raise ConfigError(
                f"one block of one layer of group {group.name!r} is {row_bytes} bytes and does not fit a slot of "
                f"{slot_bytes}; raise transfer.slot_bytes"
            )


def plan_digest(
    spec: KVSpec, num_tokens: int, skip_tokens: int, chunks: Sequence[Chunk], window: int, checksum: str
) -> bytes:
    """What both sides must have equal before a byte moves: with it, every send meets a receive of its size."""
    text = f"{spec.describe()}|{num_tokens}|{skip_tokens}|{window}|{checksum}|{[c.num_bytes for c in chunks]}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _group_chunks(part: int, num_layers: int, units: int, row_bytes: int, slot_bytes: int) -> Iterator[Chunk]:
    layers_a_chunk = max(1, slot_bytes // (units * row_bytes))
    for lo, hi in _spans(num_layers, layers_a_chunk):
        for unit_lo, unit_hi in _spans(units, slot_bytes // row_bytes):
            yield Chunk(part, lo, hi, unit_lo, unit_hi, (hi - lo) * (unit_hi - unit_lo) * row_bytes)


def _spans(total: int, step: int) -> Iterator[tuple[int, int]]:
    return ((lo, min(lo + step, total)) for lo in range(0, total, step))
