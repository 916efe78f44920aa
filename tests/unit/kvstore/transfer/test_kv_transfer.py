"""KV transfers over real gRPC and real links, both sides in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from opentelemetry.context import Context

from baton.cluster import TransferCounts
from baton.config import TestingConfig, TransferConfig
from baton.errors import (
    BatonError,
    Overloaded,
    TransferCorrupted,
    TransferError,
    TransferRefused,
    TransferTimeout,
    WorkerFailed,
)
from baton.messages import FirstToken, NewTokens, PrefillRequest, Ticket, Transferred
from decode_worker.service import DecodeService
from engine.core.runner import EMPTY_PLACE, Fence, KVSpec, LayerGroup, OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.core.sequence import Purpose
from engine.model.kv_cache import KVCache
from engine.testing import ArithmeticRunner, expected_tokens
from kvstore.transfer.connection.outgoing import TransferPart
from kvstore.transfer.connection.reservations import Arrival, Expected
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.protocol.chunk_header import VOID, Header, unpack
from kvstore.transfer.protocol.plan import Chunk, layout_of, rank_spec
from kvstore.transfer.sender import KvSender, OutgoingTransfer
from prefill_worker.service import PrefillService
from tests.support.objects import only_new_objects_are_collected
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    HOST,
    NUM_BLOCKS,
    SOON_S,
    SPEC,
    Decode,
    Prefill,
    decode_side,
    engine_worker,
    filled_cache,
    footprint,
    is_blank,
    kv_transfer,
    make_spec,
    prefill_side,
    read_all,
    same_blocks,
    scattered,
    send,
    tables_of,
    tokens_in,
    with_link,
)

pytestmark = pytest.mark.timeout(60)

CONTROL = (">offer", "<grant", ">commit", "<commit_ack", ">abort", "<abort_ack", "<nack")
"""The messages of transfers; what else a session says does not depend on them."""


@pytest.fixture(params=["shm", "tcp"])
def link(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@contextlib.asynccontextmanager
async def sides(config: TransferConfig, faults: str = "") -> AsyncIterator[tuple[Prefill, Decode]]:
    async with decode_side(config) as decode, prefill_side(config, faults) as prefill:
        yield prefill, decode


# -- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "skip_tokens"), [(100, 0), (100, 32), (96, 96), (1, 0)])
async def test_blocks_and_states_arrive_as_they_were_and_nothing_else_changes(
    link: str, num_tokens: int, skip_tokens: int
) -> None:
    async with sides(with_link(link)) as (prefill, decode):
        before = filled_cache(2)
        for mine, other in zip(decode.cache.groups, before.groups, strict=True):
            mine.copy_(other)
        num_blocks, skip = -(-num_tokens // 16), skip_tokens // 16
        source, target = scattered(num_blocks, 1), scattered(num_blocks + 2, 2)
        ticket = decode.receiver.expect("t", num_tokens, skip_tokens, tables_of(decode.receiver, target, 5))
        transferred = await send(prefill, ticket, source, state_slot=3)
        assert await decode.receiver.wait_committed(ticket) == Arrival(num_tokens, 1234)
        written = target[skip:num_blocks]
        rest = [b for b in range(NUM_BLOCKS) if b not in written]
        assert same_blocks(prefill.cache, source[skip:], decode.cache, written)
        assert same_blocks(before, rest, decode.cache, rest)
        assert torch.equal(prefill.cache.states["conv"][3], decode.cache.states["conv"][5])
        assert not decode.cache.states["conv"][[0, 1, 2, 3, 4, 6, 7]].any()
        assert transferred.num_bytes == (num_blocks - skip) * SPEC.block_bytes + 33 * 4
        assert transferred.num_bytes == decode.receiver.stats.num_bytes == prefill.sender.stats.num_bytes
        assert (await decode.receiver.release(ticket))[0] == tuple(target)
        assert await decode.receiver.release(ticket) == ()


async def test_a_ticket_that_contradicts_itself_is_refused() -> None:
    config = with_link("tcp")
    async with decode_side(config) as decode, prefill_side(config) as prefill:
        for begins, sentence in (
            ((0,), "has 1 begins"),
            ((0, 48), "within the ticket's 32 tokens"),
            ((0, 8), "multiple of the block size 16"),
        ):
            assert sentence in await refusal(prefill, decode, begins=begins)
        assert "plan this transfer differently" in await refusal(prefill, decode, begins=(0, 16))


async def test_transfers_over_two_pairs_at_once_do_not_mix(link: str) -> None:
    config = with_link(link)
    async with decode_side(config, "d0") as d0, decode_side(config, "d1") as d1, prefill_side(config) as prefill:
        async with asyncio.TaskGroup() as tasks:
            for index in range(16):
                target = range(index // 2 * 8, index // 2 * 8 + 6)
                tasks.create_task(
                    kv_transfer(prefill, (d0, d1)[index % 2], scattered(6, index), target, name=f"t{index}")
                )
        stats = prefill.sender.stats
        assert (stats.committed, d0.receiver.stats.committed, d1.receiver.stats.committed) == (16, 8, 8)
        assert (
            stats.num_bytes
            == d0.receiver.stats.num_bytes + d1.receiver.stats.num_bytes
            == 16 * (6 * SPEC.block_bytes + 33 * 4)
        )
        assert prefill.sender.num_connections == 2


LAYERS = KVSpec(
    (LayerGroup(name="all", layers=(0, 1, 2), num_kv_heads=3, k_dim=4, v_dim=6, block_size=16, dtype="float32"),)
)
"""Three heads, K and V of different widths, no state."""


def with_block_size(spec: KVSpec, block_size: int) -> KVSpec:
    groups = tuple(dataclasses.replace(group, block_size=block_size) for group in spec.groups)
    return dataclasses.replace(spec, groups=groups)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (32, 16), (64, 16)])
async def test_workers_with_other_block_sizes(link: str, ours: int, theirs: int) -> None:
    caches = [
        filled_cache(number, with_block_size(LAYERS, size), NUM_BLOCKS * 16 // size)
        for number, size in enumerate((ours, theirs))
    ]
    config = with_link(link, slot_bytes=8192)
    async with (
        decode_side(config, caches=caches[1:]) as decode,
        prefill_side(config, caches=caches[:1]) as prefill,
    ):
        source = random.Random(1).sample(range(caches[0].num_blocks), -(-150 // ours))
        target = random.Random(2).sample(range(caches[1].num_blocks), -(-150 // theirs))
        ticket = decode.receiver.expect("t", 150, 0, tables_of(decode.receiver, target))
        await send(prefill, ticket, source)
        await decode.receiver.wait_committed(ticket)
        sent = tokens_in(prefill.sender.layout, prefill.caches, source, 150)
        for one, other in zip(sent, tokens_in(decode.receiver.layout, decode.caches, target, 150), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("wire_dtype", "exact"), [("auto", torch.bfloat16), ("float32", None), ("bfloat16", torch.bfloat16), ("int8", None)]
)
async def test_wire_data_types(wire_dtype: str, exact: torch.dtype | None) -> None:
    """From a cache in float32 to one in bfloat16."""
    narrow = dataclasses.replace(LAYERS, groups=(dataclasses.replace(LAYERS.groups[0], dtype="bfloat16"),))
    config = dataclasses.replace(CONFIG, wire_dtype=wire_dtype)
    async with (
        decode_side(config, caches=[KVCache(narrow, NUM_BLOCKS, 8)]) as decode,
        prefill_side(config, caches=[filled_cache(1, LAYERS)]) as prefill,
    ):
        source, target = scattered(4, 1), scattered(4, 2)
        ticket = decode.receiver.expect("t", 60, 0, tables_of(decode.receiver, target))
        transferred = await send(prefill, ticket, source)
        await decode.receiver.wait_committed(ticket)
        width = {"float32": 4, "int8": 1}.get(wire_dtype, 2)
        num_scales = 3 * 3 * 2 * 4 if wire_dtype == "int8" else 0  # layers, heads, pages, blocks
        assert transferred.num_bytes == 4 * 16 * 3 * 10 * 3 * width + num_scales * 4
        sent = tokens_in(prefill.sender.layout, prefill.caches, source, 60)
        for one, other in zip(sent, tokens_in(decode.receiver.layout, decode.caches, target, 60), strict=True):
            if exact is not None:
                assert torch.equal(one.to(exact), other)
            assert torch.allclose(one, other.float(), rtol=0.01, atol=0.03 if wire_dtype == "int8" else 0.001)


async def test_one_rank_to_three_and_back_to_one(link: str) -> None:
    """Each pair of ranks has a pair of its own, and a transfer is in when all of its parts are."""
    config = with_link(link, slot_bytes=8192)
    whole, last = filled_cache(1, LAYERS), KVCache(LAYERS, NUM_BLOCKS, 8)
    layout = layout_of(LAYERS)
    thirds = [KVCache(rank_spec(dataclasses.replace(layout, tp_size=3), rank), NUM_BLOCKS, 8) for rank in range(3)]
    source, middle, target = (scattered(7, seed) for seed in (1, 2, 3))
    expected = tokens_in(layout, [whole], source, 100)
    async with (
        decode_side(config, "d3", caches=thirds) as d3,
        decode_side(config, "d1", caches=[last]) as d1,
        prefill_side(config, name="p1", caches=[whole]) as p1,
        prefill_side(config, name="p3", caches=thirds) as p3,
    ):
        for number in range(2):
            ticket = d3.receiver.expect(f"there{number}", 100, 0, tables_of(d3.receiver, middle))
            spread = await send(p1, ticket, source)
            await d3.receiver.wait_committed(ticket)
            for one, other in zip(expected, tokens_in(d3.receiver.layout, thirds, middle, 100), strict=True):
                assert torch.equal(one, other)
            back = d1.receiver.expect(f"back{number}", 100, 0, tables_of(d1.receiver, target))
            joined = await send(p3, back, middle)
            await d1.receiver.wait_committed(back)
            for one, other in zip(expected, tokens_in(layout, [last], target, 100), strict=True):
                assert torch.equal(one, other)
            assert spread.num_bytes == joined.num_bytes == 7 * LAYERS.block_bytes
            assert (await d3.receiver.release(ticket))[0] == tuple(middle)
            assert (await d1.receiver.release(back))[0] == tuple(target)
            for cache in (*thirds, last):
                cache.groups[0].zero_()
        assert (p1.sender.num_connections, p3.sender.num_connections) == (3, 3)
        assert (p1.sender.stats.committed, p3.sender.stats.committed) == (2, 2)

        # One of the three parts is lost: so is the transfer, everywhere, and the next one is served.
        ticket = d3.receiver.expect("lost", 100, 0, tables_of(d3.receiver, middle))
        async with p1.sender.transfer(ticket) as transfer:
            transfer.extend(tables_of(transfer, source))
            await until(
                lambda: len(d3.receiver._reservations._state._by_generation[ticket.generation].sources) == 3, SOON_S
            )
            next(iter(d3.receiver._connections.values())).break_off(TransferError("on purpose"))
            with pytest.raises(BatonError, match="on purpose"):
                await transfer.finish(1)
        with pytest.raises(TransferError, match="on purpose"):
            await d3.receiver.wait_committed(ticket)
        assert (await d3.receiver.release(ticket))[0] == tuple(middle)
        # Its other sessions may have told of it before.
        await until(lambda: p1.sender.num_connections == 2, SOON_S)
        ticket = d3.receiver.expect("next", 100, 0, tables_of(d3.receiver, middle))
        await send(p1, ticket, source)
        await d3.receiver.wait_committed(ticket)
        for one, other in zip(expected, tokens_in(d3.receiver.layout, thirds, middle, 100), strict=True):
            assert torch.equal(one, other)


# -- streaming -------------------------------------------------------------------------------------------------------


async def test_what_is_computed_leaves_before_the_rest_is(link: str) -> None:
    async with sides(with_link(link, span_tokens=32)) as (prefill, decode):
        source, target = list(range(4)), list(range(10, 14))
        ticket = decode.receiver.expect("t", 64, 0, tables_of(decode.receiver, target, 0))

        def arrived(blocks: list[int], layers: slice) -> bool:
            return same_layers(prefill.cache, decode.cache, blocks, 10, layers)

        async with prefill.sender.transfer(ticket) as transfer:
            transfer.extend(tables_of(transfer, source, 0))
            await asyncio.sleep(0.1)
            assert is_blank(decode.cache, target), "nothing is computed"
            transfer.advance(32, 3)
            await until(lambda: arrived([0, 1], slice(0, 3)), SOON_S)
            assert is_blank(decode.cache, target, group=1), "the layers of the second group are not computed"
            transfer.advance(32, 5)
            await until(lambda: same_blocks(prefill.cache, [0, 1], decode.cache, [10, 11]), SOON_S)
            transfer.advance(64, 1)  # the next step begins with its first layer, and takes nothing back
            await asyncio.sleep(0.1)
            assert is_blank(decode.cache, [12, 13], slice(1, 3))
            transfer.advance(64, 5)
            await until(lambda: same_blocks(prefill.cache, source, decode.cache, target), SOON_S)
            assert not decode.cache.states["conv"][0].any(), "a state is final when the last token is computed"
            await transfer.finish(5)
        assert torch.equal(decode.cache.states["conv"][0], prefill.cache.states["conv"][0])
        assert await decode.receiver.wait_committed(ticket) == Arrival(64, 5)


def same_layers(a: KVCache, b: KVCache, blocks: list[int], offset: int, layers: slice) -> bool:
    theirs = [block + offset for block in blocks]
    return torch.equal(a.groups[0][layers][:, blocks], b.groups[0][layers][:, theirs])


async def test_stalled_transfers_hold_nobody_up(link: str) -> None:
    """One waits for its grant to be used, one is half computed; eight more pass them on the same pair."""
    async with sides(with_link(link, window=2, num_slots=2)) as (prefill, decode):
        tickets = [
            decode.receiver.expect(f"slow{n}", 64, 0, tables_of(decode.receiver, range(4 * n, 4 * n + 4), n))
            for n in range(2)
        ]
        async with (
            prefill.sender.transfer(tickets[0]) as waiting,
            prefill.sender.transfer(tickets[1]) as half_way,
        ):
            half_way.extend(tables_of(half_way, [0, 1, 2, 3], 0))
            half_way.advance(64, 2)
            for number in range(8):
                await kv_transfer(prefill, decode, scattered(6, number), range(20, 26), name=f"quick{number}")
            waiting.extend(tables_of(waiting, [4, 5, 6, 7], 1))
            await asyncio.gather(waiting.finish(1), half_way.finish(1))
        for ticket, target in zip(tickets, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
            await decode.receiver.wait_committed(ticket)
            source = [4, 5, 6, 7] if target[0] == 0 else [0, 1, 2, 3]
            assert same_blocks(prefill.cache, source, decode.cache, target)
        assert decode.num_pairs_ever == 1


async def test_a_short_transfer_does_not_wait_for_a_long_one(link: str) -> None:
    """Chunks of all transfers of a pair take turns."""
    async with sides(with_link(link, slot_bytes=1024), faults="link_delay_ms=2") as (prefill, decode):
        ticket = decode.receiver.expect("long", 800, 0, tables_of(decode.receiver, range(50), 0))
        async with prefill.sender.transfer(ticket) as long:
            long.extend(tables_of(long, range(50), 0))
            finishing = asyncio.create_task(long.finish(1))
            await until(lambda: not is_blank(decode.cache, range(50)), SOON_S)
            short = await kv_transfer(prefill, decode, [60], [60])
            assert not finishing.done()
            await finishing
        assert short.num_chunks < 8
        assert same_blocks(prefill.cache, range(50), decode.cache, range(50))


async def test_the_number_of_messages_does_not_grow_with_layers_or_chunks(link: str) -> None:
    for num_layers in (2, 60):
        spec = KVSpec(
            (
                LayerGroup(
                    name="all",
                    layers=tuple(range(num_layers)),
                    num_kv_heads=1,
                    k_dim=8,
                    v_dim=8,
                    block_size=16,
                    dtype="float32",
                ),
            ),
        )
        config = with_link(link, slot_bytes=2048, resend_s=5.0)
        async with (
            decode_side(config, caches=[KVCache(spec, NUM_BLOCKS, 1)]) as decode,
            prefill_side(config, caches=[filled_cache(1, spec)]) as prefill,
        ):
            chunks = 0
            for number in range(3):
                chunks += (await kv_transfer(prefill, decode, scattered(9, number), range(9))).num_chunks
            assert chunks > 3 * num_layers
            said = {kind: decode.endpoint.messages[kind] for kind in CONTROL if decode.endpoint.messages[kind]}
            assert said == {">offer": 3, "<grant": 3, ">commit": 3, "<commit_ack": 3}


async def test_a_pool_of_two_slots_serves_four_pairs_on_either_side() -> None:
    """Slots are fewer than the windows of the pairs ask for: everything gets through, and takes turns."""
    config = with_link("tcp", num_slots=2, window=3)
    async with contextlib.AsyncExitStack() as stack:
        decodes = [await stack.enter_async_context(decode_side(config, f"d{n}")) for n in range(4)]
        prefills = [await stack.enter_async_context(prefill_side(config, name=f"p{n}")) for n in range(4)]
        for case in ([(prefills[0], decode) for decode in decodes], [(prefill, decodes[0]) for prefill in prefills]):
            started = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for index in range(24):
                    prefill, decode = case[index % 4]
                    target = range(index // 4 * 10, index // 4 * 10 + 7)
                    if case[0][1] is case[1][1]:  # one receiver has the blocks of all
                        target = range(index * 2, index * 2 + 2)
                    source = scattered(len(target), index)
                    tasks.create_task(kv_transfer(prefill, decode, source, target, name=f"t{index}"))
            assert time.monotonic() - started < 20
        everyone = [side.sender for side in prefills] + [side.receiver for side in decodes]
        await until(lambda: not any(side.slots_in_use for side in everyone), SOON_S)
        assert sum(side.sender.stats.committed for side in prefills) == 48
        assert not any(side.stats.failed for side in everyone)


async def test_new_prompts_wait_while_too_much_is_unsent(link: str) -> None:
    spec = KVSpec(
        (
            LayerGroup(
                name="all", layers=tuple(range(9)), num_kv_heads=1, k_dim=512, v_dim=512, block_size=16, dtype="float32"
            ),
        )
    )  # 64 KiB a row
    config = with_link(link, slot_bytes=2**17, max_unsent_mib=1)
    async with (
        decode_side(config, caches=[KVCache(spec, 4, 1)]) as decode,
        prefill_side(config, caches=[filled_cache(1, spec, 4)]) as prefill,
    ):
        decode.endpoint.lose("<grant")
        ticket = decode.receiver.expect("t", 64, 0, tables_of(decode.receiver, [0, 1, 2, 3]))
        async with prefill.sender.transfer(ticket) as transfer:
            transfer.extend(tables_of(transfer, [3, 2, 1, 0]))
            transfer.advance(64, 3)
            await prefill.sender.wait_for_room(9)
            transfer.advance(64, 9)
            assert prefill.sender.unsent_bytes == 36 * 2**16
            waiting = asyncio.create_task(prefill.sender.wait_for_room(9))
            await asyncio.wait({waiting}, timeout=0.05)
            assert not waiting.done()
            with pytest.raises(Overloaded):  # one more than may wait
                await asyncio.wait_for(prefill.sender.wait_for_room(1), SOON_S)
            await transfer.finish(1)  # the offer is said again, and granted
        await asyncio.wait_for(waiting, SOON_S)
        assert prefill.sender.unsent_bytes == 0
        assert same_blocks(prefill.cache, [3, 2, 1, 0], decode.cache, [0, 1, 2, 3])


# -- what does not fit -----------------------------------------------------------------------------------------------


async def refusal(prefill: Prefill, decode: Decode, **changes: Any) -> str:
    ticket = decode.receiver.expect("t", 32, 0, tables_of(decode.receiver, [0, 1], 0))
    with pytest.raises(TransferRefused) as caught:
        await send(prefill, dataclasses.replace(ticket, **changes), [4, 5])
    assert (await decode.receiver.release(ticket))[0] == (0, 1)
    return str(caught.value)


async def test_a_reservation_that_could_not_be_filled_is_refused() -> None:
    async with decode_side(CONFIG) as decode:
        for num_tokens, skip_tokens, block_ids, sentence in (
            (65, 0, (0, 1, 2, 3), "65 tokens need 5 blocks, got 4"),
            (64, 0, (EMPTY_PLACE, 1, 2, 3), "cannot be received into an empty place"),
            (64, 16, (0, 1, 2, EMPTY_PLACE), "cannot be received into an empty place"),
            (64, 8, (0, 1, 2, 3), "KV must begin at a multiple of 16 up to 64, got 8"),
            (64, 80, (0, 1, 2, 3), "KV must begin at a multiple of 16 up to 64, got 80"),
        ):
            with pytest.raises(ValueError, match=sentence):
                decode.receiver.expect("t", num_tokens, skip_tokens, tables_of(decode.receiver, block_ids, 3))
        for row in ((), (EMPTY_PLACE,), (EMPTY_PLACE, 2)):
            with pytest.raises(ValueError, match="states cannot be received without a row"):
                decode.receiver.expect("t", 64, 0, (*tables_of(decode.receiver, (0, 1, 2, 3))[:-1], row))
        for begins, sentence in (((0, 8), "multiple of 16 up to 64, got 8"), ((0, 80), "up to 64, got 80")):
            with pytest.raises(ValueError, match=sentence):
                decode.receiver.expect("t", 64, 0, tables_of(decode.receiver, (0, 1, 2, 3)), begins=begins)
        # Where nothing is written, there may be no block.
        tables = tables_of(decode.receiver, (EMPTY_PLACE, 1, 2, 3), 3)
        ticket = decode.receiver.expect("t", 64, 16, tables)
        assert await decode.receiver.release(ticket) == tables
        decode.receiver.check()


async def test_sides_that_do_not_fit_are_refused_in_words() -> None:
    config = with_link("tcp")
    settings: list[tuple[dict[str, Any], str]] = [
        ({"transports": ("shm",)}, "offers the transports tcp, worker d0 can use shm"),
        ({"slot_bytes": 2048}, "chunks of 4096 bytes do not fit the slots of 2048 bytes here"),
        ({"span_tokens": 16}, "spans of 16 tokens"),
        ({"checksum": "off"}, "checksum off"),
    ]
    async with prefill_side(config) as prefill:
        for number, (changes, sentence) in enumerate(settings):
            async with decode_side(dataclasses.replace(config, **changes), f"d{number}") as decode:
                assert sentence in await refusal(prefill, decode)
                assert is_blank(decode.cache, range(NUM_BLOCKS))
        async with decode_side(config, "other-model", compat="kind-b") as decode:
            assert "other-model has KV of kind kind-b, this worker kind-a" in await refusal(prefill, decode)
            assert "prefill-0 has KV of kind kind-a" in await refusal(prefill, decode, wire_compat="kind-a")
        codes = dataclasses.replace(SPEC.groups[0], dtype="int8", k_dim=SPEC.groups[0].k_dim + 4)
        caches = [KVCache(dataclasses.replace(SPEC, groups=(codes, *SPEC.groups[1:])), NUM_BLOCKS, 8)]
        async with decode_side(config, "other-pages", compat="kind-b", caches=caches) as decode:
            why = f"in group 'global', {SPEC.groups[0].dtype} cannot be converted to int8"
            assert f"other-pages has KV of kind kind-b, this worker kind-a: {why}" in await refusal(prefill, decode)
            assert await refusal(prefill, decode, wire_compat="kind-a") == why
        for spec, sentence in (
            (dataclasses.replace(SPEC, groups=SPEC.groups[:1]), "layer groups ['global', 'window']"),
            (dataclasses.replace(SPEC, states=()), "states are conv[33] float32 at the source and none"),
        ):
            async with decode_side(config, "other-shape", caches=[KVCache(spec, NUM_BLOCKS, 8)]) as decode:
                assert sentence in await refusal(prefill, decode)
                # a ticket that tells a lie
                assert sentence in await refusal(prefill, decode, layout=prefill.sender.layout)
        three = KVCache(with_block_size(SPEC, 48), NUM_BLOCKS, 8)
        async with (
            decode_side(config, "other-shape", caches=[three]) as decode,
            prefill_side(config, caches=[filled_cache(1, with_block_size(SPEC, 32))]) as two,
        ):
            assert "32 (source) and 48 (destination) neither divides the other" in await refusal(two, decode)
        async with decode_side(config) as decode:
            await kv_transfer(prefill, decode, [1], [1])
        pairs = prefill.sender._connections
        pairs._hello = dataclasses.replace(pairs._hello, protocol_version=9)
        async with decode_side(config, "d9") as decode:
            assert "speaks version 9" in await refusal(prefill, decode)


@pytest.mark.parametrize("receivers", [4096, 16384])
async def test_slots_may_be_larger_at_the_receiver(link: str, receivers: int) -> None:
    async with decode_side(with_link(link, slot_bytes=receivers)) as decode, prefill_side(with_link(link)) as prefill:
        await kv_transfer(prefill, decode, scattered(4, 1), scattered(4, 2))
        await kv_transfer(prefill, decode, scattered(4, 3), scattered(4, 4), name="again")


async def test_chunks_are_as_large_as_suits_the_transport_once_it_is_known(
    link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.transfer.transport.select._WARM_BYTES", 1536)
    offered = []

    def note(kind: str, message: Any) -> bool:
        if kind == ">offer":
            offered.append(message.offer.chunk_bytes)
        return True

    async with sides(with_link(link)) as (prefill, decode):
        decode.endpoint.watch = note
        for number in range(3):
            await kv_transfer(prefill, decode, [number], [number], name=f"t{number}")
    warm = 1536 if link == "tcp" else 4096
    assert offered == [4096, warm, warm]


async def test_an_offer_of_impossible_chunks_is_refused_and_harms_no_other() -> None:
    async with sides(with_link("tcp")) as (prefill, decode):
        await kv_transfer(prefill, decode, [4], [0])
        target = decode.receiver.expect("good", 32, 0, tables_of(decode.receiver, [1, 2], 0))
        async with prefill.sender.transfer(target) as good:
            await until(lambda: decode.endpoint.messages["<grant"] == 2, SOON_S)

            def shrink(kind: str, message: Any) -> bool:
                if kind == ">offer":
                    message.offer.chunk_bytes = 0
                return True

            decode.endpoint.watch = shrink
            assert "does not fit a slot of 0" in await refusal(prefill, decode)
            good.extend(tables_of(good, [5, 6], 0))
            await good.finish(1)
        assert (await decode.receiver.wait_committed(target)).num_tokens == 32
        assert decode.num_pairs_ever == 1


async def test_a_ticket_of_a_past_incarnation_is_refused_and_leaves_the_good_pair_alone(link: str) -> None:
    async with sides(with_link(link)) as (prefill, decode):
        await kv_transfer(prefill, decode, [4], [0])
        assert "decode-0.1 answers" in await refusal(prefill, decode, incarnation="decode-0.0")
        await kv_transfer(prefill, decode, [5], [1])
        assert (decode.num_pairs_ever, prefill.sender.num_connections) == (2, 1), "one for the ticket of the past"


async def test_an_address_where_nobody_listens_is_a_failed_worker() -> None:
    async with sides(CONFIG) as (prefill, decode):
        ticket = decode.receiver.expect("t", 16, 0, tables_of(decode.receiver, [0], 0))
        with pytest.raises(WorkerFailed, match="decode-0"):
            await send(prefill, dataclasses.replace(ticket, kv_address=f"{HOST}:1"), [4])
        await send(prefill, ticket, [4])
        assert same_blocks(prefill.cache, [4], decode.cache, [0])


async def test_a_past_generation_is_fenced_and_the_new_one_stands(link: str) -> None:
    async with sides(with_link(link)) as (prefill, decode):
        old = decode.receiver.expect("t", 32, 0, tables_of(decode.receiver, [0, 1], 0))
        assert (await decode.receiver.release(old))[0] == (0, 1)
        new = decode.receiver.expect("t", 32, 0, tables_of(decode.receiver, [0, 1], 0))
        with pytest.raises(TransferError, match="gave up its reservation"):
            await send(prefill, old, [4, 5])
        with pytest.raises(TransferRefused, match="not expected"):
            await send(prefill, dataclasses.replace(new, generation=99), [4, 5])
        assert decode.receiver.stats.fenced >= 2
        assert is_blank(decode.cache, [0, 1])
        await send(prefill, new, [8, 9])
        assert same_blocks(prefill.cache, [8, 9], decode.cache, [0, 1])


# -- leases ----------------------------------------------------------------------------------------------------------


async def test_a_lease_that_ends_fails_the_reservation() -> None:
    async with sides(dataclasses.replace(CONFIG, lease_s=0.1, ping_s=0.05)) as (prefill, decode):
        ticket = decode.receiver.expect("t", 32, 0, tables_of(decode.receiver, [0, 1], 0))
        with pytest.raises(TransferTimeout, match="lease"):
            await decode.receiver.wait_committed(ticket)
        assert decode.receiver.stats.expired == 1
        with pytest.raises(TransferTimeout, match="lease"):
            await send(prefill, ticket, [4, 5])
        assert (await decode.receiver.release(ticket))[0] == (0, 1)
        assert is_blank(decode.cache, [0, 1])


@pytest.mark.clock
async def test_pings_renew_a_lease_that_is_shorter_than_the_prefill(link: str) -> None:
    async with sides(with_link(link, lease_s=0.8, ping_s=0.1)) as (prefill, decode):
        ticket = decode.receiver.expect("t", 32, 0, tables_of(decode.receiver, [0, 1], 0))
        async with prefill.sender.transfer(ticket) as transfer:
            await asyncio.sleep(1.2)  # in the queue
            transfer.extend(tables_of(transfer, [4, 5], 0))
            transfer.advance(32, 2)
            await asyncio.sleep(1.2)
            await transfer.finish(1)
        assert same_blocks(prefill.cache, [4, 5], decode.cache, [0, 1])

        decode.endpoint.watch = lambda kind, message: kind != ">ping"
        ticket = decode.receiver.expect("t", 32, 0, tables_of(decode.receiver, [0, 1], 0))
        async with prefill.sender.transfer(ticket) as transfer:
            started = time.monotonic()
            with pytest.raises(TransferTimeout, match="lease"):
                await decode.receiver.wait_committed(ticket)
            assert 0.6 < time.monotonic() - started < 5.0
            transfer.extend(tables_of(transfer, [8, 9], 0))
            with pytest.raises(TransferTimeout, match="lease"):
                await transfer.finish(1)
        assert decode.receiver.stats.expired == prefill.sender.stats.failed == 1
        assert same_blocks(prefill.cache, [4, 5], decode.cache, [0, 1]), "an expired transfer writes nothing"
        assert (await decode.receiver.release(ticket))[0] == (0, 1)


# -- what gets lost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [">offer", "<grant", ">commit", "<commit_ack"])
async def test_a_lost_message_is_said_again(kind: str) -> None:
    async with sides(CONFIG) as (prefill, decode):
        await kv_transfer(prefill, decode, [4], [0])
        decode.endpoint.lose(kind)
        await kv_transfer(prefill, decode, [5], [1])
        assert prefill.sender.stats.resent >= 1
        assert decode.receiver.stats.committed == 2


@pytest.mark.parametrize("kind", [">abort", "<abort_ack"])
async def test_a_lost_abort_is_said_again_and_nobody_waits_for_it(kind: str) -> None:
    async with sides(CONFIG) as (prefill, decode):
        decode.endpoint.lose(kind, times=99)
        ticket = decode.receiver.expect("t", 16, 0, tables_of(decode.receiver, [0], 0))
        async with prefill.sender.transfer(ticket) as transfer:
            transfer.extend(tables_of(transfer, [4], 0))
            await until(lambda: decode.endpoint.messages["<grant"] == 1, SOON_S)
            started = time.monotonic()
        assert time.monotonic() - started < CONFIG.op_timeout_s / 2
        await until(lambda: decode.endpoint.messages[kind] >= 1, SOON_S)
        decode.endpoint.lose("", times=0)
        with pytest.raises(TransferError, match="aborted the transfer"):
            await decode.receiver.wait_committed(ticket)
        await until(lambda: prefill.sender.stats.resent >= 1 and decode.endpoint.messages["<abort_ack"] >= 1, SOON_S)
        assert (await decode.receiver.release(ticket))[0] == (0,)
        await kv_transfer(prefill, decode, [5], [0])


async def test_what_is_never_answered_is_given_up_in_time() -> None:
    async with sides(dataclasses.replace(CONFIG, op_timeout_s=1.0, ping_s=0.2)) as (prefill, decode):
        await kv_transfer(prefill, decode, [4], [0])
        decode.endpoint.lose("<grant", times=99)
        started = time.monotonic()
        ticket = decode.receiver.expect("t", 16, 0, tables_of(decode.receiver, [0], 0))
        with pytest.raises(TransferTimeout, match="no answer to an offer"):
            await send(prefill, ticket, [5])
        assert time.monotonic() - started < CONFIG.op_timeout_s / 2
        with pytest.raises(TransferTimeout):
            await decode.receiver.wait_committed(ticket)
        assert (await decode.receiver.release(ticket))[0] == (0,)
        decode.endpoint.lose("", times=0)
        await kv_transfer(prefill, decode, [6], [0])
        assert decode.num_pairs_ever == 1


# -- payloads that go wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["corrupt_chunk=6", "drop_chunk=6", "swap_blocks=5"])
async def test_a_spoiled_chunk_fails_the_transfer_and_only_that(link: str, fault: str) -> None:
    async with sides(with_link(link), faults=fault) as (prefill, decode):
        ticket = decode.receiver.expect(
            "spoiled", 64, 0, tables_of(decode.receiver, [0, 1, 2, 3], 0)
        )  # 6 chunks, 5 of several rows
        with pytest.raises(TransferCorrupted, match="checksum"):
            await send(prefill, ticket, [4, 5, 6, 7])
        with pytest.raises(TransferCorrupted, match="checksum"):
            await decode.receiver.wait_committed(ticket)
        assert (await decode.receiver.release(ticket))[0] == (0, 1, 2, 3)
        for stats in (prefill.sender.stats, decode.receiver.stats):
            assert (stats.committed, stats.failed, stats.corrupted) == (0, 1, 1)
        await kv_transfer(prefill, decode, [9], [0])  # 4 chunks
        assert decode.num_pairs_ever == 1, "over the same pair"


@pytest.mark.parametrize("fault", ["corrupt_chunk", "drop_chunk", "swap_blocks"])
async def test_without_checksums_a_spoiled_chunk_reaches_the_cache(link: str, fault: str) -> None:
    async with sides(with_link(link, checksum="off"), faults=f"{fault}=1") as (prefill, decode):
        ticket = decode.receiver.expect("t", 64, 0, tables_of(decode.receiver, [0, 1, 2, 3], 0))
        await send(prefill, ticket, [4, 5, 6, 7])
        assert not same_blocks(prefill.cache, [4, 5, 6, 7], decode.cache, [0, 1, 2, 3])
        assert decode.receiver.stats.corrupted == 0


# -- giving up -------------------------------------------------------------------------------------------------------


class WatchedSender(KvSender):
    """Notes when blocks were read last, by transfer."""

    read_s: dict[str, float]

    def copier(self, rank: int, part: TransferPart, *where: Any) -> BlockCopier:
        copier = super().copier(rank, part, *where)
        gather = copier.gather

        def noted(chunk: Chunk, payload: torch.Tensor, *how: Any) -> None:
            gather(chunk, payload, *how)
            name, _, _ = part.ticket.transfer_id.partition("#")
            self.read_s[name] = time.monotonic()

        copier.gather = noted  # type: ignore[assignment, method-assign]
        return copier


STAGES = ("opening", "offered", "granted", "attached", "half computed", "under way", "computed", "committing")


async def reach(
    stage: str, transfer: OutgoingTransfer, decode: Decode, source: Sequence[int], target: Sequence[int]
) -> asyncio.Task[Transferred] | None:
    """Brings a transfer of 160 tokens to a stage. Returns what finishes it, where that has begun."""
    place, said = STAGES.index(stage), decode.endpoint.messages
    finishing = None
    if stage == "offered":
        decode.endpoint.lose("<grant", times=99)
        await until(lambda: said[">offer"] == 2, SOON_S)
    if place >= STAGES.index("granted"):
        await until(lambda: said["<grant"] == 2, SOON_S)
    if place >= STAGES.index("attached"):
        transfer.extend(tables_of(transfer, source, 0))
    if place >= STAGES.index("half computed"):
        transfer.advance(160, 2)
        await until(lambda: not is_blank(decode.cache, target, slice(1, 2)), SOON_S)
        assert is_blank(decode.cache, target, slice(2, 3))
    if place >= STAGES.index("under way"):
        transfer.advance(160, 5)
        await until(lambda: not is_blank(decode.cache, target, slice(2, 3)), SOON_S)
    if place >= STAGES.index("computed"):
        await until(lambda: not is_blank(decode.cache, target[-1:], slice(1, 2), group=1), SOON_S)
    if stage == "committing":
        decode.endpoint.lose(">commit", times=99)
        finishing = asyncio.create_task(transfer.finish(1))
        await until(lambda: said[">commit"] == 2, SOON_S)
    return finishing


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("stage", STAGES)
async def test_giving_up_at_any_stage_leaves_the_transport_for_the_next_transfer(
    link: str, stage: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks are back at once on the side that gives up, and on the other one as soon as it has heard."""
    read_s: dict[str, float] = {}
    monkeypatch.setattr(WatchedSender, "read_s", read_s, raising=False)
    monkeypatch.setattr("tests.unit.kvstore.transfer.peers.KvSender", WatchedSender)
    async with sides(with_link(link, slot_bytes=1024), f"link_delay_ms={5 * (stage == 'under way') or 1}") as (
        prefill,
        decode,
    ):
        await kv_transfer(prefill, decode, [4], [0], name="first")
        source, target = list(range(20, 30)), list(range(30, 40))
        ticket = decode.receiver.expect("given up", 160, 0, tables_of(decode.receiver, target, 0))
        async with prefill.sender.transfer(ticket) as transfer:
            finishing = await reach(stage, transfer, decode, source, target)
            began_s = time.monotonic()
            if who == "receiver":
                assert (await decode.receiver.release(ticket))[0] == tuple(target)
                decode.cache.clear_blocks([target] * 2)  # somebody else's by now
                with pytest.raises(TransferError, match="gave up its reservation"):
                    await (finishing or transfer.finish(1))
        left_s = time.monotonic()
        assert left_s - began_s < CONFIG.op_timeout_s / 2
        decode.endpoint.lose("", times=0)
        if who == "sender":
            if finishing is not None:
                with pytest.raises(TransferError, match="aborted the transfer"):
                    await finishing
            if stage != "opening":  # the receiver has not heard of it yet
                with pytest.raises(TransferError, match="aborted the transfer"):
                    await decode.receiver.wait_committed(ticket)
            assert (await decode.receiver.release(ticket))[0] == tuple(target)
            decode.cache.clear_blocks([target] * 2)
        await kv_transfer(prefill, decode, scattered(6, 3), range(6), name="next")
        assert is_blank(decode.cache, target), "nothing is written into blocks that are given back"
        assert read_s.pop("given up", 0.0) <= left_s, "nothing reads blocks that are let go"
        assert set(read_s) == {"first", "next"}
        assert decode.num_pairs_ever == 1
        assert len(decode.receiver._reservations._state) == 0
        await until(lambda: prefill.sender.slots_in_use == decode.receiver.slots_in_use == 0, SOON_S)
        await until(lambda: all(len(pair._state) == 0 for pair in prefill.sender._connections._alive), SOON_S)


