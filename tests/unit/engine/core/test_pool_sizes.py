"""Division of a pool's memory, in words."""

from __future__ import annotations

from dataclasses import replace

from engine.core.pool_sizes import PoolNeeds, in_words, pool_bytes, sizes_within, table_sizes
from engine.core.runner import KVSpec, LayerGroup, StateSpec

FULL = LayerGroup(
    name="full", layers=tuple(range(10)), block_size=16, num_kv_heads=16, k_dim=128, v_dim=128, dtype="bfloat16"
)
SLIDING = replace(FULL, name="sliding", layers=tuple(range(10, 62)), window=1024)
NEEDS = PoolNeeds(max_num_seqs=8, max_tokens=4096, snapshot_tokens=1024)


def test_the_sizes_are_told_with_the_bytes_of_a_token_a_window_and_a_state() -> None:
    assert in_words(KVSpec((FULL,)), (4096,)) == "5.00 GiB of KV: 4096 blocks of 16 tokens (80 KiB per token)"
    spec = KVSpec((FULL, SLIDING), (StateSpec("recurrent", (36, 2**21), "uint8"), StateSpec("conv", (2**18,), "uint8")))
    assert in_words(spec, (4096, 1024, 24)) == (
        "13.19 GiB of KV: 4096 blocks of 16 tokens (80 KiB per token), 1024 blocks of 16 tokens (window of 1024 "
        "tokens: 416 MiB, 416 KiB per token), 24 rows of states (72.25 MiB)"
    )
    without_attention = replace(spec, groups=(replace(FULL, layers=()),))
    assert in_words(without_attention, (512, 24)) == (
        "1.69 GiB of KV: 512 blocks of 16 tokens (0 KiB per token), 24 rows of states (72.25 MiB)"
    )
    of_another_process = KVSpec((replace(FULL, layers=()),))
    assert in_words(of_another_process, (512,)) == "512 blocks of 16 tokens, whose memory another process has"


def test_the_memory_is_used_and_not_exceeded() -> None:
    spec = KVSpec((FULL, SLIDING), (StateSpec("recurrent", (36, 2**21), "uint8"),))
    sizes = sizes_within(spec, 20 * 2**30, NEEDS)
    assert sizes == table_sizes(spec, sizes[0], NEEDS)
    assert pool_bytes(spec, sizes) <= 20 * 2**30
    assert pool_bytes(spec, table_sizes(spec, sizes[0] + 1, NEEDS)) > 20 * 2**30
    assert min(sizes_within(spec, 2**20, NEEDS)) == 0


def test_windows_leave_room_for_more_tokens() -> None:
    """Half as many blocks, but a longest prompt."""
    spec, num_bytes = KVSpec((FULL, SLIDING)), 40 * 2**30
    alike = num_bytes // spec.block_bytes
    full, windowed = sizes_within(spec, num_bytes, replace(NEEDS, max_tokens=32768))
    assert windowed == full // 2
    assert full > 1.7 * alike
    assert sizes_within(spec, num_bytes, replace(NEEDS, max_tokens=131072)) == (alike, alike)


def test_blocks_without_bytes_leave_the_memory_to_the_states() -> None:
    spec = KVSpec((replace(FULL, layers=()),), (StateSpec("recurrent", (64, 2**22), "uint8"),))
    assert sizes_within(spec, 10 * 2**30, NEEDS) == (64 * 256, 40)
    assert sizes_within(spec, 2**40, NEEDS) == table_sizes(spec, 64 * 256, NEEDS)


def test_snapshots_are_whole_blocks_apart() -> None:
    spec = KVSpec((FULL,), (StateSpec("recurrent", (1,), "uint8"),))
    assert table_sizes(spec, 64, replace(NEEDS, snapshot_tokens=1)) == (64, 2 + 64)
