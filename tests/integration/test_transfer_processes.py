"""KV transfers between real processes, and what the death or silence of one does to the other."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from baton.config import TransferConfig
from baton.errors import BatonError, TransferError, WorkerFailed
from engine.model.kv_cache import KVCache
from kvstore.transfer.connection.reservations import Arrival
from tests.support.waiting import until
from tests.unit.kvstore.transfer.child import Child, child
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    SOON_S,
    Decode,
    Prefill,
    decode_side,
    filled_cache,
    is_blank,
    kv_transfer,
    prefill_side,
    same_blocks,
    send,
    tables_of,
    with_link,
)

pytestmark = [pytest.mark.clock, pytest.mark.timeout(120)]

OP_TIMEOUT_S = 1.5
SOURCE, TARGET = list(range(20, 30)), list(range(30, 40))
"""Of the transfers that something happens to: 160 tokens."""
USUALLY_S, AT_WORST_S = 0.25, 1.0
"""From a kill to the blocks being back: the median of all steps, and any single one. A step is measured once, on a
machine whose processors others use too, so one of them may be late by as much as a few turns of the scheduler."""


@pytest.fixture(params=["tcp", "shm"])
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return with_link(request.param, CONFIG, op_timeout_s=OP_TIMEOUT_S, slot_bytes=1024, lease_s=20.0)


def contents(cache: KVCache, blocks: list[int]) -> list[list[float]]:
    return [group[:, blocks].view(-1).float().tolist() for group in cache.groups]


@contextlib.asynccontextmanager
async def going_on(prefill: Prefill, decode: Decode) -> AsyncIterator[None]:
    """Another pair, which transfers all the time, and must not notice anything."""
    count = 0
    stop = asyncio.Event()

    async def go_on() -> None:
        nonlocal count
        while not stop.is_set():
            await kv_transfer(prefill, decode, [0, 1, 2], [3, 4, 5], name=f"bystander{count}")
            await asyncio.sleep(0.005)
            count += 1

    task = asyncio.create_task(go_on())
    await until(lambda: count > 0, SOON_S)
    before = count
    yield
    await until(lambda: count > before + 2, SOON_S)
    stop.set()
    await task


async def test_blocks_arrive_in_another_process(config: TransferConfig) -> None:
    async with child("decode", config) as decode, prefill_side(config) as prefill:
        for number in range(2):
            ticket = await decode.expect(f"t{number}", 160, TARGET)
            await send(prefill, ticket, SOURCE, first_token=77)
            assert await decode.ask("outcome") == Arrival(160, 77)
            assert await decode.ask("blocks", TARGET) == contents(prefill.cache, SOURCE)
            assert (await decode.ask("release"))[0] == tuple(TARGET)


# -- SIGKILL ---------------------------------------------------------------------------------------------------------

RECEIVER_STEPS = (">hello", "opened", ">offer", "<grant", "between chunks", "last chunk", ">commit", "<commit_ack")


async def test_a_decode_worker_is_killed_at_each_step(config: TransferConfig) -> None:
    """The sender lets go of its blocks at once, and serves the worker's next incarnation."""
    took_s: dict[str, float] = {}
    async with decode_side(config) as other, prefill_side(config) as prefill:
        for number, step in enumerate(RECEIVER_STEPS, start=1):
            async with child("decode", config, number, die_at=step) as decode, going_on(prefill, other):
                took_s[step] = await kill_receiver(step, prefill, decode)
        async with child("decode", config, 99) as decode:
            ticket = await decode.expect("next", 160, TARGET)
            await send(prefill, ticket, SOURCE)
            assert await decode.ask("blocks", TARGET) == contents(prefill.cache, SOURCE)
        assert other.num_pairs_ever == 1
        assert prefill.sender.stats.failed == len(RECEIVER_STEPS)
    report("decode worker", config, took_s)


