"""How pairs are made, kept and closed, when several things happen at once. Real gRPC and real links."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from typing import Any

import pytest

from baton import wire
from baton.cluster import OpenConnections
from baton.errors import BatonError, TransferError
from baton.messages import Grant, Offer, Ping, SessionFailed, Welcome
from baton.v1 import kv_pb2_grpc
from engine.testing import ArithmeticRunner
from kvstore.transfer.connection.control_stream import open_channel
from kvstore.transfer.connection.pool import LONGEST_PAUSE_S
from kvstore.transfer.protocol.plan import WireOptions, plan
from kvstore.transfer.stats import TransferStats
from kvstore.transfer.transport.base import TransportEnd
from kvstore.transfer.transport.select import KINDS, open_receiver, open_sender
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    SOON_S,
    Decode,
    Prefill,
    decode_side,
    engine_worker,
    prefill_side,
    same_blocks,
    send,
    tables_of,
)

TWO_KINDS = dataclasses.replace(CONFIG, transports=("shm", "tcp"))


async def kv_transfer(prefill: Prefill, decode: Decode, name: str) -> str:
    """ "" or what went wrong."""
    ticket = decode.receiver.expect(name, 640, 0, tables_of(decode.receiver, range(40), 3))
    try:
        await send(prefill, ticket, range(40))
    except BatonError as error:
        return str(error)
    finally:
        await decode.receiver.release(ticket)
    return ""


@pytest.mark.parametrize("yields", [0, 1, 2, 3])
async def test_what_is_given_up_while_its_pair_opens_is_never_offered(yields: int) -> None:
    async with decode_side(CONFIG) as decode, prefill_side(CONFIG) as prefill:
        ticket = decode.receiver.expect("early", 16, 0, tables_of(decode.receiver, [0], 0))
        async with prefill.sender.transfer(ticket) as transfer:
            await until(lambda: bool(prefill.sender._connections._routes), SOON_S)
            (route,) = prefill.sender._connections._routes.values()
            await asyncio.wait({route.opening})  # the pair has just been made
            for _ in range(yields):
                await asyncio.sleep(0)
            await transfer.close()
            await asyncio.sleep(0.05)
        assert not prefill.sender._live
        assert await kv_transfer(prefill, decode, "next") == "", "the pair is well"
        await decode.receiver.release(ticket)


async def test_a_ticket_that_is_used_twice_harms_only_the_second() -> None:
    async with decode_side(CONFIG) as decode, prefill_side(CONFIG) as prefill:
        ticket = decode.receiver.expect("once", 640, 0, tables_of(decode.receiver, range(40), 3))
        async with prefill.sender.transfer(ticket) as transfer:
            transfer.extend(tables_of(transfer, range(40), 3))
            await until(lambda: all(part.granted for part in transfer._parts.values()), SOON_S)
            with pytest.raises(BatonError, match="in use already"):
                await send(prefill, ticket, range(40))
            await transfer.finish(1)
        assert same_blocks(prefill.cache, range(40), decode.cache, range(40))
        await decode.receiver.release(ticket)


async def test_a_burst_to_more_peers_than_pairs_is_served_and_the_surplus_closed() -> None:
    config = dataclasses.replace(CONFIG, max_connections=2)
    async with contextlib.AsyncExitStack() as stack:
        decodes = [await stack.enter_async_context(decode_side(config, f"d{n}")) for n in range(6)]
        prefill = await stack.enter_async_context(prefill_side(config))
        for number in range(3):
            outcomes = await asyncio.gather(*(kv_transfer(prefill, d, f"t{number}") for d in decodes))
            assert outcomes == [""] * 6
            kinds = {pair.transport_kind for pair in prefill.sender._connections._alive}
            assert kinds == {"shm"}, "none is taken for a broken link"
            await until(lambda: prefill.sender.num_connections <= 2, SOON_S)


async def test_a_transport_that_only_the_receiver_cannot_open_gives_way_to_the_next_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_shm(kind: str, end: TransportEnd) -> object:
        if kind == "shm":
            raise RuntimeError("not permitted here")
        return open_receiver(kind, end)

    monkeypatch.setattr("kvstore.transfer.connection.incoming.open_receiver", refuse_shm)
    async with decode_side(TWO_KINDS) as decode, prefill_side(TWO_KINDS) as prefill:
        assert await asyncio.gather(*(kv_transfer(prefill, decode, f"t{n}") for n in range(3))) == [""] * 3
        assert [pair.transport_kind for pair in prefill.sender._connections._alive if not pair.failure] == ["tcp"]
        assert same_blocks(prefill.cache, range(40), decode.cache, range(40))


def good_kinds(prefill: Prefill) -> list[str]:
    return sorted(pair.transport_kind for pair in prefill.sender._connections._alive if not pair.failure)


async def test_a_transport_that_could_not_be_opened_is_tried_again_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_refusals = 0

    def refuse_shm_three_times(kind: str, end: TransportEnd) -> object:
        nonlocal num_refusals
        if kind == "shm" and num_refusals < 3:
            num_refusals += 1
            raise RuntimeError("not now")
        return open_receiver(kind, end)

    monkeypatch.setattr("kvstore.transfer.connection.incoming.open_receiver", refuse_shm_three_times)
    monkeypatch.setattr("kvstore.transfer.connection.pool.FIRST_PAUSE_S", 0.05)
    async with decode_side(TWO_KINDS) as decode, prefill_side(TWO_KINDS) as prefill:
        assert await kv_transfer(prefill, decode, "first") == ""
        assert good_kinds(prefill) == ["tcp"]
        (route,) = prefill.sender._connections._routes.values()
        async with asyncio.timeout(SOON_S):
            while good_kinds(prefill) != ["shm"]:
                assert await kv_transfer(prefill, decode, "again") == ""
                await asyncio.sleep(0.01)
        assert route.pauses.pause_s == 0.2, "the third, after 0.05 and 0.1"
        assert prefill.sender._connections.num_failed_openings == 3
        assert await kv_transfer(prefill, decode, "last") == ""
        assert good_kinds(prefill) == ["shm"]


async def test_a_transport_that_could_not_be_opened_is_left_alone_until_its_pause_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_asked = 0

    def refuse_shm(kind: str, end: TransportEnd) -> object:
        nonlocal num_asked
        if kind == "shm":
            num_asked += 1
            raise RuntimeError("not now")
        return open_receiver(kind, end)

    monkeypatch.setattr("kvstore.transfer.connection.incoming.open_receiver", refuse_shm)
    monkeypatch.setattr("kvstore.transfer.connection.pool.FIRST_PAUSE_S", 60.0)
    async with decode_side(TWO_KINDS) as decode, prefill_side(TWO_KINDS) as prefill:
        for name in ("first", "second", "third"):
            assert await kv_transfer(prefill, decode, name) == ""
            await asyncio.sleep(0.02)  # a link is opened beside the transfer
    assert num_asked == 1


async def test_kv_travels_otherwise_while_a_slow_transport_is_opened_which_then_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_open = threading.Event()

    def open_when_let(kind: str, end: TransportEnd) -> object:
        assert kind != "shm" or let_open.wait(SOON_S)
        return open_receiver(kind, end)

    monkeypatch.setattr("kvstore.transfer.connection.incoming.open_receiver", open_when_let)
    monkeypatch.setitem(KINDS, "shm", dataclasses.replace(KINDS["shm"], opens_slowly=True))
    config = dataclasses.replace(TWO_KINDS, open_timeout_s=SOON_S, nccl_open_timeout_s=SOON_S)
    async with decode_side(config) as decode, prefill_side(config) as prefill:
        assert await kv_transfer(prefill, decode, "first") == ""
        ticket = decode.receiver.expect("long", 640, 0, tables_of(decode.receiver, range(40), 3))
        async with prefill.sender.transfer(ticket) as transfer:
            await until(lambda: all(part.granted for part in transfer._parts.values()), SOON_S)
            let_open.set()
            await until(lambda: good_kinds(prefill) == ["shm", "tcp"], SOON_S)
            (route,) = prefill.sender._connections._routes.values()
            await until(lambda: route.connection is not None and route.connection.transport_kind == "shm", SOON_S)
            transfer.extend(tables_of(transfer, range(40), 3))
            await transfer.finish(1)
        await decode.receiver.release(ticket)
        await until(lambda: good_kinds(prefill) == ["shm"], SOON_S)
        assert await kv_transfer(prefill, decode, "last") == ""
        assert good_kinds(prefill) == ["shm"]
        assert decode.num_pairs_ever == 2


async def test_a_sender_opens_one_slow_transport_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stops what else its GPU sends, and one GPU opens no two at a time."""
    let_open, lock = threading.Event(), threading.Lock()
    under_way, most = 0, 0

    def open_when_let(kind: str, end: TransportEnd) -> object:
        nonlocal under_way, most
        if kind != "shm":
            return open_receiver(kind, end)
        with lock:
            under_way += 1
            most = max(most, under_way)
        assert let_open.wait(SOON_S)
        try:
            return open_receiver(kind, end)
        finally:
            with lock:
                under_way -= 1

    monkeypatch.setattr("kvstore.transfer.connection.incoming.open_receiver", open_when_let)
    monkeypatch.setitem(KINDS, "shm", dataclasses.replace(KINDS["shm"], opens_slowly=True))
    config = dataclasses.replace(TWO_KINDS, open_timeout_s=SOON_S, nccl_open_timeout_s=SOON_S)
    async with contextlib.AsyncExitStack() as stack:
        decodes = [await stack.enter_async_context(decode_side(config, f"d{n}")) for n in range(3)]
        prefill = await stack.enter_async_context(prefill_side(config))
        assert await asyncio.gather(*(kv_transfer(prefill, d, "first") for d in decodes)) == [""] * 3
        await until(lambda: under_way > 0, SOON_S)
        assert await asyncio.gather(*(kv_transfer(prefill, d, "second") for d in decodes)) == [""] * 3
        let_open.set()
        await until(lambda: good_kinds(prefill).count("shm") == 3, SOON_S)
        assert most == 1


