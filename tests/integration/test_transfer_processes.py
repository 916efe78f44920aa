"""Hand-overs between real processes, and what the death or silence of one does to the other.

Run as a module this is the other process: `python -m tests.integration.test_transfer_processes decode|prefill`. It
takes one JSON object a line and answers each with one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import torch

from baton.config import TransferConfig
from baton.engine.kv_cache import KVCache, KVSpec, LayerGroup
from baton.errors import BatonError, TransferError, TransferTimeout, WorkerFailed
from baton.messages import Ticket
from baton.rpc.server import SERVER_OPTIONS
from baton.v1 import kv_pb2_grpc
from kvstore.transfer.receiver import KvReceiver
from kvstore.transfer.sender import KvSender

torch.set_num_threads(1)

SPEC = KVSpec(16, (LayerGroup("all", tuple(range(24)), 4, 64, 64, torch.float32),))  # rows of 32 KiB
NUM_BLOCKS = 64
CONFIG = TransferConfig(slot_bytes=256 * 1024, open_timeout_s=5.0, op_timeout_s=1.5, lease_s=20.0)
ALL_TOKENS = NUM_BLOCKS * 16  # 48 MiB: some 100 ms on the link


def filled_cache() -> KVCache:
    cache = KVCache(SPEC, NUM_BLOCKS, max_num_seqs=1)
    cache.groups[0].copy_(torch.randn(cache.groups[0].shape, generator=torch.Generator().manual_seed(3)))
    return cache


def digest(cache: KVCache, block_ids: list[int]) -> str:
    return hashlib.blake2b(cache.groups[0][:, block_ids].numpy().tobytes()).hexdigest()


@contextlib.asynccontextmanager
async def decode_side(name: str) -> AsyncIterator[KvReceiver]:
    receiver = KvReceiver(name, f"{name}.1", KVCache(SPEC, NUM_BLOCKS, 1), "kind", CONFIG, "127.0.0.1")
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
async def prefill_side() -> AsyncIterator[KvSender]:
    sender = KvSender("prefill-0", "prefill-0.1", filled_cache(), "kind", CONFIG, "127.0.0.1")
    try:
        yield sender
    finally:
        await sender.close()


class Peer:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return answer


@contextlib.asynccontextmanager
async def peer(role: str) -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.test_transfer_processes",
        role,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Peer(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def expect_at(decode: Peer, num_tokens: int, skip_tokens: int, blocks: list[int]) -> Ticket:
    return Ticket(**await decode.ask(op="expect", tokens=num_tokens, skip=skip_tokens, blocks=blocks))


async def in_the_middle(sender: KvSender) -> None:
    """Returns once the first bytes of a transfer are moving. The code under test has no event for it."""
    while not any(pair._talk and pair._talk.sent for pair in sender._pairs.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)


async def test_blocks_arrive_in_another_process() -> None:
    async with peer("decode") as decode, prefill_side() as sender:
        for _ in range(2):
            ticket = await expect_at(decode, ALL_TOKENS - 5, 32, list(reversed(range(NUM_BLOCKS))))
            await sender.send(ticket, list(range(NUM_BLOCKS)), 77)
            assert await decode.ask(op="wait") == {"first_token": 77}
            written = list(reversed(range(NUM_BLOCKS)))[2:]
            assert (await decode.ask(op="digest", blocks=written))["digest"] == digest(
                sender._cache, list(range(2, NUM_BLOCKS))
            )
            assert len((await decode.ask(op="release"))["blocks"]) == NUM_BLOCKS


@pytest.mark.parametrize("moment", ["idle", "middle"])
async def test_a_killed_decode_worker_is_a_typed_error_at_once_and_other_pairs_go_on(moment: str) -> None:
    async with peer("decode") as decode, decode_side("decode-1") as other, prefill_side() as sender:
        doomed = await expect_at(decode, ALL_TOKENS, 0, list(range(NUM_BLOCKS)))
        if moment == "idle":
            await sender.send(await expect_at(decode, 16, 0, [0]), [0], 1)
        sending = asyncio.create_task(sender.send(doomed, list(range(NUM_BLOCKS)), 1))
        if moment == "middle":
            await in_the_middle(sender)
        decode.process.kill()
        start = time.monotonic()
        with pytest.raises((WorkerFailed, TransferError)):
            await sending
        assert time.monotonic() - start < 1.0
        ticket = other.expect("t", 64, 0, [1, 2, 3, 4])
        await sender.send(ticket, [5, 6, 7, 8], 9)
        assert await other.wait_committed(ticket) == 9
        assert torch.equal(sender._cache.groups[0][:, 5:9], other.cache.groups[0][:, 1:5])
        assert sender.stats.num_pairs == 1


async def test_a_killed_prefill_worker_frees_the_reservation_at_once() -> None:
    async with decode_side("decode-0") as receiver, peer("prefill") as prefill:
        ticket = receiver.expect("t", ALL_TOKENS, 0, list(range(NUM_BLOCKS)))
        asking = asyncio.create_task(prefill.ask(op="send", ticket=dataclasses.asdict(ticket)))
        while not receiver.cache.groups[0].any():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        prefill.process.kill()
        start = time.monotonic()
        with pytest.raises(TransferError, match=r"prefill-0 is gone|gloo link is broken"):
            await receiver.wait_committed(ticket)
        assert await receiver.release(ticket) == tuple(range(NUM_BLOCKS))
        assert time.monotonic() - start < 1.0
        receiver.cache.groups[0].zero_()  # the blocks are someone else's now
        await asyncio.wait({asking})
        asking.exception()
        await asyncio.sleep(CONFIG.op_timeout_s + 0.2)
        assert not receiver.cache.groups[0].any(), "nothing writes into freed blocks"
        assert receiver.stats.num_pairs == 0
        async with prefill_side() as sender:  # the same worker again
            ticket = receiver.expect("t", 32, 0, [0, 1])
            await sender.send(ticket, [2, 3], 4)
            assert await receiver.wait_committed(ticket) == 4
            assert receiver._epochs == {"prefill-0": 2}


async def test_a_hung_decode_worker_costs_no_more_than_the_operation_timeout() -> None:
    async with peer("decode") as decode, prefill_side() as sender:
        await sender.send(await expect_at(decode, 16, 0, [0]), [0], 1)
        ticket = await expect_at(decode, 32, 0, [0, 1])
        decode.process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(TransferTimeout, match="grant"):
            await sender.send(ticket, [2, 3], 1)
        assert time.monotonic() - start < CONFIG.op_timeout_s + 0.5
        decode.process.send_signal(signal.SIGCONT)
        await sender.send(await expect_at(decode, 16, 0, [5]), [5], 1)
        assert (await decode.ask(op="digest", blocks=[5]))["digest"] == digest(sender._cache, [5])


async def serve(role: str) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop.add_reader(sys.stdin, lambda: lines.put_nowait(sys.stdin.readline()))

    async with decode_side("decode-0") as receiver, prefill_side() as sender:
        ticket: Ticket | None = None
        while line := await lines.get():
            question = json.loads(line)
            answer: dict[str, Any]
            match question["op"]:
                case "expect":
                    ticket = receiver.expect("t", question["tokens"], question["skip"], question["blocks"])
                    answer = dataclasses.asdict(ticket)
                case "wait":
                    assert ticket
                    answer = {"first_token": await receiver.wait_committed(ticket)}
                case "release":
                    assert ticket
                    answer = {"blocks": await receiver.release(ticket)}
                case "digest":
                    answer = {"digest": digest(receiver.cache, question["blocks"])}
                case _:
                    try:
                        await sender.send(Ticket(**question["ticket"]), list(range(NUM_BLOCKS)), 1)
                        answer = {"error": None}
                    except BatonError as error:
                        answer = {"error": type(error).__name__}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
