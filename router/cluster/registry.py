"""Keeps the router's view of its models current, and announces the router at its endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from baton.cluster import (
    CertificateTerm,
    ClusterStatus,
    ControllerInfo,
    ModelAnnouncement,
    ModelState,
    PoolStatus,
    Role,
    RoutedModel,
    RouterInfo,
    ServedModel,
    StoreMemory,
    Worker,
    WorkerState,
)
from baton.config import without_password
from baton.errors import StoreUnavailable
from baton.registered_adapters import Adapters
from baton.rpc import MalformedCount
from baton.tls import Tls
from kvstore.adapters import AdapterStore
from kvstore.index import MirrorFollower, RedisConnection
from kvstore.leases import EndpointStore, LeaseStore
from router.admission import SloCounts
from router.placement.pool_view import PoolView
from router.serve.worker_client import WorkerClient

logger = logging.getLogger(__name__)
START_POLL_S = 0.2
"""Longest pause between two polls until the router has seen all workers ready: its readiness and the start of
`baton up` wait for them."""

IDLE_POLLS = 3
"""Factor on the interval between two polls of a model that is announced, ready or asleep, and without requests. Many
idle models then cost a router little."""
LOOK_S = 10.0
"""Seconds between two requests for the memory of Redis."""


class ModelWatch:
    """Keeps a router's view of one model's pools current while `run` runs.

    Attributes:
        announcement: the model, as its controller announced it last; a router's own model may not be announced yet.

    Args:
        counts: counts of this router's requests of the model.
        num_held: returns how many of them wait until the model is awake.
        adapters: the registry of LoRA adapters, which is followed too.
        engines: settings of each pool's engine that differ from the other pool's, for `served`; None: not known.
    """

    def __init__(
        self,
        announcement: ModelAnnouncement,
        *,
        leases: LeaseStore,
        pools: PoolView,
        client: WorkerClient,
        follower: MirrorFollower,
        counts: SloCounts,
        num_held: Callable[[], int],
        adapters: AdapterStore,
        poll_s: float,
        lease_s: float,
        engines: Mapping[Role, tuple[str, ...]] | None = None,
    ) -> None:
        self.announcement = announcement
        self.pools = pools
        self._leases = leases
        self._client = client
        self._follower = follower
        self._counts = counts
        self._num_held = num_held
        self._adapters = adapters
        self._follows_adapters = True
        """False if the registry of adapters could not be read at the last poll."""
        self._poll_s = poll_s
        self._lease_s = lease_s
        self._engines = engines or {}
        self._desired: dict[str, int] = {}
        self._controller: ControllerInfo | None = None
        self._redis_ok = False
        self._boot = ""
        self._keep_until_s: dict[str, float] = {}
        """Worker that was known when Redis lost its state and is not listed again yet -> time until which it is kept.

        A further loss does not prolong the time, because a client of Redis may write boot tokens.
        """

    async def run(self) -> None:
        """Poll until cancelled. While Redis is away, keep the last state."""
        was_whole = False
        while True:
            try:
                await self.poll()
            except StoreUnavailable as error:
                if self._redis_ok:
                    logger.warning("Redis is away; serving from the last known state: %s", error)
                self._redis_ok = False
            else:
                self._redis_ok = True
                num_ready = _ready(self.pools.workers).total()
                was_whole |= num_ready > 0 and num_ready >= sum(self._desired.values())
            await asyncio.sleep(self._pause_s(was_whole))

    def _pause_s(self, was_whole: bool) -> float:
        """Return the time until the next poll.

        Args:
            was_whole: whether the model once had all of its workers.
        """
        state = self.pools.state
        if not was_whole and state is not ModelState.ASLEEP:
            return min(self._poll_s, START_POLL_S)
        is_idle = not self._counts.in_flight and state in (ModelState.READY, ModelState.ASLEEP)
        return IDLE_POLLS * self._poll_s if is_idle and self.announcement.files else self._poll_s

    async def poll(self) -> None:
        """Read the state of the pools once. Raises StoreUnavailable."""
        self._desired = await self._leases.get_desired()
        self._controller = await self._leases.get_controller()
        workers = await self._listed_workers()
        await self._follow_adapters()  # before the workers are known, and so before requests are served
        model = self.announcement
        num_desired = sum(self._desired.values())
        self.pools.note_sleep(
            is_asleep=model.is_asleep and not model.is_leaving,  # its controller wakes it no more, so nothing may wait
            num_desired=num_desired,
            problem=model.problem,
            wake_s=model.wake_s,
        )
        await self.pools.update(workers)
        await self._client.forget_past_incarnations(workers)

    async def _follow_adapters(self) -> None:
        """Update the registered adapters. A user of Redis without the right to read them can serve the model itself."""
        try:
            await self._adapters.follow()
            self._follows_adapters = True
        except StoreUnavailable as error:
            if self._follows_adapters:
                logger.warning("the registry of adapters cannot be read; the last known adapters are served: %s", error)
            self._follows_adapters = False

    async def _listed_workers(self) -> list[Worker]:
        """Return the workers with leases and, for a while after Redis lost its state, those not listed again yet."""
        workers = await self._leases.list_workers()
        boot = await self._leases.boot()  # read last: a list that lacks lost leases then always shows a new boot token
        listed = {worker.info.id for worker in workers}
        now, unheard = time.monotonic(), self._keep_until_s
        if boot != self._boot:
            self._boot = boot
            known = listed | {worker.info.id for worker in self.pools.workers}
            until_s = {worker_id: unheard.get(worker_id, now + self._lease_s) for worker_id in known - listed}
            self._keep_until_s = until_s | dict.fromkeys(listed, now + self._lease_s)
        else:
            self._keep_until_s = {each: until_s for each, until_s in unheard.items() if each not in listed}
        kept = {each for each, until_s in self._keep_until_s.items() if now < until_s} - listed
        return workers + [worker for worker in self.pools.workers if worker.info.id in kept]

    @property
    def redis_ok(self) -> bool:
        """True if the last poll reached Redis."""
        return self._redis_ok

    @property
    def is_known(self) -> bool:
        """True if a worker or a controller shows that the model exists, although its announcement is missing."""
        return bool(self.pools.workers) or self._controller is not None

    @property
    def adapters(self) -> Adapters:
        """The registered adapters by name."""
        return self._adapters.adapters

    @property
    def mirrored_blocks(self) -> Mapping[str, int]:
        """Number of blocks of each worker in the mirror of the index."""
        return self._follower.mirror.workers()

    @property
    def mirror_lag_s(self) -> float:
        return self._follower.lag_s

    def controller(self) -> ControllerInfo | None:
        """Return the controller that Redis last named; None: it names none."""
        return self._controller

    def routed(self) -> RoutedModel:
        """Return this router's counts for the model."""
        counts = self._counts
        return RoutedModel(
            content_id=self.announcement.content_id,
            met=counts.met,
            missed=counts.missed,
            rejected=counts.rejected,
            ready_workers=_ready(self.pools.workers).total(),
            in_flight=counts.in_flight,
            held=self._num_held(),
        )

    def served(self, routers: Collection[RouterInfo]) -> ServedModel:
        """Return the model as this router serves it.

        Args:
            routers: the live routers, of which those that serve the model hold requests.
        """
        model, ready = self.announcement, _ready(self.pools.workers)
        pools = {
            role.value: PoolStatus(self._desired.get(role.value, ready[role]), ready[role], self._engines.get(role, ()))
            for role in Role
        }
        return ServedModel(
            id=model.name,
            path=model.path,
            content_id=model.content_id,
            release=model.release,
            share=model.share,
            state=ModelState.LEAVING if model.is_leaving else self.pools.state,
            pools=pools,
            controller=self._controller,
            held=sum(router.of_model(model.content_id).held for router in routers) if routers else self._num_held(),
            wake_s=model.wake_s,
            problem=model.problem,
        )


