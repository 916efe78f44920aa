"""The router's picture of the cluster, from a store that forgets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

import pytest

from baton.cluster import (
    ModelAnnouncement,
    ModelState,
    RoutedModel,
    RouterInfo,
    Worker,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from baton.errors import StoreUnavailable
from baton.rpc import MalformedCount
from baton.tasks import cancel_and_wait
from kvstore.adapters import AdapterStore, MemoryAdapters
from kvstore.index import MemoryIndex, MemoryStore, Mirror, MirrorFollower, RedisConnection
from kvstore.leases import MemoryEndpoint, MemoryLeases
from router.admission import SloCounts
from router.cluster import registry
from router.cluster.registry import Dependencies, EndpointWatch, ModelWatch
from router.placement.pool_view import PoolView
from router.serve.worker_client import WorkerClient
from tests.support.builders import model_announcement, registered_adapter, worker_info
from tests.support.waiting import until

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


@contextlib.asynccontextmanager
async def followed(
    store: MemoryStore,
    leases: MemoryLeases,
    lease_s: float,
    poll_s: float = POLL_S,
    adapters: AdapterStore | None = None,
    announcement: ModelAnnouncement | None = None,
) -> AsyncIterator[PoolView]:
    """What a router knows of the workers while it polls."""
    mirror = Mirror()
    pools = PoolView(mirror.lookup, time.monotonic)
    watch = ModelWatch(
        announcement or model_announcement(),
        leases=leases,
        pools=pools,
        client=WorkerClient(),
        follower=MirrorFollower(MemoryIndex(store), mirror),
        counts=SloCounts(),
        num_held=lambda: 0,
        adapters=adapters or MemoryAdapters(store),
        poll_s=poll_s,
        lease_s=lease_s,
    )
    redis = RedisConnection("redis://127.0.0.1:1/0")
    endpoint = EndpointWatch(
        MemoryEndpoint(store),
        lambda: (watch,),
        me=RouterInfo(id="r", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0),
        redis=redis,
        malformed=MalformedCount(),
        dependencies=Dependencies(redis, {}),
        poll_s=poll_s,
    )
    running = [asyncio.create_task(each.run()) for each in (watch, endpoint)]
    yield pools
    await cancel_and_wait(running)


async def joins(leases: MemoryLeases, worker_id: str) -> WorkerInfo:
    info = worker_info(worker_id, epoch=await leases.acquire(worker_id))
    await leases.renew(info, WorkerLoad(state=WorkerState.READY))
    return info


async def comes_to(pools: PoolView, *worker_ids: str) -> None:
    while {worker.info.id for worker in pools.workers} != set(worker_ids):
        await pools.wait_for_change(1)


async def test_a_store_that_loses_its_state_between_two_questions_loses_no_worker() -> None:
    """Regression: asked for its boot token first, it told the old one and then the empty list of its new life."""
    store = MemoryStore()
    leases = ForgetfulLeases(store, 20)
    await joins(leases, "w")
    async with followed(store, leases, 10 * POLL_S) as pools, asyncio.timeout(10):
        while not pools.workers:
            await pools.wait_for_change(1)
        while store.boot != "new":
            await pools.wait_for_change(1)
            assert pools.workers, "the list was empty, and taken for true"
        while pools.workers:  # nobody renews, so in the end it is
            await pools.wait_for_change(1)


async def test_who_leaves_a_router_that_has_just_begun_is_gone_at_once() -> None:
    """Regression: a router kept whatever it had seen for a lease's length after its own start."""
    store = MemoryStore()
    leases = MemoryLeases(store)
    async with followed(store, leases, lease_s=600) as pools, asyncio.timeout(10):
        first = await joins(leases, "first")
        await comes_to(pools, "first")
        await joins(leases, "second")
        await comes_to(pools, "first", "second")
        await leases.release("first", first.epoch)
        await comes_to(pools, "second")


