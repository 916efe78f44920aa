from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.kv_layout import GroupLayout, KvLayout, StateLayout
from kvstore.transfer.protocol.plan import (
    EVERY_LAYER,
    WIRE_DTYPES,
    Chunk,
    TransferPlan,
    WireOptions,
    block_size_of,
    destination_ranks,
    heads_of,
    least_chunk_bytes,
    mismatch,
    plan,
    require_fitting_slots,
    source_ranks,
)

SLOT = 16384
OPTIONS = WireOptions(SLOT, 512, "auto")


def layout_of_groups(*num_layers: int, states: tuple[int, ...] = (), block_size: int = 16) -> KvLayout:
    """Group i has `num_layers[i]` layers of i + 1 heads; the groups' layers alternate as long as there are any."""
    order = sorted((index, group) for group, count in enumerate(num_layers) for index in range(count))
    groups = tuple(
        GroupLayout(
            name=f"g{i}",
            layers=tuple(la for la, (_, group) in enumerate(order) if group == i),
            num_kv_heads=1 + i,
            k_dim=4,
            v_dim=4,
            dtype="float32",
        )
        for i in range(len(num_layers))
    )
    return KvLayout(block_size, 1, groups, tuple(StateLayout(f"s{i}", (n,), "uint8") for i, n in enumerate(states)))


def between_equals(
    layout: KvLayout, num_tokens: int, skip_tokens: int = 0, options: WireOptions = OPTIONS
) -> TransferPlan:
    return plan(layout, 0, layout, 0, num_tokens, (skip_tokens,) * len(layout.groups), options)


