"""The contract of PrefixIndex, and what publishers and followers make of it when things break."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from baton.cluster import WorkerLoad
from baton.errors import Fenced
from kvstore.index import (
    ORIGIN,
    Applied,
    BlockEvent,
    Cursor,
    IndexAnswer,
    IndexOutcome,
    IndexPublisher,
    Mirror,
    MirrorFollower,
    Op,
    Position,
    RedisIndex,
    StreamBounds,
    Tier,
)
from kvstore.index.connection import RedisConnection
from kvstore.index.keys import Keys
from kvstore.index.publisher import MAX_EVENT_KEYS
from kvstore.leases import LeaseKeeper
from tests.contract.conftest import CHECKED, STREAM_MAX_EVENTS, UNSIGNED
from tests.support.builders import worker_info
from tests.support.cases import chosen
from tests.support.waiting import until
from tests.unit.kvstore.index.test_mirror import replace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.contract.conftest import Backend, RedisServer

RESYNC, APPLIED = IndexOutcome.RESYNC, IndexOutcome.APPLIED


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "big") for number in numbers)


def stored(epoch: int, seq: int, *numbers: int, worker_id: str = "w") -> BlockEvent:
    return BlockEvent(worker_id=worker_id, epoch=epoch, seq=seq, op=Op.STORED, keys=keys(*numbers))


def snapshot(epoch: int, seq: int, *numbers: int) -> list[BlockEvent]:
    return [
        BlockEvent(worker_id="w", epoch=epoch, seq=seq, op=Op.SNAPSHOT_BEGIN),
        BlockEvent(worker_id="w", epoch=epoch, seq=seq + 1, op=Op.SNAPSHOT_PART, keys=keys(*numbers[:1])),
        BlockEvent(worker_id="w", epoch=epoch, seq=seq + 2, op=Op.SNAPSHOT_PART, keys=keys(*numbers[1:])),
        BlockEvent(worker_id="w", epoch=epoch, seq=seq + 3, op=Op.SNAPSHOT_END, num_keys=len(numbers)),
    ]


async def read(backend: Backend, since: Cursor = ORIGIN) -> list[tuple[Cursor, BlockEvent]]:
    return [(cursor, event) for cursor, event in await backend.index.read(since, 0) if event]


@contextlib.asynccontextmanager
async def running(*loops: MirrorFollower | IndexPublisher) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(loop.run()) for loop in loops]
        yield
        for task in started:
            task.cancel()


class FakeWorker:
    """A worker's block table, and the publisher that tells of it."""

    def __init__(self, backend: Backend, worker_id: str, epoch: int, **options: int) -> None:
        self.owned: set[bytes] = set()
        self.worker_id, self.epoch = worker_id, epoch
        self.publisher = IndexPublisher(
            backend.index, worker_id, epoch, lambda: list(self.owned), check_s=0.05, **options
        )

    def store(self, *numbers: int) -> None:
        self.owned.update(keys(*numbers))
        self.publisher.stored(keys(*numbers))

    def remove(self, *numbers: int) -> None:
        self.owned.difference_update(keys(*numbers))
        self.publisher.removed(keys(*numbers))

    def clear(self) -> None:
        self.owned.clear()
        self.publisher.cleared()


def follower(backend: Backend) -> MirrorFollower:
    return MirrorFollower(backend.index, Mirror(), poll_s=0.05, lease_s=5.0, blocks_ttl_s=60.0)


def owns(mirror: Mirror, worker: FakeWorker) -> bool:
    """Whether the mirror has exactly the worker's blocks."""
    mirror.check()
    found = {key for key in worker.owned if mirror.lookup([key]).get(worker.worker_id)}
    return found == worker.owned and mirror.workers().get(worker.worker_id) == len(worker.owned)


# The contract


async def test_events_are_applied_in_order_and_streamed(backend: Backend) -> None:
    epoch = await backend.leases.acquire("w")
    events = [
        stored(epoch, 1, 1, 2, 3),
        BlockEvent(worker_id="w", epoch=epoch, seq=2, op=Op.REMOVED, keys=keys(2, 9)),
        BlockEvent(worker_id="w", epoch=epoch, seq=3, op=Op.CLEARED),
        stored(epoch, 4, 4),
        *snapshot(epoch, 5, 5, 6),
        stored(epoch, 9),
    ]
    owned: list[set[bytes]] = []
    for event in events:
        assert await backend.index.apply(event) == IndexAnswer(APPLIED, event.seq)
        seq, found = await backend.index.snapshot("w", epoch)
        assert seq == event.seq
        owned.append(found)
    after = [(1, 2, 3), (1, 3), (), (4,), (4,), (4,), (4,), (5, 6), (5, 6)]
    assert owned == [set(keys(*numbers)) for numbers in after]
    entries = await read(backend)
    assert [(event.seq, event.op, event.keys) for _, event in entries] == [(e.seq, e.op, e.keys) for e in events]
    assert entries[7][1].num_keys == 2
    cursors = [cursor for cursor, _ in entries]
    assert cursors == sorted(set(cursors))
    assert [event.seq for _, event in await read(backend, cursors[6])] == [8, 9]
    state = await backend.index.state()
    assert state.owners == {"w": Position(epoch, 9)}
    assert state.tip == cursors[-1]


