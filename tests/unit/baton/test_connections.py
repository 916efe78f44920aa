"""What a connection of gRPC may do to a server that others use, too."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator

import pytest

from baton.rpc import RpcServer
from baton.rpc.server import MEMBERS_LIMITS, ClientLimits
from tests.support import http2
from tests.support.waiting import until

HEALTH = "/grpc.health.v1.Health/Check"
NUM_PINGS = 20_000


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[str]:
    """The address of a server as members have it."""
    rpc = RpcServer((), describes_itself=False)
    address = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
    await rpc.start()
    try:
        async with asyncio.timeout(60):
            yield address
    finally:
        await rpc.stop(0)


async def is_answered(connection: http2.Connection) -> bool:
    stream = connection.call(HEALTH)
    await connection.send(stream, http2.message(0), ends=True)
    return await connection.status(stream) == 0


async def test_each_ping_costs_the_same() -> None:
    """gRPC's strikes end a connection after some pings, but each ping until then costs more than the one before."""
    async with served() as address, http2.connected(address) as connection:
        for _ in range(10):
            connection.write(*[http2.frame(http2.PING, payload=bytes(8))] * (NUM_PINGS // 10))
            await connection.drain()
        await until(lambda: connection.num_pongs == NUM_PINGS, seen=lambda: connection.num_pongs)
        assert await is_answered(connection)
        assert not connection.goaways


async def test_members_servers_have_limits_that_hundreds_of_workers_do_not_meet() -> None:
    async with served() as address, http2.connected(address) as connection:
        await until(lambda: connection.settings)
        assert connection.settings[http2.MAX_CONCURRENT_STREAMS] == MEMBERS_LIMITS.max_streams == 1024
    assert MEMBERS_LIMITS.max_connections >= 4096


async def test_connections_leave_half_of_the_descriptors_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    async with served() as address, contextlib.AsyncExitStack() as stack:
        those = [await stack.enter_async_context(http2.connected(address)) for _ in range(3)]
        for each in those:
            assert await is_answered(each)
        for _ in range(20):
            async with http2.connected(address) as further:
                await until(lambda: further.is_closed)
        for each in those:
            assert await is_answered(each)


@pytest.mark.parametrize(("max_files", "most"), [(1024, 512), (10**6, 8192), (resource.RLIM_INFINITY, 8192)])
def test_a_servers_limit_is_its_own_or_half_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, max_files: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (max_files, max_files))
    limits = ClientLimits(max_connections=8192, max_streams=10)
    assert limits.options["grpc.max_allowed_incoming_connections"] == most
