"""What a gateway is told over ext_proc, in each of its body modes, by a picker that it calls over TLS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import Unauthenticated
from router.picker import Wanted
from router.picker.service import LIVENESS, READINESS, SERVICE_NAME
from router.picker.v3 import external_processor_pb2 as pb
from router.picker.wire import DESTINATION, LB, MAX_PIECE
from tests.support.gateways import (
    MODELS,
    Cluster,
    Stream,
    body,
    channel_to,
    headers,
    picked,
    router_at,
    running,
    served_by,
)

CHAT = json.dumps({"model": "llama", "user": "ada", "messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
ALL = {each.http for each in Cluster().routers}
DUPLEX = (pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def channel(cluster: Cluster) -> AsyncGenerator[grpc.aio.Channel]:
    async with running(cluster) as (_, port), channel_to(port) as channel:
        yield channel


def immediate(response: pb.ProcessingResponse) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body with which the gateway answers its client."""
    assert response.WhichOneof("response") == "immediate_response", response
    found = response.immediate_response
    told = {each.header.key: each.header.raw_value.decode() for each in found.headers.set_headers}
    assert told["content-type"] == "application/json"
    return found.status.code, told, json.loads(found.body)


async def pick_for(channel: grpc.aio.Channel, chat: bytes = CHAT, *args: Any, **kwargs: Any) -> pb.ProcessingResponse:
    """The first response to a request in full duplex mode."""
    stream = Stream(channel)
    await stream.send(headers(*args, **kwargs))
    await stream.send(body(chat))
    return await stream.next()


@pytest.mark.parametrize("modes", [None, DUPLEX, (pb.GRPC, pb.GRPC)])
@pytest.mark.parametrize("size", [1, 1000, 10**6])
async def test_a_streamed_body_is_kept_until_it_is_whole_and_comes_back_unchanged(
    channel: grpc.aio.Channel, cluster: Cluster, modes: Any, size: int
) -> None:
    stream, chat = Stream(channel), CHAT if size > 1 else CHAT[:700] + b'"}]}'
    await stream.send(headers(modes=modes))
    pieces = [chat[at : at + size] for at in range(0, len(chat), size)]
    for piece in pieces:
        await stream.send(body(piece, ends=False))
    assert not cluster.asked
    await stream.send(body(b""))
    assert set(picked(await stream.next())) == ALL
    back, is_last = b"", False
    while not is_last:
        streamed = (await stream.next()).request_body.response.body_mutation.streamed_response
        assert len(streamed.body) <= MAX_PIECE
        back, is_last = back + streamed.body, streamed.end_of_stream
    assert back == chat
    assert cluster.asked == [(None, "llama", json.loads(chat))]
    await stream.call.done_writing()
    assert await stream.ends() is grpc.StatusCode.OK


