"""Clocks that are set while a cluster runs, wrongly or by NTP: readers believe every kind of member again soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from redis.exceptions import NoPermissionError

from baton.cluster import ControllerInfo, RouterInfo
from baton.errors import StoreUnavailable
from baton.trust import Principal
from kvstore.index import MemoryStore, RedisConnection
from kvstore.index.keys import Keys, endpoint_namespace
from kvstore.leases import MODEL_LEASE_S, LeaseKeeper, MemoryLeases, RedisEndpoint, RedisLeases, keeper
from tests.contract.conftest import Clock
from tests.contract.test_leases import LOAD
from tests.support.builders import model_announcement, worker_info

if TYPE_CHECKING:
    from tests.contract.conftest import RedisServer
    from tests.support.keys import MemberKeys

Command = tuple[object, ...]
RENEW_S, LEASE_S = 3.0, 10.0
HOUR_S = 3600.0
AUTHORS = {
    "worker": Principal.WORKER,
    "router": Principal.ROUTER,
    "controller": Principal.CONTROLLER,
    "model": Principal.CONTROLLER,
}
"""The member that writes each kind of value."""
LASTS_S = dict.fromkeys(AUTHORS, LEASE_S) | {"model": MODEL_LEASE_S}
"""Time for which a value counts."""


class Redis(RedisConnection):
    """A Redis whose clock the test sets; None: this user may not ask for it."""

    time_s: Callable[[], float] | None = None

    async def call(self, *command: Any) -> Any:
        if command != ("TIME",):
            return await super().call(*command)
        if self.time_s is None:
            raise StoreUnavailable("Redis: NOPERM") from NoPermissionError("NOPERM")
        return [b"%d" % int(self.time_s()), b"0"]


class World:
    """One cluster whose clocks the test sets, each by seconds ahead of the true time."""

    def __init__(self, redis: Redis, namespace: str, keys: MemberKeys) -> None:
        self.now_s = 1_800_000_000.0
        self.ahead_s = {"member": 0.0, "reader": 0.0, "redis": 0.0}
        self.redis, self.namespace, self.keys = redis, namespace, keys
        redis.time_s = self.clock("redis")

    def clock(self, of: str) -> Callable[[], float]:
        return lambda: self.now_s + self.ahead_s[of]

    def leases(self, principal: Principal, of: str) -> RedisLeases:
        return RedisLeases(
            self.redis,
            self.namespace,
            lease_s=LEASE_S,
            clock=self.clock(of),
            monotonic_s=lambda: self.now_s,
            keys=self.keys[principal],
        )

    def endpoint(self, principal: Principal, of: str) -> RedisEndpoint:
        return RedisEndpoint(
            self.redis,
            self.namespace,
            lease_s=LEASE_S,
            clock=self.clock(of),
            monotonic_s=lambda: self.now_s,
            keys=self.keys[principal],
        )

    def reader(self) -> Reader:
        return Reader(self.leases(Principal.ROUTER, "reader"), self.endpoint(Principal.ROUTER, "reader"))


class Reader(NamedTuple):
    """Returns the values that a router reads."""

    leases: RedisLeases
    endpoint: RedisEndpoint


class Member:
    """A worker, router or controller, or a model's controller, and whether a reader believes what it writes."""

    def __init__(self, world: World, kind: str) -> None:
        self.world, self.kind = world, kind
        self.leases = world.leases(AUTHORS[kind], "member")
        self.endpoint = world.endpoint(AUTHORS[kind], "member")
        self.epochs: list[int] = []

    async def renew(self) -> None:
        """What a member does every few seconds; a worker whose epoch is over takes the next one."""
        match self.kind:
            case "router":
                info = RouterInfo(id="r0", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0)
                await self.endpoint.announce_router(info)
            case "model":
                await self.endpoint.announce_model(model_announcement())
            case "controller":
                await self.leases.announce_controller(ControllerInfo(pid=1, address="h:3"))
            case _ if not self.epochs or not await self._renewed():
                self.epochs.append(await self.leases.acquire("w", self.epochs[-1] if self.epochs else None))
                assert await self._renewed()

    async def is_believed(self, reader: Reader) -> bool:
        match self.kind:
            case "router":
                return bool(await reader.endpoint.list_routers())
            case "model":
                return bool(await reader.endpoint.list_models())
            case "controller":
                return await reader.leases.get_controller() is not None
            case _:
                return bool(await reader.leases.list_workers())

    async def _renewed(self) -> bool:
        return await self.leases.renew(worker_info("w", epoch=self.epochs[-1], address="w:1"), LOAD)