async def test_a_gap_or_a_repetition_asks_for_a_snapshot_and_changes_nothing(backend: Backend) -> None:
    epoch = await backend.leases.acquire("w")
    await backend.index.apply(stored(epoch, 1, 1))
    for seq in (0, 1, 3):
        assert await backend.index.apply(stored(epoch, seq, 7)) == IndexAnswer(RESYNC, 1)
    assert await backend.index.snapshot("w", epoch) == (1, set(keys(1)))
    assert len(await read(backend)) == 1
    for event in snapshot(epoch, 10, 7, 8):
        assert await backend.index.apply(event) == IndexAnswer(APPLIED, event.seq)
    assert await backend.index.snapshot("w", epoch) == (13, set(keys(7, 8)))


async def test_regression_sequence_reset_unseen(backend: Backend) -> None:
    """llm-d-router#2853: a publisher that counts from 1 again was taken for an old one."""
    epoch = await backend.leases.acquire("w")
    for event in snapshot(epoch, 1000, 1, 2):
        await backend.index.apply(event)
    assert await backend.index.apply(snapshot(epoch, 1, 8)[0]) == IndexAnswer(RESYNC, 1003)
    again = FakeWorker(backend, "w", epoch)
    again.store(8)
    async with running(again.publisher):
        await until(lambda: again.publisher.is_settled)
    assert await backend.index.snapshot("w", epoch) == (1006, set(keys(8)))


async def test_a_snapshot_with_a_missing_part_is_refused(backend: Backend) -> None:
    epoch = await backend.leases.acquire("w")
    begin, part, _, _ = snapshot(epoch, 1, 1, 2)
    await backend.index.apply(begin)
    await backend.index.apply(part)
    end = BlockEvent(worker_id="w", epoch=epoch, seq=3, op=Op.SNAPSHOT_END, num_keys=2)
    assert await backend.index.apply(end) == IndexAnswer(RESYNC, 2)
    for event in snapshot(epoch, 5, 3, 4):
        await backend.index.apply(event)
    assert await backend.index.snapshot("w", epoch) == (8, set(keys(3, 4)))


async def test_what_a_worker_leaves_in_redis_expires(server: RedisServer, namespace: str) -> None:
    """Also what it leaves in the middle of a snapshot."""
    backend = server.backend(namespace)
    epoch = await backend.leases.acquire("w")
    await backend.index.apply(stored(epoch, 1, 1))
    for event in snapshot(epoch, 2, 2, 3)[:2]:
        assert (await backend.index.apply(event)).outcome is APPLIED
    assert backend.connection
    found = await backend.connection.call("KEYS", f"*{namespace}*:w:{epoch}")
    lives = {key.decode().split(":")[2]: await backend.connection.call("PTTL", key) for key in found}
    assert lives.keys() == {"blk", "seq", "snap"}
    assert all(left > 0 for left in lives.values()), lives


async def test_an_empty_snapshot_empties(backend: Backend) -> None:
    epoch = await backend.leases.acquire("w")
    events = [
        stored(epoch, 1, 1),
        BlockEvent(worker_id="w", epoch=epoch, seq=2, op=Op.SNAPSHOT_BEGIN),
        BlockEvent(worker_id="w", epoch=epoch, seq=3, op=Op.SNAPSHOT_END),
    ]
    assert [(await backend.index.apply(event)).outcome for event in events] == [APPLIED] * 3
    assert await backend.index.snapshot("w", epoch) == (3, set())


async def test_regression_a_restarted_worker_that_keeps_its_name_is_scored_warm(backend: Backend) -> None:
    """kthena#1463: a restarted pod with the name of the old one was credited with its blocks. It is a new owner."""
    old = await backend.leases.acquire("w")
    await backend.index.apply(stored(old, 1, 1))
    new = await backend.leases.acquire("w")
    assert await backend.index.snapshot("w", new) == (0, set())
    assert (await backend.index.state()).owners == {"w": Position(new, 0)}
    assert await backend.index.apply(stored(new, 1, 2)) == IndexAnswer(APPLIED, 1)