async def test_trailers_end_a_streamed_body(channel: grpc.aio.Channel) -> None:
    stream = Stream(channel)
    await stream.send(headers(modes=DUPLEX))
    await stream.send(body(CHAT[:100], ends=False))
    await stream.send(body(CHAT[100:], ends=False))
    await stream.send(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    first = picked(await stream.next())
    assert first == picked(await pick_for(channel))
    back = b""
    while (response := await stream.next()).WhichOneof("response") == "request_body":
        assert not response.request_body.response.body_mutation.streamed_response.end_of_stream
        back += response.request_body.response.body_mutation.streamed_response.body
    assert back == CHAT
    assert response.WhichOneof("response") == "request_trailers"


async def test_a_refusal_at_the_trailers_is_the_last_message(channel: grpc.aio.Channel, cluster: Cluster) -> None:
    cluster.is_crowded = True
    stream = Stream(channel)
    await stream.send(headers(modes=DUPLEX))
    await stream.send(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    assert immediate(await stream.next())[0] == 429
    assert await stream.ends() is grpc.StatusCode.OK


@pytest.mark.parametrize("mode", [pb.BUFFERED, pb.BUFFERED_PARTIAL])
async def test_a_buffered_body_gets_the_endpoint_once_the_headers_are_answered(
    channel: grpc.aio.Channel, mode: pb.BodySendMode.ValueType
) -> None:
    stream = Stream(channel)
    await stream.send(headers(modes=(mode, pb.NONE)))
    response = await stream.next()
    assert response.WhichOneof("response") == "request_headers"
    assert not response.request_headers.response.header_mutation.set_headers
    await stream.send(body(CHAT))
    response = await stream.next()
    assert picked(response) == picked(await pick_for(channel))
    assert not response.request_body.response.HasField("body_mutation")
    await stream.send(body(b"more than the gateway buffers"))
    response = await stream.next()
    assert response.WhichOneof("response") == "request_body"
    assert not response.request_body.response.HasField("header_mutation")


async def test_a_request_of_headers_and_trailers_gets_the_endpoint_in_the_metadata(channel: grpc.aio.Channel) -> None:
    stream = Stream(channel)
    await stream.send(headers(modes=(pb.BUFFERED, pb.NONE)))
    await stream.next()
    await stream.send(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    response = await stream.next()
    assert response.WhichOneof("response") == "request_trailers"
    named = response.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value
    assert set(named.split(",")) == ALL


async def test_what_buffers_of_a_long_body_are_enough_to_pick_by_load(
    channel: grpc.aio.Channel, cluster: Cluster
) -> None:
    stream = Stream(channel)
    await stream.send(headers(modes=(pb.BUFFERED_PARTIAL, pb.NONE)))
    await stream.next()
    await stream.send(body(CHAT[:1000], ends=False))
    assert set(picked(await stream.next())) == ALL
    assert not cluster.asked


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED])
async def test_modes_in_which_the_body_comes_too_late_are_served_by_load(
    channel: grpc.aio.Channel, cluster: Cluster, mode: pb.BodySendMode.ValueType
) -> None:
    stream = Stream(channel)
    await stream.send(headers(modes=(mode, pb.NONE)))
    assert set(picked(await stream.next())) == ALL
    for ends in (False, True):
        await stream.send(body(CHAT[:100], ends=ends))
        response = await stream.next()
        assert response.WhichOneof("response") == "request_body"
        assert not response.request_body.response.HasField("body_mutation")
    assert not cluster.asked


async def test_requests_without_a_body_are_picked_at_their_headers(channel: grpc.aio.Channel, cluster: Cluster) -> None:
    cluster.is_crowded = True  # which does not concern them
    stream = Stream(channel)
    await stream.send(headers(path="/v1/models", ends=True))
    assert set(picked(await stream.next())) == ALL


async def test_the_parts_of_a_response_pass_unchanged(channel: grpc.aio.Channel) -> None:
    for modes, comes_back in ((None, True), (DUPLEX, True), ((pb.NONE, pb.STREAMED), False)):
        stream = Stream(channel)
        await stream.send(headers(path="/v1/models", ends=True, modes=modes))
        (first, *_) = picked(await stream.next())
        await stream.send(served_by(first))
        assert (await stream.next()).WhichOneof("response") == "response_headers"
        long = b"y" * (MAX_PIECE + 1)
        await stream.send(pb.ProcessingRequest(response_body=pb.HttpBody(body=b"z", end_of_stream=False)))
        await stream.send(pb.ProcessingRequest(response_body=pb.HttpBody(body=long, end_of_stream=True)))
        mutations = [(await stream.next()).response_body.response for _ in range(3 if comes_back else 2)]
        if comes_back:
            pieces = [each.body_mutation.streamed_response for each in mutations]
            assert b"".join(each.body for each in pieces) == b"z" + long
            assert [each.end_of_stream for each in pieces] == [False, False, True]
        else:
            assert not any(each.HasField("body_mutation") for each in mutations)
        await stream.send(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
        assert (await stream.next()).WhichOneof("response") == "response_trailers"


async def test_a_gateway_that_only_observes_gets_no_responses(channel: grpc.aio.Channel) -> None:
    stream = Stream(channel)
    message = headers(path="/v1/models", ends=True)
    message.observability_mode = True
    await stream.send(message)
    assert await stream.is_silent()


# -- the choice --------------------------------------------------------------------------------------------------------


async def test_a_session_stays_at_its_router_and_others_go_elsewhere(channel: grpc.aio.Channel) -> None:
    def chat(user: str) -> bytes:
        return json.dumps({"model": "llama", "user": user}).encode()

    first = [picked(await pick_for(channel, chat("ada")))[0] for _ in range(5)]
    assert len(set(first)) == 1
    assert len({picked(await pick_for(channel, chat(f"user {number}")))[0] for number in range(40)}) == len(ALL)


async def test_the_picker_chooses_among_those_that_the_gateway_allows(channel: grpc.aio.Channel) -> None:
    one, two = sorted(ALL)[:2]
    assert set(picked(await pick_for(channel, subset=[one, two, "10.9.9.9:1"]))) == {one, two}
    assert picked(await pick_for(channel, subset=f"{one}, 10.9.9.9:1")) == [one]  # a header that became metadata
    for none in ([], ["10.9.9.9:1"], ""):
        status, _, answer = immediate(await pick_for(channel, subset=none))
        assert status == 503
        assert "that the gateway allows" in answer["error"]["message"]


async def test_without_routers_at_ip_addresses_clients_get_503(channel: grpc.aio.Channel, cluster: Cluster) -> None:
    for none in ((), (router_at("router-0:8000"),)):
        cluster.routers = none
        status, _, answer = immediate(await pick_for(channel))
        assert (status, answer["error"]["code"]) == (503, "no_worker")


async def test_a_crowded_endpoint_is_spared_requests(channel: grpc.aio.Channel, cluster: Cluster) -> None:
    cluster.is_crowded = True
    status, told, answer = immediate(await pick_for(channel))
    assert (status, told["retry-after"], answer["error"]["code"]) == (429, "1", "rate_limit_exceeded")
    stream = Stream(channel)
    await stream.send(headers(modes=(pb.NONE, pb.NONE)))
    assert immediate(await stream.next())[0] == 429


async def test_unknown_models_are_refused_in_the_format_of_the_clients_api(channel: grpc.aio.Channel) -> None:
    chat = json.dumps({"model": "gpt \ud800"}).encode()
    named = {"x-request-id": "mine-1"}
    status, told, answer = immediate(await pick_for(channel, chat, named))
    assert (status, told["x-request-id"]) == (404, "mine-1")
    assert answer["error"]["code"] == "model_not_found"
    assert answer["error"]["param"] == "model"
    status, _, answer = immediate(await pick_for(channel, chat, named, path="/v1/messages?beta=true"))
    assert (status, answer["error"]["type"], answer["request_id"]) == (404, "not_found_error", "mine-1")


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        b"--form\r\n",
        b"[" * 100_000,
        b'{"model": "llama"' + b', "a": []' * 20_000 + b"}",
    ],
)
async def test_bodies_that_say_nothing_go_to_any_router_which_judges_them(
    channel: grpc.aio.Channel, cluster: Cluster, odd: bytes
) -> None:
    found = {picked(await pick_for(channel, odd))[0] for _ in range(12)}
    assert len(found) > 1
    assert not cluster.asked


