from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import wire
from baton.kv_layout import GroupLayout, KvLayout, StateLayout
from baton.messages import Ticket
from baton.v1 import worker_pb2
from engine.core.runner import KVSpec, LayerGroup, PageOrder, StateSpec
from kvstore.transfer.protocol.plan import (
    begins_of,
    destination_ranks,
    heads_of,
    layout_of,
    mismatch,
    rank_spec,
    shared_heads,
    source_ranks,
    state_source,
    window_begins,
    wire_dtype,
)

FULL = GroupLayout(name="full", layers=(0, 2), num_kv_heads=6, k_dim=8, v_dim=8, dtype="float32")
LATENT = GroupLayout(name="latent", layers=(1, 3), num_kv_heads=1, k_dim=16, v_dim=0, dtype="bfloat16")
CONV = StateLayout("conv", (3, 5), "float32")
TICKET = Ticket(
    transfer_id="t", generation=1, decode_worker_id="d", incarnation="d.1", kv_address="h:1", num_tokens=9,
    skip_tokens=0, wire_compat="kind", layout=KvLayout(16, 1, ()),
)  # fmt: skip


def layout(tp_size: int = 1, block_size: int = 16, num_heads: int = 6) -> KvLayout:
    return KvLayout(block_size, tp_size, (replace(FULL, num_kv_heads=num_heads), LATENT))


STATEFUL = replace(layout(), states=(CONV,))
degrees = st.sampled_from([1, 2, 3, 6, 12, 24])
"""All of them divide, or are divided by, the six heads."""


@pytest.mark.parametrize(
    ("num_heads", "tp_size", "held"),
    [
        (6, 1, [(0, 1, 2, 3, 4, 5)]),
        (6, 3, [(0, 1), (2, 3), (4, 5)]),
        (3, 3, [(0,), (1,), (2,)]),
        (3, 6, [(0,), (0,), (1,), (1,), (2,), (2,)]),
        (1, 2, [(0,), (0,)]),
    ],
)
def test_heads_are_cut_evenly_and_replicated_where_ranks_outnumber_them(
    num_heads: int, tp_size: int, held: list[tuple[int, ...]]
) -> None:
    group = replace(FULL, num_kv_heads=num_heads)
    assert [tuple(heads_of(group, tp_size, rank)) for rank in range(tp_size)] == held
    whole = replace(group, is_replicated=True)
    assert [tuple(heads_of(whole, tp_size, rank)) for rank in range(tp_size)] == [tuple(range(num_heads))] * tp_size


@pytest.mark.parametrize(
    ("src_tp", "dst_tp", "num_heads", "sources"),
    [
        (1, 3, 3, [(0,), (0,), (0,)]),
        (3, 1, 3, [(0, 1, 2)]),
        (2, 3, 6, [(0,), (0, 1), (1,)]),
        (4, 4, 4, [(0,), (1,), (2,), (3,)]),
        # Heads 0 0 1 1 2 2: each destination takes the replica of its number, so that both of a head's ranks send.
        (6, 3, 3, [(0,), (3,), (4,)]),
        (6, 6, 3, [(0,), (1,), (2,), (3,), (4,), (5,)]),
        (4, 8, 2, [(0,), (1,), (0,), (1,), (2,), (3,), (2,), (3,)]),
    ],
)
def test_the_sources_of_each_destination(
    src_tp: int, dst_tp: int, num_heads: int, sources: list[tuple[int, ...]]
) -> None:
    group = replace(FULL, num_kv_heads=num_heads)
    src, dst = KvLayout(16, src_tp, (group,)), KvLayout(16, dst_tp, (group,))
    assert [source_ranks(src, dst, rank) for rank in range(dst_tp)] == sources