async def test_fenced_worker_after_a_pause_changes_nothing(backend: Backend) -> None:
    old = await backend.leases.acquire("w")
    await backend.index.apply(stored(old, 1, 1))
    new = await backend.leases.acquire("w")
    for event in (stored(old, 2, 2), snapshot(old, 2, 2)[0]):
        with pytest.raises(Fenced, match=str(new)):
            await backend.index.apply(event)
    assert await backend.index.snapshot("w", old) == (1, set(keys(1)))
    assert len(await read(backend)) == 1


async def test_without_a_lease_nothing_is_applied(backend: Backend) -> None:
    epoch = await backend.leases.acquire("w")
    await backend.lapse("w")
    assert await backend.index.apply(stored(epoch, 1, 1)) == IndexAnswer(RESYNC, 0)
    assert await backend.index.apply(snapshot(epoch, 1, 1)[0]) == IndexAnswer(RESYNC, 0)
    assert (await backend.index.state()).owners == {}


async def test_an_event_may_hold_more_keys_than_one_lua_call(backend: Backend) -> None:
    epoch = await backend.leases.acquire("w")
    many = keys(*range(9001))
    await backend.index.apply(BlockEvent(worker_id="w", epoch=epoch, seq=1, op=Op.STORED, keys=many))
    assert await backend.index.snapshot("w", epoch) == (1, set(many))
    await backend.index.apply(BlockEvent(worker_id="w", epoch=epoch, seq=2, op=Op.REMOVED, keys=many[:8000]))
    assert await backend.index.snapshot("w", epoch) == (2, set(many[8000:]))
    assert (await read(backend))[0][1].keys == many


async def test_an_entry_says_in_which_tier_the_block_lies(backend: Backend) -> None:
    epoch = await backend.leases.acquire("w")

    def event(seq: int, op: Op, *numbers: int, tier: Tier = Tier.DEVICE, num_keys: int = 0) -> BlockEvent:
        return BlockEvent(
            worker_id="w",
            epoch=epoch,
            seq=seq,
            op=op,
            keys=keys(*numbers),
            num_keys=num_keys or len(numbers),
            tier=tier,
        )

    one, two, three = keys(1, 2, 3)
    history: list[tuple[BlockEvent, set[bytes]]] = [
        (event(1, Op.STORED, 1, 2), {one, two}),
        (event(2, Op.STORED, 2, 3, tier=Tier.HOST), {one, two, two + b"h", three + b"h"}),
        (event(3, Op.STORED, 3, tier=Tier.DISK), {one, two, two + b"h", three + b"h", three + b"s"}),
        (event(4, Op.REMOVED, 2), {one, two + b"h", three + b"h", three + b"s"}),
        (event(5, Op.REMOVED, 3, tier=Tier.HOST), {one, two + b"h", three + b"s"}),
        (event(6, Op.SNAPSHOT_BEGIN), {one, two + b"h", three + b"s"}),
        (event(7, Op.SNAPSHOT_PART, 3), {one, two + b"h", three + b"s"}),
        (event(8, Op.SNAPSHOT_PART, 1, 3, tier=Tier.HOST), {one, two + b"h", three + b"s"}),
        (event(9, Op.SNAPSHOT_END, num_keys=3), {three, one + b"h", three + b"h"}),
        (event(10, Op.CLEARED), set()),
    ]
    mirror = Mirror()
    mirror.set_leased({"w": epoch})
    for published, owned in history:
        assert await backend.index.apply(published) == IndexAnswer(APPLIED, published.seq)
        assert await backend.index.snapshot("w", epoch) == (published.seq, owned)
    for (_, event_read), (published, owned) in zip(await read(backend), history, strict=True):
        assert event_read == published
        assert mirror.apply(event_read) is Applied.DONE
        mirror.check()
        assert {entry for number in range(9) for entry in _entries(number) if mirror.lookup([entry])} == owned


def _entries(number: int) -> list[bytes]:
    return [
        BlockEvent(worker_id="w", epoch=1, seq=1, op=Op.STORED, keys=keys(number), num_keys=1, tier=tier).entries[0]
        for tier in Tier
    ]


async def test_read_waits_for_the_first_event(backend: Backend) -> None:
    epoch = await backend.leases.acquire("w")
    assert await backend.index.read(ORIGIN, 0.01) == []
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(backend.index.read(ORIGIN, 4))
        await asyncio.sleep(0.02)
        await backend.index.apply(stored(epoch, 1, 1))
    assert [event.seq for _, event in reading.result() if event] == [1]