async def test_a_request_that_the_lookup_refuses_otherwise_goes_to_any_router(
    channel: grpc.aio.Channel, cluster: Cluster
) -> None:
    def refuse(*_: Any) -> Wanted:
        raise Unauthenticated("no API key")

    cluster.lookup = refuse
    assert set(picked(await pick_for(channel))) == ALL


async def test_the_lookup_gets_key_session_and_model(channel: grpc.aio.Channel, cluster: Cluster) -> None:
    await pick_for(channel, CHAT, {"authorization": "Bearer sk-1", "x-gateway-destination-endpoint": "6.6.6.6:6"})
    cluster.lookup = lambda *_: Wanted(b"")
    for model in (None, 7, ["llama"]):
        await pick_for(channel, json.dumps({"model": model}).encode(), {"X-Api-Key": "sk-2", "X-Session-Id": "mine"})
    assert [each[:2] for each in cluster.asked] == [("sk-1", "llama"), *[("sk-2", "")] * 3]
    assert cluster.sessions == ["", *["mine"] * 3]


async def test_routers_that_serve_the_model_are_chosen(channel: grpc.aio.Channel, cluster: Cluster) -> None:
    one, two = "10.0.0.1:8000", "10.0.0.2:8000"
    cluster.routers = (router_at(one, {MODELS["llama"]: 0}), router_at(two, {MODELS["qwen"]: 0}))
    assert picked(await pick_for(channel, b'{"model": "llama"}')) == [one]
    assert picked(await pick_for(channel, b'{"model": "qwen"}')) == [two]


async def test_a_router_that_did_not_serve_comes_last_for_a_while(
    channel: grpc.aio.Channel, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def waiting() -> Stream:
        stream = Stream(channel)
        await stream.send(headers(modes=(pb.BUFFERED, pb.NONE)))
        await stream.next()
        await stream.send(body(CHAT))
        assert picked(await stream.next()) == order
        return stream

    async def served(stream: Stream, endpoint: str) -> None:
        await stream.send(served_by(endpoint))
        await stream.next()

    order = picked(await pick_for(channel))
    for odd in (order[0], "", "10.9.9.9:1", "\r\n"):
        await served(await waiting(), odd)
    one, two = await waiting(), await waiting()
    assert not caplog.messages
    await served(one, order[1])
    assert picked(await pick_for(channel)) == [*order[1:], order[0]]
    monkeypatch.setattr("router.picker.exchange.FAILING_S", 0.0)
    await served(two, order[1])
    assert picked(await pick_for(channel)) == order
    assert len(caplog.messages) == 1


# -- health ------------------------------------------------------------------------------------------------------------


async def test_health_checks_tell_readiness_from_life(cluster: Cluster) -> None:
    async def status(channel: grpc.aio.Channel, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        found: health_pb2.HealthCheckResponse = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return found.status

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with running(cluster) as (picker, port), channel_to(port) as channel:
        for is_ready in (True, False):
            await picker.set_serving(is_ready)
            for name in ("", SERVICE_NAME, READINESS):
                assert await status(channel, name) == (serving if is_ready else not_serving)
            assert await status(channel, LIVENESS) == serving


async def test_streams_that_run_when_the_picker_stops_may_end(cluster: Cluster) -> None:
    async with running(cluster) as (picker, port), channel_to(port) as channel:
        stream = Stream(channel)
        await stream.send(headers())
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(picker.stop(20))
        await stream.send(body(CHAT))
        picked(await stream.next())
        await stream.call.done_writing()
        while await stream.call.read() is not grpc.aio.EOF:
            pass
        await stopping
