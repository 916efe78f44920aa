"""What a server takes of messages that do not end, of whom, and for how long; and that others are served meanwhile.

A client that keeps to the windows can send what the server takes and no more: what was sent is what is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import BatonError, InvalidRequest, NotWhole
from baton.rpc import RpcServer, arrivals, channel, from_rpc_error
from baton.rpc.arrivals import HELD_BYTES, MESSAGE_S, OPEN_HELD_BYTES
from baton.rpc.member_auth import WORKERS_RULES, member_auth
from baton.rpc.server import UNREAD_BYTES
from baton.trust import KeyFile, Principal, draw_secret, write_private
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.admission.tenants import TenantBook
from router.api.grpc_api import MAX_MESSAGE_BYTES, SERVICE_NAMES, Authentication
from tests.support import http2
from tests.support.waiting import until

TOKENIZE, GENERATE = "/baton.v1.Inference/Tokenize", "/baton.v1.Inference/Generate"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
WHOLE = http2.message(MAX_MESSAGE_BYTES)
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, UNAUTHENTICATED = 4, 8, 12, 16
ONE_CONNECTION = HELD_BYTES // 4
NO_KEY: dict[str, str] = {}
KEY = {"authorization": "Bearer key-a"}


class Servicer(inference_pb2_grpc.InferenceServicer):
    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inference_pb2.TokenizeResponse()

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("nobody asks")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield inference_pb2.GenerateResponse()


@contextlib.asynccontextmanager
async def served(rpc: RpcServer) -> AsyncIterator[str]:
    """The address of a server until the block is left."""
    inference_pb2_grpc.add_InferenceServicer_to_server(Servicer(), rpc.server)
    address = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
    await rpc.start()
    await rpc.set_serving(True)
    try:
        async with asyncio.timeout(60):
            yield address
    finally:
        await rpc.stop(0)


def routers(message_s: float = MESSAGE_S, *endpoints: Any) -> RpcServer:
    return RpcServer(SERVICE_NAMES, endpoints, max_message_bytes=MAX_MESSAGE_BYTES, message_s=message_s)


def with_tenants(folder: Path) -> RpcServer:
    path = folder / "tenants.yaml"
    path.write_text(f"acme:\n  key_sha256: [{hashlib.sha256(b'key-a').hexdigest()}]\n")
    return routers(MESSAGE_S, Authentication(TenantBook.load(path)))


def workers(folder: Path) -> RpcServer:
    write_private(folder / "secret", draw_secret())
    endpoints = member_auth(KeyFile(folder / "secret", Principal.WORKER), "a1", WORKERS_RULES)
    return RpcServer((), endpoints, max_message_bytes=MAX_MESSAGE_BYTES, describes_itself=False)


@contextlib.asynccontextmanager
async def sending(connection: http2.Connection, method: str, num: int, data: bytes) -> AsyncIterator[list[int]]:
    """Has so many calls send as much of the data as the server takes until the block is left. Yields their streams."""
    streams = [connection.call(method, KEY) for _ in range(num)]
    tasks = [asyncio.create_task(connection.send(stream, data)) for stream in streams]
    try:
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def is_served(address: str, times: int = 1) -> bool:
    async with channel(address, None, [("grpc.use_local_subchannel_pool", 1)]) as link:
        stub = inference_pb2_grpc.InferenceStub(link)
        calls = (stub.Tokenize(inference_pb2.TokenizeRequest(), metadata=tuple(KEY.items())) for _ in range(times))
        return len(await asyncio.gather(*calls)) == times


async def is_healthy(address: str) -> bool:
    async with channel(address, None, [("grpc.use_local_subchannel_pool", 1)]) as link:
        answer = await health_pb2_grpc.HealthStub(link).Check(health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


# -- who is not admitted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "fields", "status"),
    [
        (TOKENIZE, NO_KEY, UNAUTHENTICATED),
        (GENERATE, NO_KEY, UNAUTHENTICATED),
        (TOKENIZE, {"authorization": "Bearer nobody"}, UNAUTHENTICATED),
        ("/baton.v1.Inference/Unknown", KEY, UNIMPLEMENTED),
        ("/baton.v1.Admin/GetStatus", NO_KEY, UNAUTHENTICATED),
        ("/unknown.Service/Method", NO_KEY, UNIMPLEMENTED),
    ],
)
async def test_a_router_refuses_a_call_of_which_no_message_has_come(
    tmp_path: Path, method: str, fields: dict[str, str], status: int
) -> None:
    async with served(with_tenants(tmp_path)) as address, http2.connected(address) as connection:
        assert await connection.status(connection.call(method, fields)) == status
        assert connection.num_sent == 0


@pytest.mark.parametrize(
    "method", ["/baton.v1.WorkerControl/Drain", "/baton.v1.WorkerCalls/Serve", "/baton.v1.KvControl/Pull", REFLECTION]
)
async def test_a_worker_refuses_a_strangers_call_of_which_no_message_has_come(tmp_path: Path, method: str) -> None:
    async with served(workers(tmp_path)) as address, http2.connected(address) as connection:
        assert await connection.status(connection.call(method)) == UNAUTHENTICATED
        assert connection.num_sent == 0


# -- what is held ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [TOKENIZE, GENERATE])
async def test_of_a_connections_messages_little_is_held(method: str) -> None:
    async with served(routers()) as address, http2.connected(address) as connection:
        await until(lambda: connection.settings)
        num_read = ONE_CONNECTION // MAX_MESSAGE_BYTES
        most = num_read * len(WHOLE[:-1]) + (60 - num_read) * UNREAD_BYTES
        async with sending(connection, method, 60, WHOLE[:-1]):
            await until(lambda: connection.num_sent >= most, seen=lambda: connection.num_sent)
            assert await is_served(address)
            assert connection.num_sent == most


@pytest.mark.parametrize("num_connections", [4, 12])
async def test_of_all_connections_messages_little_is_held_and_others_are_served(num_connections: int) -> None:
    async with served(routers()) as address, contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(http2.connected(address)) for _ in range(num_connections)]
        for each in connections:
            await stack.enter_async_context(sending(each, TOKENIZE, 60, WHOLE[:-1]))
        await until(lambda: sum(each.num_sent for each in connections) >= HELD_BYTES)
        for _ in range(20):
            assert await is_served(address)
            most = HELD_BYTES + 60 * num_connections * UNREAD_BYTES
            assert sum(each.num_held for each in connections) <= most
        statuses = {status for each in connections for status in each.statuses}
        assert statuses == {RESOURCE_EXHAUSTED}, "those that waited too long have made room"
        most = HELD_BYTES // 2 + 60 * num_connections * UNREAD_BYTES
        while sum(each.num_held for each in connections) > most:
            assert await is_served(address)
        for _ in range(10):
            assert await is_served(address)
            assert sum(each.num_held for each in connections) <= most, "the other half is free for others"


async def test_what_everybody_may_ask_takes_no_place_from_others(tmp_path: Path) -> None:
    for rpc, methods in ((with_tenants(tmp_path), (HEALTH, REFLECTION)), (workers(tmp_path), (HEALTH,))):
        async with served(rpc) as address, contextlib.AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(http2.connected(address)) for _ in range(6)]
            for each in connections:
                for method in methods:
                    await stack.enter_async_context(sending(each, method, 20, WHOLE[:-1]))
            await until(lambda those=connections: sum(each.num_sent for each in those) >= OPEN_HELD_BYTES)  # type: ignore[misc]
            for _ in range(5):
                assert await is_healthy(address)
                most = OPEN_HELD_BYTES + 20 * len(connections) * len(methods) * UNREAD_BYTES
                assert sum(each.num_held for each in connections) <= most


async def test_many_more_small_messages_at_a_time_than_there_are_places_are_served() -> None:
    """gRPC itself ends some where a thousand calls begin before the server has looked at one."""
    async with served(routers()) as address:
        assert await asyncio.gather(*(is_served(address, 300) for _ in range(3))) == [True] * 3


async def test_connections_that_break_leave_no_place_taken() -> None:
    async with served(routers()) as address:
        for _ in range(6):
            async with http2.connected(address) as connection, sending(connection, TOKENIZE, 20, WHOLE[:-1]):
                await until(lambda: connection.num_sent > ONE_CONNECTION)
        async with http2.connected(address) as connection, sending(connection, TOKENIZE, 20, WHOLE[:-1]):
            await until(lambda: connection.num_sent > ONE_CONNECTION)
            assert await is_served(address)


async def test_who_waits_longest_on_the_busiest_connection_goes_where_too_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrivals, "MAX_WAITING", 8)
    async with served(routers()) as address, http2.connected(address) as connection:
        num_places = ONE_CONNECTION // MAX_MESSAGE_BYTES
        async with sending(connection, TOKENIZE, num_places + 8 + 3, WHOLE[:-1]) as streams:
            gone = streams[num_places : num_places + 3]
            assert [await connection.status(each) for each in gone] == [RESOURCE_EXHAUSTED] * 3
            assert await is_served(address)
            assert connection.num_ended == 3


# -- how long ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [TOKENIZE, GENERATE, HEALTH, REFLECTION])
@pytest.mark.parametrize("data", [b"", WHOLE[:4], WHOLE[:-1]], ids=["nothing", "a bit", "almost all"])
async def test_a_message_has_to_be_whole_in_time(method: str, data: bytes) -> None:
    async with (
        served(routers(message_s=0.3)) as address,
        http2.connected(address) as connection,
        sending(connection, method, 1, data) as (stream,),
    ):
        assert await connection.status(stream) == DEADLINE_EXCEEDED


@pytest.mark.parametrize("kind", [NotWhole, InvalidRequest])
async def test_a_call_without_a_message_has_a_typed_error(kind: type[BatonError]) -> None:
    async with served(routers(message_s=0.3)) as address, channel(address) as link:
        call: Any = link.stream_unary(TOKENIZE)()
        if kind is InvalidRequest:
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert type(from_rpc_error(caught.value, "router")) is kind


async def test_a_message_that_comes_slowly_is_served() -> None:
    async with served(routers()) as address, http2.connected(address) as connection:
        stream = connection.call(TOKENIZE)
        data = http2.message(0)
        for at in range(len(data)):
            await connection.send(stream, data[at : at + 1], ends=at == len(data) - 1)
            await asyncio.sleep(0.02)
        assert await connection.status(stream) == 0
