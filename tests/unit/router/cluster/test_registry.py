"""The router's picture of the cluster, from a store that forgets."""

from __future__ import annotations

import asyncio
import time

from baton.cluster import RouterInfo, Worker, WorkerLoad, WorkerState
from kvstore.index import MemoryIndex, MemoryStore, Mirror, MirrorFollower, RedisConnection
from kvstore.leases import MemoryLeases
from router.admission import SloCounts
from router.cluster.registry import Registry
from router.dispatch.worker_client import WorkerClient
from router.placement.pool_view import PoolView
from tests.support.builders import worker_info

POLL_S = 0.005


class ForgetfulLeases(MemoryLeases):
    """The store loses its state just before the `n`-th list of workers."""

    def __init__(self, store: MemoryStore, n: int) -> None:
        super().__init__(store)
        self._memory, self._until_loss = store, n

    async def list_workers(self) -> list[Worker]:
        self._until_loss -= 1
        if not self._until_loss:
            self._memory.leases.clear()
            self._memory.boot = "new"
        return await super().list_workers()


async def test_a_store_that_loses_its_state_between_two_questions_loses_no_worker() -> None:
    """Regression: asked for its boot token first, it told the old one and then the empty list of its new life."""
    store = MemoryStore()
    leases = ForgetfulLeases(store, 20)
    info = worker_info("w", epoch=await leases.acquire("w"))
    await leases.renew(info, WorkerLoad(state=WorkerState.READY))
    mirror = Mirror()
    pools = PoolView(mirror.lookup, time.monotonic)
    follower = MirrorFollower(MemoryIndex(store), mirror)
    me, redis = (
        RouterInfo(id="r", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0),
        RedisConnection("redis://127.0.0.1:1/0"),
    )
    registry = Registry(
        leases=leases,
        pools=pools,
        client=WorkerClient(),
        follower=follower,
        me=me,
        slo_counts=SloCounts(),
        models=(),
        redis=redis,
        poll_s=POLL_S,
        lease_s=10 * POLL_S,
    )
    running = asyncio.create_task(registry.run())
    async with asyncio.timeout(10):
        while not pools.workers:
            await pools.wait_for_change(1)
        while store.boot != "new":
            await pools.wait_for_change(1)
            assert pools.workers, "the list was empty, and taken for true"
        while pools.workers:  # nobody renews, so in the end it is
            await pools.wait_for_change(1)
    running.cancel()
