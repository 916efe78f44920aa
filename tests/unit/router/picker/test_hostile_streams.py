"""Gateways that stall, flood or send nonsense end with a typed status, and harm no other stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc
import pytest

from router.api.exchange import MAX_BODY_BYTES
from router.picker.service import MAX_MESSAGE_BYTES, SERVICE_NAME
from router.picker.v3 import external_processor_pb2 as pb
from router.picker.wire import MAX_PIECE, SUBSET, SUBSET_HINT
from tests.support.gateways import Cluster, Stream, body, channel_to, headers, picked, running, served_by

STALL_S = 0.5
CHAT = b'{"model": "llama"}'
DUPLEX = (pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)
MIB = 2**20


@pytest.fixture
async def channel() -> AsyncGenerator[grpc.aio.Channel]:
    async with running(Cluster(), stall_s=STALL_S) as (_, port), channel_to(port) as channel:
        yield channel
        await serves(channel)


async def serves(channel: grpc.aio.Channel, chat: bytes = CHAT) -> None:
    """Checks that a good stream is served."""
    stream = Stream(channel)
    await stream.send(headers())
    await stream.send(body(chat))
    assert len(picked(await stream.next())) == 4
    while not (await stream.next()).request_body.response.body_mutation.streamed_response.end_of_stream:
        pass


def trailers() -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers())


@pytest.mark.parametrize(
    "messages",
    [
        [pb.ProcessingRequest()],
        [body(CHAT)],
        [trailers()],
        [served_by("10.0.0.1:8000")],
        [headers(), headers()],
        [headers(), pb.ProcessingRequest()],
    ],
)
async def test_messages_out_of_order_end_the_stream(
    channel: grpc.aio.Channel, messages: Sequence[pb.ProcessingRequest]
) -> None:
    stream = Stream(channel)
    for each in messages:
        await stream.send(each)
    assert await stream.ends() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_is_no_message_ends_the_stream(channel: grpc.aio.Channel) -> None:
    call: Any = channel.stream_stream(f"/{SERVICE_NAME}/Process")()
    await call.write(b"\xff" * 100)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_is_too_long_ends_the_stream(channel: grpc.aio.Channel) -> None:
    stream = Stream(channel)
    await stream.send(headers(modes=(pb.BUFFERED, pb.NONE)))
    await stream.next()
    await stream.send(body(b"x" * MAX_MESSAGE_BYTES))
    assert await stream.ends() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_gateway_that_sends_nothing_is_cut_off(channel: grpc.aio.Channel) -> None:
    assert await Stream(channel).ends() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("mode", [pb.FULL_DUPLEX_STREAMED, pb.BUFFERED])
async def test_a_request_that_stalls_gets_408(channel: grpc.aio.Channel, mode: pb.BodySendMode.ValueType) -> None:
    stream = Stream(channel)
    await stream.send(headers(modes=(mode, pb.NONE)))
    if mode == pb.BUFFERED:
        await stream.next()
    else:
        await stream.send(body(CHAT, ends=False))
    response = await stream.next()
    assert response.immediate_response.status.code == 408
    assert await stream.ends() is grpc.StatusCode.OK


async def test_a_response_may_take_longer_than_that_and_is_not_waited_for_forever(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(channel)
    await stream.send(headers(ends=True))
    picked(await stream.next())
    await asyncio.sleep(2 * STALL_S)
    await stream.send(served_by(""))
    assert (await stream.next()).WhichOneof("response") == "response_headers"
    monkeypatch.setattr("router.picker.exchange.IDLE_S", STALL_S)
    await stream.send(pb.ProcessingRequest(response_body=pb.HttpBody()))
    assert (await stream.next()).WhichOneof("response") == "response_body"
    assert await stream.ends() is grpc.StatusCode.OK


async def test_a_gateway_that_does_not_read_is_cut_off(channel: grpc.aio.Channel) -> None:
    stream = Stream(channel)
    await stream.send(headers(modes=DUPLEX))
    for _ in range(7):
        await stream.send(body(b"x" * MIB, ends=False))
    await stream.send(body(b""))
    await asyncio.sleep(4 * STALL_S)
    num_read = 0
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await stream.call.read() is not grpc.aio.EOF:
            num_read += 1
    assert await stream.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert num_read < 7 * MIB / MAX_PIECE


@pytest.mark.parametrize("mode", [pb.FULL_DUPLEX_STREAMED, pb.STREAMED, pb.BUFFERED])
async def test_bodies_are_as_long_as_over_http(channel: grpc.aio.Channel, mode: pb.BodySendMode.ValueType) -> None:
    for extra, status in ((0, 0), (1, 413)):
        stream = Stream(channel)
        await stream.send(headers(modes=(mode, pb.NONE)))
        if mode != pb.FULL_DUPLEX_STREAMED:
            await stream.next()
        await stream.send(body(b"x" * (MAX_BODY_BYTES - 1 + extra), ends=False))
        if mode == pb.STREAMED:
            await stream.next()
        if mode == pb.BUFFERED:
            await stream.next()
        await stream.send(body(b"x"))
        assert (await stream.next()).immediate_response.status.code == status


async def test_bodies_without_memory_are_passed_on_and_what_broken_streams_held_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.picker.service.MAX_HELD_BYTES", MIB)
    cluster, chat = Cluster(), json.dumps({"model": "llama", "user": "x" * (MIB // 2)}).encode()
    async with running(cluster) as (_, port), channel_to(port) as channel:
        for ends in ("break", "refusal", "answer", "response"):
            first, second = Stream(channel), Stream(channel)
            await first.send(headers(modes=DUPLEX))
            await first.send(body(chat, ends=False))
            assert await first.is_silent()
            await second.send(headers(modes=DUPLEX))
            half = len(chat) // 2
            await second.send(body(chat[:half], ends=False))
            await second.send(body(chat[half:], ends=False))
            assert len(picked(await second.next())) == 4
            back = b""
            while len(back) < len(chat):
                back += (await second.next()).request_body.response.body_mutation.streamed_response.body
            assert back == chat
            await second.send(body(b"the end"))
            streamed = (await second.next()).request_body.response.body_mutation.streamed_response
            assert (streamed.body, streamed.end_of_stream) == (b"the end", True)
            assert not cluster.asked
            await _end(first, cluster, ends)
            cluster.asked.clear()
            await serves(channel, chat)
            await serves(channel, chat)
            assert len(cluster.asked) == 2, ends
            cluster.asked.clear()


async def _end(stream: Stream, cluster: Cluster, how: str) -> None:
    match how:
        case "break":
            stream.call.cancel()
        case "refusal":
            cluster.is_crowded = True
            await stream.send(body(b""))
            await asyncio.sleep(0.1)
            cluster.is_crowded = False
        case "answer":
            await stream.send(body(b""))
        case "response":
            await stream.send(served_by(""))
    await asyncio.sleep(0.2)


async def test_streams_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.picker.service.MAX_STREAMS", 2)
    async with running(Cluster()) as (_, port), channel_to(port) as channel:
        streams = [Stream(channel) for _ in range(2)]
        for each in streams:
            await each.send(headers(ends=True))
            picked(await each.next())
        further = Stream(channel)
        assert (await further.next()).immediate_response.status.code == 429
        assert await further.ends() is grpc.StatusCode.OK
        streams[0].call.cancel()
        await asyncio.sleep(0.2)
        await serves(channel)


@pytest.mark.parametrize("hint", [7, True, None, {"a": "10.0.0.1:8000"}, ["10.0.0.1"] * 0, [["10.0.0.1:8000"]], [1.5]])
async def test_a_hint_that_is_no_list_of_endpoints_allows_none(channel: grpc.aio.Channel, hint: Any) -> None:
    message = headers(ends=True)
    message.metadata_context.filter_metadata[SUBSET_HINT].update({SUBSET: hint})
    stream = Stream(channel)
    await stream.send(message)
    assert (await stream.next()).immediate_response.status.code == 503


async def test_long_hints_and_odd_headers_are_read(channel: grpc.aio.Channel) -> None:
    message = headers(subset=["10.0.0.1:8000", *(f"10.1.{number % 256}.{number // 256}:1" for number in range(20_000))])
    for name, value in (
        (":path", b"\xff" * 5000),
        ("authorization", b"Bearer \xff\x00"),
        ("x-request-id", b"\xe2" * 9),
    ):
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    stream = Stream(channel)
    await stream.send(message)
    await stream.send(body(b'{"model": "gpt"}'))
    response = await stream.next()
    assert response.immediate_response.status.code == 404
    sent = {each.header.key: each.header.raw_value for each in response.immediate_response.headers.set_headers}
    assert sent["x-request-id"].isalnum()


MESSAGES: Sequence[Callable[[], pb.ProcessingRequest]] = (
    pb.ProcessingRequest,
    headers,
    trailers,
    lambda: headers(ends=True),
    lambda: body(CHAT),
    lambda: body(CHAT, ends=False),
    lambda: body(b"", ends=False),
    lambda: served_by("10.0.0.2:8000"),
    lambda: pb.ProcessingRequest(response_body=pb.HttpBody(body=b"y", end_of_stream=True)),
    lambda: pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
)
OF_THE_CLIENT = "Internal error from Core"
"""What gRPC's client says if it writes to a stream that the picker has just ended."""
ENDS = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED}


async def test_any_messages_in_any_order_end_in_a_known_way(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    async def one(seed: int) -> None:
        choice, stream = random.Random(seed), Stream(channel)
        messages = [headers(modes=(choice.choice(pb.BodySendMode.values()), choice.choice(pb.BodySendMode.values())))]
        messages += [choice.choice(MESSAGES)() for _ in range(choice.randint(0, 6))]
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # if the picker ends it before
            for each in messages[seed % 5 == 0 :]:
                await stream.send(each)
            await stream.call.done_writing()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await stream.call.read() is not grpc.aio.EOF:
                pass
        code, details = await stream.call.code(), await stream.call.details()
        assert code in ENDS or details == OF_THE_CLIENT, (seed, code, details)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for seed in range(300):
            tasks.create_task(one(seed))
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
