"""Blocks are given back once no copy reads or writes them. Both sides over real gRPC and a real link; the copies are
slow, and somebody else takes the blocks as soon as they are back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baton.errors import TransferError
from engine.model.kv_cache import KVCache
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.protocol.plan import Chunk
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    SOON_S,
    decode_side,
    filled_cache,
    prefill_side,
    send,
    tables_of,
    with_link,
)

COPY_S = 0.05
SOURCE, TARGET = list(range(20, 30)), list(range(30, 40))
CONFIG = with_link("tcp")
gather, scatter = BlockCopier.gather, BlockCopier.scatter


class SlowRows:
    """In the place of what `BlockCopier` does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = threading.Event()
        self.ended: list[bool] = []
        """For each copy, whether what it moved was there when it began."""
        monkeypatch.setattr(BlockCopier, "gather", lambda rows, *copy: self._gather(rows, *copy))
        monkeypatch.setattr(BlockCopier, "scatter", lambda rows, *copy: self._scatter(rows, *copy))
        self.slow = ""

    def _gather(self, rows: BlockCopier, chunk: Chunk, payload: torch.Tensor, *how: Any) -> None:
        if self.slow != "gather":
            gather(rows, chunk, payload, *how)
            return
        there = torch.empty_like(payload)
        gather(rows, chunk, there)
        self._wait()
        gather(rows, chunk, payload, *how)
        self.ended.append(torch.equal(payload, there))

    def _scatter(self, rows: BlockCopier, chunk: Chunk, payload: torch.Tensor, *how: Any) -> None:
        if self.slow != "scatter":
            scatter(rows, chunk, payload, *how)
            return
        self._wait()
        scatter(rows, chunk, payload, *how)
        self.ended.append(True)

    def _wait(self) -> None:
        self.began.set()
        time.sleep(COPY_S)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> SlowRows:
    return SlowRows(monkeypatch)


async def cancel(task: asyncio.Task[Any], times: int) -> None:
    """And waits for its end. The caller's own caller may be cancelled while the first cancel is under way."""
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(COPY_S / 10)
    await asyncio.wait({task})


def take(cache: KVCache, blocks: Sequence[int]) -> None:
    """Somebody else's KV."""
    for group in cache.groups:
        group[:, list(blocks)] = 7.0


def is_taken(cache: KVCache, blocks: Sequence[int]) -> bool:
    return all(bool((group[:, list(blocks)] == 7.0).all()) for group in cache.groups)


@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_a_sender_lets_go_of_its_blocks_once_they_are_read(rows: SlowRows, cancels: int) -> None:
    rows.slow = "gather"
    async with decode_side(CONFIG) as decode, prefill_side(CONFIG) as prefill:
        ticket = decode.receiver.expect("t", 160, 0, tables_of(decode.receiver, TARGET, 3))
        sending = asyncio.create_task(send(prefill, ticket, SOURCE))
        assert await asyncio.to_thread(rows.began.wait, 10)
        await cancel(sending, cancels)
        assert sending.cancelled()
        take(prefill.cache, SOURCE)
        await until(lambda: bool(rows.ended), SOON_S)
        assert rows.ended == [True], "a copy saw the KV of the blocks' next owner"
        await decode.receiver.release(ticket)


@pytest.mark.parametrize("cancels", [0, 1, 2])
async def test_a_receiver_gives_its_blocks_back_once_they_are_written(rows: SlowRows, cancels: int) -> None:
    rows.slow = "scatter"
    async with decode_side(CONFIG) as decode, prefill_side(CONFIG, caches=[filled_cache(1)]) as prefill:
        ticket = decode.receiver.expect("t", 160, 0, tables_of(decode.receiver, TARGET, 3))
        sending = asyncio.create_task(send(prefill, ticket, SOURCE))
        assert await asyncio.to_thread(rows.began.wait, 10)
        releasing = asyncio.create_task(decode.receiver.release(ticket))
        await asyncio.sleep(0)
        await cancel(releasing, cancels)
        take(decode.cache, TARGET)
        with pytest.raises(TransferError, match="gave up its reservation"):
            await sending
        await until(lambda: bool(rows.ended), SOON_S)
        assert is_taken(decode.cache, TARGET), "a copy wrote into the KV of the blocks' next owner"
        assert len(rows.ended) == 1, "and no other began"
        assert releasing.cancelled() == bool(cancels)


async def test_blocks_are_given_back_once_though_two_ask_for_them(rows: SlowRows) -> None:
    rows.slow = "scatter"
    async with decode_side(CONFIG) as decode, prefill_side(CONFIG, caches=[filled_cache(1)]) as prefill:
        ticket = decode.receiver.expect("t", 160, 0, tables_of(decode.receiver, TARGET, 3))
        sending = asyncio.create_task(send(prefill, ticket, SOURCE))
        assert await asyncio.to_thread(rows.began.wait, 10)
        first, second = await asyncio.gather(decode.receiver.release(ticket), decode.receiver.release(ticket))
        assert (bool(first), bool(second)) == (True, False)
        with pytest.raises(TransferError, match="gave up its reservation"):
            await sending