async def kill_receiver(step: str, prefill: Prefill, decode: Child) -> float:
    ticket = await decode.expect(step, 160, TARGET)
    failed = prefill.sender.stats.failed
    async with prefill.sender.transfer(ticket) as transfer:
        transfer.extend(tables_of(transfer, SOURCE, 3))
        (part,) = transfer._parts.values()
        if step in ("between chunks", "last chunk"):
            transfer.advance(160, 2 if step == "between chunks" else 5)
        if step in (">commit", "<commit_ack"):
            finishing = asyncio.create_task(transfer.finish(1))
        else:
            finishing = asyncio.create_task(asyncio.wait_for(asyncio.shield(part.settled), 10))  # type: ignore[arg-type]
        if step == "opened":
            await until(lambda: part._connection is not None, SOON_S)
            killed_s = decode.kill()
        elif step in ("between chunks", "last chunk"):
            await until(lambda: part.granted and transfer._queues[0].unsent_bytes == 0, SOON_S)
            await asyncio.sleep(0.02)
            killed_s = decode.kill()
        else:
            killed_s = await asyncio.to_thread(decode.pipe.recv)
        with pytest.raises(BatonError):
            await finishing
        if step not in (">commit", "<commit_ack"):
            with pytest.raises(BatonError):
                await transfer.finish(1)
        assert prefill.sender.stats.failed == failed + 1
    assert part.unpinned.done()
    return time.monotonic() - killed_s


SENDER_STEPS = (">hello", ">rendezvous", ">offer", "<grant", "between chunks", "last chunk", ">commit", "<commit_ack")


async def test_a_prefill_worker_is_killed_at_each_step(config: TransferConfig) -> None:
    """The receiver has its blocks back at once, and takes transfers of the worker's next incarnation."""
    took_s: dict[str, float] = {}
    async with decode_side(config) as decode, prefill_side(config) as other:
        for number, step in enumerate(SENDER_STEPS, start=1):
            async with child("prefill", config, number) as prefill, going_on(other, decode):
                took_s[step] = await kill_sender(step, prefill, decode)
        async with child("prefill", config, 99) as prefill:
            ticket = decode.receiver.expect("next", 160, 0, tables_of(decode.receiver, TARGET, 3))
            assert await prefill.ask("send", ticket, SOURCE, 160, 5, 9) == "committed"
            assert same_blocks(filled_cache(1), SOURCE, decode.cache, TARGET)
        assert decode.num_pairs_ever == 1 + len(SENDER_STEPS) + 1
    report("prefill worker", config, took_s)


async def kill_sender(step: str, prefill: Child, decode: Decode) -> float:
    killed_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    decode.cache.clear_blocks([TARGET] * 2)
    ticket = decode.receiver.expect(step, 160, 0, tables_of(decode.receiver, TARGET, 3))

    def watch(kind: str, message: Any) -> bool:
        if kind != step or killed_s.done() or not is_childs(message):
            return True
        killed_s.set_result(prefill.kill())
        return step != ">commit"  # it is lost with its sender

    def is_childs(message: Any) -> bool:
        named = getattr(message, message.WhichOneof("message"))
        if step == ">hello":
            return bool(named.worker_id == "prefill-9")
        return step == ">rendezvous" or bool(named.transfer_id == ticket.transfer_id)

    decode.endpoint.watch = watch
    num_layers = 2 if step == "between chunks" else 5
    first_token = 1 if step in (">commit", "<commit_ack") else None
    prefill.pipe.send(("send", ticket, SOURCE, 160, num_layers, first_token))
    if step == "between chunks":
        await until(lambda: not is_blank(decode.cache, TARGET, slice(1, 2)), SOON_S)
    if step == "last chunk":
        await until(lambda: not is_blank(decode.cache, TARGET[-1:], slice(1, 2), group=1), SOON_S)
    if step in ("between chunks", "last chunk"):
        killed_s.set_result(prefill.kill())
    await killed_s
    if step in (">hello", ">rendezvous"):  # nothing was offered yet: the reservation waits for who may still offer
        await until(lambda: decode.receiver.num_connections == 1, SOON_S)
    elif step == "<commit_ack":
        assert await decode.receiver.wait_committed(ticket) == Arrival(160, 1)
    else:
        with pytest.raises(TransferError):
            await decode.receiver.wait_committed(ticket)
    assert (await decode.receiver.release(ticket))[0] == tuple(TARGET)
    took_s = time.monotonic() - killed_s.result()
    await until(lambda: decode.receiver.num_connections == 1, SOON_S)
    if step == "<commit_ack":
        assert same_blocks(filled_cache(1), SOURCE, decode.cache, TARGET)
    decode.cache.clear_blocks([TARGET] * 2)
    decode.receiver.check()
    decode.endpoint.watch = lambda kind, message: True
    return took_s