async def test_places_that_were_announced_are_filled_with_void_chunks(
    link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Header] = []

    def noting(*message: Any) -> Header:
        header = unpack(*message)
        seen.append(header)
        return header

    monkeypatch.setattr("kvstore.transfer.protocol.chunk_header.unpack", noting)
    async with sides(with_link(link, slot_bytes=1024), "link_delay_ms=5") as (prefill, decode):
        ticket = decode.receiver.expect("t", 320, 0, tables_of(decode.receiver, range(20), 0))
        async with prefill.sender.transfer(ticket) as transfer:
            transfer.extend(tables_of(transfer, range(20), 0))
            transfer.advance(320, 5)
            await until(lambda: not is_blank(decode.cache, range(20)), SOON_S)
        await kv_transfer(prefill, decode, [4], [40])
        void = [header for header in seen if header.flags & VOID]
        assert 1 <= len(void) <= 4
        assert all(header.generation == 0 for header in void)
        assert [header.place for header in seen] == list(range(len(seen)))
        assert decode.num_pairs_ever == 1


async def test_cancels_at_any_moment_leave_both_sides_whole(link: str) -> None:
    """Blocks of the pool are in a reservation or free, each exactly once; transfers in between arrive intact."""
    rng = random.Random(7)
    async with sides(with_link(link)) as (prefill, decode):
        free = set(range(NUM_BLOCKS))
        outcomes: Counter[str] = Counter()

        async def one(index: int) -> None:
            target = rng.sample(sorted(free), 6)
            free.difference_update(target)
            source = rng.sample(range(NUM_BLOCKS), 6)
            ticket = decode.receiver.expect(f"t{index}", 90, 0, tables_of(decode.receiver, target, 0))
            sending = asyncio.create_task(send(prefill, ticket, source, 5, 0))
            who = rng.choice(["sender", "receiver", "nobody"])
            if who != "nobody":
                await asyncio.sleep(rng.random() * 0.008)
            if who == "sender":
                sending.cancel()
            if who == "receiver":
                released = await decode.receiver.release(ticket)
            try:
                await sending
                assert who != "nobody" or await decode.receiver.wait_committed(ticket) == Arrival(90, 5)
                outcome = "committed"
                if who != "receiver":
                    assert same_blocks(prefill.cache, source, decode.cache, target)
            except (BatonError, asyncio.CancelledError):
                outcome = "failed"
            assert who != "nobody" or outcome == "committed"
            if who != "receiver":
                released = await decode.receiver.release(ticket)
            assert released[0] == tuple(target)
            assert free.isdisjoint(released[0])
            free.update(released[0])
            outcomes[f"{who} {outcome}"] += 1

        await kv_transfer(prefill, decode, [0], [0])
        for start in range(0, 80, 4):
            async with asyncio.TaskGroup() as tasks:
                for index in range(start, start + 4):
                    tasks.create_task(one(index))
            decode.receiver.check()
        assert free == set(range(NUM_BLOCKS))
        assert len(decode.receiver._reservations._state) == 0
        assert outcomes["sender failed"] > 5, outcomes
        assert outcomes["receiver failed"] > 5, outcomes
        assert decode.receiver.stats.corrupted == 0
        assert decode.num_pairs_ever == 1, "no cancel cost the pair"
        await until(lambda: prefill.sender.slots_in_use == decode.receiver.slots_in_use == 0, SOON_S)


