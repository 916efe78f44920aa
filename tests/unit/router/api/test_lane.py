"""Connections take turns, so that those of one client leave the loop to others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from router.api import places
from router.api.connections import PIECES_AT_ONCE
from router.api.places import Lane
from tests.support.bounded import CHUNKED, PATIENCE_S, REQUEST, Server, request, wired
from tests.support.waiting import until


async def test_so_many_go_on_at_once_and_clients_take_turns() -> None:
    lane, called = Lane(2, 0.0), list[str]()
    for name in ("a1", "a2", "a3", "a4", "b1", "c1"):
        lane.wait(name[0], lambda name=name: called.append(name))  # type: ignore[misc]
    assert called == []
    rounds: list[list[str]] = []
    while len(called) < 6:
        num_before = len(called)
        await asyncio.sleep(0)
        rounds.append(called[num_before:])
    assert [each for each in rounds if each] == [["a1", "b1"], ["c1", "a2"], ["a3", "a4"]]


async def test_others_are_served_for_a_time_between_turns() -> None:
    loop = asyncio.get_running_loop()
    lane, called_s = Lane(1, 0.05), list[float]()
    began_s = loop.time()
    for _ in range(3):
        lane.wait("a", lambda: called_s.append(loop.time()))
    await until(lambda: len(called_s) == 3)
    assert called_s[-1] - began_s >= 3 * 0.05 - 0.01


async def test_who_waits_again_in_its_turn_comes_behind_the_others() -> None:
    lane, called = Lane(1, 0.0), list[str]()

    def again() -> None:
        called.append("again")
        if called.count("again") < 3:
            lane.wait("a", again)

    lane.wait("a", again)
    lane.wait("a", lambda: called.append("other"))
    await until(lambda: len(called) == 4)
    assert called == ["again", "other", "again", "again"]


@pytest.mark.parametrize(
    ("before", "piece"),
    [(b"GET /", b"x"), (REQUEST % 10_000 + b"\r\n", b"x"), (CHUNKED, b"1\r\nx\r\n")],
    ids=["head", "body", "chunks"],
)
async def test_who_sends_many_small_pieces_waits_for_a_turn_for_each(before: bytes, piece: bytes) -> None:
    protocol, transport = wired()
    for each in (before, *[piece] * (PIECES_AT_ONCE - 1)):
        protocol.data_received(each)
        await asyncio.sleep(0)
        assert transport.reads
    for _ in range(3):
        protocol.data_received(piece)
        protocol.data_received(piece)
        assert not transport.reads
        await until(lambda: transport.reads)
    protocol.connection_lost(None)


async def test_many_chunks_that_come_at_once_are_parsed_in_turns() -> None:
    protocol, transport = wired()
    protocol.data_received(CHUNKED + b"1\r\nx\r\n" * 1000)
    assert not transport.reads
    assert protocol.cycle is not None
    assert len(protocol.cycle.body) <= PIECES_AT_ONCE
    await until(lambda: transport.reads)
    protocol.connection_lost(None)


async def test_requests_that_come_at_once_leave_the_loop_to_others() -> None:
    """The loop goes round several times before all of them are asked."""
    server, num_rounds = Server(), 0
    server.may_answer.clear()
    async with server.runs(), AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        writers = [(await stack.enter_async_context(server.client()))[1] for _ in range(40)]
        await until(lambda: server.open.num_of.total() == 40)
        for writer in writers:
            writer.write(request(b"", b""))
        rounds: list[int] = []
        while server.num_asked < 40:
            before = server.num_asked
            await asyncio.sleep(0)
            rounds.append(server.num_asked - before)
            num_rounds += 1
        assert max(rounds) <= places.STARTS_AT_ONCE
        server.may_answer.set()