async def test_a_better_transport_that_the_receiver_refuses_is_not_asked_for_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KINDS, "shm", dataclasses.replace(KINDS["shm"], opens_slowly=True))
    async with (
        decode_side(dataclasses.replace(CONFIG, transports=("tcp",))) as decode,
        prefill_side(TWO_KINDS) as prefill,
    ):
        assert await kv_transfer(prefill, decode, "first") == ""
        (route,) = prefill.sender._connections._routes.values()
        await until(lambda: route.pauses.pause_s == LONGEST_PAUSE_S, SOON_S)
        assert await kv_transfer(prefill, decode, "next") == ""
        assert good_kinds(prefill) == ["tcp"]


@pytest.mark.parametrize("links", [("shm", "tcp"), ("shm",)])
async def test_memory_is_shared_on_one_host_only(links: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts no pair waits for a link that cannot be."""
    monkeypatch.setattr("kvstore.transfer.sender.host_id", lambda: "another host")
    config = dataclasses.replace(CONFIG, transports=links)
    async with decode_side(config) as decode, prefill_side(config) as prefill:
        failure = await kv_transfer(prefill, decode, "t")
        if "tcp" in links:
            assert failure == ""
            assert {pair.transport_kind for pair in prefill.sender._connections._alive} == {"tcp"}
            assert decode.num_pairs_ever == 1, "and none was tried before"
        else:
            assert "offers the transports shm, and is on another host; worker decode-0 can use shm" in failure


async def test_a_sender_that_is_still_talking_hears_why_its_session_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a client writes to a stream that the server has ended, gRPC tells it INTERNAL, and nothing else."""

    def talk(kind: str, end: TransportEnd) -> object:
        if kind == "shm":
            for number in range(5000):
                end.rendezvous.set(f"shm/{number % 10}", "0" * 1000)
        return open_sender(kind, end)

    def refuse_shm(kind: str, end: TransportEnd) -> object:
        if kind == "shm":
            end.rendezvous.get("shm/9")
            raise RuntimeError("not permitted here")
        return open_receiver(kind, end)

    monkeypatch.setattr("kvstore.transfer.connection.outgoing.open_sender", talk)
    monkeypatch.setattr("kvstore.transfer.connection.incoming.open_receiver", refuse_shm)
    async with decode_side(TWO_KINDS) as decode:
        for number in range(5):
            async with prefill_side(TWO_KINDS, name=f"p{number}") as prefill:
                assert await kv_transfer(prefill, decode, f"t{number}") == ""
                assert [pair.transport_kind for pair in prefill.sender._connections._alive if not pair.failure] == [
                    "tcp"
                ]
        await until(lambda: not decode.receiver._connections, SOON_S)


async def test_a_sender_that_falls_silent_is_left_and_its_blocks_come_back() -> None:
    """Its connection stands and it reads, and there is no link that could break: the session alone can notice."""
    config = dataclasses.replace(CONFIG, op_timeout_s=0.5, ping_s=0.2, open_timeout_s=60.0, lease_s=60.0)
    async with decode_side(config) as decode, prefill_side(config) as prefill:
        ticket = decode.receiver.expect("silent", 32, 0, tables_of(decode.receiver, [0, 1], 0))
        arriving = asyncio.create_task(decode.receiver.wait_committed(ticket))
        hello = prefill.sender._connections._hello
        planned = plan(
            hello.layout, 0, ticket.layout, 0, 32, (0, 0), WireOptions(config.slot_bytes, config.span_tokens, "auto")
        )
        digest = planned.digest(config.checksum)
        offer = Offer(
            transfer_id=ticket.transfer_id,
            generation=ticket.generation,
            plan_digest=digest,
            num_chunks=len(planned.chunks),
            wire_dtype=planned.options.wire_dtype,
            num_tokens=32,
            chunk_bytes=config.slot_bytes,
        )
        async with open_channel(ticket.kv_address) as channel, asyncio.timeout(20):
            stub: Any = kv_pb2_grpc.KvControlStub(channel)
            call = stub.Session()
            for message in (hello, offer):
                await call.write(wire.session_request(message))
            heard = [wire.session_response_from_pb(message) async for message in call]
        with pytest.raises(TransferError, match=r"prefill-0 has been silent for 0\.5 s"):
            await arriving
        assert heard[-1] == SessionFailed("TransferError: worker prefill-0 has been silent for 0.5 s")
        assert {type(message) for message in heard} >= {Welcome, Grant, Ping}, (
            "it was a session, and the offer was taken"
        )
        assert (await decode.receiver.release(ticket))[0] == (0, 1)
        await until(lambda: not decode.receiver._threads, SOON_S)
        assert await kv_transfer(prefill, decode, "next") == ""


def session_tasks() -> list[str]:
    """Of the server's streams, and of the sessions on them."""
    names = [f"{task.get_name()} {task.get_coro()}" for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith("HandleExceptions") or "IncomingConnection." in name]


@pytest.mark.parametrize("says_hello", [True, False])
async def test_a_closed_receiver_has_no_task_left(says_hello: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for a sender that does not hang up, or has not said who it is."""
    monkeypatch.setattr("kvstore.transfer.receiver.HANG_UP_S", 0.2)
    async with (
        decode_side(CONFIG) as decode,
        prefill_side(CONFIG) as prefill,
        open_channel(decode.receiver.kv_address) as channel,
    ):
        stub: Any = kv_pb2_grpc.KvControlStub(channel)
        call = stub.Session()
        if says_hello:
            await call.write(wire.session_request(prefill.sender._connections._hello))
        await until(lambda: len(session_tasks()) == (4 if says_hello else 1), SOON_S)
        await decode.receiver.close()
        assert not session_tasks()
        call.cancel()


@pytest.mark.parametrize("num_slots", [1, 2])
async def test_pools_too_small_for_all_pairs_starve_none(num_slots: int) -> None:
    config = dataclasses.replace(CONFIG, transports=("tcp",), num_slots=num_slots, window=1)
    async with contextlib.AsyncExitStack() as stack:
        decodes = [await stack.enter_async_context(decode_side(config, f"d{n}")) for n in range(3)]
        prefills = [await stack.enter_async_context(prefill_side(config, name=f"p{n}")) for n in range(3)]
        for number in range(3):
            cross = [(p, d) for p in prefills for d in decodes]
            outcomes = await asyncio.gather(*(kv_transfer(p, d, f"{number}/{n}") for n, (p, d) in enumerate(cross)))
            assert outcomes == [""] * 9
        sides = [p.sender for p in prefills] + [d.receiver for d in decodes]
        await until(lambda: all(side.slots_in_use <= 2 for side in sides), SOON_S)


async def test_two_communicators_that_cannot_be_ended_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    num_stuck = 1
    monkeypatch.setattr("kvstore.transfer.endpoint.num_stuck_aborts", lambda: num_stuck)
    monkeypatch.setattr("kvstore.transfer.endpoint.POLL_S", 0.01)
    async with engine_worker("w", ArithmeticRunner(num_blocks=8)) as worker:
        stuck = asyncio.create_task(worker.kv.stuck())
        await asyncio.sleep(0.1)
        assert not stuck.done()
        num_stuck = 2
        await asyncio.wait_for(stuck, SOON_S)


async def test_open_connections_are_counted_by_kind_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.transfer.endpoint.nccl_connections_by_carrier", lambda: {"P2P": 2, "NET/Socket": 1})
    async with (
        engine_worker("w", ArithmeticRunner(num_blocks=8)) as worker,
        decode_side(TWO_KINDS) as decode,
        prefill_side(TWO_KINDS) as prefill,
    ):
        assert worker.kv.connections() == (OpenConnections("nccl", "NET/Socket", 1), OpenConnections("nccl", "P2P", 2))
        assert await kv_transfer(prefill, decode, "t") == ""
        assert prefill.sender.open_kinds == decode.receiver.open_kinds == ["shm"]
        monkeypatch.setattr(worker.kv, "sender", prefill.sender)
        monkeypatch.setattr(worker.kv, "receiver", decode.receiver)
        assert worker.kv.connections()[2:] == (OpenConnections("shm", "", 2),)
        monkeypatch.undo()


async def test_a_workers_counts_are_those_of_both_its_sides() -> None:
    async with engine_worker("w", ArithmeticRunner(num_blocks=8)) as worker:
        worker.kv.sender._stats = TransferStats(**{name: n for n, name in enumerate(TransferStats.__slots__[:10], 1)})
        worker.kv.receiver._reservations._stats = TransferStats(
            **dict(zip(TransferStats.__slots__, range(100, 1100, 100), strict=False))
        )
        counts = worker.kv.counts()
    assert (counts.sent_committed, counts.received_committed, counts.committed) == (1, 100, 101)
    reasons = (counts.corrupted, counts.expired, counts.timed_out, counts.refused, counts.lost)
    assert reasons == (202, 303, 404, 505, 606)
    assert (counts.sent_failed, counts.received_failed, counts.failed) == (20, 2000, sum(reasons))
    assert (counts.sent_bytes, counts.received_bytes) == (7, 700)
    assert (counts.sent_chunks, counts.received_chunks) == (8, 800)
    assert (counts.transfer_s, counts.exposed_s) == (9, 10)
