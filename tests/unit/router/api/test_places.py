"""What connections hold, of a client and of all: who sends or reads as fast as it can is served."""

from __future__ import annotations

import asyncio

import pytest

from router.api import connections, places
from router.api.places import PROGRESS_BYTES
from tests.support.bounded import PATIENCE_S, REQUEST, Roomy, Server, request
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.25)


def body(num_bytes: int, num_sent: int) -> bytes:
    """A request with the begin of its body."""
    return REQUEST % num_bytes + b"connection: close\r\n\r\n" + b"x" * num_sent


async def holds(server: Server, num_bytes: int) -> None:
    """Waits until connections hold so much; of each the last few bytes may not be counted."""
    await until(lambda: server.open.num_held.total() > num_bytes - PROGRESS_BYTES)


async def test_the_body_that_has_stood_longest_makes_room() -> None:
    async with (
        Server(held_bytes_per_client=250_000).runs() as server,
        server.client() as (first, one),
        server.client() as (second, two),
        server.client("127.0.0.2") as (third, other),
        asyncio.timeout(PATIENCE_S),
    ):
        for number, writer in enumerate((one, two, other), 1):
            writer.write(body(200_001, 100_000))
            await holds(server, number * 100_000)
        two.write(b"x" * 100_000)
        said = await first.read()
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"try again later" in said
        two.write(b"x")
        other.write(b"x" * 100_001)
        for reader in (second, third):
            assert (await reader.read()).endswith(b"\r\n\r\n200001")
        await server.until_empty()
        assert not server.open.num_held


async def test_heads_count_too_whether_or_not_they_are_whole() -> None:
    """Regression: a thousand connections of one address held 64 KiB each."""
    head = REQUEST % 50_000 + b"a: " + b"x" * 30_000
    async with (
        Server(held_bytes_per_client=50_000).runs() as server,
        server.client() as (first, one),
        server.client() as (_, two),
        asyncio.timeout(PATIENCE_S),
    ):
        one.write(head + b"\r\n\r\n")
        await holds(server, 30_000)
        two.write(head)
        assert (await first.read()).startswith(b"HTTP/1.1 503 ")
        await holds(server, 30_000)


async def test_a_body_that_alone_is_too_much_is_refused() -> None:
    async with Server(held_bytes_per_client=250_000).runs() as server:
        assert (await server.says(body(400_000, 300_000))).startswith(b"HTTP/1.1 503 ")
        await server.until_empty()
        assert not server.open.num_held


async def test_little_of_all_clients_is_held_and_who_has_most_makes_room() -> None:
    async with (
        Server(held_bytes=250_000).runs() as server,
        server.client("127.0.0.2") as (first, most),
        server.client() as (second, less),
        asyncio.timeout(PATIENCE_S),
    ):
        most.write(body(400_000, 150_000))
        await holds(server, 150_000)
        less.write(body(220_000, 90_000))
        await holds(server, 240_000)
        less.write(b"x" * 40_000)
        assert (await first.read()).startswith(b"HTTP/1.1 503 ")
        less.write(b"x" * 90_000)
        assert (await second.read()).endswith(b"\r\n\r\n220000")


async def test_a_whole_request_holds_nothing() -> None:
    async with Server().runs() as server, server.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
        server.may_answer.clear()
        writer.write(request(b"x" * 500_000, b""))
        await until(lambda: server.num_asked == 1)
        assert not server.open.num_held
        server.may_answer.set()
        assert await reader.readuntil(b"\r\n\r\n500000")


async def test_the_answer_that_has_been_unread_longest_makes_room() -> None:
    """The kernel takes up to ten MB of each."""
    server = Server(held_bytes_per_client=45_000_000)
    server.protocol = Roomy
    server.pieces = [b"x" * 40_000_000]
    async with server.runs(), server.client() as (first, one), server.client() as (second, two):
        for number, (reader, writer) in enumerate(((first, one), (second, two)), 1):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request(b"", b""))
            await until(lambda number=number: server.num_ended == number)  # type: ignore[misc]
        await until(lambda: server.open.num_of.total() == 1)
        second._transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(PATIENCE_S):
            await second.readuntil(b"\r\n\r\n")
            assert len(await second.readexactly(40_000_000)) == 40_000_000


async def test_of_many_connections_too_many_some_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_TOLD", 2)
    async with Server(max_per_client=1).runs() as server, server.client(), asyncio.timeout(PATIENCE_S):
        await until(lambda: server.open.num_of.total() == 1)
        said = []
        async with server.client() as (first, _), server.client() as (second, _), server.client() as (third, _):
            for reader in (first, second, third):
                try:
                    said.append((await reader.read()).startswith(b"HTTP/1.1 503 "))
                except ConnectionError:
                    said.append(False)
        assert said == [True, True, False]
        await until(lambda: server.open.num_of.total() == 1)
        assert (await server.says(b"")).startswith(b"HTTP/1.1 503 "), "others are told again"


async def test_many_refusals_are_few_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with Server().runs() as server:
        for _ in range(20):
            assert (await server.says(b"\0\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    lines = [record.getMessage() for record in caplog.records if "is closed" in record.getMessage()]
    assert lines[0] == "a connection of 127.0.0.1 is closed: this is not an HTTP/1.1 request"
    assert len(lines) < 20