# -- pairs -----------------------------------------------------------------------------------------------------------


async def test_the_pair_that_was_idle_longest_makes_room(link: str) -> None:
    config = with_link(link, max_connections=2)
    async with contextlib.AsyncExitStack() as stack:
        decodes = [await stack.enter_async_context(decode_side(config, f"d{n}")) for n in range(4)]
        prefill = await stack.enter_async_context(prefill_side(config))
        busy = decodes[0].receiver.expect("busy", 16, 0, tables_of(decodes[0].receiver, [9], 0))
        async with prefill.sender.transfer(busy) as transfer:
            for number in (1, 2, 3):
                await kv_transfer(prefill, decodes[number], [number], [0])
            await until(lambda: [d.receiver.num_connections for d in decodes] == [1, 0, 0, 1], SOON_S)
            transfer.extend(tables_of(transfer, [8], 0))
            await transfer.finish(1)
        assert same_blocks(prefill.cache, [8], decodes[0].cache, [9])
        await kv_transfer(prefill, decodes[1], [5], [5])
        assert [d.num_pairs_ever for d in decodes] == [1, 2, 1, 1]


@pytest.mark.parametrize("lost", [">rendezvous", "<rendezvous"])
async def test_where_the_best_transport_cannot_be_made_the_next_one_is_used(lost: str) -> None:
    config = dataclasses.replace(CONFIG, transports=("shm", "tcp"), open_timeout_s=0.5)
    async with sides(config) as (prefill, decode):
        await kv_transfer(prefill, decode, [4], [0])
        assert [pair.transport_kind for pair in prefill.sender._connections._alive] == ["shm"]
        async with decode_side(config, "decode-1") as other:
            other.endpoint.watch = lambda kind, message: kind != lost or not message.rendezvous.key.startswith("shm")
            source = scattered(6, 3)
            await asyncio.gather(
                *(kv_transfer(prefill, other, source, range(n * 6, n * 6 + 6), name=f"t{n}") for n in range(3))
            )
            kinds = {
                pair.peer.worker_id: pair.transport_kind
                for pair in prefill.sender._connections._alive
                if not pair.failure
            }
            assert kinds == {"decode-0": "shm", "decode-1": "tcp"}
            await kv_transfer(prefill, decode, [5], [1])


