"""Main loop of the controller: observes the workers, calls `reconcile`, and carries out its actions.

Every decision is written to the state file before it is carried out, so that the next controller continues from there:
it finds the workers by the names of their actors and by their leases, and takes them over as they are.

    lease_watch ──leases──> observed() ──> reconcile ──> step() ──orders──> worker_life ──> Ray
    ServingPools, orders ──> state file ──────^                                │
                                              └───────── due: something has happened
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from baton.addresses import host_of
from baton.cluster import (
    ClusterStatus,
    ControllerInfo,
    PoolStatus,
    PoolTrouble,
    Role,
    RouterInfo,
    Worker,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from baton.config import Config, without_password
from baton.errors import BatonError, StoreUnavailable
from baton.rpc import MalformedCount
from baton.rpc.member_auth import MemberLink
from baton.serving_files import ServingFiles
from baton.tls import Tls
from baton.trust import KeyFile
from deploy.controller.announcement import ModelAnnouncer
from deploy.controller.claim import is_surely_gone
from deploy.controller.lease_watch import LeaseWatch
from deploy.controller.model_copy import ModelCopy
from deploy.controller.reconcile import (
    EndWorker,
    ForgetWorker,
    GivingWay,
    ObservedWorker,
    RetireWorker,
    StartWorker,
    WorkerPhase,
    is_serving,
    num_serving,
    reconcile,
)
from deploy.controller.serving_pools import PoolSpecs
from deploy.controller.sleeping import awoken, resized, wake_problem
from deploy.controller.state import ControllerState, RoleChange, StateFile
from deploy.controller.worker_life import ADOPTION_S, ManagedWorker, WorkerLives
from deploy.kubernetes.node_plan import NodeLayout, NodePod, PlacedWorker, PodRollout, pod_rollout
from deploy.kubernetes.serving_pool import PoolReport, PoolSpec
from deploy.ray_pools.actors import RayActors
from deploy.scaling.values import ScalingDecision
from kvstore.index import CountingMirror
from kvstore.leases import EndpointStore, LeaseStore

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Interval between rounds without events, because waits end and the workers' load changes."""
ROOM_S = 10.0
"""Time without a node after which a starting worker counts as waiting for room."""
TURN_S = 1.0
"""Time without an answer of its node after which a starting worker counts as waiting for its turn."""
CHECK_RAY_S = 5.0
COPY_S = 1.0
"""Interval between checks whether the copy of the model's files is the announced one, and between attempts to copy."""
STATES = {
    WorkerPhase.DOWN: WorkerState.DEAD,
    WorkerPhase.STARTING: WorkerState.STARTING,
    WorkerPhase.READY: WorkerState.READY,
    WorkerPhase.LEAVING: WorkerState.DRAINING,
}


