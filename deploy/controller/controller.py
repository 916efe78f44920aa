"""Keeps the pools as they should be: observes, asks `reconcile` what to do, and does it.

What it decides is in the state file before it is done, so that the next controller goes on where this one ended: it
finds the workers by the names of their actors, and leaves them as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from baton.cluster import (
    ClusterStatus,
    ControllerInfo,
    PoolStatus,
    Role,
    Worker,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
    pool_of,
)
from baton.config import Config
from baton.errors import BatonError, StoreUnavailable, WorkerFailed
from baton.rpc import channel, from_rpc_error
from baton.tasks import cancel_and_wait
from baton.v1 import worker_pb2, worker_pb2_grpc
from deploy.controller import state as state_file
from deploy.controller.reconcile import Forget, Leave, Phase, Retire, Seen, Start, is_serving, reconcile
from deploy.controller.state import Flip, State, why_not
from deploy.kubernetes.node_plan import PlacedWorker
from deploy.kubernetes.serving_pool import PoolReport, PoolSpec
from deploy.processes import STABLE_S
from deploy.ray_pools.actors import RayActors, Started, first_line
from deploy.scaling.policy import Decision
from kvstore.index import Mirror
from kvstore.leases import LeaseStore

logger = logging.getLogger(__name__)

RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Waits before the restarts of a worker that keeps failing to start, or dies soon after it has."""
TICK_S = 0.5
"""Between two looks at what nobody tells of: waits that are over, and work that workers have."""
ROOM_S = 10.0
"""After so long without a node that takes it, a worker is held to wait for room."""
SILENT_LEASES = 2
"""A worker that is ready and has had no lease for the time of so many serves nobody, though its process is there."""
GIVEN_UP_LEASES = 8
"""After the time of so many it is killed, and started again."""
ADOPTION_S = 10.0
"""A worker that is ready says so within this time, if its node lives."""
CHECK_RAY_S = 5.0
RPC_SLACK_S = 10.0
"""For an answer, beyond the time that the worker was given."""
GONE_S = 5.0
GONE_POLL_S = 0.1
"""Ray ends actors behind our back: how long we wait for that at the end, and how often we look."""
STATES = {
    Phase.DOWN: WorkerState.DEAD,
    Phase.STARTING: WorkerState.STARTING,
    Phase.READY: WorkerState.READY,
    Phase.LEAVING: WorkerState.DRAINING,
}


@dataclass(slots=True, eq=False, kw_only=True)
class Tended:
    """A worker that the controller looks after. `task` follows its process from start to end."""

    id: str
    role: Role
    phase: Phase = Phase.DOWN
    is_placed: bool = False
    since_s: float = 0.0
    """STARTING, READY: since when."""
    is_told_to_wait: bool = False
    """It was logged that the worker waits for room."""
    heard_s: float = 0.0
    """READY: when its lease was seen last."""
    is_silent: bool = False
    is_given_up: bool = False
    """READY: it has been silent for so long that it is being killed."""
    draining_since_s: float | None = None
    """READY: since when its lease says that it drains, though it was given no order."""
    is_draining: bool = False
    """READY: it has said so for the time of a lease."""
    start_at_s: float = 0.0
    num_failures: int = 0
    pid: int = 0
    address: str = ""
    pod: str = ""
    """Kubernetes pod that it was placed in last."""
    actor: asyncio.Future[Any] | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, kw_only=True)
class _Knowledge:
    """Of Redis, as of the latest answer."""

    leases: dict[str, Worker] = field(default_factory=dict)
    boot: str = ""
    told_s: float = 0.0
    """When it answered last."""
    since_s: float = 0.0
    """Since when it has answered all the time, and kept its state: workers have their leases if they are well."""
    published: tuple[str, Mapping[Role, int]] | None = None
    """The boot token and the sizes that Redis has from us."""


