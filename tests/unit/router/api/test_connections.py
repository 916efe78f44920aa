"""Bounds of HTTP connections, over real sockets and uvicorn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import uvicorn

from router.api import connections
from router.api.connections import BoundedProtocol, ConnectionLimits, OpenConnections
from tests.support.waiting import until

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.25)


REQUEST = b"POST /it HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n"


class Server:
    """A server that answers with the length of what it was sent."""

    def __init__(self, **limits: Any) -> None:
        most = {"max_connections": 100, "max_per_client": 100}
        self.open = OpenConnections(ConnectionLimits(**(most | limits)))
        self.num_left = 0
        self.port = 0
        self.pieces: list[bytes] = []
        """Of the answer; empty: it is the length of what was sent."""
        self.num_asked, self.num_ended = 0, 0
        self.protocol: type[BoundedProtocol] = BoundedProtocol

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        length = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_left += 1
                return
            length += len(message["body"])
            if not message["more_body"]:
                break
        self.num_asked += 1
        pieces = self.pieces or [str(length).encode()]
        headers = [(b"content-length", str(sum(map(len, pieces))).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, piece in enumerate(pieces, 1):
            await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})
        self.num_ended += 1

    @asynccontextmanager
    async def runs(self) -> AsyncIterator[Server]:
        protocol: Any = partial(self.protocol, self.open)
        config = uvicorn.Config(self.app, port=0, http=protocol, interface="asgi3", log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        server.config.load()
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        self.port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.should_exit = True
            await task

    @asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def says(self, data: bytes) -> bytes:
        """Sends something on a connection of its own, and returns all that comes until it is closed."""
        async with self.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
            writer.write(data)
            return await reader.read()

    async def until_empty(self) -> None:
        await until(lambda: not self.open.num_of)


def request(body: bytes, head: bytes = b"connection: close\r\n") -> bytes:
    return REQUEST % len(body) + head + b"\r\n" + body


async def test_what_is_within_the_bounds_is_answered() -> None:
    async with Server().runs() as server:
        assert (await server.says(request(b"x" * 1_000_000))).endswith(b"\r\n\r\n1000000")
        long_head = b"a: " + b"x" * 60_000 + b"\r\nconnection: close\r\n"
        assert (await server.says(request(b"abc", long_head))).endswith(b"\r\n\r\n3")
        await server.until_empty()


@pytest.mark.parametrize(
    "head",
    [b"a: " + b"x" * 70_000 + b"\r\n", b"a: b\r\n" * 20_000, b"a: " + b"x" * 4_000_000],
    ids=["one field", "many fields", "one without an end"],
)
@pytest.mark.parametrize("ends", [True, False])
async def test_a_long_head_is_refused(head: bytes, ends: bool) -> None:
    async with Server().runs() as server:
        said = await server.says(REQUEST % 0 + head + b"\r\n" * ends)
        assert said.startswith(b"HTTP/1.1 431 "), said
        assert b"longer than 65536 bytes" in said
        assert server.num_left == 0
        await server.until_empty()


async def test_a_long_address_is_refused() -> None:
    async with Server().runs() as server:
        assert (await server.says(b"GET /" + b"x" * 100_000)).startswith(b"HTTP/1.1 431 ")


async def test_a_head_that_does_not_end_is_not_waited_for() -> None:
    async with Server(head_s=0.2).runs() as server:
        assert (await server.says(b"POST /it HTTP/1.1\r\nhost: he")).startswith(b"HTTP/1.1 408 ")
        assert await server.says(b"") == b""  # a browser opens some in store
        await server.until_empty()


async def test_a_further_request_has_the_same_bounds() -> None:
    async with Server(head_s=0.3).runs() as server, server.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            writer.write(request(b"abcd", b""))
            assert (await reader.readuntil(b"\r\n\r\n4")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"POST /it HTTP/1.1\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_a_further_long_head_is_refused() -> None:
    async with Server().runs() as server, server.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(request(b"abcd", b""))
        assert await reader.readuntil(b"\r\n\r\n4")
        writer.write(REQUEST % 0 + b"a: " + b"x" * 100_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")


async def test_a_body_that_stands_is_not_waited_for() -> None:
    async with Server(body_s=0.2).runs() as server:
        said = await server.says(REQUEST % 10 + b"\r\nabc")
        assert said.startswith(b"HTTP/1.1 408 "), said
        assert server.num_left == 1
        await server.until_empty()


async def test_a_body_may_be_slow() -> None:
    limits = {"body_s": 0.2, "body_bytes_s": 1}
    async with (
        Server(**limits).runs() as server,
        server.client() as (reader, writer),
        asyncio.timeout(PATIENCE_S),
    ):
        writer.write(REQUEST % 20 + b"connection: close\r\n\r\n" + b"x" * 16)
        for _ in range(4):
            await asyncio.sleep(0.2)
            writer.write(b"y")
        assert (await reader.read()).endswith(b"\r\n\r\n20")


@pytest.mark.parametrize("limits", [{"max_connections": 2}, {"max_per_client": 2}], ids=["in all", "of one client"])
async def test_more_connections_are_refused_until_some_are_closed(limits: dict[str, int]) -> None:
    async with Server(**limits).runs() as server, server.client() as (reader, writer):
        async with server.client():
            writer.write(request(b"", b""))
            assert await reader.readuntil(b"\r\n\r\n0")
            said = await server.says(request(b""))
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"2 connections" in said
        await until(lambda: server.open.num_of.total() == 1)
        assert (await server.says(request(b"ab"))).endswith(b"\r\n\r\n2")


class Roomy(BoundedProtocol):
    """A connection that takes whole answers, so that nothing waits to be written."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=10**9)


@pytest.mark.parametrize("protocol", [Roomy, BoundedProtocol], ids=["which is written", "while it is written"])
async def test_a_client_that_does_not_read_its_answer_is_ended(protocol: type[BoundedProtocol]) -> None:
    server = Server(stall_s=0.5)
    server.protocol = protocol
    server.pieces = [b"x" * 1_000_000] * 40
    async with server.runs(), server.client() as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request(b"", b""))
        await until(lambda: server.num_asked == 1)
        await server.until_empty()
        await until(lambda: server.num_ended == 1)


async def test_little_is_held_for_a_client_that_does_not_read() -> None:
    held: list[BoundedProtocol] = []

    class Watched(BoundedProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            held.append(self)

    server = Server(stall_s=20.0)
    server.protocol = Watched
    server.pieces = [b"x" * 4_096] * 10_000
    async with server.runs(), server.client() as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request(b"", b""))
        await until(lambda: bool(held) and held[0].flow.write_paused)
        assert held[0].transport.get_write_buffer_size() <= connections.UNSENT_BYTES + 2 * 4_096
        held[0].transport.abort()
        await server.until_empty()


async def test_a_client_that_reads_slowly_gets_all_of_its_answer() -> None:
    server = Server(stall_s=1.0)
    server.pieces = [b"x" * 500_000] * 80
    async with server.runs(), server.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        began_s, num_read = time.monotonic(), 0
        writer.write(request(b""))
        while piece := await reader.read(1_000_000):
            num_read += len(piece)
            await asyncio.sleep(0.04)
        assert num_read > 40_000_000
        assert time.monotonic() - began_s > server.open.limits.stall_s