async def test_where_no_transport_can_be_made_every_transfer_says_so() -> None:
    async with sides(dataclasses.replace(CONFIG, open_timeout_s=0.4)) as (prefill, decode):
        decode.endpoint.watch = lambda kind, message: not kind.endswith("rendezvous")
        ticket = decode.receiver.expect("t", 16, 0, tables_of(decode.receiver, [0], 0))
        with pytest.raises(TransferError, match="did not join the transport"):
            await send(prefill, ticket, [4])
        decode.endpoint.lose("", times=0)
        await send(prefill, ticket, [4])
        assert same_blocks(prefill.cache, [4], decode.cache, [0])


async def test_closing_leaves_no_thread_file_or_task(link: str) -> None:
    async def cycle() -> None:
        async with sides(with_link(link)) as (prefill, decode):
            await kv_transfer(prefill, decode, range(7), range(7))
            pending = decode.receiver.expect("pending", 100, 0, tables_of(decode.receiver, list(range(7, 14)), 1))
            cancelled = asyncio.create_task(send(prefill, pending, list(range(7))))
            await asyncio.sleep(0.001)
            cancelled.cancel()
            await asyncio.wait({cancelled})

    tasks = asyncio.all_tasks()
    await cycle()
    with only_new_objects_are_collected():
        before = footprint()
        for _ in range(3):
            await cycle()
        await until(lambda: footprint() <= before, SOON_S, seen=lambda: (footprint(), before))
    await until(lambda: asyncio.all_tasks() == tasks, SOON_S, seen=lambda: asyncio.all_tasks() - tasks)