class Controller:
    """`adopt` comes first, then `run`; `orders` may be given meanwhile (`deploy.controller.orders`).

    Args:
        me: as routers are to find it.
        state: to begin with; from now on `path` holds it.
        is_first: nothing has run in this cluster yet: a worker that cannot start as configured ends `run`.
    """

    def __init__(
        self,
        config: Config,
        me: ControllerInfo,
        actors: RayActors,
        leases: LeaseStore,
        mirror: Mirror,
        path: Path,
        state: State,
        is_first: bool,
    ) -> None:
        self.config = config
        self.state = state
        self._me = me
        self._actors = actors
        self._leases = leases
        self._mirror = mirror
        self._path = path
        self._is_first = is_first
        self._workers: dict[str, Tended] = {}
        self._known = _Knowledge()
        self._specs: dict[Role, PoolSpec] = {}
        """Of the ServingPools, in Kubernetes."""
        self._refusal = ""
        """Why the sizes that they ask for are not the desired ones."""
        self._due = asyncio.Event()
        self._publish_due = asyncio.Event()
        self._is_whole = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Condition()
        self._leaving: set[asyncio.Task[None]] = set()

    async def adopt(self) -> None:
        """Finds the workers that run. What the state knows besides is started again.

        Raises:
            ConfigError: Ray does not answer.
        """
        found = set(await self._actors.ids())
        told: dict[str, Role] = {}
        with contextlib.suppress(StoreUnavailable):
            told = {worker.info.id: worker.info.role for worker in await self._leases.list_workers()}
        for worker_id in sorted(found | self.state.roles.keys()):
            # A state file that is lost leaves what workers say of themselves, then the role they began with.
            role = self.state.roles.get(worker_id) or told.get(worker_id) or pool_of(worker_id)
            worker = Tended(id=worker_id, role=role)
            self._workers[worker_id] = worker
            if worker_id in found:
                self._begin(worker, self._actors.get(worker_id))
        self._record()
        await self._settled([worker for worker in self._workers.values() if worker.task])

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            ConfigError: Ray does not answer any more, or the node by which this process has joined is gone.
            BatonError: of the first start, a worker that cannot run as configured.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reconcile(), name="reconcile")
            tasks.create_task(self._tell_redis(), name="redis")
            tasks.create_task(self._check_ray(), name="ray")
            tasks.create_task(self._until_failed(), name="failure")

    async def whole(self) -> None:
        """Once the pools are as they should be for the first time."""
        await self._is_whole.wait()

    async def end_workers(self) -> None:
        """Lets every worker leave the cluster, then ends its process. `run` has ended."""
        await cancel_and_wait(self._leaving)
        await asyncio.gather(
            *(
                self._end(w, w.is_placed and not w.is_silent and w.phase in (Phase.READY, Phase.LEAVING))
                for w in self._workers.values()
            )
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                while left := await self._actors.ids():
                    for worker_id in left:
                        await self._kill(asyncio.ensure_future(self._actors.get(worker_id)))
                    await asyncio.sleep(GONE_POLL_S)

    async def let_go(self) -> None:
        """Leaves the workers as they are. `run` has ended."""
        await cancel_and_wait(self._leaving)
        await cancel_and_wait({worker.task for worker in self._workers.values() if worker.task})

    # -- what orders see and change ------------------------------------------------------------------------------------

    @property
    def is_starting(self) -> bool:
        """The first start is under way, which has to become what it was asked for."""
        return self._is_first and not self._is_whole.is_set()

    @property
    def ids(self) -> list[str]:
        return sorted(self._workers)

    def seen(self) -> dict[str, Seen]:
        """Every known worker, as of now."""
        unique = self._mirror.unique_blocks() if self._is_any_pool_too_large() else {}
        return {worker.id: self._seen(worker, unique.get(worker.id, 0)) for worker in self._workers.values()}

    def pool(self, role: Role) -> PoolStatus:
        return PoolStatus(self.state.desired[role], _num_serving(self.seen(), role))

    def worker(self, worker_id: str) -> Worker:
        """As its lease tells, with the role and the state that it has by now."""
        worker = self._workers[worker_id]
        if (lease := self._known.leases.get(worker_id)) is None:
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

    def tell_scaling(self, decision: Decision) -> None:
        """What the autoscaler has decided, for whoever looks at the cluster."""
        self._me = replace(self._me, scaling=decision.scaling)

    async def observe(self) -> ClusterStatus:
        """The cluster as workers and routers last told. Raises StoreUnavailable."""
        return ClusterStatus(
            pools={role.value: self.pool(role) for role in Role},
            workers=tuple(await self._leases.list_workers()),
            routers=tuple(await self._leases.list_routers()),
            redis_address=self.config.index.redis_url,
            redis_ok=True,
            models=(),
            controller=self._me,
        )

    def record(self, state: State) -> None:
        """What is decided is written down, then done.

        Raises:
            ConfigError: the file cannot be written; nothing is changed.
        """
        state_file.save(self._path, state)
        self.state = state
        self._due.set()
        self._publish_due.set()

    def step(self) -> None:
        """One round of reconciling, now."""
        self._follow_specs()
        seen = self.seen()
        if all(_num_serving(seen, role) >= self.state.desired[role] for role in Role):
            self._is_whole.set()
        for worker in self._workers.values():
            if seen[worker.id].waits_for_room and not worker.is_told_to_wait:
                worker.is_told_to_wait = True
                pool, needs = pool_of(worker.id), self._actors.needs
                logger.warning("%s waits: no Ray node for %s workers has room for %s", worker.id, pool, needs)
        for action in reconcile(self.state.desired, list(seen.values()), time.monotonic()):
            match action:
                case Start(worker_id, role):
                    worker = self._workers.setdefault(worker_id, Tended(id=worker_id, role=role))
                    self._record()
                    self._begin(worker, self._actors.create(worker_id, role))
                case Retire(worker_id):
                    self.record(replace(self.state, retiring=self.state.retiring | {worker_id}))
                case Leave(worker_id):
                    self._leave(self._workers[worker_id])
                case Forget(worker_id):
                    self._forget(self._workers[worker_id])

    def set_role(self, worker_id: str, role: Role) -> None:
        """The worker has taken the other pool's work: one from one size to the other."""
        roles = {**self.state.roles, worker_id: role}
        desired = self.sizes_after(Flip(worker_id, role))
        self.record(replace(self.state, desired=desired, roles=roles, flip=None))
        self._workers[worker_id].role = role

    def sizes_after(self, flip: Flip) -> dict[Role, int]:
        """The desired ones, once that change of role is done."""
        desired, before = dict(self.state.desired), self._workers[flip.worker_id].role
        desired[before] = max(desired[before] - 1, 0)
        desired[flip.role] += 1
        return desired

    # -- Kubernetes ----------------------------------------------------------------------------------------------------

    def follow(self, role: Role, spec: PoolSpec) -> None:
        """Its ServingPool asks for that from now on."""
        self._specs[role] = spec
        self._follow_specs()

    def _follow_specs(self) -> None:
        """Not while a worker changes its role, for which both sizes change."""
        if self.state.flip is not None:
            return
        followed = {role: spec.size for role, spec in self._specs.items() if not spec.is_paused}
        desired = {**self.state.desired, **followed}
        self._refusal = why_not(desired, self.config)
        if not self._refusal and desired != self.state.desired:
            logger.info("the ServingPools ask for %s", ", ".join(f"{size} {role}" for role, size in desired.items()))
            self.record(replace(self.state, desired=desired))

    def reports(self) -> dict[Role, PoolReport]:
        """What becomes of the ServingPools."""
        seen = self.seen()
        return {role: self._report(role, seen) for role in Role}

    def _report(self, role: Role, seen: Mapping[str, Seen]) -> PoolReport:
        phases = [worker.phase for worker in seen.values() if worker.role is role]
        return PoolReport(
            desired=self.state.desired[role],
            num_workers=len(phases) - phases.count(Phase.DOWN),
            num_ready=_num_serving(seen, role),
            num_draining=phases.count(Phase.LEAVING),
            refusal=self._refusal,
        )

    def placed_workers(self) -> list[PlacedWorker]:
        """Where the workers are that run, or may."""
        return [
            PlacedWorker(pool_of(worker.id), worker.role, pod, stays)
            for worker in self._workers.values()
            for pod in [worker.pod if worker.phase in (Phase.READY, Phase.LEAVING) else ""]
            for stays in [worker.id not in self.state.retiring and worker.phase is not Phase.LEAVING]
        ]

    def why_not(self, sizes: Mapping[Role, int]) -> str:
        """Why the pools must not have those sizes; empty: they may."""
        for role, size in sizes.items():
            if (spec := self._specs.get(role)) and (reason := spec.why_not(size)):
                return reason
        return why_not({**self.state.desired, **sizes}, self.config)

    def _drain_timeout_s(self, role: Role) -> float:
        spec = self._specs.get(role)
        own_s = spec.drain_timeout_s if spec else None
        return self.config.cluster.drain_timeout_s if own_s is None else own_s

    async def ask_for_role(self, flip: Flip) -> None:
        """Has the worker change its role. Raises the worker's own error, or WorkerFailed."""
        worker = self._workers[flip.worker_id]
        timeout_s = self._drain_timeout_s(worker.role)
        async with channel(worker.address) as link:
            request = worker_pb2.SetRoleRequest(role=flip.role, timeout_s=timeout_s)
            try:
                await worker_pb2_grpc.WorkerControlStub(link).SetRole(request, timeout=timeout_s + RPC_SLACK_S)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, worker.id) from error

    # -- the life of a worker ------------------------------------------------------------------------------------------

    def _begin(self, worker: Tended, actor: Any) -> None:
        worker.phase, worker.is_placed, worker.since_s = Phase.STARTING, False, time.monotonic()
        worker.is_told_to_wait = worker.is_silent = worker.is_given_up = worker.is_draining = False
        worker.draining_since_s = None
        worker.actor = asyncio.ensure_future(actor)
        worker.task = self._spawn(self._tend(worker, worker.actor), worker.id)

    async def _tend(self, worker: Tended, coming: asyncio.Future[Any]) -> None:
        """From its start until its process has ended, for whatever reason."""
        try:
            actor = await asyncio.shield(coming)
            await self._actors.placed(actor)
            worker.is_placed = True
            started = await self._started(worker, actor)
            worker.pid, worker.address, worker.pod = started.pid, started.address, started.pod
            worker.phase = Phase.READY
            worker.since_s = worker.heard_s = time.monotonic()
            logger.info("%s is ready, pid %d, at %s", worker.id, worker.pid, worker.address)
            await self._notify()
            await self._actors.ended(actor)
        except BatonError as error:
            if worker.phase is Phase.LEAVING:
                return  # whoever has it leave does the rest
            is_stable = worker.phase is Phase.READY and time.monotonic() - worker.since_s > STABLE_S
            worker.num_failures = 0 if is_stable else worker.num_failures + 1
            if worker.phase is Phase.READY:
                logger.warning("%s is gone (%s); starting it again", worker.id, first_line(error))
            else:
                logger.error("%s does not start: %s", worker.id, first_line(error))
                if self.is_starting:
                    self._fail(error)
        wait_s = RESTART_BACKOFF_S[min(worker.num_failures, len(RESTART_BACKOFF_S) - 1)]
        worker.phase, worker.start_at_s = Phase.DOWN, time.monotonic() + wait_s
        await self._kill(coming)
        await self._notify()

    async def _started(self, worker: Tended, actor: Any) -> Started:
        timeout_s = self.config.cluster.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._actors.start(actor)
        except TimeoutError:
            raise WorkerFailed(f"{worker.id} was not ready within {timeout_s:g} s (cluster.start_timeout_s)") from None

    def _leave(self, worker: Tended) -> None:
        """In a task of its own: drains it if it can answer, ends it, and forgets it."""

        async def leave(is_ready: bool) -> None:
            if is_ready:
                await self._drain(worker)
            await self._end(worker, is_ready)
            self._forget(worker)
            await self._notify()

        is_ready = worker.phase is Phase.READY and not worker.is_silent
        if worker.task and not is_ready:
            worker.task.cancel()  # before it finds that the worker is ready
        worker.phase = Phase.LEAVING
        logger.info("%s leaves", worker.id)
        self._send_off(leave(is_ready), f"{worker.id} leaves")

    async def _drain(self, worker: Tended) -> None:
        """As far as possible: what is left is computed again elsewhere."""
        timeout_s = self._drain_timeout_s(worker.role)
        async with channel(worker.address) as link:
            request = worker_pb2.DrainRequest(timeout_s=timeout_s)
            try:
                answer = await worker_pb2_grpc.WorkerControlStub(link).Drain(request, timeout=timeout_s + RPC_SLACK_S)
            except grpc.aio.AioRpcError as error:
                logger.warning("%s is not drained: %s", worker.id, from_rpc_error(error, worker.id))
            else:
                if answer.num_left:
                    logger.warning("%s leaves with %d calls that others take over", worker.id, answer.num_left)

    async def _end(self, worker: Tended, is_ready: bool) -> None:
        """The process and its actor. A worker that is not ready yet has nothing to hand over."""
        await cancel_and_wait([worker.task] if worker.task else [])
        if worker.actor:
            if is_ready:
                with contextlib.suppress(BatonError):
                    await self._actors.stop(await worker.actor, self.config.cluster.stop_timeout_s / 2)
            await self._kill(worker.actor)

    async def _kill(self, coming: asyncio.Future[Any]) -> None:
        try:
            actor = await coming
        except BatonError:
            return  # there is none
        await self._actors.kill(actor)

    def _forget(self, worker: Tended) -> None:
        del self._workers[worker.id]
        self._record()

    # -- observing -----------------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        while True:
            self._due.clear()
            self.step()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._due.wait()

    async def _tell_redis(self) -> None:
        """Tells who we are and how many workers there should be, and reads what they have to do.

        Redis holds a copy of the sizes: it gets them again where the copy is another one, or after it lost its state (a
        new boot token).
        """
        while True:
            self._publish_due.clear()
            try:
                await self._leases.announce_controller(self._me)
                current = (await self._leases.boot(), self.state.desired)
                sizes = {role.value: size for role, size in current[1].items()}
                if current != self._known.published or not sizes.items() <= (await self._leases.get_desired()).items():
                    await self._leases.set_desired(sizes)
                    self._known.published = current
                self._learn(await self._leases.list_leases(), current[0], time.monotonic())
            except StoreUnavailable as error:
                logger.debug("Redis is away; going on with what is known: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.index.renew_s):
                    await self._publish_due.wait()

    def _learn(self, leases: dict[str, Worker | None], boot: str, now_s: float) -> None:
        """Who has a lease, who has had none for so long that it is held to hang, and who drains without an order.

        One that cannot be read is a lease: who hangs does not renew it.
        """
        known, lease_s = self._known, self.config.index.lease_s
        if boot != known.boot or now_s - known.told_s > lease_s:
            known.since_s = now_s
        known.leases = {worker_id: worker for worker_id, worker in leases.items() if worker is not None}
        known.boot, known.told_s = boot, now_s
        for worker in self._workers.values():
            self._note_draining(worker, leases.get(worker.id), now_s)
            if worker.phase is not Phase.READY or worker.id in leases:
                worker.heard_s, worker.is_silent = now_s, False
                continue
            silent_s = now_s - max(worker.heard_s, known.since_s)
            if silent_s > SILENT_LEASES * lease_s and not worker.is_silent:
                worker.is_silent = True
                logger.warning("%s has had no lease for %.0f s: it does not serve, though it runs", worker.id, silent_s)
            if silent_s > GIVEN_UP_LEASES * lease_s and not worker.is_given_up and worker.actor:
                worker.is_given_up = True
                logger.error("%s has had no lease for %.0f s: it is killed", worker.id, silent_s)
                self._send_off(self._kill(worker.actor), f"{worker.id} is killed")

    def _note_draining(self, worker: Tended, lease: Worker | None, now_s: float) -> None:
        """A worker that a signal or a stranger has told to drain will serve nobody any more.

        Just after a change of role its lease may still say what was true before: hence the time of a lease.
        """
        drains = lease is not None and lease.info.pid == worker.pid and lease.load.state is WorkerState.DRAINING
        if worker.phase is not Phase.READY or self._is_changing_role(worker) or not drains:
            worker.draining_since_s, worker.is_draining = None, False
            return
        if worker.draining_since_s is None:
            worker.draining_since_s = now_s
        if now_s - worker.draining_since_s > self.config.index.lease_s and not worker.is_draining:
            worker.is_draining = True
            if worker.id not in self.state.retiring:
                logger.warning("%s drains without an order from here: another worker takes its place", worker.id)

    def _is_changing_role(self, worker: Tended) -> bool:
        return self.state.flip is not None and self.state.flip.worker_id == worker.id

    async def _check_ray(self) -> None:
        while True:
            await asyncio.sleep(CHECK_RAY_S)
            await self._actors.check()

    async def _until_failed(self) -> None:
        await self._failed

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _send_off(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._spawn(work, name)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """What it does not expect ends `run`."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                self._fail(error)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    def _seen(self, worker: Tended, num_unique_blocks: int) -> Seen:
        lease = self._known.leases.get(worker.id)
        return Seen(
            id=worker.id,
            role=worker.role,
            phase=worker.phase,
            is_retiring=worker.id in self.state.retiring,
            is_held=self._is_changing_role(worker),
            is_silent=worker.is_silent and worker.phase is Phase.READY,
            is_draining=worker.is_draining and worker.phase is Phase.READY and not self._is_changing_role(worker),
            waits_for_room=(
                worker.phase is Phase.STARTING and not worker.is_placed and time.monotonic() - worker.since_s > ROOM_S
            ),
            start_at_s=worker.start_at_s,
            num_requests=lease.load.running + lease.load.waiting if lease else 0,
            num_unique_blocks=num_unique_blocks,
        )

    def _is_any_pool_too_large(self) -> bool:
        staying = [worker.role for worker in self._workers.values() if worker.id not in self.state.retiring]
        return any(staying.count(role) > self.state.desired[role] for role in Role)

    def _record(self) -> None:
        """The workers that are known by now."""
        roles = {worker.id: worker.role for worker in self._workers.values()}
        self.record(replace(self.state, roles=roles, retiring=self.state.retiring & roles.keys()))

    async def _notify(self) -> None:
        self._due.set()
        async with self._changed:
            self._changed.notify_all()

    async def _settled(self, workers: Sequence[Tended]) -> None:
        """Until none of them is about to be ready, for a few seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADOPTION_S), self._changed:
                await self._changed.wait_for(lambda: all(w.phase is not Phase.STARTING for w in workers))


def _num_serving(seen: Mapping[str, Seen], role: Role) -> int:
    return sum(is_serving(worker) and worker.role is role for worker in seen.values())
