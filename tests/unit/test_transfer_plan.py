from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv_cache import KVSpec, LayerGroup, StateSpec
from baton.errors import ConfigError
from kvstore.transfer.plan import num_units, plan, plan_digest

SLOT = 4096


def spec_of(layers: tuple[int, ...], state_bytes: tuple[int, ...] = ()) -> KVSpec:
    first = [0]
    for count in layers:
        first.append(first[-1] + count)
    groups = tuple(
        LayerGroup(f"g{i}", tuple(range(first[i], first[i + 1])), 1 + i, 4, 4, torch.float32)
        for i in range(len(layers))
    )
    return KVSpec(16, groups, tuple(StateSpec(f"s{i}", (n,), torch.uint8) for i, n in enumerate(state_bytes)))


specs = st.builds(
    spec_of,
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 3 * SLOT), max_size=2).map(tuple),
)


@given(specs, st.integers(1, 400), st.integers(0, 25), st.integers(2048, 4 * SLOT))
def test_chunks_cover_every_row_and_state_byte_once_in_layer_order(
    spec: KVSpec, num_tokens: int, skip_blocks: int, slot_bytes: int
) -> None:
    skip = min(skip_blocks * 16, num_tokens // 16 * 16)
    chunks = plan(spec, num_tokens, skip, slot_bytes)
    seen = [
        (c.part, layer, unit)
        for c in chunks
        for layer in range(c.layer_lo, c.layer_hi)
        for unit in range(c.unit_lo, c.unit_hi)
    ]
    units = num_units(spec, num_tokens, skip)
    want = [(p, la, u) for p, g in enumerate(spec.groups) for la in range(len(g.layers)) for u in range(units)]
    want += [(len(spec.groups) + i, 0, b) for i, s in enumerate(spec.states) for b in range(s.num_bytes)]
    assert seen == want
    assert all(0 < c.num_bytes <= slot_bytes for c in chunks)
    moved = units * spec.block_bytes + sum(s.num_bytes for s in spec.states)
    assert sum(c.num_bytes for c in chunks) == moved


def test_whole_layers_share_a_chunk_and_a_large_layer_is_cut() -> None:
    spec = spec_of((4,))  # rows of 512 bytes
    assert [(c.layer_lo, c.layer_hi) for c in plan(spec, 48, 0, SLOT)] == [(0, 2), (2, 4)]
    assert [(c.layer_lo, c.unit_lo, c.unit_hi) for c in plan(spec, 160, 0, SLOT)][:2] == [(0, 0, 8), (0, 8, 10)]


def test_a_prefix_that_is_held_entirely_moves_nothing() -> None:
    assert plan(spec_of((2,)), 32, 32, SLOT) == ()


@pytest.mark.parametrize("skip", [-16, 8, 48])
def test_skip_must_be_whole_blocks_of_the_sequence(skip: int) -> None:
    with pytest.raises(ValueError, match="multiple of the block size"):
        plan(spec_of((1,)), 40, skip, SLOT)


def test_a_row_larger_than_a_slot_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"group 'g0' is 512 bytes"):
        plan(spec_of((1,)), 16, 0, 511)


def test_digest_tells_apart_whatever_changes_a_size_or_the_protocol() -> None:
    spec, other = spec_of((2,)), spec_of((2,), (8,))
    digests = [
        plan_digest(s, n, k, plan(s, n, k, slot), window, checksum)
        for s, n, k, slot, window, checksum in [
            (spec, 64, 0, SLOT, 4, "full"),
            (other, 64, 0, SLOT, 4, "full"),
            (spec, 65, 0, SLOT, 4, "full"),
            (spec, 64, 16, SLOT, 4, "full"),
            (spec, 64, 0, SLOT // 2, 4, "full"),
            (spec, 64, 0, SLOT, 3, "full"),
            (spec, 64, 0, SLOT, 4, "off"),
        ]
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == plan_digest(spec_of((2,)), 64, 0, plan(spec_of((2,)), 64, 0, SLOT), 4, "full")