def test_one_latent_head_comes_from_one_rank_and_destinations_take_turns() -> None:
    src, dst = KvLayout(16, 4, (LATENT,)), KvLayout(16, 8, (LATENT,))
    assert [source_ranks(src, dst, rank) for rank in range(8)] == [(0,), (1,), (2,), (3,)] * 2
    assert [destination_ranks(src, dst, rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def replicated(each: KvLayout, *, is_replicated: bool = True) -> KvLayout:
    return replace(each, groups=(replace(each.groups[0], is_replicated=is_replicated), *each.groups[1:]))


@given(degrees, degrees, st.booleans(), st.booleans())
def test_every_head_of_every_destination_comes_from_one_source_and_both_sides_know_it(
    src_tp: int, dst_tp: int, from_replicas: bool, to_replicas: bool
) -> None:
    src = replicated(layout(src_tp), is_replicated=from_replicas)
    dst = replicated(layout(dst_tp), is_replicated=to_replicas)
    for dst_rank in range(dst_tp):
        for index, group in enumerate(dst.groups):
            shared = [tuple(shared_heads(src, rank, dst, dst_rank, index)) for rank in range(src_tp)]
            assert sorted(sum(shared, ())) == list(heads_of(group, dst_tp, dst_rank))
            assert all(rank in source_ranks(src, dst, dst_rank) for rank in range(src_tp) if shared[rank])
            for rank, heads in enumerate(shared):
                assert set(heads) <= set(heads_of(src.groups[index], src_tp, rank))
    pairs = {(rank, to) for to in range(dst_tp) for rank in source_ranks(src, dst, to)}
    assert pairs == {(rank, to) for rank in range(src_tp) for to in destination_ranks(src, dst, rank)}


def test_destinations_take_turns_among_ranks_that_hold_all_heads() -> None:
    groups = (replace(FULL, num_kv_heads=5, is_replicated=True),)
    src, dst = KvLayout(16, 2, groups), KvLayout(16, 4, groups)
    assert not mismatch(src, dst, "auto"), "however many heads there are"
    assert [source_ranks(src, dst, rank) for rank in range(4)] == [(0,), (1,), (0,), (1,)]
    assert [source_ranks(dst, src, rank) for rank in range(2)] == [(0,), (1,)]
    assert "5 KV heads of group 'full' cannot be spread over 2" in mismatch(
        replace(src, groups=(replace(FULL, num_kv_heads=5),)), dst, "auto"
    )


def test_a_surplus_replica_sends_to_nobody() -> None:
    assert [destination_ranks(layout(12), layout(1), rank) for rank in range(4)] == [(0,), (), (0,), ()]


@pytest.mark.parametrize(
    ("src_tp", "dst_tp", "sources"),
    [
        (1, 2, [0, 0]),
        (2, 1, [0]),
        (2, 4, [0, 0, 1, 1]),
        (4, 2, [0, 2]),
        (3, 3, [0, 1, 2]),
        (12, 3, [0, 4, 8]),
    ],
)
def test_states_come_from_a_rank_that_sends_heads_too(src_tp: int, dst_tp: int, sources: list[int]) -> None:
    heads = KvLayout(16, src_tp, (replace(FULL, num_kv_heads=12),), (CONV,))
    to = replace(heads, tp_size=dst_tp)
    assert [state_source(heads, to, rank) for rank in range(dst_tp)] == sources
    for rank, source in enumerate(sources):
        without = replace(heads, states=()), replace(to, states=())
        assert source in source_ranks(heads, to, rank) == source_ranks(*without, rank), "no further connection"


def test_states_without_a_head_come_from_one_rank_and_destinations_take_turns() -> None:
    no_layers = replace(FULL, layers=(), num_kv_heads=0)
    for groups in ((), (no_layers,)):
        src, dst = KvLayout(16, 2, groups, (CONV,)), KvLayout(16, 3, groups, (CONV,))
        assert mismatch(src, dst, "auto") == ""
        assert [source_ranks(src, dst, rank) for rank in range(3)] == [(0,), (1,), (0,)]
        assert [destination_ranks(src, dst, rank) for rank in range(2)] == [(0, 2), (1,)]


def windowed(block_size: int, window: int = 100) -> KvLayout:
    return KvLayout(block_size, 1, (FULL, replace(LATENT, window=window)))


def ticket_for(layout: KvLayout, num_tokens: int, skip_tokens: int = 0, begins: tuple[int, ...] = ()) -> Ticket:
    return replace(TICKET, layout=layout, num_tokens=num_tokens, skip_tokens=skip_tokens, begins=begins)


def test_a_window_begins_with_the_block_of_its_first_token() -> None:
    assert [window_begins(windowed(32), n) for n in (0, 100, 131, 132, 228, 260)] == [
        (0, 0), (0, 0), (0, 0), (0, 32), (0, 128), (0, 160),
    ]  # fmt: skip


def test_the_begins_of_a_ticket() -> None:
    assert begins_of(ticket_for(windowed(16), 300, 160), 300) == (160, 160)
    assert begins_of(ticket_for(windowed(16), 300, 160, (160, 208)), 300) == (160, 208)
    assert begins_of(ticket_for(layout(), 300, 160), 160) == (160, 160), "a state may be missing"
    assert begins_of(ticket_for(windowed(16), 99), 16) == (0, 0), "both windows start at 0"
    assert begins_of(ticket_for(windowed(64), 300, 0, (0, 192)), 292) == (0, 192), "both start in the block at 192"
    assert begins_of(ticket_for(windowed(64), 300, 0, (0, 256)), 292) == (0, 256), "it has the start of both"
    assert begins_of(ticket_for(windowed(16), 300, 0, (0, 160)), 272) == (0, 160), "it has reserved more"


@pytest.mark.parametrize(
    ("ticket", "num_tokens", "words"),
    [
        (ticket_for(layout(), 300, 0, (0,)), 300, "a ticket for 2 layer groups has 1 begins"),
        (ticket_for(layout(), 300, 0, (0, 0, 0)), 300, "has 3 begins"),
        (ticket_for(layout(), 300, 160), 144, "the receiver has more than 144 tokens already: 160"),
        (ticket_for(layout(), 300, 304), 304, r"must begin within the ticket's 300 tokens, got \[304, 304\]"),
        (ticket_for(layout(), 300, 0, (0, 304)), 300, r"within the ticket's 300 tokens, got \[0, 304\]"),
        (ticket_for(layout(), 300, 0, (-16, 0)), 300, r"within the ticket's 300 tokens, got \[-16, 0\]"),
        (
            ticket_for(windowed(16), 300, 0, (0, 192)),
            288,
            "288 of 300 tokens need blocks before the windows, which are",
        ),
        (ticket_for(windowed(16), 300, 0, (0, 240)), 288, "288 of 300 tokens need blocks before the windows"),
        (ticket_for(windowed(64), 300, 0, (0, 192)), 291, "291 of 300 tokens need blocks before the windows"),
        (ticket_for(windowed(16), 300, 0, (0, 160)), 256, "256 of 300 tokens need blocks before the windows"),
    ],
)
def test_a_ticket_that_cannot_be_served_is_refused(ticket: Ticket, num_tokens: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        begins_of(ticket, num_tokens)


@given(degrees)
def test_a_ranks_cache_and_its_layout_tell_each_other(tp_size: int) -> None:
    whole = replace(layout(tp_size), states=(CONV,))
    whole = replace(whole, groups=(whole.groups[0], replace(whole.groups[1], window=77)))
    heads = tuple(group.num_kv_heads for group in whole.groups)
    for rank in range(tp_size):
        assert layout_of(rank_spec(whole, rank), tp_size, heads) == whole


def test_the_layout_of_a_cache() -> None:
    spec = KVSpec(
        (LayerGroup(name="all", layers=(0, 1), num_kv_heads=2, k_dim=64, v_dim=64, block_size=32, dtype="bfloat16"),),
        (StateSpec("conv", (3, 5), "float32"),),
    )
    want = KvLayout(
        32, 1, (GroupLayout(name="all", layers=(0, 1), num_kv_heads=2, k_dim=64, v_dim=64, dtype="bfloat16"),), (CONV,)
    )
    assert layout_of(spec) == want
    assert rank_spec(want, 0) == spec
    assert layout_of(spec, 3) == replace(want, tp_size=3, groups=(replace(want.groups[0], num_kv_heads=6),))
    whole = replace(spec, groups=(replace(spec.groups[0], is_replicated=True),))
    kept = replace(want, tp_size=3, groups=(replace(want.groups[0], is_replicated=True),))
    assert layout_of(whole, 3) == kept
    assert rank_spec(kept, 2) == whole


@pytest.mark.parametrize(
    ("src", "dst", "wanted", "wire"),
    [
        ("float32", "float32", "auto", "float32"),
        ("float32", "bfloat16", "auto", "bfloat16"),
        ("float16", "float32", "auto", "float16"),
        ("float32", "float32", "int8", "int8"),
        ("bfloat16", "bfloat16", "float32", "float32"),
        ("int64", "int64", "auto", "int64"),
        ("int64", "int64", "bfloat16", "int64"),
        ("float8_e4m3fn", "float8_e4m3fn", "int8", "float8_e4m3fn"),
        ("int8", "int8", "bfloat16", "int8"),
    ],
)
def test_the_wire_dtype(src: str, dst: str, wanted: str, wire: str) -> None:
    assert wire_dtype(src, dst, wanted) == wire


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("int64", "float32"),
        ("float32", "int64"),
        ("int64", "int32"),
        ("int8", "bfloat16"),
        ("float8_e4m3fn", "bfloat16"),
        ("float32", "float8_e4m3fn"),
    ],
)
def test_what_cannot_be_converted_has_no_wire_dtype(src: str, dst: str) -> None:
    with pytest.raises(ValueError, match=f"{src} cannot be converted to {dst}"):
        wire_dtype(src, dst, "float32")


def with_group(**changes: object) -> KvLayout:
    return replace(layout(), groups=(replace(FULL, **changes), LATENT))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [layout(), layout(tp_size=3), layout(tp_size=12), layout(block_size=64), with_group(dtype="bfloat16")],
)
def test_layouts_that_fit(other: KvLayout) -> None:
    assert mismatch(layout(), other, "auto") == ""
    assert mismatch(other, layout(), "int8") == ""


