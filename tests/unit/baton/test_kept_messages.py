"""A server keeps no message of a call that has ended, though garbage is seldom collected there."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest

from baton.errors import InvalidRequest, Unsupported
from baton.rpc import RpcServer, channel
from baton.rpc.errors import CallContext
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.waiting import until

Ending = Callable[[inference_pb2.TokenizeRequest, CallContext], Awaitable[Any]]


async def answers(request: inference_pb2.TokenizeRequest, context: CallContext) -> Any:
    return inference_pb2.TokenizeResponse()


async def refuses(request: inference_pb2.TokenizeRequest, context: CallContext) -> Any:
    raise InvalidRequest("too long")


async def refuses_for_a_reason(request: inference_pb2.TokenizeRequest, context: CallContext) -> Any:
    try:
        int(request.text)
    except ValueError as error:
        raise Unsupported("no number") from error


async def fails(request: inference_pb2.TokenizeRequest, context: CallContext) -> Any:
    raise ZeroDivisionError


async def waits(request: inference_pb2.TokenizeRequest, context: CallContext) -> Any:
    await asyncio.Event().wait()


class Servicer:
    def __init__(self) -> None:
        self.ending: Ending = answers
        self.has_begun = asyncio.Semaphore(0)

    async def ListModels(self, request: Any, context: Any) -> None:  # noqa: N802
        raise NotImplementedError

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.has_begun.release()
        return await self.ending(request, context)

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        self.has_begun.release()
        await self.ending(request, context)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Servicer, inference_pb2_grpc.InferenceStub]]:
    rpc, servicer = RpcServer(("baton.v1.Inference",)), Servicer()
    stand_in: Any = servicer
    inference_pb2_grpc.add_InferenceServicer_to_server(stand_in, rpc.server)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with channel(f"127.0.0.1:{port}") as connection:
        yield servicer, inference_pb2_grpc.InferenceStub(connection)
    await rpc.stop(0)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def num_kept(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.mark.parametrize("ending", [answers, refuses, refuses_for_a_reason, fails, waits])
@pytest.mark.parametrize("is_stream", [False, True], ids=["one", "stream"])
async def test_a_message_goes_with_its_call(
    served: tuple[Servicer, inference_pb2_grpc.InferenceStub],
    ending: Ending,
    is_stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # records would be kept, with their frames
    servicer, stub = served
    servicer.ending = ending
    kind: Any = inference_pb2.GenerateRequest if is_stream else inference_pb2.TokenizeRequest
    with no_collection():
        message, num_before = kind(text="a"), num_kept(kind)
        for _ in range(3):
            call: Any = stub.Generate(message) if is_stream else stub.Tokenize(message)
            if ending is waits:
                await asyncio.wait_for(servicer.has_begun.acquire(), 30.0)
                call.cancel()
            with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
                await (anext(aiter(call), None) if is_stream else call)
            del call
        await until(lambda: num_kept(kind) <= num_before)
        assert message.text == "a"
