"""Runs a prefill worker inside an asyncio process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from baton.cluster import Role
from baton.config import Config
from baton.engine.runner import Runner
from baton.rpc import RpcServer
from baton.rpc.calls import CallServicer
from baton.v1 import kv_pb2_grpc, worker_pb2_grpc
from kvstore.member import Member
from prefill_worker.service import PrefillService


@contextlib.asynccontextmanager
async def running(
    config: Config, worker_id: str, host: str, runner: Runner
) -> AsyncGenerator[tuple[Member, asyncio.Task[None]]]:
    """A prefill worker that takes traffic while the block is entered. Yields as `Member.joined` does."""
    member = Member(Role.PREFILL, worker_id, host, config, runner)
    rpc = RpcServer(["baton.v1.WorkerCalls", "baton.v1.KvControl"])
    service = PrefillService(worker_id, member.loop, member.kv)
    worker_pb2_grpc.add_WorkerCallsServicer_to_server(CallServicer(prefill=service.prefill), rpc.server)
    kv_pb2_grpc.add_KvControlServicer_to_server(member.kv, rpc.server)
    port = rpc.bind(host, 0)
    async with member.joined(rpc, port) as ended:
        yield member, ended
