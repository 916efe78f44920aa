"""Bytes that are no message are refused at every method of every service, with a sentence and without a traceback."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from baton.errors import InvalidRequest
from baton.rpc import RpcServer, channel, from_rpc_error
from baton.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.wire.convert import MAX_FIELDS
from worker.calls import CallServicer

FILES = (inference_pb2, admin_pb2, worker_pb2, kv_pb2, health_pb2, reflection_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}": method.client_streaming
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "List"  # of the health service; only newer releases of it serve that
}
GARBAGE = b"\xff"


class Reading(kv_pb2_grpc.KvControlServicer):
    """Reads what it is sent, as a worker does."""

    async def Pull(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        async for _ in request_iterator:
            await context.write(kv_pb2.SessionResponse())


class Nobody:
    """Has every method, none of which is to be called."""

    def __getattr__(self, name: str) -> Any:
        return self._fail

    async def _fail(self, request: Any, context: Any) -> Any:
        raise AssertionError("a handler was called")


@pytest.fixture
async def server() -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    """A server of all services of all processes, and a channel to it."""
    rpc = RpcServer(("baton.v1.Inference",))
    nobody: Any = Nobody()
    inference_pb2_grpc.add_InferenceServicer_to_server(nobody, rpc.server)
    admin_pb2_grpc.add_AdminServicer_to_server(nobody, rpc.server)
    worker_pb2_grpc.add_WorkerCallsServicer_to_server(CallServicer(), rpc.server)
    worker_pb2_grpc.add_WorkerControlServicer_to_server(nobody, rpc.server)
    worker_pb2_grpc.add_WorkerLogServicer_to_server(nobody, rpc.server)
    worker_pb2_grpc.add_ModelFilesServicer_to_server(nobody, rpc.server)
    kv_pb2_grpc.add_KvControlServicer_to_server(Reading(), rpc.server)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with channel(f"127.0.0.1:{port}") as connection:
        yield rpc, connection
    await rpc.stop(0)


async def refusal(connection: grpc.aio.Channel, method: str, *messages: bytes) -> grpc.aio.AioRpcError:
    async def said() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    streams: Any = connection.stream_stream(method)
    answers: Any = connection.unary_stream(method)
    call = streams(said(), timeout=30) if METHODS[method] else answers(*messages, timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


@pytest.mark.parametrize("method", METHODS)
async def test_garbage_is_refused_with_a_sentence(
    server: tuple[RpcServer, grpc.aio.Channel], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    rpc, connection = server
    with caplog.at_level(logging.INFO):
        error = await refusal(connection, method, GARBAGE)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message is not in protobuf's form" in (error.details() or "")
    assert type(from_rpc_error(error, "peer")) is InvalidRequest
    assert rpc.malformed.total == 1
    assert not caplog.records


async def test_a_clients_message_of_very_many_fields_is_refused_before_it_is_read(
    server: tuple[RpcServer, grpc.aio.Channel],
) -> None:
    rpc, connection = server
    for method in (each for each in METHODS if each.startswith(("/baton.v1.Inference/", "/baton.v1.Admin/"))):
        error = await refusal(connection, method, b"\x08\x01" * 40_000 + GARBAGE)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"more than {MAX_FIELDS} fields" in (error.details() or ""), method
    assert rpc.malformed.total == 0


async def test_garbage_behind_a_message_is_refused_like_the_first(
    server: tuple[RpcServer, grpc.aio.Channel], caplog: pytest.LogCaptureFixture
) -> None:
    rpc, connection = server
    for method in ("/baton.v1.WorkerCalls/Serve", "/baton.v1.KvControl/Session"):
        error = await refusal(connection, method, b"", GARBAGE)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, method
    assert rpc.malformed.total == 2
    assert not caplog.records
