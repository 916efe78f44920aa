"""Bounds of HTTP connections, over real sockets and uvicorn."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.api import connections
from router.api.connections import BoundedProtocol
from tests.support.bounded import PATIENCE_S, REQUEST, Roomy, Server, request, wired
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.25)


async def test_what_is_within_the_bounds_is_answered() -> None:
    async with Server().runs() as server:
        assert (await server.says(request(b"x" * 1_000_000))).endswith(b"\r\n\r\n1000000")
        long_head = b"a: " + b"x" * 30_000 + b"\r\nconnection: close\r\n"
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
        assert b"longer than 32768 bytes" in said
        assert server.num_left == 0
        await server.until_empty()


async def test_a_long_address_is_refused() -> None:
    async with Server().runs() as server:
        assert (await server.says(b"GET /" + b"x" * 100_000)).startswith(b"HTTP/1.1 431 ")


async def test_many_fields_are_refused() -> None:
    async with Server().runs() as server:
        assert (await server.says(request(b"abc", b"connection: close\r\n" + b"a:\r\n" * 253))).endswith(b"\r\n\r\n3")
        said = await server.says(request(b"abc", b"a:\r\n" * 255))
        assert said.startswith(b"HTTP/1.1 431 ")
        assert b"more than 256 fields" in said


@pytest.mark.parametrize("begin", [b"GET /", b"GET /?"], ids=["path", "query"])
async def test_a_url_that_no_client_has_is_refused(begin: bytes) -> None:
    async with Server().runs() as server:
        fits = begin + b"x" * (8192 - len(begin) + 4) + b" HTTP/1.1\r\nconnection: close\r\n\r\n"
        assert (await server.says(fits)).startswith(b"HTTP/1.1 200 ")
        assert (await server.says(fits.replace(b"x", b"xx", 1))).startswith(b"HTTP/1.1 414 ")


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


async def test_what_came_at_once_buys_no_time_to_stand() -> None:
    async with Server(stall_s=0.3).runs() as server:
        said = await server.says(REQUEST % 4_000_001 + b"\r\n" + b"x" * 4_000_000)
        assert said.startswith(b"HTTP/1.1 408 "), said
        await server.until_empty()


async def test_a_body_that_comes_byte_by_byte_is_not_waited_for() -> None:
    async with Server(body_s=0.3).runs() as server, server.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(REQUEST % 10_000 + b"\r\n")
        answering = asyncio.create_task(reader.read())
        while not answering.done():
            writer.write(b"x")
            await asyncio.sleep(0.02)
        assert answering.result().startswith(b"HTTP/1.1 408 ")


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


@pytest.mark.parametrize("close", ["eof_received", "timeout_keep_alive_handler", "shutdown"])
async def test_a_connection_that_closes_does_not_wait_for_its_client_to_read(close: str) -> None:
    """Closing sends what is left first, however little that is."""
    protocol, wire = wired(stall_s=0.2)
    wire.num_unread = 5
    getattr(protocol, close)()
    await until(lambda: wire.is_aborted)
    protocol.connection_lost(None)