async def test_who_is_listed_again_after_the_store_lost_its_state_can_leave() -> None:
    store = MemoryStore()
    leases = MemoryLeases(store)
    async with followed(store, leases, lease_s=600) as pools, asyncio.timeout(10):
        for name in ("leaves", "silent"):
            await joins(leases, name)
        await comes_to(pools, "leaves", "silent")
        store.leases.clear()
        store.boot = "new"
        await asyncio.sleep(10 * POLL_S)
        await comes_to(pools, "leaves", "silent")  # as one may be that has not noticed the loss
        again = await joins(leases, "leaves")
        await asyncio.sleep(10 * POLL_S)
        await leases.release("leaves", again.epoch)
        await comes_to(pools, "silent")


async def test_a_router_says_how_many_workers_it_knows_to_be_ready() -> None:
    """`baton up` waits for it."""
    store = MemoryStore()
    leases = MemoryLeases(store, lease_s=600)
    async with followed(store, leases, lease_s=600) as pools, asyncio.timeout(10):
        await joins(leases, "ready")
        loading = worker_info("loading", epoch=await leases.acquire("loading"))
        await leases.renew(loading, WorkerLoad(state=WorkerState.STARTING))
        while True:
            said = [router.ready_workers for router in await MemoryEndpoint(store).list_routers()]
            if said not in ([], [0]):
                break
            await asyncio.sleep(POLL_S)
        assert said == [1]
        assert {worker.info.id for worker in pools.workers} >= {"ready"}


async def test_each_model_has_its_own_counts_and_workers() -> None:
    counts = {"llama": SloCounts(met=5, missed=2, rejected=1, in_flight=4), "qwen": SloCounts(met=7)}
    held = {"llama": 3, "qwen": 0}
    stores = {name: MemoryStore() for name in counts}
    redis, watches = RedisConnection("redis://127.0.0.1:1/0"), list[ModelWatch]()
    for name, store in stores.items():
        mirror, leases = Mirror(), MemoryLeases(store, lease_s=600)
        await leases.set_desired({"decode": len(watches) + 1})
        await joins(leases, f"{name}-worker")
        watch = ModelWatch(
            model_announcement(f"{name}-1", name=name, wake_s=2.5, problem="no room"),
            leases=leases,
            pools=PoolView(mirror.lookup, time.monotonic),
            client=WorkerClient(),
            follower=MirrorFollower(MemoryIndex(store), mirror),
            counts=counts[name],
            num_held=lambda name=name: held[name],  # type: ignore[misc]
            adapters=MemoryAdapters(store),
            poll_s=POLL_S,
            lease_s=600,
        )
        await watch.poll()
        watches.append(watch)
    shared = MemoryEndpoint(MemoryStore())
    endpoint = EndpointWatch(
        shared,
        lambda: watches,
        me=RouterInfo(id="r", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0),
        redis=redis,
        malformed=MalformedCount(),
        dependencies=Dependencies(redis, {}),
        poll_s=POLL_S,
    )
    await shared.announce_router(
        RouterInfo(
            id="s",
            pid=1,
            grpc="h:3",
            http="h:4",
            mirror_lag_s=0.0,
            models=(RoutedModel(content_id="qwen-1", met=1, missed=0, rejected=0, ready_workers=0, held=6),),
        )
    )
    running = asyncio.create_task(endpoint.run())
    await until(lambda: len(endpoint.routers) == 2)
    me = next(each for each in endpoint.routers if each.id == "r")
    assert (me.met, me.missed, me.rejected, me.ready_workers) == (12, 2, 1, 2)
    llama, qwen = me.of_model("llama-1"), me.of_model("qwen-1")
    assert (llama.met, llama.missed, llama.in_flight, llama.held, llama.ready_workers) == (5, 2, 4, 3, 1)
    assert (qwen.met, qwen.missed, qwen.in_flight, qwen.held, qwen.ready_workers) == (7, 0, 0, 0, 1)
    whole, one = endpoint.status(), endpoint.status({"qwen-1"})
    assert [(each.id, each.held, each.pools["decode"].desired) for each in whole.models] == [
        ("llama", 3, 1),
        ("qwen", 6, 2),
    ]
    assert (whole.pools["decode"].desired, whole.pools["decode"].ready) == (3, 2)
    assert [(each.id, each.wake_s, each.problem) for each in one.models] == [("qwen", 2.5, "no room")]
    assert [each.info.id for each in one.workers] == ["qwen-worker"]
    assert one.pools["decode"].desired == 2
    await cancel_and_wait([running])


