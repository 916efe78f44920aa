"""A gateway's side of ext_proc, and an endpoint picker for it to call."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.cluster import RoutedModel, RouterInfo
from baton.config import Config, RouterConfig
from baton.errors import ModelNotFound
from router.picker import Picker, Request, Sources, Wanted
from router.picker.service import OWN_NAME
from router.picker.v3 import external_processor_pb2 as pb
from router.picker.v3 import external_processor_pb2_grpc as rpc
from router.picker.wire import DESTINATION, LB, SERVED, SUBSET, SUBSET_HINT

HOST = "127.0.0.1"
MODELS = {"llama": "content-llama", "qwen": "content-qwen"}


def router_at(address: str, loads: Mapping[str, int] | None = None, *, ready: int = 1, held: int = 0) -> RouterInfo:
    """A router's announcement; `loads` are its requests in flight by content id."""
    loads = dict.fromkeys(MODELS.values(), 0) if loads is None else loads
    return RouterInfo(
        id=address,
        pid=1,
        grpc="",
        http=address,
        mirror_lag_s=0.0,
        models=tuple(
            RoutedModel(content_id=each, in_flight=load, held=held, ready_workers=ready) for each, load in loads.items()
        ),
    )


@dataclass(slots=True)
class Cluster:
    """What a picker asks its router: set its fields to what the router shall answer."""

    routers: Sequence[RouterInfo] = tuple(router_at(f"10.0.0.{number}:8000") for number in range(1, 5))
    is_crowded: bool = False
    lookup: Callable[[Request, str, Mapping[str, Any]], Wanted] | None = None
    asked: list[tuple[str | None, str, Mapping[str, Any]]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    """Names that the clients gave their sessions, one for each look-up."""

    @property
    def sources(self) -> Sources:
        return Sources(routers=lambda: self.routers, lookup=self._lookup, is_crowded=lambda: self.is_crowded)

    def _lookup(self, request: Request, model: str, body: Mapping[str, Any]) -> Wanted:
        self.asked.append((request.api_key, model, body))
        self.sessions.append(request.session)
        if self.lookup is not None:
            return self.lookup(request, model, body)
        if model not in MODELS:
            raise ModelNotFound(f"model {model!r} is not served", "model")
        return Wanted(str(body.get("user", "")).encode(), frozenset({MODELS[model]}))


@contextlib.asynccontextmanager
async def running(cluster: Cluster, **settings: Any) -> AsyncGenerator[tuple[Picker, int]]:
    """A picker that serves, with its port."""
    picker = Picker(Config(router=RouterConfig(**settings)), cluster.sources)
    port = picker.bind(HOST, 0, None)
    await picker.start()
    await picker.set_serving(True)
    try:
        yield picker, port
    finally:
        await picker.stop(0)


@contextlib.asynccontextmanager
async def channel_to(port: int) -> AsyncGenerator[grpc.aio.Channel]:
    """A channel that trusts the certificate that the picker has made."""
    found = await asyncio.to_thread(ssl.get_server_certificate, (HOST, port))
    credentials = grpc.ssl_channel_credentials(found.encode())
    options = [("grpc.ssl_target_name_override", OWN_NAME)]
    async with grpc.aio.secure_channel(f"{HOST}:{port}", credentials, options=options) as channel:
        yield channel


class Stream:
    """The stream of one HTTP request, from the gateway's side."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = rpc.ExternalProcessorStub(channel).Process()

    async def send(self, message: pb.ProcessingRequest) -> None:
        await self.call.write(message)

    async def next(self) -> pb.ProcessingResponse:
        async with asyncio.timeout(20):
            found = await self.call.read()
        assert found is not grpc.aio.EOF, "the picker has ended the stream"
        assert isinstance(found, pb.ProcessingResponse)
        return found

    async def ends(self) -> grpc.StatusCode:
        """The status with which the picker ends the stream, after which it sends nothing."""
        async with asyncio.timeout(20):
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await self.call.read() is grpc.aio.EOF
            code = await self.call.code()
        assert isinstance(code, grpc.StatusCode)
        return code

    async def is_silent(self, seconds: float = 0.1) -> bool:
        """Whether the picker sends nothing for that long."""
        done, _ = await asyncio.wait([asyncio.ensure_future(self.call.read())], timeout=seconds)
        return not done


def headers(
    given: Mapping[str, str] | None = None,
    *,
    path: str = "/v1/chat/completions",
    ends: bool = False,
    modes: tuple[pb.BodySendMode.ValueType, pb.BodySendMode.ValueType] | None = None,
    subset: Sequence[str] | str | None = None,
) -> pb.ProcessingRequest:
    """The message with a request's headers. Without `modes` the gateway does not say how it sends bodies."""
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=ends))
    every = {":method": "GET" if ends else "POST", ":path": path, **(given or {})}
    for name, value in every.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    if subset is not None:
        hint = message.metadata_context.filter_metadata[SUBSET_HINT]
        hint.update({SUBSET: subset if isinstance(subset, str) else list(subset)})
    return message


def body(piece: bytes, *, ends: bool = True) -> pb.ProcessingRequest:
    """A piece of a request's body."""
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=piece, end_of_stream=ends))


def served_by(endpoint: str) -> pb.ProcessingRequest:
    """The headers of a response, with the endpoint that has sent it."""
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
    message.metadata_context.filter_metadata[LB].update({SERVED: endpoint})
    return message


def picked(response: pb.ProcessingResponse) -> list[str]:
    """The endpoints that a response names, in the header and the metadata alike."""
    kind = response.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), response
    common = getattr(response, kind).response
    (option,) = common.header_mutation.set_headers
    assert option.header.key == DESTINATION
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert common.clear_route_cache
    value = option.header.raw_value.decode()
    assert response.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value == value
    return [*value.split(",")]