def report(who: str, config: TransferConfig, took_s: dict[str, float]) -> None:
    figures = ", ".join(f"{step} {1e3 * s:.0f}" for step, s in took_s.items())
    print(f"\n{who} killed, {config.transports[0]}: blocks back after ms: {figures}")
    assert statistics.median(took_s.values()) <= USUALLY_S, took_s
    assert max(took_s.values()) <= AT_WORST_S, took_s


# -- SIGSTOP ---------------------------------------------------------------------------------------------------------


async def test_a_decode_worker_that_is_stopped_is_given_up_and_fenced(config: TransferConfig) -> None:
    async with child("decode", config) as decode, prefill_side(config) as prefill, decode_side(config) as other:
        first = await decode.expect("first", 160, TARGET)
        await send(prefill, first, SOURCE)
        assert (await decode.ask("release"))[0] == tuple(TARGET)
        ticket = await decode.expect("stopped", 160, TARGET)
        async with going_on(prefill, other), prefill.sender.transfer(ticket) as transfer:
            transfer.extend(tables_of(transfer, SOURCE, 3))
            transfer.advance(160, 2)
            (part,) = transfer._parts.values()
            await until(lambda: part.granted and transfer._queues[0].unsent_bytes == 0, SOON_S)
            await asyncio.sleep(0.1)
            stopped_s = decode.signal(signal.SIGSTOP)
            with pytest.raises(WorkerFailed, match="silent"):
                await part.settled  # nothing is asked and nothing is sent
            assert time.monotonic() - stopped_s < OP_TIMEOUT_S + 1.0
            with pytest.raises(BatonError):
                await transfer.finish(1)
        kept = prefill.cache.groups[0][:, SOURCE].clone()
        prefill.cache.clear_blocks([SOURCE] * 2)  # somebody else's by now
        decode.signal(signal.SIGCONT)
        assert await decode.ask("outcome") in ("TransferError", "TransferTimeout")
        assert (await decode.ask("release"))[0] == tuple(TARGET)
        prefill.cache.groups[0][:, SOURCE] = kept * 2
        ticket = await decode.expect("again", 160, TARGET)
        await send(prefill, ticket, SOURCE)
        assert await decode.ask("outcome") == Arrival(160, 1234)
        assert await decode.ask("blocks", TARGET) == contents(prefill.cache, SOURCE)


async def test_a_prefill_worker_that_is_stopped_is_given_up_and_fenced(config: TransferConfig) -> None:
    """Its blocks are another transfer's when it goes on, and what it still sends does not touch them."""
    async with (
        child("prefill", config, faults="link_delay_ms=20") as prefill,
        decode_side(config) as decode,
        prefill_side(config, caches=[filled_cache(8)]) as other,
    ):
        ticket = decode.receiver.expect("stopped", 160, 0, tables_of(decode.receiver, TARGET, 3))
        answering = asyncio.create_task(prefill.ask("send", ticket, SOURCE, 160, 5, 1))
        await until(lambda: not is_blank(decode.cache, TARGET), SOON_S)
        async with going_on(other, decode):
            stopped_s = prefill.signal(signal.SIGSTOP)
            with pytest.raises(TransferError):
                await decode.receiver.wait_committed(ticket)
            assert (await decode.receiver.release(ticket))[0] == tuple(TARGET)
        assert time.monotonic() - stopped_s < OP_TIMEOUT_S + 1.0
        await kv_transfer(other, decode, SOURCE, TARGET, name="in its place")
        prefill.signal(signal.SIGCONT)
        assert await answering in ("TransferError", "TransferTimeout", "WorkerFailed")
        await asyncio.sleep(0.3)
        assert same_blocks(other.cache, SOURCE, decode.cache, TARGET)
        assert not torch.equal(other.cache.groups[0], filled_cache(1).groups[0])
        again = decode.receiver.expect("again", 160, 0, tables_of(decode.receiver, TARGET, 3))
        assert await prefill.ask("send", again, SOURCE, 160, 5, 1) == "committed"
        assert same_blocks(filled_cache(1), SOURCE, decode.cache, TARGET)
        (connection,) = (c for c in decode.receiver._connections.values() if c._peer_id == "prefill-9")
        assert connection.number == decode.num_pairs_ever, "a new one"