class EndpointWatch:
    """Announces this router at its endpoint while `run` runs, follows the other routers, and reports the whole status.

    Args:
        me: this router with its addresses; the watch adds its counts.
        models: returns the models that this router serves.
        redis: the connection of `store`; `status` shows its address and malformed values.
        malformed: counts the malformed messages that this router's server has received.
        dependencies: source of the memory of Redis and the certificates in `status`.
    """

    def __init__(
        self,
        store: EndpointStore,
        models: Callable[[], Sequence[ModelWatch]],
        *,
        me: RouterInfo,
        redis: RedisConnection,
        malformed: MalformedCount,
        dependencies: Dependencies,
        poll_s: float,
    ) -> None:
        self._store = store
        self._models = models
        self._me = me
        self._redis = redis
        self._malformed = malformed
        self._dependencies = dependencies
        self._poll_s = poll_s
        self._routers: tuple[RouterInfo, ...] = ()
        self._redis_ok = False

    async def run(self) -> None:
        """Announce and read until cancelled. While Redis is away, keep the last state."""
        announced = -1
        while True:
            try:
                me = self._myself()
                await self._store.announce_router(me)
                self._routers = tuple(await self._store.list_routers())
            except StoreUnavailable as error:
                if self._redis_ok:
                    logger.warning("Redis is away; other routers do not see this one: %s", error)
                self._redis_ok = False
            else:
                self._redis_ok = True
                has_changed, announced = announced != me.ready_workers, me.ready_workers
                await self._dependencies.look(time.monotonic())
            is_starting = not announced or has_changed
            await asyncio.sleep(min(self._poll_s, START_POLL_S) if is_starting else self._poll_s)

    def status(self, models: Collection[str] = ()) -> ClusterStatus:
        """Return the state of the endpoint.

        Args:
            models: content ids of the models to report; none: all of them.
        """
        watches = [each for each in self._models() if not models or each.announcement.content_id in models]
        served = tuple(each.served(self._routers) for each in watches)
        pools = {
            role.value: PoolStatus(
                sum(model.pools[role.value].desired for model in served),
                sum(model.pools[role.value].ready for model in served),
                served[0].pools[role.value].engine if len(served) == 1 else (),
            )
            for role in Role
        }
        return ClusterStatus(
            pools=pools,
            workers=tuple(worker for each in watches for worker in each.pools.workers),
            routers=self._routers or (self._myself(),),
            redis_address=without_password(self._redis.url),
            redis_ok=self._redis_ok and all(each.redis_ok for each in watches),
            models=served,
            controller=served[0].controller if len(served) == 1 else None,
            mirrored_blocks={each.announcement.content_id: each.mirrored_blocks for each in watches},
            store_garbage=self._redis.garbage.seen(),
            malformed=self._malformed.total,
            store_memory=self._dependencies.store_memory,
            certificates=self._dependencies.certificates(),
            adapters={each.announcement.content_id: each.adapters for each in watches},
        )

    @property
    def routers(self) -> tuple[RouterInfo, ...]:
        """The live routers, as of the last poll."""
        return self._routers

    def num_routers(self) -> int:
        """Return the number of routers that were alive when Redis was last read, at least 1."""
        return max(1, len(self._routers))

    def _myself(self) -> RouterInfo:
        watches = self._models()
        routed = tuple(each.routed() for each in watches)
        return replace(
            self._me,
            pid=os.getpid(),
            mirror_lag_s=round(max((each.mirror_lag_s for each in watches), default=0.0), 6),
            met=sum(each.met for each in routed),
            missed=sum(each.missed for each in routed),
            rejected=sum(each.rejected for each in routed),
            ready_workers=sum(each.ready_workers for each in routed),
            models=routed,
        )