async def test_a_closing_decode_worker_fails_what_waits_on_both_sides(link: str) -> None:
    async with prefill_side(with_link(link)) as prefill:
        async with decode_side(with_link(link)) as decode:
            done = decode.receiver.expect("done", 16, 0, tables_of(decode.receiver, [0], 0))
            await send(prefill, done, [0])
            waiting = decode.receiver.expect("waiting", 16, 0, tables_of(decode.receiver, [1], 1))
            async with prefill.sender.transfer(waiting) as transfer:
                transfer.extend(tables_of(transfer, [1], 0))
                wait = asyncio.create_task(decode.receiver.wait_committed(waiting))
                await until(lambda: decode.endpoint.messages["<grant"] == 2, SOON_S)
                await decode.receiver.close()
                with pytest.raises(TransferError, match="shuts down"):
                    await wait
                with pytest.raises(BatonError, match=r"shuts down|transport is broken"):  # whichever is seen first
                    await transfer.finish(1)
            assert (await decode.receiver.release(waiting))[0] == (1,)
            assert (await decode.receiver.release(done))[0] == (0,)
        with pytest.raises(WorkerFailed):
            await send(prefill, waiting, [1])


# -- prefixes --------------------------------------------------------------------------------------------------------


async def offer_some(prefill: Prefill, ticket: Ticket, blocks: Sequence[int], num_tokens: int) -> None:
    async with prefill.sender.transfer(ticket, num_tokens) as transfer:
        transfer.extend(tables_of(transfer, blocks, 0))
        await transfer.finish(None)