Transfer = tuple[KvLayout, KvLayout, int, tuple[int, ...], WireOptions]


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    """Two layouts of six heads, a latent head, maybe with a window, and maybe a state; and what is moved between them.

    The smallest slot is what the largest unit needs: 64 tokens of six heads.
    """
    dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
    num_layers, num_latent = draw(st.integers(1, 9)), draw(st.integers(0, 4))
    layers = draw(st.permutations(range(num_layers + num_latent)))
    states = draw(st.sampled_from([(), (StateLayout("conv", (3, 1701), "float32"),)]))
    degrees, sizes = st.sampled_from([1, 2, 3, 6, 12]), st.sampled_from([16, 32, 64])
    window = draw(st.sampled_from([0, 1, 40, 512, 2000]))
    here, there = draw(sizes), draw(sizes)
    latents = (max(here, there), min(here, there)) if window else (here, there)
    sides = [
        KvLayout(
            max(full, latent),
            tp_size,
            (
                GroupLayout(
                    name="full",
                    layers=tuple(sorted(layers[:num_layers])),
                    num_kv_heads=6,
                    k_dim=8,
                    v_dim=8,
                    dtype=draw(dtypes),
                    block_size=full if full != latent else 0,
                    is_replicated=draw(st.booleans()),
                ),
                GroupLayout(
                    name="latent",
                    layers=tuple(sorted(layers[num_layers:])),
                    num_kv_heads=1,
                    k_dim=12,
                    v_dim=4,
                    dtype=draw(dtypes),
                    block_size=latent if full != latent else 0,
                    window=window,
                ),
            ),
            states,
        )
        for tp_size, full, latent in ((draw(degrees), draw(sizes), latent) for latent in latents)
    ]
    num_tokens = draw(st.integers(1, 900))
    dst_sizes = [block_size_of(sides[1], group) for group in range(2)]
    held = tuple(draw(st.integers(0, num_tokens // size + 1)) * size for size in dst_sizes)
    options = WireOptions(
        draw(st.sampled_from([3 * SLOT // 2, 3 * SLOT, 2**20])),
        draw(st.sampled_from([1, 64, 512])),
        draw(st.sampled_from(WIRE_DTYPES)),
    )
    return sides[0], sides[1], num_tokens, held, options


@given(transfers())
def test_the_pairs_together_move_everything_to_every_destination_once(transfer: Transfer) -> None:
    src, dst, num_tokens, held, options = transfer
    starts = [
        max(begin, max(0, num_tokens - group.window) // size * size if group.window else 0)
        for group, begin, size in zip(dst.groups, held, [block_size_of(dst, 0), block_size_of(dst, 1)], strict=True)
    ]
    for dst_rank in range(dst.tp_size):
        moved: Counter[tuple[int, int, int, int]] = Counter()
        state_bytes: Counter[tuple[int, int]] = Counter()
        for src_rank in source_ranks(src, dst, dst_rank):
            planned = plan(src, src_rank, dst, dst_rank, num_tokens, held, options)
            assert dst_rank in destination_ranks(src, dst, src_rank)
            for chunk in planned.chunks:
                assert 0 < chunk.num_bytes <= options.chunk_bytes
                units = range(chunk.unit_lo, chunk.unit_hi)
                if chunk.part >= len(src.groups):
                    state_bytes.update((chunk.part, byte) for byte in units)
                    continue
                group = planned.groups[chunk.part]
                num_layers = chunk.layer_hi - chunk.layer_lo
                assert chunk.num_bytes == num_layers * len(units) * group.unit_bytes
                moved.update(
                    (chunk.part, layer, head, starts[chunk.part] + unit * group.unit_tokens)
                    for layer in range(chunk.layer_lo, chunk.layer_hi)
                    for head in range(group.head_lo, group.head_hi)
                    for unit in units
                )
        assert moved == Counter(
            (part, layer, head, token)
            for part, group_layout in enumerate(dst.groups)
            for layer in range(len(group_layout.layers))
            for head in heads_of(group_layout, dst.tp_size, dst_rank)
            for token in range(starts[part], num_tokens, min(block_size_of(src, part), block_size_of(dst, part)))
        )
        assert state_bytes == Counter((2, byte) for _ in dst.states for byte in range(3 * 1701 * 4))


@given(transfers())
def test_chunks_leave_in_the_order_in_which_they_can(transfer: Transfer) -> None:
    src, dst, num_tokens, held, options = transfer
    planned = plan(src, source_ranks(src, dst, 0)[0], dst, 0, num_tokens, held, options)
    unit_tokens = max(group.unit_tokens for group, of in zip(planned.groups, src.groups, strict=True) if of.layers)
    span = max(options.span_tokens // unit_tokens * unit_tokens, unit_tokens)
    ready = []
    for chunk in planned.chunks:
        tokens, layers = planned.ready_at(chunk)
        assert tokens <= num_tokens
        ready.append((-(-tokens // span), layers))
    assert ready == sorted(ready)


def spans(planned: TransferPlan) -> list[list[Chunk]]:
    found: list[list[Chunk]] = []
    for before, chunk in pairwise((None, *planned.chunks)):
        assert chunk
        if before is None or chunk.layer_lo < before.layer_lo:
            found.append([])
        found[-1].append(chunk)
    return found


def test_the_last_layer_of_a_span_travels_alone() -> None:
    layout = layout_of_groups(30)  # units of 512 bytes
    planned = between_equals(layout, 6 * 16)
    assert [c.layer_hi - c.layer_lo for c in planned.chunks] == [5, 5, 5, 5, 5, 3, 1, 1]
    assert [c.layer_hi - c.layer_lo for c in between_equals(layout, 16).chunks] == [15, 8, 4, 2, 1]


def test_spans_are_cut_at_multiples_of_the_sequences_tokens() -> None:
    planned = between_equals(layout_of_groups(2), 600, 32, WireOptions(SLOT, 256, "auto"))
    assert [(s[0].unit_lo, s[-1].unit_hi) for s in spans(planned)] == [(0, 14), (14, 30), (30, 36)]
    assert [planned.ready_at(s[-1]) for s in spans(planned)] == [(256, 2), (512, 2), (600, 2)]


def test_a_layer_that_does_not_fit_travels_in_runs_of_units() -> None:
    planned = between_equals(layout_of_groups(2), 640, options=WireOptions(SLOT, 1024, "auto"))
    assert [(c.layer_lo, c.unit_lo, c.unit_hi) for c in planned.chunks] == [
        (0, 0, 32),
        (0, 32, 40),
        (1, 0, 32),
        (1, 32, 40),
    ]


def test_units_are_of_each_groups_own_size_and_spans_whole_in_all_groups() -> None:
    whole = layout_of_groups(1, 1)
    narrow, wide = whole.groups
    src, dst = (
        replace(whole, block_size=b, groups=(replace(narrow, block_size=a), replace(wide, block_size=b)))
        for a, b in ((16, 48), (32, 96))
    )
    planned = plan(src, 0, dst, 0, 210, (96, 96), WireOptions(SLOT, 64, "auto"))
    assert [group.unit_tokens for group in planned.groups] == [16, 48]
    assert [planned.num_units(part) for part in range(2)] == [8, 3]
    assert [(c.part, c.unit_lo, c.unit_hi) for c in planned.chunks] == [
        (0, 0, 3), (1, 0, 1), (0, 3, 6), (1, 1, 2), (0, 6, 8), (1, 2, 3),
    ]  # fmt: skip
    assert [planned.ready_at(c)[0] for c in planned.chunks] == [144, 144, 192, 192, 210, 210]


def test_an_opaque_group_travels_in_whole_blocks_and_its_own_data_type() -> None:
    layout = layout_of_groups(2)
    (group,) = layout.groups
    opaque = replace(layout, groups=(replace(group, page_order="opaque", tag="vendor/1"),))
    planned = between_equals(opaque, 40, options=replace(OPTIONS, wire_dtype="int8"))
    assert [(g.dtype, g.unit_tokens, g.unit_bytes) for g in planned.groups] == [("float32", 16, 512)]
    with pytest.raises(ConfigError, match=r"group 'g0' is 512 bytes"):
        require_fitting_slots(opaque, 511, "int8")


def test_each_group_begins_where_the_destination_needs_it() -> None:
    full, window = layout_of_groups(1, 1).groups
    layout = replace(layout_of_groups(1, 1), groups=(full, replace(window, window=40)))

    def units(num_tokens: int, held: tuple[int, int]) -> list[tuple[int, int, int]]:
        planned = plan(layout, 0, layout, 0, num_tokens, held, WireOptions(SLOT, 64, "auto"))
        begins = [begin // 16 for begin in planned.begins]
        return [(c.part, begins[c.part] + c.unit_lo, begins[c.part] + c.unit_hi) for c in planned.chunks]

    assert units(200, (0, 0)) == [(0, 0, 4), (0, 4, 8), (0, 8, 12), (1, 10, 12), (0, 12, 13), (1, 12, 13)]
    assert units(200, (192, 0)) == [(1, 10, 12), (0, 12, 13), (1, 12, 13)], "from 160 on, the block of 200 - 40"
    assert units(200, (176, 192)) == [(0, 11, 12), (0, 12, 13), (1, 12, 13)]
    assert units(40, (32, 0)) == [(0, 2, 3), (1, 0, 3)], "the window holds all tokens"
    assert units(100, (192, 192)) == [], "the destination has more than is sent"
    (chunk,) = plan(layout, 0, layout, 0, 200, (208, 192), OPTIONS).chunks
    assert (chunk.part, chunk.unit_lo, chunk.unit_hi) == (1, 0, 1)


def test_a_group_without_layers_moves_nothing_and_a_model_may_have_no_other() -> None:
    (group,) = layout_of_groups(1).groups
    names = replace(group, layers=(), num_kv_heads=1, k_dim=0, v_dim=0)
    bare = KvLayout(64, 1, (names,), (StateLayout("conv", (40,), "uint8"),))
    for src_tp, dst_tp in ((1, 1), (1, 2), (2, 1), (2, 4)):
        src = replace(bare, tp_size=src_tp, groups=(replace(names, num_kv_heads=src_tp),))
        dst = replace(bare, tp_size=dst_tp, groups=(replace(names, num_kv_heads=dst_tp),), block_size=16)
        assert mismatch(src, dst, "auto") == ""
        for rank in range(dst_tp):
            (source,) = source_ranks(src, dst, rank)
            assert rank in destination_ranks(src, dst, source)
            planned = plan(src, source, dst, rank, 1000, (16,), WireOptions(16, 64, "auto"))
            assert [(c.part, c.unit_lo, c.unit_hi) for c in planned.chunks] == [(1, 0, 16), (1, 16, 32), (1, 32, 40)]
            assert planned.ready_at(planned.chunks[0]) == (1000, EVERY_LAYER)
    require_fitting_slots(bare, 1)
    assert least_chunk_bytes(bare, "auto") == 1, "chunks are never empty"
    mixed = replace(layout_of_groups(2, states=(8,)), groups=(*layout_of_groups(2).groups, names))
    assert [c.part for c in between_equals(mixed, 64).chunks] == [0, 0, 2]


def test_groups_whose_layers_alternate_do_so_on_the_wire() -> None:
    planned = between_equals(layout_of_groups(2, 2), 512)
    assert [(c.part, c.layer_lo) for c in planned.chunks] == [(0, 0), (1, 0), (1, 0), (0, 1), (1, 1), (1, 1)]


def test_a_chunk_is_ready_with_its_last_layer_and_a_state_with_the_step() -> None:
    layout = replace(layout_of_groups(4, states=(40,)), block_size=16)
    planned = between_equals(layout, 40)
    assert [planned.ready_at(c) for c in planned.chunks] == [(40, 2), (40, 3), (40, 4), (40, EVERY_LAYER)]


def test_units_of_int8_carry_a_scale_a_page() -> None:
    src = replace(layout_of_groups(1, 1), block_size=32)
    planned = plan(src, 0, layout_of_groups(1, 1), 0, 64, (0, 0), replace(OPTIONS, wire_dtype="int8"))
    assert [g.unit_bytes for g in planned.groups] == [8 + 16 * 8, 2 * (8 + 16 * 8)]
    assert planned.num_bytes == 4 * 3 * (8 + 16 * 8)


def test_a_prefix_that_is_held_entirely_moves_no_blocks() -> None:
    assert between_equals(layout_of_groups(2), 48, 48).chunks == ()
    (state,) = between_equals(layout_of_groups(2, states=(8,)), 48, 48).chunks
    assert (state.part, state.unit_lo, state.unit_hi) == (1, 0, 8)


@pytest.mark.parametrize("skip", [-32, 16])
def test_skip_must_be_whole_blocks_of_the_destination(skip: int) -> None:
    src, dst = layout_of_groups(1), layout_of_groups(1, block_size=32)
    with pytest.raises(ValueError, match="group 'g0' must begin at a multiple of the block size 32"):
        plan(src, 0, dst, 0, 60, (skip,), OPTIONS)


def test_a_unit_larger_than_a_slot_is_refused_by_name() -> None:
    layout, options = layout_of_groups(1), replace(OPTIONS, chunk_bytes=511)
    with pytest.raises(ConfigError, match=r"group 'g0' is 512 bytes"):
        between_equals(layout, 16, 0, options)
    with pytest.raises(ConfigError, match=r"group 'g0' is 512 bytes"):
        require_fitting_slots(layout, 511)
    require_fitting_slots(layout, 512)
    require_fitting_slots(layout, 256, "bfloat16")


@pytest.mark.parametrize("wire", ["auto", "bfloat16", "int8"])
def test_the_least_chunk_is_one_that_fits(wire: str) -> None:
    layout = layout_of_groups(2, 1)
    least = least_chunk_bytes(layout, wire)
    require_fitting_slots(layout, least, wire)
    between_equals(layout, 64, options=WireOptions(least, 512, wire))
    with pytest.raises(ConfigError):
        require_fitting_slots(layout, least - 1, wire)


@given(transfers())
def test_slots_that_fit_at_the_start_fit_every_plan(transfer: Transfer) -> None:
    src, dst, num_tokens, held, options = transfer
    options = replace(options, chunk_bytes=4096)
    try:
        require_fitting_slots(dst, options.chunk_bytes, options.wire_dtype)
    except ConfigError:
        reject()
    for src_rank in source_ranks(src, dst, 0):
        plan(src, src_rank, dst, 0, num_tokens, held, options)


def test_digest_tells_apart_whatever_changes_a_byte_or_the_protocol() -> None:
    whole = layout_of_groups(2)
    thirds = replace(whole, tp_size=3, groups=(replace(whole.groups[0], num_kv_heads=3),))
    plans = [
        between_equals(whole, 64),
        between_equals(layout_of_groups(2, states=(8,)), 64),
        between_equals(whole, 63),
        between_equals(whole, 64, 16),
        between_equals(replace(whole, groups=(replace(whole.groups[0], window=64),)), 64),
        between_equals(whole, 64, options=replace(OPTIONS, chunk_bytes=SLOT // 2)),
        between_equals(whole, 64, options=replace(OPTIONS, span_tokens=256)),
        between_equals(whole, 64, options=replace(OPTIONS, wire_dtype="int8")),
        plan(whole, 0, replace(whole, block_size=32), 0, 64, (0,), OPTIONS),
        plan(replace(whole, block_size=32), 0, whole, 0, 64, (0,), OPTIONS),
        *(plan(thirds, rank, thirds, rank, 64, (0,), OPTIONS) for rank in range(3)),
    ]
    digests = [planned.digest("full") for planned in plans]
    assert len({*digests, plans[0].digest("off")}) == len(plans) + 1
    assert digests[0] == between_equals(layout_of_groups(2), 64).digest("full")
