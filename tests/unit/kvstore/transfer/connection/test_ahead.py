"""Connections that are open before a transfer needs them, over NCCL as `tests.fakes` has it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from engine.model.kv_cache import KVCache
from kvstore.transfer.connection.control_stream import Peer
from tests.fakes.gpu import FakeGpu, fake_gpus
from tests.fakes.nccl import Knobs
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    NUM_BLOCKS,
    SOON_S,
    SPEC,
    Decode,
    Prefill,
    decode_side,
    filled_cache,
    kv_transfer,
    prefill_side,
    scattered,
)

LINKS = dataclasses.replace(CONFIG, transports=("nccl", "tcp"), op_timeout_s=2.0)
SOURCE, TARGET = scattered(10, 1), scattered(10, 2)


@contextlib.asynccontextmanager
async def workers(num_decode: int, max_connections: int = 0) -> AsyncIterator[tuple[Prefill, list[Decode]]]:
    config = dataclasses.replace(LINKS, max_connections=max_connections)
    with fake_gpus(num_decode + 1) as (here, *there):
        async with contextlib.AsyncExitStack() as stack:
            sides = [await stack.enter_async_context(decode_on(gpu, number)) for number, gpu in enumerate(there)]
            cache = filled_cache(1)
            cache.device = here.device
            yield await stack.enter_async_context(prefill_side(config, caches=[cache])), sides


def decode_on(gpu: FakeGpu, number: int) -> contextlib.AbstractAsyncContextManager[Decode]:
    cache = KVCache(SPEC, NUM_BLOCKS, 8)
    cache.device = gpu.device
    return decode_side(LINKS, f"decode-{number}", caches=[cache])


def peer_of(decode: Decode) -> Peer:
    worker = decode.receiver._worker
    return Peer(worker.worker_id, worker.incarnation, decode.receiver.kv_address, 0)


def kinds(prefill: Prefill) -> list[str]:
    return sorted(prefill.sender.open_kinds)


async def test_the_first_transfer_finds_an_nccl_pair(knobs: Knobs) -> None:
    knobs.opening_s = 0.2
    async with workers(2) as (prefill, sides):
        assert prefill.sender.opens_slowly
        peers = [peer_of(side) for side in sides]
        for number in (1, 2):  # one after the other, each until it is as good as it gets
            assert await prefill.sender.open_ahead(peers)
            assert prefill.sender.open_kinds.count("nccl") == number
        assert not await prefill.sender.open_ahead(peers)
        await until(lambda: kinds(prefill) == ["nccl", "nccl"], SOON_S)
        for side in sides:
            await kv_transfer(prefill, side, SOURCE, TARGET, name="t")
            assert side.num_pairs_ever == 2, "over tcp at first, then over nccl; none for the transfer"
        assert kinds(prefill) == ["nccl", "nccl"]


async def test_no_more_than_the_limit_are_opened_and_none_is_closed_for_them(knobs: Knobs) -> None:
    async with workers(3, max_connections=2) as (prefill, sides):
        peers = [peer_of(side) for side in sides]
        for _ in range(2):
            assert await prefill.sender.open_ahead(peers)
            await until(lambda: "tcp" not in kinds(prefill), SOON_S)
        assert not await prefill.sender.open_ahead(peers)
        assert [side.num_pairs_ever for side in sides] == [2, 2, 0]
        await kv_transfer(prefill, sides[2], SOURCE, TARGET, name="needed")


async def test_a_pair_that_hangs_holds_up_no_transfer_and_is_tried_again(
    knobs: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.transfer.connection.pool.FIRST_PAUSE_S", 0.05)
    knobs.never_opens = True
    async with workers(1) as (prefill, (decode,)):
        peers = [peer_of(decode)]
        opening = asyncio.create_task(prefill.sender.open_ahead(peers))
        await until(lambda: kinds(prefill) == ["tcp"], SOON_S)
        await kv_transfer(prefill, decode, SOURCE, TARGET, name="meanwhile")
        assert await opening
        assert kinds(prefill) == ["tcp"]
        knobs.never_opens = False
        await until_open(prefill, peers)
        assert prefill.sender.stats.failed == 0


async def until_open(prefill: Prefill, peers: list[Peer]) -> None:
    async with asyncio.timeout(SOON_S):
        while "nccl" not in kinds(prefill):
            await prefill.sender.open_ahead(peers)
            await asyncio.sleep(0.02)


async def test_a_peer_that_is_gone_is_left_alone_for_a_while_and_others_are_served(
    knobs: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(1) as (prefill, (decode,)):
        gone = Peer("gone", "gone.1", "127.0.0.1:1", 0)
        peers = [gone, peer_of(decode)]
        assert await prefill.sender.open_ahead(peers)
        assert kinds(prefill) == []
        assert await prefill.sender.open_ahead(peers)
        assert "nccl" in kinds(prefill)
        assert not await prefill.sender.open_ahead(peers)


async def test_a_transfer_does_not_fail_with_the_opening_ahead_that_it_waits_for(
    knobs: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first session that comes is lost; it is the one that nobody has asked for."""
    async with workers(1) as (prefill, (decode,)):
        num_sessions = 0
        lost = asyncio.Event()
        session = decode.receiver.session

        async def endpoint(requests: object, context: object) -> None:
            nonlocal num_sessions
            num_sessions += 1
            if num_sessions == 1:
                await lost.wait()
                raise RuntimeError("lost")
            await session(requests, context)

        monkeypatch.setattr(decode.receiver, "session", endpoint)
        opening = asyncio.create_task(prefill.sender.open_ahead([peer_of(decode)]))
        await until(lambda: num_sessions == 1, SOON_S)
        transfer = asyncio.create_task(kv_transfer(prefill, decode, SOURCE, TARGET, name="t"))
        await asyncio.sleep(0.1)
        lost.set()
        await transfer
        assert await opening
        assert prefill.sender.stats.failed == 0
