from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest

from baton import errors
from baton.errors import BatonError, InvalidRequest, NotAMember, NotWhole, Overloaded, WorkerFailed, first_of
from baton.rpc import RpcServer, channel, from_rpc_error
from baton.rpc.errors import is_lost
from baton.v1 import inference_pb2, inference_pb2_grpc


def tree(cls: type[BatonError], depth: int = 0) -> list[tuple[int, type[BatonError]]]:
    return [(depth, cls), *(entry for sub in cls.__subclasses__() for entry in tree(sub, depth + 1))]


CLASSES = [cls for _, cls in tree(BatonError)]


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    drawn = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^    ([│ ├└─]*)(\w+) +([A-Z_]+) +(\d{3})\b", line):
            branch, name, status, http = match.groups()
            drawn.append((len(branch) // 4, name, status, int(http)))
    assert drawn == [(depth, cls.__name__, cls.status, cls.http) for depth, cls in tree(BatonError)]


def test_every_error_of_the_module_is_in_the_tree() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_statuses_exist(cls: type[BatonError]) -> None:
    assert cls.status in grpc.StatusCode.__members__
    assert 400 <= cls.http < 600
    is_clients_fault = grpc.StatusCode[cls.status] in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
    )
    # A message that is not whole in time is the client's fault, too, whatever gRPC calls it otherwise.
    # The caller that is refused as no member is a part of ours to the client whose request it carries.
    assert (is_clients_fault or cls is NotWhole) == (cls.http < 500 or cls is NotAMember)


class Raising(inference_pb2_grpc.InferenceServicer):
    """Raises the error that the request's id names."""

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(text="first")
        raise self.error(request.request_id)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.TokenizeResponse:
        if request.text == "RuntimeError":
            raise RuntimeError("a bug")
        if request.text == "long":
            raise InvalidRequest("x" * 100_000)
        raise self.error(request.text)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse()

    @staticmethod
    def error(name: str) -> BatonError:
        cls: type[BatonError] = getattr(errors, name)
        return cls("what happened", 2.5) if issubclass(cls, Overloaded) else cls("what happened")


@pytest.fixture
async def stub() -> AsyncGenerator[inference_pb2_grpc.InferenceAsyncStub]:
    rpc = RpcServer(["baton.v1.Inference"])
    inference_pb2_grpc.add_InferenceServicer_to_server(Raising(), rpc.server)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with channel(f"127.0.0.1:{port}") as connection:
        yield inference_pb2_grpc.InferenceStub(connection)
    await rpc.stop(0)


async def test_every_error_crosses_grpc_as_what_it_was(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
    for cls in CLASSES:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text=cls.__name__))
        assert failure.value.code() is grpc.StatusCode[cls.status]
        assert failure.value.details() == "what happened"
        call = stub.Generate(inference_pb2.GenerateRequest(request_id=cls.__name__))
        responses = aiter(call)
        assert (await anext(responses)).text == "first"
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await anext(responses)
        error = from_rpc_error(failure.value, "worker")
        if cls is BatonError:  # which says no more than that the peer failed
            assert type(error) is WorkerFailed
            continue
        assert type(error) is cls
        assert str(error) == "what happened"
        if isinstance(error, Overloaded):
            assert error.retry_after_s == 2.5


async def test_what_is_none_of_ours_means_that_the_peer_failed(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="RuntimeError"))
    error = from_rpc_error(failure.value, "decode-0")
    assert type(error) is WorkerFailed
    assert failure.value.code() is grpc.StatusCode.INTERNAL
    assert str(error) == "decode-0 failed: internal error; the server's log says more"


async def test_an_error_of_the_peers_is_no_lost_connection(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
    """Not even one that has the status of a lost connection."""
    for cls in CLASSES:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text=cls.__name__))
        assert not is_lost(failure.value), cls
    async with channel("127.0.0.1:1") as nobody:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await inference_pb2_grpc.InferenceStub(nobody).Tokenize(inference_pb2.TokenizeRequest(text="x"))
    assert is_lost(failure.value)


async def test_a_long_message_is_cut_and_keeps_its_status(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
    """gRPC refuses long trailers, and would answer RESOURCE_EXHAUSTED in our place."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="long"))
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(failure.value.details() or "") == 1024


def test_param_names_the_field() -> None:
    assert InvalidRequest("x", "top_p").param == "top_p"
    assert InvalidRequest("x").param is None


def test_of_groups_within_groups_the_first_error_is_found() -> None:
    first, second = NotWhole("this"), NotWhole("that")
    nested: list[Any] = [ExceptionGroup("of tasks", [first]), second]
    assert first_of(BaseExceptionGroup("of tasks", nested)) is first
    assert first_of(BaseExceptionGroup("of tasks", nested[::-1])) is second
