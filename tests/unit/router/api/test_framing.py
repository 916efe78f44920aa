"""What a request is made of, and what comes behind it: neither takes a router's memory or its loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.api import connections
from router.api.connections import BoundedProtocol
from tests.support.bounded import CHUNKED, PATIENCE_S, REQUEST, Server, request
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.25)


class Counted(BoundedProtocol):
    """A connection that counts the requests which the parser has begun, over all connections."""

    num_begun = 0

    def on_message_begin(self) -> None:
        Counted.num_begun += 1
        super().on_message_begin()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(Counted, "num_begun", 0)
    server = Server()
    server.protocol = Counted
    return server


@pytest.mark.parametrize(
    "trailers", [b"a: b\r\n" * 20_000, b"a: " + b"x" * 70_000], ids=["many lines", "one without an end"]
)
@pytest.mark.parametrize("sent_at_once", [70_000, 1000])
async def test_long_trailers_are_refused(trailers: bytes, sent_at_once: int) -> None:
    async with Server().runs() as server, server.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        said = CHUNKED + b"2\r\nab\r\n0\r\n" + trailers
        for begin in range(0, len(said), sent_at_once):
            writer.write(said[begin : begin + sent_at_once])
            await asyncio.sleep(0)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 "), answer
        assert b"trailers are longer than 32768 bytes" in answer
        await server.until_empty()


async def test_short_trailers_are_no_fields_of_the_head() -> None:
    class Asked(Server):
        async def app(self, scope: Any, receive: Any, send: Any) -> None:
            await super().app(scope, receive, send)
            assert [name for name, _ in scope["headers"]] == [b"host", b"connection", b"transfer-encoding"]

    async with Asked().runs() as server:
        said = await server.says(CHUNKED + b"2\r\nab\r\n0\r\nx-late: 1\r\n\r\n")
        assert said.endswith(b"\r\n\r\n2")
        assert server.num_ended == 1


@pytest.mark.parametrize(
    "chunks",
    [b"2;" + b"x" * 70_000, b"1;a=b\r\nx\r\n" * 10_000, b"1\r\nx\r\n" * 10_000, b"0" * 70_000],
    ids=["a long extension", "many extensions", "many small ones", "a long size"],
)
async def test_a_body_that_is_mostly_framing_is_refused(chunks: bytes) -> None:
    async with Server().runs() as server:
        said = await server.says(CHUNKED + chunks)
        assert said.startswith(b"HTTP/1.1 400 "), said
        assert b"very small chunks" in said
        await server.until_empty()


@pytest.mark.parametrize(("num_bytes", "num_chunks"), [(1, 1000), (1100, 3000), (5000, 600), (300_000, 10)])
async def test_a_body_in_chunks_is_read(num_bytes: int, num_chunks: int) -> None:
    """Of any size, and a few that are small."""
    async with Server().runs() as server:
        chunk = b"%x\r\n%b\r\n" % (num_bytes, b"x" * num_bytes)
        said = await server.says(CHUNKED + chunk * num_chunks + b"0\r\n\r\n")
        assert said.endswith(b"\r\n\r\n%d" % (num_bytes * num_chunks)), said


async def test_nothing_is_parsed_behind_a_request_that_is_not_answered(counted: Server) -> None:
    async with counted.runs(), counted.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        counted.may_answer.clear()
        bodies = [b"", b"a", b"ab" * 50] * 20
        said = b"".join(request(body, b"") for body in bodies)
        chunked = b"POST /it HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2;x\r\nab\r\n0\r\ny: z\r\n\r\n"
        writer.write(chunked + said)
        await until(lambda: counted.num_asked == 1)
        await asyncio.sleep(0.05)
        assert Counted.num_begun == 1
        counted.may_answer.set()
        for length in (2, *map(len, bodies)):
            assert await reader.readuntil(b"\r\n\r\n%d" % length)
        assert Counted.num_begun == counted.num_asked == len(bodies) + 1


async def test_who_sends_much_behind_a_request_gets_one_answer(counted: Server) -> None:
    async with counted.runs(), counted.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        counted.may_answer.clear()
        writer.write(request(b"abc", b""))
        await until(lambda: counted.num_asked == 1)
        for _ in range(20):
            writer.write(request(b"abc", b"") * 500)
            await asyncio.sleep(0.01)
        counted.may_answer.set()
        said = await reader.read()
        assert said.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in said
        assert said.endswith(b"\r\n\r\n3")
        await counted.until_empty()


async def test_the_end_of_a_client_that_sends_much_ahead_is_seen(counted: Server) -> None:
    """Its answer is computed for nobody else."""
    left = asyncio.Event()

    class Asking(Server):
        async def app(self, scope: Any, receive: Any, send: Any) -> None:
            self.num_asked += 1
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

    async with Asking().runs() as server, asyncio.timeout(PATIENCE_S):
        async with server.client() as (_, writer):
            writer.write(request(b"abc", b""))
            await until(lambda: server.num_asked == 1)
            writer.write(b"x" * 1_000_000)
        await left.wait()
        await server.until_empty()


async def test_no_further_request_is_parsed_while_answers_wait_to_be_read(counted: Server) -> None:
    counted.pieces = [b"x" * 1_000_000] * 20
    async with counted.runs(), counted.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request(b"", b"") * 50)
        await until(lambda: counted.num_asked == 1)
        await asyncio.sleep(0.2)
        assert Counted.num_begun == 1
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(50 * 20):
            await reader.readexactly(1_000_000)
        assert counted.num_asked == 50


async def test_an_upgrade_is_not_made_and_the_connection_goes_on() -> None:
    head = b"connection: upgrade\r\nupgrade: %b\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAA\r\n"
    async with Server().runs() as server, server.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        for protocol in (b"websocket", b"h2c", b"x"):
            writer.write(b"GET /it HTTP/1.1\r\nhost: here\r\n" + head % protocol + b"\r\n" + request(b"ab", b""))
            for length in (0, 2):
                assert (await reader.readuntil(b"\r\n\r\n%d" % length)).startswith(b"HTTP/1.1 200 ")
        said = await server.says(request(b"ab", head % b"h2c"))
        assert said.startswith(b"HTTP/1.1 400 ")
        assert said.count(b"HTTP/1.1 ") == 1
        assert b"cannot ask for an upgrade" in said


@pytest.mark.parametrize("is_first", [True, False])
async def test_empty_lines_keep_no_connection(is_first: bool) -> None:
    async with Server(head_s=0.3).runs() as server, server.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        if not is_first:
            writer.write(request(b"ab", b""))
            await reader.readuntil(b"\r\n\r\n2")
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            writer.write(b"\r\n")
            await asyncio.sleep(0.05)
        await server.until_empty()


async def test_who_is_refused_before_the_body_is_not_answered_twice() -> None:
    server = Server(stall_s=0.2, body_s=0.2)
    server.answers_before_the_body = True
    async with server.runs():
        said = await server.says(REQUEST % 10 + b"\r\nabc")
        assert said.count(b"HTTP/1.1 ") == 1
        assert said.startswith(b"HTTP/1.1 200 ")
        await server.until_empty()


async def test_a_body_that_is_refused_may_come_to_its_end_but_not_without_one() -> None:
    server = Server(body_bytes=1_000_000)
    server.answers_before_the_body = True
    async with server.runs(), server.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            writer.write(request(b"x" * 900_000, b""))
            assert await reader.readuntil(b"\r\n\r\n0")
        writer.write(REQUEST % 10**9 + b"\r\n")
        for _ in range(11):
            writer.write(b"x" * 100_000)
        assert (await reader.read()).count(b"HTTP/1.1 ") == 1
        await server.until_empty()