OPAQUE = replace(FULL, page_order="opaque", tag="vendor/1")


def mixed(full: int, latent: int, common: int, **changes: object) -> KvLayout:
    """Groups with blocks of their own."""
    groups = replace(FULL, block_size=full, **changes), replace(LATENT, block_size=latent)  # type: ignore[arg-type]
    return KvLayout(common, 1, groups)


def opaque(block_size: int = 16, tp_size: int = 1, **changes: object) -> KvLayout:
    return KvLayout(block_size, tp_size, (replace(OPAQUE, **changes), LATENT))  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", ["auto", "int8"])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (mixed(16, 64, 64), mixed(48, 16, 48)),
        (mixed(16, 64, 64), layout(block_size=32)),
        (opaque(), opaque()),
        (opaque(tp_size=3), opaque(tp_size=3)),
        (opaque(dtype="uint8"), opaque(dtype="uint8")),
        (with_group(page_order="by_token"), replace(with_group(page_order="by_token"), block_size=64)),
        (windowed(32), windowed(32)),
        (replace(STATEFUL, tp_size=2), replace(STATEFUL, tp_size=6)),
        (with_group(layers=(), num_kv_heads=1), with_group(layers=(), num_kv_heads=2, dtype="float16")),
    ],
)
def test_layouts_of_other_shapes_that_fit(src: KvLayout, dst: KvLayout, wanted: str) -> None:
    assert mismatch(src, dst, wanted) == mismatch(dst, src, wanted) == ""