@pytest.fixture
async def world(server: RedisServer, namespace: str, member_keys: MemberKeys) -> AsyncGenerator[World]:
    redis = Redis(server.embedded.url)
    yield World(redis, namespace, member_keys)
    await redis.close()


async def believed(member: Member, readers: list[Reader], seconds: float) -> list[float]:
    """Lets time pass, and returns after how many seconds each reader believes the member for good."""
    since = [0.0 for _ in readers]
    for number in range(int(seconds / RENEW_S)):
        member.world.now_s += RENEW_S
        await member.renew()
        for index, reader in enumerate(readers):
            if not await member.is_believed(reader):
                since[index] = (number + 2) * RENEW_S
    return since


@pytest.mark.parametrize("kind", AUTHORS)
@pytest.mark.parametrize("ahead_s", [-61.0, HOUR_S])
async def test_a_clock_that_is_set_wrongly_and_right_again_changes_nothing(
    world: World, kind: str, ahead_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: set back by 61 s, a worker took a new epoch 300 times a second, and nobody believed it."""
    member, known = Member(world, kind), world.reader()
    await member.renew()
    assert await member.is_believed(known)
    for set_ahead_s in (ahead_s, 0.0, ahead_s, 0.0):
        world.ahead_s["member"] = set_ahead_s
        assert await believed(member, [known, world.reader()], 66) == [0, 0]
    assert len(member.epochs) == (kind == "worker")
    assert len(caplog.records) <= 2, "one line each time"


@pytest.mark.parametrize("kind", AUTHORS)
@pytest.mark.parametrize("ahead_s", [-HOUR_S, 120.0])
async def test_a_clock_that_was_wrong_from_the_start_is_believed_once_it_is_set(
    world: World, kind: str, ahead_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    member, known = Member(world, kind), world.reader()
    world.ahead_s["member"] = ahead_s
    await member.renew()
    assert not await member.is_believed(known)
    world.ahead_s["member"] = 0.0
    assert await believed(member, [known, world.reader()], 66) == [0, 0]
    assert len(member.epochs) <= 2
    assert len(caplog.records) <= 2


@pytest.mark.parametrize("kind", AUTHORS)
async def test_all_clocks_may_be_set_at_once(world: World, kind: str) -> None:
    """A worker is believed with its next renewal, for its epoch rises; the others within a lease."""
    member, known = Member(world, kind), world.reader()
    await member.renew()
    assert await member.is_believed(known)
    for ahead_s in (2 * HOUR_S, 0.0, -2 * HOUR_S, 0.0):
        world.ahead_s = dict.fromkeys(world.ahead_s, ahead_s)
        since = await believed(member, [known, world.reader()], LASTS_S[kind] + 57)
        assert max(since) <= (0 if kind == "worker" else LASTS_S[kind] + 2 * RENEW_S), ahead_s
    assert len(member.epochs) == (3 if kind == "worker" else 0)


@pytest.mark.parametrize("kind", AUTHORS)
async def test_who_may_not_ask_for_redis_time_follows_the_own_clock(world: World, kind: str) -> None:
    member = Member(world, kind)
    world.redis.time_s = None
    world.ahead_s = dict.fromkeys(world.ahead_s, 2 * HOUR_S)
    await member.renew()
    world.ahead_s = dict.fromkeys(world.ahead_s, 0.0)
    assert await believed(member, [world.reader()], 30) == [0]
    assert len(member.epochs) == (2 if kind == "worker" else 0)


async def test_a_reader_s_clock_may_be_set_after_the_author_s_was(world: World) -> None:
    """Within one epoch a stamp rises at once where NTP sets a clock forward: from there on it is counted."""
    world.ahead_s |= {"member": -59.0, "redis": 5.0}
    member, known = Member(world, "worker"), world.reader()
    await member.renew()
    assert await member.is_believed(known)
    world.ahead_s["member"] = 3.0
    assert await believed(member, [known], 9) == [0]
    world.ahead_s["reader"] = HOUR_S
    assert await believed(member, [known], 30) == [0]
    assert len(member.epochs) == 1


async def recorded_of(member: Member) -> tuple[Command, ...]:
    """The commands that put what a member has written last where it lay."""
    keys, call = Keys(member.world.namespace), member.world.redis.call
    if member.kind == "worker":
        key = keys.lease("w")
        lease = await call("HGETALL", key)
        fields = [part for field in lease.items() for part in field]
        return ("DEL", key), ("HSET", key, *fields), ("SADD", keys.workers, "w")
    shared = Keys(endpoint_namespace(member.world.namespace))
    key = {"controller": keys.controller, "router": shared.router("r0"), "model": shared.model("c" * 32)}[member.kind]
    return (("SET", key, await call("GET", key)),)


@pytest.mark.parametrize("kind", AUTHORS)
async def test_what_was_recorded_of_a_member_that_is_gone_is_not_believed(world: World, kind: str) -> None:
    """Neither that of half a minute ago nor, of one with epochs, that of the time to which a clock is set back."""
    member, known = Member(world, kind), world.reader()
    await member.renew()
    long_ago = await recorded_of(member)
    world.now_s += HOUR_S
    await member.renew()
    assert await member.is_believed(known)
    lately = await recorded_of(member)
    world.now_s += RENEW_S
    await member.renew()
    assert await member.is_believed(known)
    world.now_s += LASTS_S[kind] + 1
    await world.redis.pipeline(list(lately))
    assert not await member.is_believed(known)
    world.ahead_s["reader"] = -HOUR_S - LASTS_S[kind]
    await world.redis.pipeline(list(long_ago))
    assert await member.is_believed(known) == (kind != "worker"), "as docs/redis.md says"


@pytest.mark.parametrize("kind", ["router", "controller", "model"])
async def test_a_member_without_epochs_is_not_set_back_by_what_was_recorded(world: World, kind: str) -> None:
    """A reader whose clock is set back believes nothing of that earlier time while the member lives."""
    member, known = Member(world, kind), world.reader()
    await member.renew()
    recorded = await recorded_of(member)
    world.now_s += HOUR_S
    assert await believed(member, [known], 30) == [0]
    world.ahead_s["reader"] = -HOUR_S
    await world.redis.pipeline(list(recorded))
    before = world.redis.garbage.seen()
    assert await member.is_believed(known), "as it was read last"
    assert world.redis.garbage.seen() != before, "and not what was recorded"
    assert await believed(member, [known], 60) == [0]


async def test_sizes_of_a_controller_whose_predecessor_was_ahead_are_read(world: World) -> None:
    """Regression: routers kept the old ones until they were started again."""
    reader = world.reader().leases
    world.ahead_s["member"] = HOUR_S
    await world.leases(Principal.CONTROLLER, "member").set_desired({"decode": 1})
    assert await reader.get_desired() == {"decode": 1}
    world.ahead_s["member"] = 0.0
    await world.leases(Principal.CONTROLLER, "member").set_desired({"decode": 2})
    assert await reader.get_desired() == {"decode": 2}


async def test_epochs_that_are_of_no_use_are_not_taken_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[int] = []

    def pause_s(number: int) -> float:
        pauses.append(number)
        return 0.0

    monkeypatch.setattr(keeper, "backoff_s", pause_s)
    store = MemoryStore(Clock())
    holder = LeaseKeeper(MemoryLeases(store), "w", renew_s=60)
    is_lapsing, has_renewed = True, asyncio.Event()

    def describe() -> Any:
        if is_lapsing:
            store.leases["w"].expires_at = 0
        else:
            has_renewed.set()
        return worker_info("w", epoch=holder.epoch), LOAD

    for _ in range(6):
        await holder.acquire()
        await holder.run(describe)
    assert pauses == [1, 2, 3, 4, 5]
    assert len(caplog.records) == 0, "an epoch that was never renewed has not ended"
    is_lapsing = False
    await holder.acquire()
    running = asyncio.create_task(holder.run(describe))
    await has_renewed.wait()
    is_lapsing = True
    await asyncio.sleep(0)
    holder.renew_soon()
    await running
    pauses.clear()
    for _ in range(6):
        await holder.acquire()
        await holder.run(describe)
    assert pauses == [1, 2, 3, 4, 5], "after one that was of use it begins anew"
    assert len(caplog.records) == 2, "it is over, and the worker goes on"