async def test_a_prefix_may_be_shorter_than_what_was_asked_for(link: str) -> None:
    async with sides(with_link(link)) as (prefill, decode):
        target = list(range(10, 16))
        ticket = decode.receiver.expect("prefix", 96, 16, tables_of(decode.receiver, target, 0), Expected.PREFIX)
        await offer_some(prefill, ticket, [5, 4, 3, 2], 64)
        assert await decode.receiver.wait_committed(ticket) == Arrival(64, None)
        assert same_blocks(prefill.cache, [4, 3, 2], decode.cache, target[1:4])
        assert is_blank(decode.cache, [10, 14, 15])
        assert (await decode.receiver.release(ticket))[0] == tuple(target)

        more = decode.receiver.expect("more", 64, 0, tables_of(decode.receiver, range(4), 0), Expected.PREFIX)
        with pytest.raises(TransferRefused, match="64 tokens are expected, 96 were offered"):
            await offer_some(prefill, more, range(6), 96)
        whole = decode.receiver.expect("whole", 64, 0, tables_of(decode.receiver, range(20, 24), 0))
        with pytest.raises(TransferRefused, match="64 tokens are expected, 48 were offered"):
            await offer_some(prefill, whole, range(3), 48)
        assert is_blank(decode.cache, range(24)[:10])


