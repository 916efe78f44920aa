"""Workers that answer instantly: `python -m tests.bench.stub_worker`, one process as a prefill and a decode worker.

They hold leases and speak the workers' protocol, and compute nothing. Every answer is the same run of token ids. A
request's `seed` says how they leave: 0, all at once, a message each; else one message every so many microseconds, and
of all streams in the same moment, as an engine's steps send them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from baton.blocks import content_id
from baton.cluster import Role, WorkerInfo, WorkerLoad, WorkerState
from baton.rpc import RpcServer
from baton.v1 import worker_pb2, worker_pb2_grpc
from kvstore.index import Connection
from kvstore.leases import LeaseKeeper, RedisLeases
from tests.bench.peer import serve

HOST = "127.0.0.1"
INSTANT = 0


class _Answers:
    """The messages of an answer, made beforehand."""

    def __init__(self, token_ids: list[int]) -> None:
        self.first_token = token_ids[0]
        self._messages = [_tokens(token_id, "") for token_id in token_ids]
        self._last = [_tokens(token_id, "length") for token_id in token_ids]

    async def stream(self, first: int, num_tokens: int, gap_us: int) -> AsyncIterator[worker_pb2.DecodeResponse]:
        loop, gap_s = asyncio.get_running_loop(), gap_us / 1e6
        for index in range(first, num_tokens):
            if gap_us:
                # The tick after the nearest one, because a timer may fire a little early.
                await asyncio.sleep((round(loop.time() / gap_s) + 1) * gap_s - loop.time())
            yield self._messages[index] if index < num_tokens - 1 else self._last[index]


def _tokens(token_id: int, finish_reason: str) -> worker_pb2.DecodeResponse:
    return worker_pb2.DecodeResponse(new_tokens=worker_pb2.NewTokens(token_ids=[token_id], finish_reason=finish_reason))


class _Decode(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, answers: _Answers, handed_over: dict[str, asyncio.Event]) -> None:
        self._answers = answers
        self._handed_over = handed_over
        self._num_transfers = 0

    async def Decode(  # noqa: N802 - the generated name
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[worker_pb2.DecodeResponse]:
        spec = request.sequence
        if request.await_kv:
            self._num_transfers += 1
            transfer_id = f"{self._num_transfers}"
            arrived = self._handed_over[transfer_id] = asyncio.Event()
            yield worker_pb2.DecodeResponse(
                ticket=worker_pb2.Ticket(transfer_id=transfer_id, num_tokens=len(spec.token_ids))
            )
            await arrived.wait()
        async for message in self._answers.stream(int(request.await_kv), spec.max_tokens, spec.seed):
            yield message


class _Prefill(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, answers: _Answers, handed_over: dict[str, asyncio.Event]) -> None:
        self._answers = answers
        self._handed_over = handed_over

    async def Prefill(  # noqa: N802
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        finish_reason = "length" if request.sequence.max_tokens == 1 else ""
        first_token = worker_pb2.FirstToken(token_id=self._answers.first_token, finish_reason=finish_reason)
        yield worker_pb2.PrefillResponse(first_token=first_token)
        self._handed_over.pop(request.ticket.transfer_id).set()
        yield worker_pb2.PrefillResponse(handed_over=worker_pb2.HandedOver(num_bytes=1, num_chunks=1))


async def _main() -> None:
    rpc = RpcServer(("baton.v1.PrefillWorker", "baton.v1.DecodeWorker"))
    tasks: list[asyncio.Task[None]] = []

    async def start(redis_url: str, revision: str, token_ids: list[int]) -> dict[str, Any]:
        answers, handed_over = _Answers(token_ids), dict[str, asyncio.Event]()
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(_Decode(answers, handed_over), rpc.server)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(_Prefill(answers, handed_over), rpc.server)
        address = f"{HOST}:{rpc.bind(HOST, 0)}"
        await rpc.start()
        tasks.extend(asyncio.create_task(_hold_lease(role, redis_url, revision, address)) for role in Role)
        return {"address": address}

    await serve({"start": start})
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await rpc.stop(0.0)


async def _hold_lease(role: Role, redis_url: str, revision: str, address: str) -> None:
    content = content_id(revision)
    leases = RedisLeases(Connection(redis_url), content)
    keeper = LeaseKeeper(leases, f"{role}-0", renew_s=1.0)
    info = WorkerInfo(
        id=f"{role}-0",
        role=role,
        address=address,
        pid=os.getpid(),
        node=socket.gethostname(),
        epoch=await keeper.acquire(),
        content_id=content,
        wire_compat="bench",
        block_size=16,
        max_model_len=8192,
    )
    try:
        await keeper.run(lambda: (info, WorkerLoad(WorkerState.READY)))
    finally:
        await leases.close()


if __name__ == "__main__":
    uvloop.run(_main())