class CountedLeases(MemoryLeases):
    num_polls = 0

    async def list_workers(self) -> list[Worker]:
        self.num_polls += 1
        return await super().list_workers()


async def test_a_router_polls_often_until_it_has_seen_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.cluster.registry.START_POLL_S", POLL_S)
    store = MemoryStore()
    leases = CountedLeases(store)
    await leases.set_desired({"prefill": 1, "decode": 1})
    async with followed(store, leases, lease_s=600, poll_s=600) as pools, asyncio.timeout(10):
        await joins(leases, "first")
        await comes_to(pools, "first")
        await joins(leases, "second")
        await comes_to(pools, "first", "second")
        polled = leases.num_polls
        await joins(leases, "third")
        await asyncio.sleep(20 * POLL_S)
    assert polled > 1
    assert leases.num_polls == polled, "from then on at its own interval"


async def test_boot_tokens_that_somebody_writes_keep_no_dead_worker() -> None:
    store = MemoryStore()
    leases = MemoryLeases(store)
    async with followed(store, leases, lease_s=20 * POLL_S) as pools, asyncio.timeout(10):
        await joins(leases, "w")
        await comes_to(pools, "w")
        store.leases.clear()
        for number in itertools.count():
            store.boot = str(number)
            await pools.wait_for_change(1)
            if not pools.workers:
                break


class Adapters(MemoryAdapters):
    """A registry that a router may be kept from reading."""

    is_away = False

    async def follow(self) -> None:
        if self.is_away:
            raise StoreUnavailable("NOPERM")
        await super().follow()


async def test_adapters_are_known_before_the_workers_that_serve_them_and_followed() -> None:
    store = MemoryStore()
    leases, other, own = MemoryLeases(store), MemoryAdapters(store), Adapters(store)
    await other.put(registered_adapter("poet"))
    await joins(leases, "a")
    async with followed(store, leases, 10.0, adapters=own) as pools:
        async with asyncio.timeout(5):
            await pools.wait_for_change(5)
        assert list(own.adapters) == ["poet"]
        await other.put(registered_adapter("prose"))
        await until(lambda: len(own.adapters) == 2)


async def test_a_registry_of_adapters_that_may_not_be_read_leaves_the_model_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    leases, own = MemoryLeases(store), Adapters(store)
    own.is_away = True
    async with followed(store, leases, 10.0, adapters=own) as pools:
        await joins(leases, "a")
        await comes_to(pools, "a")
        await joins(leases, "b")
        await comes_to(pools, "a", "b")
    told = [record.getMessage() for record in caplog.records if "registry of adapters" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize(("is_leaving", "state"), [(False, ModelState.ASLEEP), (True, ModelState.DOWN)])
async def test_a_model_that_leaves_while_it_sleeps_holds_no_requests(is_leaving: bool, state: ModelState) -> None:
    """Nobody wakes it any more. They are refused after `router.worker_wait_s`, and not after `router.wake_wait_s`."""
    store = MemoryStore()
    announced = model_announcement(is_asleep=True, is_leaving=is_leaving, wake_s=7.0)
    async with followed(store, MemoryLeases(store), 1.0, announcement=announced) as pools:
        await until(lambda: pools.sleep.wake_s)
        assert pools.state is state
        assert pools.sleeps is not is_leaving


@pytest.mark.parametrize(("is_asleep", "is_often"), [(True, False), (False, True)])
async def test_a_model_that_sleeps_since_the_router_started_is_not_polled_as_one_that_starts(
    is_asleep: bool, is_often: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "START_POLL_S", 0.01)
    store, num_polls = MemoryStore(), itertools.count()
    leases = MemoryLeases(store)

    async def boot() -> str:
        next(num_polls)
        return "boot"

    monkeypatch.setattr(leases, "boot", boot)
    async with followed(store, leases, 1.0, 30.0, announcement=model_announcement(is_asleep=is_asleep)):
        await asyncio.sleep(0.2)
    assert (next(num_polls) > 3) is is_often