async def test_a_first_token_comes_with_the_kv_where_the_receiver_asks_for_one(link: str) -> None:
    async with sides(with_link(link)) as (prefill, decode):
        free = decode.receiver.expect("free", 64, 0, tables_of(decode.receiver, range(4), 0))
        forced = decode.receiver.expect(
            "forced", 64, 0, tables_of(decode.receiver, range(30, 34), 0), Expected.WITH_FIRST_TOKEN
        )
        assert (free.force_first_token, forced.force_first_token) == (False, True)
        await send(prefill, free, range(4), None)
        assert await decode.receiver.wait_committed(free) == Arrival(64, None)
        assert same_blocks(prefill.cache, range(4), decode.cache, range(4))
        with pytest.raises(TransferError, match="without the first token"):
            await send(prefill, forced, range(4), None)
        with pytest.raises(TransferError, match="without the first token"):
            await decode.receiver.wait_committed(forced)
        again = decode.receiver.expect(
            "again", 64, 0, tables_of(decode.receiver, range(40, 44), 0), Expected.WITH_FIRST_TOKEN
        )
        await send(prefill, again, range(4), 7)
        assert await decode.receiver.wait_committed(again) == Arrival(64, 7)


PROMPT = [(7 * position) % 1000 + 1 for position in range(100)]


@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (16, 32), (32, 16)])
async def test_a_prefix_is_pulled_from_the_worker_that_has_it(link: str, ours: int, theirs: int) -> None:
    config = with_link(link)
    async with (
        engine_worker("here", ArithmeticRunner(64, ours), config) as here,
        engine_worker("there", ArithmeticRunner(64, theirs), config) as there,
    ):
        expected = expected_tokens(PROMPT, 4)
        assert await there.generate(make_spec(PROMPT)) == expected
        assert (
            await here.kv.prefixes.fetch(
                make_spec(PROMPT, request_id="first"), there.source(40), time.monotonic(), Context()
            )
            == 32
        )
        assert (
            await here.kv.prefixes.fetch(
                make_spec(PROMPT, request_id="rest"), there.source(100), time.monotonic(), Context()
            )
            == 64
        )
        await here.check_idle()
        here.runner.layer_s = 0.001
        async with here.loop.sequence(make_spec(PROMPT), Purpose.GENERATE) as handle:
            assert await read_all(handle) == expected
            assert handle._sequence.num_cached_tokens == 96
        assert (
            await here.kv.prefixes.fetch(
                make_spec(PROMPT, request_id="again"), there.source(96), time.monotonic(), Context()
            )
            == 0
        ), "is here"
        assert await there.generate(make_spec(PROMPT)) == expected
        await here.check_idle()
        await there.check_idle()
        got, gave = here.kv.counts(), there.kv.counts()
        assert (got.pulled_tokens, got.failed_pulls, got.committed, gave.committed) == (96, 0, 2, 2)
        assert got.received_bytes == gave.sent_bytes == 96 * 2 * 2 * 8
        assert (got.open_connections, gave.open_connections, got.received_chunks) == (1, 1, gave.sent_chunks)
        assert min(gave.transfer_s, gave.exposed_s) > 0.0
        # And the other way, over a pair of its own.
        other = [token + 1 for token in PROMPT]
        await here.generate(make_spec(other))
        assert await there.kv.prefixes.fetch(make_spec(other), here.source(96), time.monotonic(), Context()) == 96
        assert await there.generate(make_spec(other)) == expected_tokens(other, 4)
        assert here.kv.counts().open_connections == there.kv.counts().open_connections == 2


async def test_an_answer_says_how_much_was_pulled_for_it(link: str) -> None:
    config = with_link(link)
    async with (
        engine_worker("here", ArithmeticRunner(64, 16), config) as here,
        engine_worker("there", ArithmeticRunner(64, 16), config) as there,
    ):
        other = [token + 1 for token in PROMPT]
        await there.generate(make_spec(PROMPT))
        await there.generate(make_spec(other))
        prefill, decode = PrefillService(here.context), DecodeService(here.context)
        source = there.source(48)
        for expected in ((48, 48), (96, 0)):
            async with contextlib.aclosing(
                prefill.prefill(PrefillRequest(make_spec(PROMPT), None, source), Context())
            ) as events:
                first = await anext(events)
            assert isinstance(first, FirstToken)
            assert (first.report.num_cached_tokens, first.report.num_pulled_tokens) == expected
        for expected in ((48, 48), (96, 0)):
            async with contextlib.aclosing(decode._aggregated(make_spec(other), source, Context())) as messages:
                message = await anext(messages)
            assert message.report is not None
            assert (message.report.num_cached_tokens, message.report.num_pulled_tokens) == expected