def test_the_layout_of_groups_that_are_not_alike() -> None:
    spec = KVSpec(
        (
            LayerGroup(
                name="a", layers=(0,), num_kv_heads=2, k_dim=8, v_dim=8, block_size=16, dtype="bfloat16",
                page_order=PageOrder.BY_TOKEN,
            ),
            LayerGroup(
                name="b", layers=(1,), num_kv_heads=1, k_dim=9, v_dim=0, block_size=48, dtype="uint8",
                page_order=PageOrder.OPAQUE, tag="vendor/1",
            ),
        ),
    )  # fmt: skip
    found = layout_of(spec)
    assert found.block_size == 48
    assert [(g.block_size, g.page_order, g.tag) for g in found.groups] == [
        (16, "by_token", ""),
        (48, "opaque", "vendor/1"),
    ]
    assert rank_spec(found, 0) == spec
    sent = wire.ticket_to_pb(replace(TICKET, layout=found)).SerializeToString()
    assert wire.ticket_from_pb(worker_pb2.Ticket.FromString(sent)).layout == found


def test_windows_and_begins_of_a_ticket_are_on_the_wire() -> None:
    ticket = ticket_for(windowed(32), 300, 160, (160, 192))
    assert wire.ticket_from_pb(worker_pb2.Ticket.FromString(wire.ticket_to_pb(ticket).SerializeToString())) == ticket
    plain = wire.ticket_to_pb(ticket_for(layout(), 300, 160))
    assert not plain.begins
    assert not any(group.window for group in plain.layout.groups)


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        (
            layout(),
            with_group(name="sliding"),
            "layer groups ['full', 'latent'], the destination ['sliding', 'latent']",
        ),
        (layout(), replace(layout(), groups=(FULL,)), "the destination ['full']"),
        (layout(), with_group(layers=(0, 4)), "group 'full' has layers (0, 2) at the source and (0, 4)"),
        (layout(), with_group(num_kv_heads=3), "KV heads 6 at the source and 3"),
        (layout(), with_group(v_dim=4), "K and V dimensions (8, 8) at the source and (8, 4)"),
        (layout(block_size=48), layout(block_size=32), "block sizes 48 (source) and 32 (destination)"),
        (layout(tp_size=4), layout(), "the 6 KV heads of group 'full' cannot be spread over 4 ranks"),
        (layout(), layout(tp_size=9), "the 6 KV heads of group 'full' cannot be spread over 9 ranks"),
        (layout(), layout(tp_size=64), "the 6 KV heads of group 'full' cannot be spread over 64 ranks"),
        (layout(), layout(tp_size=65), "a layout has 65 ranks, and must have 1 to 64"),
        (layout(tp_size=0), layout(), "a layout has 0 ranks, and must have 1 to 64"),
        (with_group(dtype="int64"), layout(), "in group 'full', int64 cannot be converted to float32"),
        (with_group(dtype="int8", k_dim=12), layout(), "in group 'full', int8 cannot be converted to float32"),
        (
            mixed(16, 64, 64),
            mixed(16, 48, 48),
            "in group 'latent', of the block sizes 64 (source) and 48 (destination)",
        ),
        (layout(), with_group(page_order="by_token"), "page order k_then_v at the source and by_token at the dest"),
        (opaque(), opaque(tag="vendor/2"), "group 'full' has page order opaque vendor/1 at the source and opaque"),
        (opaque(), layout(), "page order opaque vendor/1 at the source and k_then_v at the destination"),
        (opaque(), opaque(32), "is opaque and has blocks of 1536 x float32 for 16 tokens on 1 ranks at the source"),
        (opaque(), opaque(tp_size=2), "blocks of 768 x float32 for 16 tokens on 2 ranks at the destination"),
        (opaque(), opaque(dtype="int32"), "blocks of 1536 x int32 for 16 tokens on 1 ranks at the destination"),
        (opaque(), opaque(v_dim=9), "K and V dimensions (8, 8) at the source and (8, 9)"),
        (layout(block_size=24), layout(), "a layout has blocks of 24 tokens, and must have multiples of 16"),
        (layout(), layout(block_size=2**21), "a layout has blocks of 2097152 tokens, and must have"),
        (mixed(16, 40, 80), layout(), "a layout has blocks of 40 tokens, and must have multiples of 16"),
        (layout(), mixed(16, 64, 32), "a layout has blocks of 64 tokens, of which 32 are no multiple"),
        (STATEFUL, layout(), "states are conv[3, 5] float32 at the source and none at the destination"),
        (
            STATEFUL,
            replace(STATEFUL, states=(replace(CONV, shape=(3, 6)),)),
            "conv[3, 5] float32 at the source and conv",
        ),
        (windowed(16), windowed(16, 99), "group 'latent' has window 100 at the source and 99 at the destination"),
        (windowed(16), windowed(16, 0), "window 100 at the source and 0"),
        (
            windowed(16),
            windowed(32),
            "in group 'latent', which has a window, the destination's blocks of 32 tokens are larger than those of 16",
        ),
        (layout(), with_group(layers=()), "group 'full' has layers (0, 2) at the source and ()"),
    ],
)
def test_layouts_that_do_not_fit_are_told_apart_in_a_sentence(src: KvLayout, dst: KvLayout, words: str) -> None:
    assert words in mismatch(src, dst, "auto")
