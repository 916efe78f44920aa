"""Hand-overs over real gloo and real gRPC, both sides in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import torch

from baton.config import FaultsConfig, TransferConfig
from baton.engine.kv_cache import KVCache, KVSpec, LayerGroup, StateSpec
from baton.errors import BatonError, TransferCorrupted, TransferError, TransferRefused, TransferTimeout, WorkerFailed
from baton.messages import HandedOver, Ticket
from baton.rpc.server import SERVER_OPTIONS
from baton.v1 import kv_pb2_grpc
from kvstore.transfer.receiver import KvReceiver
from kvstore.transfer.sender import KvSender

torch.set_num_threads(1)

SPEC = KVSpec(
    16,
    (
        LayerGroup("global", (0, 1, 2), 2, 8, 8, torch.bfloat16),
        LayerGroup("window", (3, 4), 1, 8, 4, torch.float32),
    ),
    (StateSpec("conv", (33,), torch.float32),),
)
CONFIG = TransferConfig(slot_bytes=4096, window=3, open_timeout_s=5.0, op_timeout_s=3.0, lease_s=20.0)
NUM_BLOCKS = 64


def filled_cache(seed: int, spec: KVSpec = SPEC, num_blocks: int = NUM_BLOCKS) -> KVCache:
    cache = KVCache(spec, num_blocks, max_num_seqs=8)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*cache.groups, *cache.states.values()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def same_blocks(a: KVCache, a_ids: list[int], b: KVCache, b_ids: list[int]) -> bool:
    pairs = zip(a.groups, b.groups, strict=True)
    return all(torch.equal(x[:, a_ids].view(torch.uint8), y[:, b_ids].view(torch.uint8)) for x, y in pairs)


@contextlib.asynccontextmanager
async def decode_side(
    name: str = "decode-0", config: TransferConfig = CONFIG, compat: str = "kind-a", spec: KVSpec = SPEC
) -> AsyncIterator[KvReceiver]:
    receiver = KvReceiver(name, f"{name}.1", KVCache(spec, NUM_BLOCKS, 8), compat, config, "127.0.0.1")
    server = grpc.aio.server(options=SERVER_OPTIONS)
    kv_pb2_grpc.add_KvControlServicer_to_server(receiver, server)
    receiver.kv_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receiver
    finally:
        receiver.check()
        await receiver.close()
        await server.stop(1.0)


@contextlib.asynccontextmanager
async def prefill_side(
    config: TransferConfig = CONFIG, faults: str = "", links: tuple[str, ...] | None = None
) -> AsyncIterator[KvSender]:
    if links is not None:
        config = dataclasses.replace(config, links=links)
    sender = KvSender(
        "prefill-0", "prefill-0.1", filled_cache(1), "kind-a", config, "127.0.0.1", FaultsConfig(spec=faults)
    )
    try:
        yield sender
    finally:
        await sender.close()


async def hand_over(
    sender: KvSender, receiver: KvReceiver, ticket: Ticket, block_ids: list[int], state_slot: int | None = 3
) -> HandedOver:
    handed_over = await sender.send(ticket, block_ids, 1234, state_slot)
    assert await receiver.wait_committed(ticket) == 1234
    return handed_over


@pytest.mark.parametrize(("num_tokens", "skip_tokens"), [(100, 0), (100, 32), (96, 96), (1, 0)])
async def test_blocks_and_states_arrive_as_they_were_and_nothing_else_changes(
    num_tokens: int, skip_tokens: int
) -> None:
    async with decode_side() as receiver, prefill_side() as sender:
        before = filled_cache(2)
        for mine, other in zip(receiver.cache.groups, before.groups, strict=True):
            mine.copy_(other)
        rng = random.Random(num_tokens)
        num_blocks, skip = -(-num_tokens // 16), skip_tokens // 16
        source, target = (rng.sample(range(NUM_BLOCKS), num_blocks + extra) for extra in (0, 2))
        ticket = receiver.expect("t", num_tokens, skip_tokens, target, state_slot=5)
        handed_over = await hand_over(sender, receiver, ticket, source)
        written = target[skip:num_blocks]
        rest = [b for b in range(NUM_BLOCKS) if b not in written]
        assert same_blocks(sender._cache, source[skip:], receiver.cache, written)
        assert same_blocks(before, rest, receiver.cache, rest)
        assert torch.equal(sender._cache.states["conv"][3], receiver.cache.states["conv"][5])
        assert handed_over.num_bytes == (num_blocks - skip) * SPEC.block_bytes + 33 * 4
        assert await receiver.release(ticket) == tuple(target)
        assert await receiver.release(ticket) == ()


async def test_transfers_over_two_pairs_at_once_do_not_mix() -> None:
    async with decode_side("d0") as d0, decode_side("d1") as d1, prefill_side() as sender:

        async def one(index: int) -> None:
            receiver = (d0, d1)[index % 2]
            target = list(range(index // 2 * 8, index // 2 * 8 + 6))
            source = random.Random(index).sample(range(NUM_BLOCKS), 6)
            ticket = receiver.expect(f"t{index}", 90, 16, target, state_slot=index // 2)
            await hand_over(sender, receiver, ticket, source, state_slot=index % 8)
            assert same_blocks(sender._cache, source[1:], receiver.cache, target[1:])
            await receiver.release(ticket)

        async with asyncio.TaskGroup() as tasks:
            for index in range(16):
                tasks.create_task(one(index))
        assert sender.stats.num_transfers == 16
        assert sender.stats.num_pairs == 2
        assert (d0.stats.num_transfers, d1.stats.num_transfers) == (8, 8)
        assert d0.stats.num_bytes + d1.stats.num_bytes == sender.stats.num_bytes


@pytest.mark.parametrize("fault", ["corrupt_chunk", "drop_chunk", "swap_blocks"])
async def test_a_spoiled_chunk_fails_the_transfer_and_only_that(fault: str) -> None:
    async with decode_side() as receiver, prefill_side(faults=f"{fault}=5") as sender:
        ticket = receiver.expect("spoiled", 64, 0, [0, 1, 2, 3], state_slot=0)  # 6 chunks
        with pytest.raises(TransferCorrupted, match="checksum"):
            await sender.send(ticket, [4, 5, 6, 7], 1, 0)
        with pytest.raises(TransferCorrupted, match="checksum"):
            await receiver.wait_committed(ticket)
        assert await receiver.release(ticket) == (0, 1, 2, 3)
        assert receiver.stats.num_corrupted == sender.stats.num_failed == 1
        await hand_over(sender, receiver, receiver.expect("next", 1, 0, [0], state_slot=0), [9])  # 3 chunks
        assert same_blocks(sender._cache, [9], receiver.cache, [0])
        assert receiver._epochs == {"prefill-0": 1}, "over the same pair"


@pytest.mark.parametrize("fault", ["corrupt_chunk", "drop_chunk", "swap_blocks"])
async def test_without_checksums_a_spoiled_chunk_reaches_the_cache(fault: str) -> None:
    config = dataclasses.replace(CONFIG, checksum="off")
    async with decode_side(config=config) as receiver, prefill_side(config, f"{fault}=1") as sender:
        ticket = receiver.expect("t", 64, 0, [0, 1, 2, 3], state_slot=0)
        await hand_over(sender, receiver, ticket, [4, 5, 6, 7])
        assert not same_blocks(sender._cache, [4, 5, 6, 7], receiver.cache, [0, 1, 2, 3])
        assert receiver.stats.num_corrupted == 0


async def test_a_past_generation_is_fenced_and_the_new_one_stands() -> None:
    async with decode_side() as receiver, prefill_side() as sender:
        old = receiver.expect("t", 32, 0, [0, 1], state_slot=0)
        assert await receiver.release(old) == (0, 1)
        new = receiver.expect("t", 32, 0, [0, 1], state_slot=0)
        with pytest.raises(TransferRefused, match="not expected"):
            await sender.send(old, [4, 5], 1, 0)
        assert receiver.stats.num_fenced >= 1
        assert same_blocks(KVCache(SPEC, NUM_BLOCKS, 1), [0, 1], receiver.cache, [0, 1])
        await hand_over(sender, receiver, new, [8, 9])
        assert same_blocks(sender._cache, [8, 9], receiver.cache, [0, 1])


async def test_a_lease_that_ends_fails_the_reservation() -> None:
    async with decode_side(config=dataclasses.replace(CONFIG, lease_s=0.1)) as receiver, prefill_side() as sender:
        ticket = receiver.expect("t", 32, 0, [0, 1], state_slot=0)
        with pytest.raises(TransferTimeout, match="lease"):
            await receiver.wait_committed(ticket)
        assert receiver.stats.num_expired == 1
        with pytest.raises(TransferRefused):
            await sender.send(ticket, [4, 5], 1, 0)
        assert await receiver.release(ticket) == (0, 1)


async def refusal(sender: KvSender, receiver: KvReceiver, **changes: Any) -> str:
    ticket = receiver.expect("t", 32, 0, [0, 1], state_slot=0)
    with pytest.raises(TransferRefused) as caught:
        await sender.send(dataclasses.replace(ticket, **changes), [4, 5], 1, 0)
    await receiver.release(ticket)
    return str(caught.value)


async def test_sides_that_do_not_fit_are_refused_in_words() -> None:
    async with prefill_side() as sender:
        async with decode_side(compat="kind-b") as receiver:
            assert "KV of kind kind-b" in await refusal(sender, receiver)
            assert "prefill-0 has KV of kind kind-a" in await refusal(sender, receiver, wire_compat="kind-a")
        async with decode_side(config=dataclasses.replace(CONFIG, links=("nccl",))) as receiver:
            assert "offers the links gloo" in await refusal(sender, receiver)
        async with decode_side(config=dataclasses.replace(CONFIG, window=2)) as receiver:
            assert "window 2" in await refusal(sender, receiver)
        async with decode_side(config=dataclasses.replace(CONFIG, checksum="off")) as receiver:
            assert "checksum off" in await refusal(sender, receiver)
        async with decode_side() as receiver:
            sender._hello = dataclasses.replace(sender._hello, protocol_version=9)
            assert "speaks version 9" in await refusal(sender, receiver)


async def test_a_ticket_of_a_past_incarnation_is_refused_and_leaves_the_good_pair_alone() -> None:
    async with decode_side() as receiver, prefill_side() as sender:
        await hand_over(sender, receiver, receiver.expect("a", 16, 0, [0], state_slot=0), [4])
        pair = sender._pairs["decode-0", "decode-0.1"]
        assert "decode-0.1 answers" in await refusal(sender, receiver, incarnation="decode-0.0")
        await hand_over(sender, receiver, receiver.expect("b", 16, 0, [1], state_slot=1), [5])
        assert sender._pairs["decode-0", "decode-0.1"] is pair
        assert sender.stats.num_pairs == 1


async def test_an_address_where_nobody_listens_is_a_failed_worker() -> None:
    async with decode_side() as receiver, prefill_side() as sender:
        ticket = receiver.expect("t", 16, 0, [0], state_slot=0)
        with pytest.raises(WorkerFailed, match="decode-0"):
            await sender.send(dataclasses.replace(ticket, kv_address="127.0.0.1:1"), [4], 1, 0)
        await hand_over(sender, receiver, ticket, [4])


async def test_cancels_at_any_moment_leave_both_sides_whole() -> None:
    """Blocks of the pool are in a reservation or free, each exactly once; transfers in between arrive intact."""
    rng = random.Random(7)
    async with decode_side() as receiver, prefill_side() as sender:
        free = set(range(NUM_BLOCKS))
        outcomes: dict[str, int] = {}

        async def one(index: int) -> None:
            target = rng.sample(sorted(free), 6)
            free.difference_update(target)
            source = rng.sample(range(NUM_BLOCKS), 6)
            ticket = receiver.expect(f"t{index}", 90, 0, target, state_slot=0)
            sending = asyncio.create_task(sender.send(ticket, source, 5, 0))
            who = rng.choice(["sender", "receiver", "nobody"])
            if who != "nobody":
                await asyncio.sleep(rng.random() * 0.006)
            if who == "sender":
                sending.cancel()
            if who == "receiver":
                released = await receiver.release(ticket)
            try:
                await sending
                assert who != "nobody" or await receiver.wait_committed(ticket) == 5
                outcome = "committed"
                if who != "receiver":
                    assert same_blocks(sender._cache, source, receiver.cache, target)
            except (BatonError, asyncio.CancelledError):
                outcome = "failed"
            assert who != "nobody" or outcome == "committed"
            if who != "receiver":
                released = await receiver.release(ticket)
            assert released == tuple(target)
            assert free.isdisjoint(released)
            free.update(released)
            outcomes[f"{who} {outcome}"] = outcomes.get(f"{who} {outcome}", 0) + 1

        for start in range(0, 120, 4):
            async with asyncio.TaskGroup() as tasks:
                for index in range(start, start + 4):
                    tasks.create_task(one(index))
            receiver.check()
        assert free == set(range(NUM_BLOCKS))
        assert len(receiver.ledger) == 0
        assert outcomes["sender failed"] > 5
        assert outcomes["receiver failed"] > 5
        assert receiver.stats.num_corrupted == 0
        assert receiver.stats.num_pairs == sender.stats.num_pairs == 1, "no cancel cost the pair"
        assert receiver._epochs == {"prefill-0": 1}


async def test_after_a_cancelled_send_returns_nothing_reads_the_blocks() -> None:
    async with decode_side() as receiver, prefill_side() as sender:
        await hand_over(sender, receiver, receiver.expect("warm", 16, 0, [63], state_slot=0), [0])
        for delay_s in (0.0, 0.0005, 0.001, 0.002):
            ticket = receiver.expect(f"t{delay_s}", 900, 0, list(range(57)), state_slot=0)
            sending = asyncio.create_task(sender.send(ticket, list(range(57)), 5, 0))
            await asyncio.sleep(delay_s)
            sending.cancel()
            await asyncio.wait({sending})
            talk = sender._pairs["decode-0", "decode-0.1"]._talk
            reads: list[object] = []
            if talk is not None:  # the link is still being settled
                talk.outbound._rows.gather = lambda *what, reads=reads: reads.append(what)  # type: ignore[method-assign]
            await receiver.release(ticket)
            await asyncio.sleep(0.05)
            assert not reads


def footprint() -> tuple[int, list[str]]:
    return len(os.listdir("/proc/self/fd")), sorted(t.name for t in threading.enumerate())  # noqa: PTH208


async def eventually(condition: Callable[[], bool], within_s: float = 3.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - no event tells of a closed file
        await asyncio.sleep(0.02)
    return condition()


async def test_closing_leaves_no_thread_file_or_task() -> None:
    async def cycle() -> None:
        async with decode_side() as receiver, prefill_side() as sender:
            ticket = receiver.expect("t", 100, 0, list(range(7)), state_slot=0)
            await hand_over(sender, receiver, ticket, list(range(7)))
            pending = receiver.expect("pending", 100, 0, list(range(7, 14)), state_slot=1)
            cancelled = asyncio.create_task(sender.send(pending, list(range(7)), 1, 0))
            await asyncio.sleep(0.001)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            await receiver.release(ticket)

    await cycle()
    before, tasks = footprint(), len(asyncio.all_tasks())
    for _ in range(5):
        await cycle()
    assert await eventually(lambda: footprint() <= before), (footprint(), before)
    assert await eventually(lambda: len(asyncio.all_tasks()) == tasks)


async def test_a_closing_decode_worker_fails_what_waits_on_both_sides() -> None:
    async with prefill_side() as sender:
        async with decode_side() as receiver:
            done = receiver.expect("done", 16, 0, [0], state_slot=0)
            await hand_over(sender, receiver, done, [0])
            waiting = receiver.expect("waiting", 16, 0, [1], state_slot=1)
            wait = asyncio.create_task(receiver.wait_committed(waiting))
            await asyncio.sleep(0)
            await receiver.close()
            with pytest.raises(TransferError, match="shuts down"):
                await wait
            assert await receiver.release(waiting) == (1,)
            assert await receiver.release(done) == (0,)
        with pytest.raises(WorkerFailed):
            await sender.send(waiting, [1], 1, 0)
