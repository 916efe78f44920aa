"""Workers that answer instantly: `python -m tests.bench.stub_worker`, a prefill and a decode worker in one process.

They hold leases and speak the workers' protocol, and compute nothing. Every answer is the same run of token ids. A
request's `seed` says how they leave: 0, all at once, a message each; else one message every so many microseconds, and
of all streams in the same moment, as an engine's steps send them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvloop
from opentelemetry.context import Context

from baton import wire
from baton.blocks import content_id
from baton.cluster import Role, WorkerInfo, WorkerLoad, WorkerState
from baton.kv_layout import KvLayout
from baton.messages import (
    DecodeRequest,
    Event,
    FirstToken,
    NewTokens,
    PrefillReport,
    PrefillRequest,
    Ticket,
    Transferred,
)
from baton.rpc import RpcServer
from baton.rpc.member_auth import WORKERS_RULES, member_auth
from baton.sampling import FinishReason
from baton.tasks import cancel_and_wait
from baton.trust import KeyFile, Principal
from baton.v1 import worker_pb2_grpc
from kvstore.index import RedisConnection
from kvstore.leases import LeaseKeeper, RedisLeases
from tests.bench.peer import serve
from worker.calls import CallServicer

HOST = "127.0.0.1"
INSTANT = 0


class _Answers:
    """The messages of an answer, made beforehand."""

    def __init__(self, token_ids: list[int]) -> None:
        self.first_token = token_ids[0]
        self._messages = [NewTokens(token_ids=(token_id,), finish_reason=None) for token_id in token_ids]
        self._last = [NewTokens(token_ids=(token_id,), finish_reason=FinishReason.LENGTH) for token_id in token_ids]

    async def stream(self, first: int, num_tokens: int, gap_us: int) -> AsyncGenerator[NewTokens]:
        loop, gap_s = asyncio.get_running_loop(), gap_us / 1e6
        for index in range(first, num_tokens):
            if gap_us:
                # The tick after the nearest one, because a timer may fire a little early.
                await asyncio.sleep((round(loop.time() / gap_s) + 1) * gap_s - loop.time())
            yield self._messages[index] if index < num_tokens - 1 else self._last[index]


class _Worker:
    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self._transferred: dict[str, asyncio.Event] = {}
        self._num_transfers = 0

    async def decode(self, request: DecodeRequest, trace: Context) -> AsyncGenerator[Event]:
        spec = request.sequence
        if request.await_kv:
            self._num_transfers += 1
            transfer_id = f"{self._num_transfers}"
            arrived = self._transferred[transfer_id] = asyncio.Event()
            yield Ticket(
                transfer_id=transfer_id,
                generation=1,
                decode_worker_id="worker-1",
                incarnation="",
                kv_address="",
                num_tokens=len(spec.token_ids),
                skip_tokens=0,
                wire_compat="bench",
                layout=KvLayout(16, 1, ()),
            )
            await arrived.wait()
        async for message in self._answers.stream(int(request.await_kv), spec.max_tokens, spec.seed):
            yield message

    async def prefill(self, request: PrefillRequest, trace: Context) -> AsyncGenerator[Event]:
        assert request.ticket is not None
        finish_reason = FinishReason.LENGTH if request.sequence.max_tokens == 1 else None
        yield FirstToken(
            token_id=self._answers.first_token,
            finish_reason=finish_reason,
            report=PrefillReport(),
        )
        self._transferred.pop(request.ticket.transfer_id).set()
        yield Transferred(1, 1, 0.0, 0.0)


async def _main() -> None:
    tasks: list[asyncio.Task[None]] = []
    servers: list[RpcServer] = []

    async def start(redis_url: str, revision: str, token_ids: list[int], secret: str = "") -> dict[str, Any]:
        keys = KeyFile(Path(secret), Principal.WORKER) if secret else None
        worker = _Worker(_Answers(token_ids))
        servicer = CallServicer(prefill=worker.prefill, decode=worker.decode)
        for role in Role:  # two workers of one address are not believed where there is a secret
            rpc = RpcServer(("baton.v1.WorkerCalls",), member_auth(keys, f"bench-{role}", WORKERS_RULES))
            servers.append(rpc)
            worker_pb2_grpc.add_WorkerCallsServicer_to_server(servicer, rpc.server)
            address = f"{HOST}:{rpc.bind(HOST, 0)}"
            await rpc.start()
            leases = RedisLeases(RedisConnection(redis_url), content_id(revision), keys=keys)
            tasks.append(asyncio.create_task(_hold_lease(role, leases, content_id(revision), address)))
        return {"address": address}

    await serve({"start": start})
    await cancel_and_wait(tasks)
    for rpc in servers:
        await rpc.stop(0.0)


async def _hold_lease(role: Role, leases: RedisLeases, content: str, address: str) -> None:
    worker_id = f"worker-{list(Role).index(role)}"
    keeper = LeaseKeeper(leases, worker_id, renew_s=1.0)
    info = WorkerInfo(
        id=worker_id,
        role=role,
        address=address,
        pid=os.getpid(),
        node=socket.gethostname(),
        epoch=await keeper.acquire(),
        content_id=content,
        wire_compat="bench",
        block_size=16,
        max_model_len=8192,
        known_fields=wire.KNOWN_FIELDS,
        incarnation=f"bench-{role}",
    )
    try:
        await keeper.run(lambda: (info, WorkerLoad(state=WorkerState.READY)))
    finally:
        await leases.close()


if __name__ == "__main__":
    uvloop.run(_main())