def _ready(workers: Collection[Worker]) -> Counter[Role]:
    return Counter(worker.info.role for worker in workers if worker.load.state is WorkerState.READY)


class Dependencies:
    """The state of Redis' memory and of certificates, as one router sees it.

    Attributes:
        store_memory: latest report of Redis; None: Redis has never reported it, for example because the router's
            Redis user lacks the permission.

    Args:
        tls: the router's certificates by the group of processes that uses them; None stands for plain text.
    """

    def __init__(self, redis: RedisConnection, tls: Mapping[str, Tls | None]) -> None:
        self.store_memory: StoreMemory | None = None
        self._redis = redis
        self._tls = tls
        self._next_s = float("-inf")

    async def look(self, now_s: float) -> None:
        """Ask Redis for its memory, unless the last request was less than `LOOK_S` ago."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_S
        try:
            info = await self._redis.call("INFO")
        except StoreUnavailable as error:
            logger.debug("Redis does not report its memory: %s", error)
        else:
            used, limit, evicted = (int(info.get(name, 0)) for name in ("used_memory", "maxmemory", "evicted_keys"))
            self.store_memory = StoreMemory(used, limit, evicted)

    def certificates(self) -> tuple[CertificateTerm, ...]:
        """Return the validity periods of the certificates in use."""
        return tuple(CertificateTerm(name, *tls.now().term_s) for name, tls in self._tls.items() if tls is not None)


class Readiness:
    """Decides whether a router is ready: while it can serve one of its models, and for `timeout_s` after that.

    A router can serve a model that is asleep or wakes, because it holds the model's requests. A router without models
    is ready as soon as it has read that there are none: its answer that a model does not exist is correct. Before, it
    loads all announced ones.

    All routers usually lose their workers at the same time. If none of them was ready then, a load balancer would
    refuse clients although a short wait is enough. The cost is that clients leave a router that alone has lost its
    workers later by `timeout_s`.

    Args:
        pools: returns the pools of each model.
        needs_prefill: requests also need a prefill worker.
        timeout_s: time for which a request waits for a worker (`router.worker_wait_s`).
        clock: monotonic seconds.
        has_read: returns whether the router has read which models there are.
        is_starting: returns whether it still loads those that there were when it started.
    """

    def __init__(
        self,
        pools: Callable[[], Sequence[PoolView]],
        needs_prefill: bool,
        timeout_s: float,
        clock: Callable[[], float],
        *,
        has_read: Callable[[], bool],
        is_starting: Callable[[], bool],
    ) -> None:
        self._pools = pools
        self._needs_prefill = needs_prefill
        self._timeout_s = timeout_s
        self._clock = clock
        self._has_read = has_read
        self._is_starting = is_starting
        self._served_at_s: float | None = None
        """Time at which the router could last serve a model."""
        self._is_stopping = False

    def why_not(self) -> str:
        """Return the reason why the router is not ready; empty: it is ready. Call this at short intervals."""
        if self._is_stopping:
            return "the router is stopping"
        now, lacking = self._clock(), self._lacking()
        if not lacking:
            self._served_at_s = now
        is_waited_for = self._served_at_s is not None and now - self._served_at_s <= self._timeout_s
        return "" if is_waited_for else lacking

    def stop(self) -> None:
        """Make the router not ready from now on."""
        self._is_stopping = True

    def _lacking(self) -> str:
        models = self._pools()
        if self._is_starting():
            return "models of the endpoint are being loaded"
        if not models:
            return "" if self._has_read() else "the models of the endpoint are not known yet"
        reasons = [self._lacking_of(pools) for pools in models]
        if not all(reasons):
            return ""
        return reasons[0] if len(reasons) == 1 else f"none of {len(reasons)} models can be served: {reasons[0]}"

    def _lacking_of(self, pools: PoolView) -> str:
        if pools.sleeps:
            return ""
        if not pools.is_ready(Role.DECODE):
            return "no decode worker is ready"
        if self._needs_prefill and not pools.is_ready(Role.PREFILL):
            return "no prefill worker is ready, and router.mode is disaggregated"
        return ""