# Publisher and follower


async def test_a_follower_scans_and_then_follows(backend: Backend) -> None:
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    worker.store(*range(2000))
    async with running(worker.publisher):
        await until(lambda: worker.publisher.is_settled)
        late = follower(backend)
        async with running(late):
            await until(lambda: owns(late.mirror, worker))
            worker.store(*range(5000, 5000 + 2 * MAX_EVENT_KEYS))
            worker.remove(*range(100))
            await until(lambda: worker.publisher.is_settled and owns(late.mirror, worker))
            worker.clear()
            worker.store(7)
            await until(lambda: owns(late.mirror, worker))
            assert late.connected
            await until(lambda: late.lag_s == 0)
    assert (late.num_rescans, worker.publisher.num_snapshots) == (1, 1)


async def test_three_followers_converge(backend: Backend) -> None:
    workers = [FakeWorker(backend, name, await backend.leases.acquire(name)) for name in ("a", "b", "c")]
    followers = [follower(backend) for _ in range(3)]
    async with running(*(worker.publisher for worker in workers), *followers):
        for step in range(60):
            worker = workers[step % 3]
            worker.store(step, step + 1, 1000 * (step % 3) + step)
            worker.remove(max(step - 6, 0))
            if step == 30:
                worker.clear()
            if step % 10 == 0:
                await asyncio.sleep(0.01)
        await until(lambda: all(owns(each.mirror, worker) for each in followers for worker in workers))
    answers = [each.mirror.lookup(keys(57, 58, 59)) for each in followers]
    assert answers[0]
    assert answers[0] == answers[1] == answers[2]