async def test_what_the_source_evicted_is_computed(link: str) -> None:
    """Evicted before the pull: nothing comes, and nothing failed. During it: it cannot be, since it is pinned."""
    config = with_link(link, slot_bytes=512, span_tokens=16)
    async with (
        engine_worker("here", ArithmeticRunner(64), config) as here,
        engine_worker("there", ArithmeticRunner(16), config, "link_delay_ms=10") as there,
    ):
        await there.generate(make_spec(PROMPT))
        pulling = asyncio.create_task(
            here.kv.prefixes.fetch(make_spec(PROMPT), there.source(96), time.monotonic(), Context())
        )
        await until(lambda: bool(there.loop.engine._pins), SOON_S)
        for number in range(4):  # each wants the whole of what is free
            other = [number + 10] * 120
            assert await there.generate(make_spec(other)) == expected_tokens(other, 4)
        assert await pulling == 96
        assert await here.generate(make_spec(PROMPT)) == expected_tokens(PROMPT, 4)
        for number in range(4):
            await there.generate(make_spec([number + 20] * 200))
        assert await here.kv.prefixes.fetch(make_spec([5] * 99), there.source(96), time.monotonic(), Context()) == 0
        unseen = [token + 3 for token in PROMPT]
        assert await here.kv.prefixes.fetch(make_spec(unseen), there.source(96), time.monotonic(), Context()) == 0
        assert await here.generate(make_spec(unseen)) == expected_tokens(unseen, 4)
        assert here.kv.counts().failed_pulls == 0
        await here.check_idle()
        await there.check_idle()


@pytest.mark.parametrize("death", ["gone", "silent", "in the middle", "forgets the answer"])
async def test_a_prefix_of_a_dead_source_is_computed_and_soon(link: str, death: str) -> None:
    is_noticed = death in ("gone", "in the middle")
    config = with_link(link, op_timeout_s=60.0 if is_noticed else 1.0, slot_bytes=512, span_tokens=16)
    async with (
        contextlib.AsyncExitStack() as stack,
        engine_worker("here", ArithmeticRunner(64), config) as here,
        engine_worker("there", ArithmeticRunner(64), config, "link_delay_ms=20") as there,
    ):
        nobody = stack.enter_context(socket.create_server((HOST, 0)))  # takes connections and says nothing
        await there.generate(make_spec(PROMPT))
        source = there.source(96)
        if death == "gone":
            source = dataclasses.replace(source, address=f"{HOST}:1")
        if death == "silent":
            source = dataclasses.replace(source, address=f"{HOST}:{nobody.getsockname()[1]}")
        if death == "forgets the answer":
            connections, stalls = there.kv.sender._connections, TestingConfig(faults="link_stall=3")
            connections._ranks = tuple(dataclasses.replace(rank, testing=stalls) for rank in connections._ranks)
        started = time.monotonic()
        pulling = asyncio.create_task(here.kv.prefixes.fetch(make_spec(PROMPT), source, time.monotonic(), Context()))
        if death == "in the middle":
            await until(lambda: here.runner.cache.groups[0].any().item() is True, SOON_S)
            await asyncio.gather(there.server.stop(0), there.kv.close())
            started = time.monotonic()
        assert await pulling == 0
        assert time.monotonic() - started < 5.0
        assert here.kv.counts().failed_pulls == 1
        assert await here.generate(make_spec(PROMPT)) == expected_tokens(PROMPT, 4)
        await here.check_idle()
        await until(lambda: there.loop.engine.is_idle, SOON_S)
        there.loop.engine.check()


async def test_nothing_is_pulled_for_a_model_of_whole_prompts_or_from_oneself() -> None:
    async with (
        engine_worker("here", ArithmeticRunner(64, with_state=True, whole_prompts=True), step_tokens=128) as here,
        engine_worker("there", ArithmeticRunner(64, with_state=True, whole_prompts=True), step_tokens=128) as there,
        engine_worker("plain", ArithmeticRunner(64)) as plain,
    ):
        await there.generate(make_spec(PROMPT))
        assert await here.kv.prefixes.fetch(make_spec(PROMPT), there.source(96), time.monotonic(), Context()) == 0
        assert await plain.kv.prefixes.fetch(make_spec(PROMPT), plain.source(96), time.monotonic(), Context()) == 0
        assert (
            await plain.kv.prefixes.fetch(make_spec(PROMPT[:16]), there.source(96), time.monotonic(), Context()) == 0
        ), "a token is left to compute"
        assert here.kv.counts() == plain.kv.counts() == TransferCounts()


# -- the workers' services ---------------------------------------------------------------------------------------------


class LayerGatedRunner(ArithmeticRunner):
    """Stops before a step and after each of its layers, until it is let go."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(64, num_layers=num_layers, with_state=True)
        self.allowed = threading.Semaphore(0)

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        def tell_and_stop(layer: int, fence: Fence | None) -> None:
            on_layer_done(layer, fence)
            assert self.allowed.acquire(timeout=10)

        assert self.allowed.acquire(timeout=10)
        return super().execute(step, tell_and_stop)


async def test_the_services_transfer_layer_by_layer_while_the_prompt_is_computed(link: str) -> None:
    runner = LayerGatedRunner(num_layers=5)
    config = with_link(link, slot_bytes=256, span_tokens=64, lease_s=0.6, ping_s=0.1)  # a chunk a block of a layer
    async with (
        engine_worker("prefill", runner, config) as prefill,
        engine_worker("decode", ArithmeticRunner(64, num_layers=5, with_state=True), config) as decode,
    ):
        spec = make_spec(PROMPT[:65], num_tokens=6)
        cache = decode.runner.cache.groups[0]
        answers = DecodeService(decode.context)._after_kv_transfer(spec)
        ticket = await anext(answers)
        assert isinstance(ticket, Ticket)
        answering = asyncio.ensure_future(anext(answers))
        events = PrefillService(prefill.context).prefill(PrefillRequest(spec, ticket), Context())
        first = asyncio.ensure_future(anext(events))
        await until(lambda: bool(prefill.loop._watchers), SOON_S)
        for step, layer in itertools.product(range(2), range(5)):  # 65 tokens in steps of 64
            runner.allowed.release(2 if layer == 0 and step else 1)
            filled = step * 320 + (layer + 1) * (64 if step == 0 else 1)
            await until(
                lambda: int(cache[..., :16].count_nonzero()) >= filled,  # noqa: B023 - at once
                SOON_S,
                seen=lambda: (step, layer),  # noqa: B023
            )
            assert int(cache[..., :16].count_nonzero()) == filled, "no more than is computed has come"
            await asyncio.sleep(0.08)  # ten layers take longer than the lease
            assert not first.done()
        runner.allowed.release()
        token = await first
        assert isinstance(token, FirstToken)
        transferred = await anext(events)
        assert isinstance(transferred, Transferred)
        assert transferred.transfer_s > 0.7 > 0.3 > transferred.exposed_s
        await events.aclose()
        tokens = [token.token_id, *(await answering).token_ids]  # type: ignore[union-attr]
        async for message in answers:
            assert isinstance(message, NewTokens)
            tokens += message.token_ids
        assert tokens == expected_tokens(PROMPT[:65], 6, with_state=True)
        await prefill.check_idle()
        await decode.check_idle()
