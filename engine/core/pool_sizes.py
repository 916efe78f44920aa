"""Division of a KV pool's memory among the layer groups and the states: pure.

    layers without a window    N blocks
    layers with a window       N / 2, or one sequence of the greatest length if that is more; at most N
    states                     two rows per sequence that may run, and snapshots: one per such sequence, or one per
                               `snapshot_tokens` of the N blocks if that is more

N is as large as the memory allows. Blocks of a model without attention take no memory: N is then the greatest useful
number, and rows take all of the memory.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from baton.blocks import num_blocks_for
from baton.memory import GIB
from engine.core.runner import KVSpec

FULL_LENGTH_SEQUENCES = 64
"""Limit of the pool's size, in sequences of maximum length, unless more sequences may run."""
ROWS_PER_SEQUENCE = 2
"""Rows of the states' pool that a running sequence takes: one is read while the other is written."""
LEAST_TOKENS = 1024
"""A pool has rows for at most one running sequence per this many tokens of its blocks."""

LEAST_SNAPSHOTS = 4
"""Rows for snapshots in the smallest pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeeds:
    """Limits and settings by which a pool is divided."""

    max_num_seqs: int
    """Sequences that run at a time."""
    max_tokens: int
    """Tokens of the longest sequence."""
    snapshot_tokens: int
    """Tokens between two snapshots of states."""


def table_sizes(spec: KVSpec, num_blocks: int, needs: PoolNeeds) -> tuple[int, ...]:
    """Return the number of blocks for each block table, if groups without a window have `num_blocks`."""
    longest = num_blocks_for(needs.max_tokens, spec.block_size)
    windowed = min(num_blocks, max(num_blocks // 2, longest))
    sizes = [windowed if group.window else num_blocks for group in spec.groups]
    if spec.states:
        num_tokens = num_blocks * spec.block_size
        between = num_blocks_for(needs.snapshot_tokens, spec.block_size) * spec.block_size
        running = min(needs.max_num_seqs, num_blocks_for(num_tokens, LEAST_TOKENS))
        sizes.append(ROWS_PER_SEQUENCE * running + max(running, num_tokens // between, LEAST_SNAPSHOTS))
    return tuple(sizes)


def pool_bytes(spec: KVSpec, sizes: tuple[int, ...]) -> int:
    """Return the memory of tables of these sizes, in bytes."""
    blocks = sum(
        number * len(group.layers) * group.row_bytes for number, group in zip(sizes, spec.groups, strict=False)
    )
    return blocks + (sizes[-1] * spec.state_bytes if spec.states else 0)


def in_words(spec: KVSpec, sizes: tuple[int, ...]) -> str:
    """Return one line about a pool's tables: their sizes, and the bytes of a token, a window and a state."""
    if not spec.states and not any(group.layers for group in spec.groups):
        return f"{sizes[0]} blocks of {spec.groups[0].block_size} tokens, whose memory another process has"
    parts = []
    for number, group in zip(sizes, spec.groups, strict=False):
        of_token = len(group.layers) * group.row_bytes / group.block_size
        per = f"{of_token / 2**10:g} KiB per token"
        if group.window:
            per = f"window of {group.window} tokens: {of_token * group.window / 2**20:g} MiB, {per}"
        parts.append(f"{number} blocks of {group.block_size} tokens ({per})")
    if spec.states:
        parts.append(f"{sizes[-1]} rows of states ({spec.state_bytes / 2**20:g} MiB)")
    return f"{pool_bytes(spec, sizes) / GIB:.2f} GiB of KV: {', '.join(parts)}"


def sizes_within(spec: KVSpec, num_bytes: int, needs: PoolNeeds) -> tuple[int, ...]:
    """Return the greatest useful `table_sizes` that fit into `num_bytes`; zeros if none do."""
    most = max(FULL_LENGTH_SEQUENCES, needs.max_num_seqs) * num_blocks_for(needs.max_tokens, spec.block_size)
    if spec.states and not spec.block_bytes:
        *blocks, rows = table_sizes(spec, most, needs)
        return (*blocks, min(rows, num_bytes // spec.state_bytes))

    def needed(num_blocks: int) -> int:
        return pool_bytes(spec, table_sizes(spec, num_blocks, needs))

    return table_sizes(spec, max(0, bisect_right(range(most + 1), num_bytes, key=needed) - 1), needs)