class Controller:
    """The controller. Call `adopt`, then `run`; `deploy.controller.orders` may give commands at the same time.

    Args:
        me: the controller's address and identity for routers.
        malformed: counts messages that its server could not parse.
        state: the initial state; from now on `path` holds it.
        is_first: nothing has run in this cluster yet, and a worker that cannot start as configured ends `run`.
        tls: the certificate for connections to workers; None: plain text.
        keys: keys with which the controller authenticates to workers; None: the cluster has no secret.
    """

    def __init__(
        self,
        config: Config,
        *,
        me: ControllerInfo,
        malformed: MalformedCount,
        actors: RayActors,
        leases: LeaseStore,
        endpoint: EndpointStore,
        mirror: CountingMirror,
        path: Path,
        state: ControllerState,
        is_first: bool,
        tls: Tls | None = None,
        keys: KeyFile | None = None,
    ) -> None:
        self.config = config
        self._settings = {pool: config.worker_settings(pool) for pool in Role}
        self._actors = actors
        self._leases = leases
        self._mirror = mirror
        self._file = StateFile(path, state)
        self._specs = PoolSpecs(config)
        link = MemberLink(keys, tls)
        self._lives = WorkerLives(config.cluster, actors, self._specs, must_start=is_first, link=link)
        self._model = ModelAnnouncer(config, endpoint, self._file)
        self._copy = ModelCopy(path.with_name(f"{path.name}.files"), link)
        self._watch = LeaseWatch(config.index, me, leases, model=self._model, lives=self._lives)
        self._malformed = malformed
        self._layout = NodeLayout(dict.fromkeys(Role, ""))
        self._pods: Sequence[NodePod] = ()
        self._follows_specs = True
        self._wake_refusal = ""
        """Reason why the latest wake-up could not start; empty: it could."""
        self._is_whole = asyncio.Event()

    async def claim(self) -> None:
        """Make sure that no other cluster serves this model in the same Redis. Raises ConfigError if one does."""
        await self._watch.claim()

    async def adopt(self) -> None:
        """Take over the running workers, with or without an actor. Other workers in the state are restarted.

        Raises:
            ConfigError: Ray does not answer.
        """
        await self._copy.open()
        found = set(await self._actors.ids())
        leased = await self._leased(self.state.pools.keys() - found)
        # If the state file is lost, a worker's lease has its role, and its actor has the pool.
        pools = {**self.state.pools, **await self._actors.pools(found - self.state.pools.keys())}
        if self.config.kubernetes.namespace:  # if Ray's state is lost as well, the release's leases remain
            pools = {**{worker_id: info.role for worker_id, info in leased.items()}, **pools}
        for worker_id, pool in sorted(pools.items()):
            role = self.state.roles.get(worker_id) or (leased[worker_id].role if worker_id in leased else pool)
            settings = self.state.settings.get(worker_id) or self._settings[pool]
            worker = ManagedWorker(id=worker_id, pool=pool, role=role, settings=settings)
            self._lives.workers[worker_id] = worker
            if worker_id in found:
                self._lives.adopt(worker, leased.get(worker_id))
            elif worker_id in leased:
                self._lives.adopt_orphan(worker, leased[worker_id])
        self._record_workers()
        self._retire_flipped()
        await self._lives.settled([worker for worker in self._lives.workers.values() if worker.task])

    async def _leased(self, actorless: Set[str]) -> dict[str, WorkerInfo]:
        """Return the workers with a lease, by worker id.

        Redis may have lost its data at the same time as Ray. This therefore waits until all workers without an actor
        have renewed their leases: for at most `ADOPTION_S` until Redis answers, and then for `index.lease_s`.

        Args:
            actorless: workers that may serve without an actor.
        """
        deadline_s, has_answered = time.monotonic() + ADOPTION_S, False
        while True:
            leased: dict[str, WorkerInfo] = {}
            with contextlib.suppress(StoreUnavailable):
                leased = {worker.info.id: worker.info for worker in await self._leases.list_workers()}
                if not has_answered:
                    deadline_s, has_answered = time.monotonic() + self.config.index.lease_s, True
            if actorless <= leased.keys() or time.monotonic() > deadline_s:
                return leased
            await asyncio.sleep(self.config.index.poll_s)

    def _retire_flipped(self) -> None:
        """Replace workers that have changed their role, if the pools have got different engines since then."""
        if self.config.engine_differences:
            flipped = {worker.id for worker in self._lives.workers.values() if worker.role is not worker.pool}
            self.record(replace(self.state, retiring=self.state.retiring | flipped))

    async def run(self) -> None:
        """Keep the pools at their sizes until cancelled.

        Raises:
            ConfigError: Ray no longer answers, the Ray node of this process is gone, or another cluster serves this
                model in the same Redis.
            BatonError: during the first start, a worker cannot run as configured.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reconcile(), name="reconcile")
            tasks.create_task(self._watch.run(), name="redis")
            tasks.create_task(self._keep_copy(), name="model files")
            tasks.create_task(self._check_ray(), name="ray")
            tasks.create_task(self._until_failed(), name="failure")

    async def whole(self) -> None:
        """Wait until the pools have reached their sizes for the first time."""
        await self._is_whole.wait()

    async def end_workers(self) -> None:
        """Remove the model from its endpoint, and end its workers. `run` must have ended.

        Routers refuse new requests as soon as they have read that the model leaves. Running ones may complete before
        the workers end, because no other worker could continue them.
        """
        cluster = self.config.cluster
        try:
            async with asyncio.timeout(min(cluster.drain_timeout_s, cluster.stop_timeout_s / 2)):
                await self._until_unused()
        except TimeoutError:
            logger.warning("some requests still run; they end with their workers")
        except BatonError as error:
            logger.warning("the controller cannot announce that the model leaves: %s", error)
        await self._lives.end_all()

    async def _until_unused(self) -> None:
        """Announce that the model leaves, and wait until none of its requests runs. Raises StoreUnavailable."""
        self._model.is_leaving = True
        await self._watch.exchange()
        while self._lives.workers and await self._callers():
            await asyncio.sleep(self.config.index.poll_s)  # for routers that have not read it yet
            await self._watch.exchange()
            in_flight = sum(model.in_flight for router in await self._callers() for model in router.models)
            if not in_flight + self._watch.num_sequences():
                return

    async def _callers(self) -> list[RouterInfo]:
        """Return the routers that may send requests to the workers. Raises StoreUnavailable."""
        return [router for router in await self._model.routers() if not await is_surely_gone(router.grpc)]

    async def let_go(self) -> None:
        """Stop following the workers, which keep running. `run` must have ended."""
        await self._lives.let_go()

    # -- used by orders ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ControllerState:
        return self._file.current

    @property
    def is_starting(self) -> bool:
        """True during the first start, which must reach the desired sizes."""
        return self._lives.must_start

    @property
    def ids(self) -> list[str]:
        return sorted(self._lives.workers)

    def observed(self) -> dict[str, ObservedWorker]:
        """Return the current observation of every known worker."""
        workers = self._lives.workers.values()
        unique = self._mirror.unique_blocks() if self._is_any_pool_too_large() else {}
        staying = Counter(worker.pod for worker in workers if worker.pod and worker.id not in self.state.retiring)
        return {
            worker.id: self._observed(worker, unique.get(worker.id, 0), max(0, staying[worker.pod] - 1))
            for worker in workers
        }

    def pool(self, role: Role) -> PoolStatus:
        return PoolStatus(self.state.desired[role], num_serving(self.observed().values(), role))

    def worker(self, worker_id: str) -> Worker:
        """Return the worker as in its lease, with its current role and state."""
        worker = self._lives.workers[worker_id]
        if (lease := self._watch.lease_of(worker_id)) is None:
            info = WorkerInfo(
                id=worker_id,
                role=worker.role,
                address=worker.address,
                pid=worker.pid,
                node="",
                epoch=0,
                content_id="",
                wire_compat="",
                block_size=0,
                max_model_len=0,
            )
            return Worker(info, WorkerLoad(state=STATES[worker.phase]))
        return Worker(replace(lease.info, role=worker.role), replace(lease.load, state=STATES[worker.phase]))

    def trouble(self) -> tuple[PoolTrouble, ...]:
        """Return what keeps the pools from their sizes."""
        unplaced = Counter(worker.role for worker in self.observed().values() if worker.waits_for_room)
        return tuple(PoolTrouble(role.value, unplaced[role], self._lives.failures[role]) for role in Role)

    def announce_scaling(self, decision: ScalingDecision) -> None:
        """Publish the autoscaler's latest decision in the cluster's status."""
        self._watch.me = replace(self._watch.me, scaling=decision.scaling)

    async def observe(self) -> ClusterStatus:
        """Return the cluster's status from the latest leases. Raises StoreUnavailable."""
        return ClusterStatus(
            pools={role.value: self.pool(role) for role in Role},
            workers=tuple(await self._leases.list_workers()),
            routers=await self._model.routers(),
            redis_address=without_password(self.config.index.redis_url),
            redis_ok=True,
            models=(),
            controller=self._watch.me,
        )

    @property
    def has_copy(self) -> bool:
        """True if it has a copy of the announced files, which routers can read while no worker runs."""
        return bool(self.state.files) and self._copy.digest == self.state.files

    def read_files(self, digest: str) -> ServingFiles:
        """Return the copy of the model's files, from a thread. Raises Conflict if it has another digest."""
        return self._copy.read(digest)

    def refuse_to_wake(self, reason: str) -> None:
        """Announce the reason why a wake-up cannot start, until the model is awake or another wake-up starts."""
        self._wake_refusal = reason
        self._announce_problem()

    def record(self, state: ControllerState) -> None:
        """Write a decision to the state file; the next round carries it out.

        Raises:
            ConfigError: the file cannot be written; nothing has changed.
        """
        self._file.write(state)
        self._lives.due.set()
        self._watch.publish_due.set()

    def step(self) -> None:
        """Run one round of reconciliation."""
        workers = self._lives.workers
        if workers.keys() != self.state.roles.keys():  # one has left
            self._record_workers()
        self._follow_specs()
        if not self.config.kubernetes.namespace:  # there the pods have the settings' version, and are replaced with it
            self._replace_changed()
        observed = self.observed()
        if all(num_serving(observed.values(), role) >= self.state.desired[role] for role in Role):
            self._lives.must_start = False
            self._is_whole.set()
        self._end_wake_up(observed)
        self._log_waits(observed)
        giving_way = GivingWay(in_place=self.config.kubernetes.in_place, room=self._rollout.room)
        workers_now, cluster = list(observed.values()), self.config.cluster
        for action in reconcile(self.state.desired, workers_now, time.monotonic(), cluster, giving_way):
            match action:
                case StartWorker() if self._lives.is_adopting:
                    pass  # it would take the room of a worker that serves
                case StartWorker(worker_id, role):
                    worker = workers.setdefault(worker_id, ManagedWorker(id=worker_id, pool=role, role=role))
                    worker.settings = self._settings[worker.pool]
                    self._record_workers()
                    self._lives.start(worker)
                case RetireWorker(worker_id):
                    self.record(replace(self.state, retiring=self.state.retiring | {worker_id}))
                case EndWorker(worker_id):
                    self._lives.leave(workers[worker_id])
                case ForgetWorker(worker_id):
                    del workers[worker_id]
                    self._record_workers()

    def _end_wake_up(self, observed: Mapping[str, ObservedWorker]) -> None:
        if self.state.sleep and (state := awoken(self.state, observed.values(), self.config, time.time())):
            logger.info("the model is awake, %.1f s after the request", state.wake_s)
            self.record(state)

    def _replace_changed(self) -> None:
        """Retire workers whose settings have changed since their start, a few of a pool that is whole at a time."""
        for pool in Role:
            workers = [worker for worker in self._lives.workers.values() if worker.pool is pool]
            changed = [worker.id for worker in workers if worker.settings != self._settings[pool]]
            if not changed:
                continue
            observed = self.observed()
            ready = [worker_id for worker_id in sorted(changed) if is_serving(observed[worker_id])]
            is_whole = num_serving(observed.values(), pool) >= self.state.desired[pool]
            if not ready or not is_whole or any(observed[worker.id].is_retiring for worker in workers):
                continue
            retiring = set(ready[: max(self.config.cluster.num_unavailable(self.state.desired[pool]), 1)])
            logger.info("the settings of the %s pool have changed: %s are replaced", pool, ", ".join(sorted(retiring)))
            self.record(replace(self.state, retiring=self.state.retiring | retiring))

    async def ask_for_role(self, change: RoleChange) -> None:
        """Request a change of role from the worker. Raises the worker's own error, or WorkerFailed."""
        await self._lives.change_role(self._lives.workers[change.worker_id], change.role)

    def set_role(self, worker_id: str, role: Role) -> None:
        """Record a worker's completed change of role, which decrements one pool's size and increments the other's."""
        roles = {**self.state.roles, worker_id: role}
        desired = self.sizes_after(RoleChange(worker_id, role))
        self.record(replace(self.state, desired=desired, roles=roles, role_change=None))
        self._lives.workers[worker_id].role = role

    def sizes_after(self, change: RoleChange) -> dict[Role, int]:
        """Return the desired sizes after a change of role."""
        desired, before = dict(self.state.desired), self._lives.workers[change.worker_id].role
        desired[before] = max(desired[before] - 1, 0)
        desired[change.role] += 1
        return desired

    def sizes_problem(self, sizes: Mapping[Role, int]) -> str:
        """Return the reason why the pools must not have those sizes; empty: they may."""
        return self._specs.problem(sizes, self.state.desired)

    # -- Kubernetes ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def own_sizes(self) -> Generator[None]:
        """Context manager: the sizes are those of the state, while they are written to the ServingPools."""
        self._follows_specs = False
        try:
            yield
        finally:
            self._follows_specs = True

    def follow(self, role: Role, spec: PoolSpec) -> None:
        """Follow this specification of the role's ServingPool from now on."""
        self._specs.put(role, spec)
        self._follow_specs()

    def see_pods(self, layout: NodeLayout, pods: Sequence[NodePod]) -> None:
        """Update the current pods, for a rollout of the workers' nodes.

        A worker that was taken over without an actor gets the pod with its address.
        """
        self._layout, self._pods = layout, pods
        names = {pod.address: pod.name for pod in pods}
        for worker in self._lives.workers.values():
            worker.pod = worker.pod or (names.get(host_of(worker.address), "") if worker.address else "")

    @property
    def _rollout(self) -> PodRollout:
        return pod_rollout(self._layout, self._pods, [worker.pod for worker in self.placed_workers() if worker.pod])

    def reports(self) -> dict[Role, PoolReport]:
        """Return the statuses of the ServingPools."""
        observed = self.observed()
        return {role: self._specs.report(role, self.state.desired[role], observed) for role in Role}

    def placed_workers(self) -> list[PlacedWorker]:
        """Return the placement of all workers, running or not."""
        return [
            PlacedWorker(
                worker.pool,
                worker.role,
                worker.pod if worker.phase in (WorkerPhase.READY, WorkerPhase.LEAVING) else "",
                worker.id not in self.state.retiring and worker.phase is not WorkerPhase.LEAVING,
            )
            for worker in self._lives.workers.values()
        ]

    def _follow_specs(self) -> None:
        """Apply the ServingPools' sizes, except during a change of role, which changes both sizes itself."""
        if self.state.role_change is not None or not self._follows_specs:
            return
        desired = self._specs.followed(self.state.desired)
        if desired != self.state.desired:
            logger.info("the ServingPools ask for %s", ", ".join(f"{size} {role}" for role, size in desired.items()))
            self.record(resized(self.state, desired, time.time()))

    # -- observing -----------------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        while True:
            self._watch.me = replace(self._watch.me, malformed=self._malformed.total, trouble=self.trouble())
            self._announce_problem()
            self._lives.due.clear()
            self.step()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._lives.due.wait()

    def _announce_problem(self) -> None:
        """Update the reason why a wake-up makes no progress, and announce it at once if it has changed."""
        if self.state.sleep is None:
            self._wake_refusal = ""
        failures = {worker.id: worker.failure for worker in self._lives.workers.values() if worker.failure}
        observed = self.observed().values() if self.state.sleep else ()
        problem = wake_problem(self.state, observed, failures, self._wake_refusal)
        if problem != self._model.problem:
            self._model.problem = problem
            self._watch.publish_due.set()
            if problem:
                logger.warning("the model does not wake: %s", problem)

    async def _keep_copy(self) -> None:
        """Keep a copy of the model's files."""
        while True:
            if self.state.files and not self.has_copy:
                await self._copy.fetch(self.state.files, self._watch.providers(self.state.files))
            await asyncio.sleep(COPY_S)

    async def _check_ray(self) -> None:
        while True:
            await asyncio.sleep(CHECK_RAY_S)
            await self._actors.check()

    async def _until_failed(self) -> None:
        await self._lives.failed

    def _observed(self, worker: ManagedWorker, num_unique_blocks: int, num_neighbours: int) -> ObservedWorker:
        lease = self._watch.lease_of(worker.id)
        is_ready, is_held = worker.phase is WorkerPhase.READY, self.state.is_changing_role(worker.id)
        is_outdated = is_ready and any(pod.name == worker.pod and not pod.is_current for pod in self._pods)
        is_unplaced = worker.phase is WorkerPhase.STARTING and not worker.is_placed
        return ObservedWorker(
            id=worker.id,
            pool=worker.pool,
            role=worker.role,
            phase=worker.phase,
            is_retiring=worker.id in self.state.retiring,
            is_held=is_held,
            is_silent=worker.is_silent and is_ready,
            is_draining=worker.is_draining and is_ready and not is_held,
            is_outdated=is_outdated,
            waits_for_room=is_unplaced and time.monotonic() - worker.since_s > ROOM_S,
            waits_for_turn=worker.waits_for_turn_since_s is not None
            and time.monotonic() - worker.waits_for_turn_since_s > TURN_S,
            start_at_s=worker.start_at_s,
            num_neighbours=num_neighbours,
            num_requests=lease.load.running + lease.load.waiting if lease else 0,
            num_unique_blocks=num_unique_blocks,
        )

    def _is_any_pool_too_large(self) -> bool:
        staying = [worker.role for worker in self._lives.workers.values() if worker.id not in self.state.retiring]
        return any(staying.count(role) > self.state.desired[role] for role in Role)

    def _log_waits(self, observed: Mapping[str, ObservedWorker]) -> None:
        for worker in self._lives.workers.values():
            if observed[worker.id].waits_for_room and not worker.is_wait_logged:
                worker.is_wait_logged = True
                pool, resources = worker.pool, self._actors.needs(worker.pool)
                needs = ", ".join(f"{number:g} {name}" for name, number in resources.items())
                logger.warning("%s waits: no Ray node for %s workers has room for %s", worker, pool, needs)

    def _record_workers(self) -> None:
        """Record the current workers in the state file."""
        roles = {worker.id: worker.role for worker in self._lives.workers.values()}
        pools = {worker.id: worker.pool for worker in self._lives.workers.values()}
        settings = {worker.id: worker.settings for worker in self._lives.workers.values()}
        retiring = self.state.retiring & roles.keys()
        self.record(replace(self.state, roles=roles, pools=pools, settings=settings, retiring=retiring))