async def test_events_that_are_read_during_a_snapshot_do_not_spoil_it(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads both at once replays them."""
    epoch = await backend.leases.acquire("w")
    await backend.index.apply(stored(epoch, 1, 1, 2))
    if backend.connection is None:
        return  # in memory nothing can come in between
    run, pipeline = RedisConnection.run, RedisConnection.pipeline

    async def slow_run(self: RedisConnection, *arguments: Any) -> Any:
        found = await run(self, *arguments)
        await go_on()
        return found

    async def slow_pipeline(self: RedisConnection, commands: Any) -> Any:
        found = await pipeline(self, commands)
        if commands[0][0] == "SSCAN":
            await go_on()
        return found

    async def go_on() -> None:
        monkeypatch.undo()
        await backend.index.apply(stored(epoch, 2, 3))
        assert [event.seq for _, event in await read(backend)] == [1, 2]

    monkeypatch.setattr(RedisConnection, "run", slow_run)
    monkeypatch.setattr(RedisConnection, "pipeline", slow_pipeline)
    assert await backend.index.snapshot("w", epoch) == (1, set(keys(1, 2)))


async def test_regression_in_flight_events_re_add_entries_after_a_clear(backend: Backend) -> None:
    """llm-d-router#1738: what was stored before a clear came back with events that were still on their way."""
    epoch = await backend.leases.acquire("w")
    late = follower(backend)
    await backend.index.apply(stored(epoch, 1, 1))
    await backend.index.apply(BlockEvent(worker_id="w", epoch=epoch, seq=2, op=Op.CLEARED))
    assert (await backend.index.apply(stored(epoch, 1, 1))).outcome is RESYNC
    async with running(late):
        await until(lambda: late.mirror.position("w") == Position(epoch, 2))
        for _, event in await read(backend):
            late.mirror.apply(event)
        assert late.mirror.lookup(keys(1)) == {}


async def test_regression_the_index_is_blind_after_a_router_restart(server: RedisServer, namespace: str) -> None:
    """A new router has nothing but what it is told, and what idle workers hold is in the stream no more."""
    backend = server.backend(namespace)
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    async with running(worker.publisher):
        worker.store(1, 2)
        await until(lambda: worker.publisher.is_settled)
    assert backend.connection
    await backend.connection.call("XTRIM", f"kv:{{{namespace}}}:ev", "MAXLEN", 0)
    restarted = follower(server.backend(namespace))
    async with running(restarted):
        await until(lambda: restarted.connected)
        assert restarted.mirror.lookup(keys(1, 2)) == {"w": 2}


async def test_a_dead_worker_vanishes_from_the_mirror_and_its_successor_is_cold(backend: Backend) -> None:
    a, b = [FakeWorker(backend, name, await backend.leases.acquire(name)) for name in ("a", "b")]
    late = follower(backend)
    async with running(a.publisher, b.publisher, late):
        a.store(1, 2)
        b.store(1)
        await until(lambda: late.mirror.lookup(keys(1, 2)) == {"a": 2, "b": 1})
        await backend.lapse("a")
        await until(lambda: late.mirror.lookup(keys(1, 2)) == {"b": 1})
    await backend.leases.acquire("a")
    async with running(late):
        await until(lambda: "a" in late.mirror.workers())
        assert late.mirror.lookup(keys(1, 2)) == {"b": 1}


@pytest.mark.parametrize("backend", chosen(UNSIGNED, pytest.mark.slow, *CHECKED), indirect=True)
async def test_a_sequence_reset_after_a_loss_reaches_the_mirror(backend: Backend) -> None:
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    late = follower(backend)
    async with running(worker.publisher, late):
        for number in range(9):
            worker.store(number)
            await until(lambda: owns(late.mirror, worker))
    await backend.lapse_blocks("w", worker.epoch)
    again = FakeWorker(backend, "w", worker.epoch)
    again.store(20)
    async with running(again.publisher):
        await until(lambda: again.publisher.is_settled)
    async with running(late):
        await until(lambda: owns(late.mirror, again))


async def test_a_worker_that_stays_away_is_forgotten(backend: Backend) -> None:
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    late = MirrorFollower(backend.index, Mirror(), poll_s=0.02, blocks_ttl_s=0.1)
    async with running(worker.publisher, late):
        worker.store(1)
        await until(lambda: owns(late.mirror, worker))
        await backend.lapse("w")
        await until(lambda: not late.mirror.workers() and len(late.mirror) == 0)


async def test_a_lease_that_is_missing_for_a_moment_costs_no_scan(backend: Backend) -> None:
    """Its worker is looked over, and not forgotten: what it holds is known at once when the lease is there again."""
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    late = MirrorFollower(backend.index, Mirror(), poll_s=0.02)
    async with running(worker.publisher):
        worker.store(1, 2)
        await until(lambda: worker.publisher.is_settled)
        async with running(late):
            await until(lambda: late.mirror.lookup(keys(1, 2)) == {"w": 2})
            rescans = late.num_rescans
            await backend.lose("w")
            await until(lambda: late.mirror.lookup(keys(1, 2)) == {})
            assert late.mirror.workers() == {"w": 2}
            await backend.leases.renew(worker_info("w", epoch=worker.epoch), WorkerLoad())
            await until(lambda: late.mirror.lookup(keys(1, 2)) == {"w": 2})
            assert late.num_rescans == rescans


async def test_the_stream_is_as_long_as_it_may_be(backend: Backend) -> None:
    """A stream that only grows fills the store's memory; Redis trims by nodes of a hundred entries."""
    epoch = await backend.leases.acquire("w")
    for seq in range(1, STREAM_MAX_EVENTS + 301):
        if seq % 100 == 0:  # a busy machine takes longer for all than a lease lasts
            assert await backend.leases.renew(worker_info("w", epoch=epoch), WorkerLoad())
        assert (await backend.index.apply(stored(epoch, seq, seq))).outcome is APPLIED
    cursor, num_events = ORIGIN, 0
    while entries := await read(backend, cursor):
        cursor, num_events = entries[-1][0], num_events + len(entries)
    assert STREAM_MAX_EVENTS <= num_events < STREAM_MAX_EVENTS + 200
    assert (await backend.index.state()).owners == {"w": Position(epoch, STREAM_MAX_EVENTS + 300)}


async def test_an_event_of_an_epoch_that_nobody_holds_hides_no_blocks_for_long(
    server: RedisServer, namespace: str
) -> None:
    """Regression: the mirror adopted it, and took all that the worker said from then on for old."""
    backend = server.backend(namespace)
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    late = follower(backend)
    assert backend.connection
    async with running(worker.publisher, late):
        worker.store(1, 2)
        await until(lambda: owns(late.mirror, worker))
        forged: dict[str, str | bytes | int] = {"w": "w", "e": worker.epoch + 5, "q": 1, "o": "snap", "k": b"", "n": 0}
        flat = [part for field in forged.items() for part in field]
        await backend.connection.call("XADD", f"kv:{{{namespace}}}:ev", "*", *flat)
        worker.store(3)
        await until(lambda: owns(late.mirror, worker) and late.mirror.lookup(keys(1, 2, 3)) == {"w": 3})


async def test_a_stream_that_can_grow_no_more_is_begun_anew(server: RedisServer, namespace: str) -> None:
    """Regression: after an event with the last of all ids none could be told."""
    backend = server.backend(namespace)
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    late = follower(backend)
    assert backend.connection
    async with running(worker.publisher, late):
        worker.store(1)
        await until(lambda: owns(late.mirror, worker))
        await backend.connection.call("XADD", f"kv:{{{namespace}}}:ev", f"{2**64 - 1}-{2**64 - 1}", "x", "y")
        worker.store(2)
        await until(lambda: owns(late.mirror, worker) and late.connected and late.lag_s == 0)
        rescans = late.num_rescans
        for number in range(3, 9):
            worker.store(number)
            await until(lambda: owns(late.mirror, worker))
        assert late.num_rescans <= rescans + 1, "the new stream is not followed"


async def test_an_idle_publisher_notices_that_its_set_is_no_set(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    assert backend.connection
    async with running(worker.publisher):
        worker.store(1, 2)
        await until(lambda: worker.publisher.is_settled)
        name = Keys(namespace).blocks("w", worker.epoch)
        await backend.connection.pipeline([("DEL", name), ("SET", name, "x")])
        await until(lambda: worker.publisher.num_snapshots == 2)
    assert (await backend.index.snapshot("w", worker.epoch))[1] == worker.owned


async def test_a_gap_between_two_polls_is_healed_at_once(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    late = MirrorFollower(backend.index, Mirror(), poll_s=3600)
    assert backend.connection
    async with running(worker.publisher):
        worker.store(1)
        await until(lambda: worker.publisher.is_settled)
        async with running(late):
            await until(lambda: owns(late.mirror, worker) and late.connected)
            replace(late.mirror, "w", worker.epoch, 1, ())  # as if it had missed what followed
            worker.store(2)
            await until(lambda: owns(late.mirror, worker))
    assert late.num_rescans == 2


async def test_a_fenced_publisher_stops(backend: Backend) -> None:
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    await backend.leases.acquire("w")
    worker.store(1)
    async with asyncio.timeout(5):
        with pytest.raises(Fenced):
            await worker.publisher.run()


async def test_a_publisher_waits_for_the_lease(backend: Backend) -> None:
    epoch = await backend.leases.acquire("w")
    await backend.lose("w")
    worker = FakeWorker(backend, "w", epoch)
    async with running(worker.publisher):
        worker.store(1)
        await asyncio.sleep(0.05)
        assert not worker.publisher.is_settled
        await backend.leases.renew(worker_info("w", epoch=epoch), WorkerLoad())
        await until(lambda: worker.publisher.is_settled)
    assert (await backend.index.snapshot("w", epoch))[1] == worker.owned


async def test_an_idle_publisher_notices_that_its_set_expired(backend: Backend) -> None:
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    async with running(worker.publisher):
        worker.store(1, 2)
        await until(lambda: worker.publisher.is_settled)
        await backend.lapse_blocks("w", worker.epoch)
        await until(lambda: worker.publisher.num_snapshots == 2)
    assert (await backend.index.snapshot("w", worker.epoch))[1] == worker.owned


async def test_too_many_pending_events_become_a_snapshot(backend: Backend) -> None:
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"), max_pending_keys=10)
    async with running(worker.publisher):
        await until(lambda: worker.publisher.is_settled)
        for number in range(500):
            worker.store(number)
            assert len(worker.publisher._pending) <= 10
        await until(lambda: worker.publisher.is_settled)
    assert worker.publisher.num_snapshots == 2
    assert (await backend.index.snapshot("w", worker.epoch))[1] == worker.owned


async def test_what_many_steps_changed_is_told_in_few_events(backend: Backend) -> None:
    """Regression: with a round trip for every change of direction, a busy worker's evictions waited in a queue of
    hundreds, and the routers placed by what had long gone."""
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    async with running(worker.publisher):
        await until(lambda: worker.publisher.is_settled)
        before = await backend.index.position("w", worker.epoch)
        for number in range(400):
            worker.store(number, number + 1)
            worker.remove(max(number - 5, 0))
            if number == 200:
                worker.clear()
        await until(lambda: worker.publisher.is_settled)
    assert await backend.index.snapshot("w", worker.epoch) == (before + 3, worker.owned)
    assert [event.op for _, event in await read(backend)][-3:] == [Op.CLEARED, Op.REMOVED, Op.STORED]


async def test_a_trimmed_stream_rescans_that_worker_only(server: RedisServer, namespace: str) -> None:
    """Regression: events were cut from the stream before the router read them, and nothing follows them."""
    backend = server.backend(namespace, stream_max_events=10)
    a, b = [FakeWorker(backend, name, await backend.leases.acquire(name)) for name in ("a", "b")]
    late = follower(backend)
    async with running(a.publisher, b.publisher):
        a.store(1)
        b.store(2)
        async with running(late):
            await until(lambda: owns(late.mirror, a) and owns(late.mirror, b) and late.lag_s == 0)
        rescans = late.num_rescans
        a.store(3)
        await until(lambda: a.publisher.is_settled)
        assert backend.connection
        await backend.connection.call("XTRIM", f"kv:{{{namespace}}}:ev", "MAXLEN", 0)
        async with running(late):
            await until(lambda: owns(late.mirror, a))
            assert owns(late.mirror, b)
            assert late.num_rescans == rescans + 1


@pytest.mark.parametrize("bounds", [StreamBounds(max_bytes=2**19), StreamBounds(max_age_s=0.3)], ids=["bytes", "age"])
async def test_the_stream_is_bounded(server: RedisServer, namespace: str, bounds: StreamBounds) -> None:
    """Regression: only the number of events was bounded, each of which may have 18 KB."""
    backend = server.backend(namespace)
    connection = backend.connection
    assert connection
    epoch = await backend.leases.acquire("w")
    index = RedisIndex(connection, namespace, stream=bounds)
    stream, sizes, owned, is_by_age = Keys(namespace).events, [], set[bytes](), bounds.max_age_s < 1
    for seq in range(1, 601):
        stored = keys(*range(seq * 256, (seq + 1) * 256)) if seq % 5 else keys(seq)
        event = BlockEvent(worker_id="w", epoch=epoch, seq=seq, op=Op.STORED, keys=tuple(stored))
        await index.apply(event)
        owned.update(stored)
        sizes.append(await connection.call("MEMORY", "USAGE", stream, "SAMPLES", 0))
        await asyncio.sleep(0.002 if is_by_age else 0)
    assert is_by_age or max(sizes) < 1.5 * bounds.max_bytes
    assert is_by_age or min(sizes[-100:]) > bounds.max_bytes / 2
    tip = (await index.state()).tip
    first = (await connection.call("XRANGE", stream, "-", "+", "COUNT", 1))[0][0]
    age_ms = tip[0] - int(first.partition(b"-")[0])
    assert not is_by_age or 250 <= age_ms < 600
    assert await index.snapshot("w", epoch) == (600, owned), "what is cut is past, not the set"


async def test_a_counter_of_bytes_that_somebody_has_changed_bounds_the_stream_all_the_same(
    server: RedisServer, namespace: str
) -> None:
    backend = server.backend(namespace)
    connection = backend.connection
    assert connection
    epoch, of = await backend.leases.acquire("w"), Keys(namespace)
    index = RedisIndex(connection, namespace, stream=StreamBounds(max_bytes=2**18))
    for seq in range(1, 301):
        if seq % 60 == 0:
            garbage = [("SET", of.event_bytes, each) for each in ("x", 2**60, 5, "-3")] + [("DEL", of.event_bytes)]
            await connection.pipeline([("DEL", of.event_bytes), garbage[seq // 60 - 1]])
        event = BlockEvent(worker_id="w", epoch=epoch, seq=seq, op=Op.STORED, keys=keys(*range(seq, seq + 256)))
        assert (await index.apply(event)).outcome is IndexOutcome.APPLIED
        assert await connection.call("MEMORY", "USAGE", of.events, "SAMPLES", 0) < 2**21


async def test_changes_are_gathered(backend: Backend) -> None:
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    async with running(worker.publisher):
        await until(lambda: worker.publisher.is_settled)
        before = await backend.index.position("w", worker.epoch)
        for number in range(10):
            worker.store(number)
            await asyncio.sleep(0.002)
        await until(lambda: worker.publisher.is_settled)
        assert await backend.index.position("w", worker.epoch) <= before + 3
        assert await backend.index.snapshot("w", worker.epoch) == (
            await backend.index.position("w", worker.epoch),
            worker.owned,
        )


async def test_loads_travel_with_the_events(backend: Backend) -> None:
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    heard: list[tuple[str, int, bytes]] = []
    late = MirrorFollower(backend.index, Mirror(), poll_s=0.05, on_load=lambda *load: heard.append(load))
    assert not worker.publisher.report(1, b"too early"), "nothing is published yet"
    async with running(worker.publisher, late):
        await until(lambda: worker.publisher.is_settled and late.connected)
        before = await backend.index.position("w", worker.epoch)
        worker.store(1)
        worker.remove(2)
        assert worker.publisher.report(1, b"a")
        await until(lambda: heard == [("w", worker.epoch, b"a")])
        assert await backend.index.position("w", worker.epoch) == before + 2, "with the last of the changes"
        for number, load in ((1, b"once more"), (2, b"b"), (3, b"c")):
            assert worker.publisher.report(number, load)
        await until(lambda: heard[1:] == [("w", worker.epoch, b"c")])
        assert await backend.index.position("w", worker.epoch) == before + 3
        await until(lambda: owns(late.mirror, worker))
        assert late.num_rescans <= 1
        await backend.lapse("w")
        worker.store(3)
        await until(lambda: not worker.publisher.report(4, b"d"))


async def test_a_gap_in_the_stream_rescans_that_worker_only(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    a, b = [FakeWorker(backend, name, await backend.leases.acquire(name)) for name in ("a", "b")]
    late = follower(backend)
    async with running(a.publisher, b.publisher):
        async with running(late):
            await until(lambda: a.publisher.is_settled and b.publisher.is_settled and late.connected)
        for number in (1, 2, 3):
            a.store(number)
            b.store(number)
            await until(lambda: a.publisher.is_settled and b.publisher.is_settled)
        rescans = late.num_rescans
        entries = await read(backend)
        lost = next(cursor for cursor, event in entries if event.worker_id == "a" and event.keys == keys(2))
        assert backend.connection
        assert await backend.connection.call("XDEL", f"kv:{{{namespace}}}:ev", f"{lost[0]}-{lost[1]}") == 1
        async with running(late):
            await until(lambda: owns(late.mirror, a) and owns(late.mirror, b))
        assert late.num_rescans == rescans + 1


async def test_redis_returns_empty_workers_republish_and_the_mirror_heals(
    own_server: RedisServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression, sglang#39822: after a restart of the index, no placement may rest on what is no longer true."""
    backend = own_server.backend(namespace)
    router = own_server.backend(namespace)
    keeper = LeaseKeeper(backend.leases, "w", renew_s=0.05)
    worker = FakeWorker(backend, "w", await keeper.acquire())
    gone = FakeWorker(backend, "gone", await backend.leases.acquire("gone"))
    late = MirrorFollower(router.index, Mirror(), poll_s=0.05, lease_s=0.5)
    async with asyncio.TaskGroup() as tasks, running(worker.publisher, late):
        keeping = tasks.create_task(keeper.run(lambda: (worker_info("w", epoch=worker.epoch), WorkerLoad())))
        async with running(gone.publisher):
            worker.store(1, 2, 3)
            gone.store(1, 2)
            await until(lambda: owns(late.mirror, worker) and owns(late.mirror, gone))
        own_server.embedded.kill()
        await until(lambda: not late.connected)
        worker.store(4)  # neither blocks nor fails
        worker.remove(1)
        assert late.mirror.lookup(keys(2, 3)) == {"w": 2, "gone": 1}  # we go on with what we knew
        assert late.lag_s > 0
        own_server.embedded.start()
        await until(lambda: owns(late.mirror, worker) and late.connected and late.lag_s == 0)
        assert late.mirror.lookup(keys(2, 3, 4))["w"] == 3
        await until(lambda: late.mirror.lookup(keys(1, 2)) == {})  # the dead worker's lease never came back
        keeping.cancel()
    assert worker.publisher.num_snapshots == 2
    assert (await backend.index.snapshot("w", worker.epoch))[1] == worker.owned
    said = [record.getMessage() for record in caplog.records if record.name == "kvstore.index.follower"]
    assert len(said) == 1, "once, however often it is tried"
    assert said[0].startswith("the index is unavailable, its mirror becomes stale: ")


async def test_a_mirror_loses_nothing_while_redis_is_new(own_server: RedisServer, namespace: str) -> None:
    """Between Redis' return and the workers' renewals, no lease is there, and that says nothing."""
    backend = own_server.backend(namespace)
    worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
    late = MirrorFollower(own_server.backend(namespace).index, Mirror(), poll_s=0.02, lease_s=60)
    async with running(late):
        async with running(worker.publisher):
            worker.store(1, 2)
            await until(lambda: owns(late.mirror, worker))
        own_server.embedded.kill()
        await until(lambda: not late.connected)
        own_server.embedded.start()
        await until(lambda: late.connected)
        await asyncio.sleep(0.1)
        assert late.mirror.lookup(keys(1, 2)) == {"w": 2}
        own_server.embedded.kill()  # so soon that perhaps no call fails
        own_server.embedded.start()
        boot = (await own_server.backend(namespace).index.state()).boot
        await until(lambda: late._boot == boot and late.connected)
        assert late.mirror.lookup(keys(1, 2)) == {"w": 2}
