"""Lifecycle of each worker, from the creation of its actor to its end: start, follow, drain, end.

    DOWN ── start ──> STARTING ── ready ──> READY ── leave ──> LEAVING ──> removed
      ^── failed ────────┘                    │
      └── gone ───────────────────────────────┘

One task per worker follows its process. If Ray loses a worker's actor, the worker stays READY while it answers health
checks, until a new actor on its Ray node adopts it.

This module carries out actions and records what happens to workers; `reconcile` decides which worker starts or leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.addresses import host_of
from baton.cluster import Role, WorkerInfo, with_role
from baton.config import ClusterConfig
from baton.errors import ActorLost, BatonError, ConfigError, WorkerFailed
from baton.rpc import channel, from_rpc_error
from baton.rpc.member_auth import MemberLink, member_metadata
from baton.tasks import cancel_and_wait
from baton.tls import Tls
from baton.v1 import worker_pb2, worker_pb2_grpc
from deploy.controller.reconcile import WorkerPhase
from deploy.controller.serving_pools import PoolSpecs
from deploy.processes import STABLE_S
from deploy.ray_pools.actors import RayActors, Started, first_line

logger = logging.getLogger(__name__)

RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Waits before the restarts of a worker that repeatedly fails to start, or dies soon after its start."""
ADOPTION_S = 10.0
"""Timeouts at a start of the controller: for Redis to answer, and for the workers to report that they are ready."""
HEALTH_S = 5.0
"""Timeout of a health check."""
MAX_FAILED_CHECKS = 2
"""Consecutive failed health checks after which a worker without an actor counts as dead."""
ADOPTED_FIRST_S = 30.0
"""Time for which no worker is started while another one waits to be adopted. Ray counts the orphan's room as free."""
ADOPT_S = 0.5
"""Interval between attempts to adopt a worker, and between its health checks."""
RPC_SLACK_S = 10.0
"""Time for a worker's answer in addition to the command's own timeout."""
GONE_S = 5.0
"""Timeout for Ray to remove the actors, which it does asynchronously."""
GONE_POLL_S = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class ManagedWorker:
    """Worker that the controller manages. `task` follows its process from start to end."""

    id: str
    pool: Role
    """Pool in which it was started: it runs on a node for that pool, independent of its current role."""
    role: Role
    settings: str = ""
    """Settings with which it was started (`Config.worker_settings`)."""
    phase: WorkerPhase = WorkerPhase.DOWN
    is_placed: bool = False
    """STARTING or later: a node runs it."""
    since_s: float = 0.0
    """STARTING, READY: start time of the phase."""
    waits_for_turn_since_s: float | None = None
    """STARTING: time since which it waits until its node lets it load its model; None: it does not."""
    is_wait_logged: bool = False
    """STARTING: the wait for room on a node has been logged."""
    leased_s: float = 0.0
    """READY: time at which its lease was last seen."""
    is_silent: bool = False
    """READY: it has had no lease for `SILENT_LEASES` and counts as hanging."""
    is_given_up: bool = False
    """READY: it is being killed because it was silent."""
    draining_since_s: float | None = None
    """READY: time since which its lease reports a drain that the controller has not requested."""
    is_draining: bool = False
    """READY: its lease has reported such a drain for the duration of a lease."""
    orphan_since_s: float | None = None
    """READY: time since which it has had no actor; None: it has one."""
    start_at_s: float = 0.0
    """DOWN: earliest time of its next start."""
    num_failures: int = 0
    """Consecutive failures to start."""
    failure: str = ""
    """Error of its last failure; empty: there was none."""
    pid: int = 0
    address: str = ""
    incarnation: str = ""
    """Identity of its process, to which the proofs of commands are bound."""
    pod: str = ""
    """Kubernetes pod in which it was last placed."""
    actor: asyncio.Future[Any] | None = None
    task: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return with_role(self.id, self.role)

    @property
    def is_serving(self) -> bool:
        """True if its process can answer, as far as is known."""
        return self.phase is WorkerPhase.READY and not self.is_silent


class WorkerLives:
    """All managed workers and their lifecycles.

    Attributes:
        workers: the workers by id. A worker that has left is removed; `due` is set then, too.
        failures: number of deaths and failed starts, by role.
        due: set whenever an event may require another round of reconciliation.
        changed: notified with `due`, for tasks that wait for a worker.
        failed: receives the error that must end the controller.
        must_start: while true, a worker that cannot start as configured ends the controller.

    Args:
        link: credentials for calls to workers.
    """

    def __init__(
        self, config: ClusterConfig, actors: RayActors, specs: PoolSpecs, *, must_start: bool, link: MemberLink
    ) -> None:
        self.workers: dict[str, ManagedWorker] = {}
        self.due = asyncio.Event()
        self.changed = asyncio.Condition()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.must_start = must_start
        self.failures: Counter[Role] = Counter()
        self._config = config
        self._actors = actors
        self._link = link
        self._specs = specs
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def is_adopting(self) -> bool:
        """True if a worker has lost its actor lately and is not adopted yet."""
        oldest_s = time.monotonic() - ADOPTED_FIRST_S
        return any(
            worker.orphan_since_s is not None and worker.orphan_since_s > oldest_s for worker in self.workers.values()
        )

    # -- orders --------------------------------------------------------------------------------------------------------

    def start(self, worker: ManagedWorker) -> None:
        """Start the worker in a new actor."""
        self._begin(worker, self._actors.create(worker.id, worker.role, worker.pool))

    def adopt(self, worker: ManagedWorker, info: WorkerInfo | None) -> None:
        """Take over the worker in the running actor with its id.

        Args:
            info: the worker as its lease describes it; None: it has no lease. Without one it is started again if Ray
                loses the actor before the actor has reported the worker.
        """
        self._begin(worker, self._actors.get(worker.id))
        _learn(worker, info)

    def adopt_orphan(self, worker: ManagedWorker, info: WorkerInfo) -> None:
        """Take over a worker that serves, as its lease shows, but whose actor Ray does not know.

        It counts as READY at once. A new actor adopts it when Ray has its node.
        """
        self._begin(worker, self._successor(worker, ActorLost("Ray does not know its actor")))
        _learn(worker, info)
        worker.is_placed, worker.leased_s, worker.phase = True, worker.since_s, WorkerPhase.READY
        worker.orphan_since_s = worker.since_s
        logger.warning(
            "%s serves, but Ray does not know its actor: a new actor adopts it when its Ray node is back", worker
        )

    def leave(self, worker: ManagedWorker) -> None:
        """Drain the worker if it can answer, then end and remove it, in a separate task."""

        async def leave(can_answer: bool) -> None:
            if can_answer:
                await self._drain(worker)
            await self._end(worker, can_answer)
            del self.workers[worker.id]
            await self._notify()

        can_answer = worker.is_serving
        worker.phase = WorkerPhase.LEAVING
        logger.info("%s leaves", worker)
        self._send_off(leave(can_answer), f"{worker.id} leaves")

    def give_up(self, worker: ManagedWorker) -> None:
        """Kill a worker that hangs; it is restarted like one that died."""
        assert worker.actor is not None
        worker.is_given_up = True
        self._send_off(self._kill(worker.actor), f"{worker.id} is killed")

    def give_up_unless_well(self, worker: ManagedWorker) -> None:
        """Kill a worker that does not even answer a health check, in a separate task."""

        async def give_up() -> None:
            actor = worker.actor
            if await _is_well(worker.address, self._link.tls):
                logger.warning("%s answers: it is left to its streams for now", worker)
            elif worker.actor is actor and worker.is_silent and not worker.is_given_up:
                logger.error("%s does not answer either: it is killed", worker)
                self.give_up(worker)

        self._send_off(give_up(), f"{worker.id} is asked how it is")

    async def change_role(self, worker: ManagedWorker, role: Role) -> None:
        """Request a change of role from the worker. Raises the worker's own error, or WorkerFailed."""
        timeout_s = self._drain_timeout_s(worker.role)
        async with channel(worker.address, self._link.tls) as link:
            request = worker_pb2.SetRoleRequest(role=role, timeout_s=timeout_s)
            try:
                await worker_pb2_grpc.WorkerControlStub(link).SetRole(
                    request, timeout=timeout_s + RPC_SLACK_S, metadata=self._proof("SetRole", worker)
                )
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, worker.id) from error

    async def end_all(self) -> None:
        """Let every worker leave the cluster, and end its process. No other command may be in progress.

        A worker that has lost its actor, and is not adopted in time, ends by itself after `cluster.orphan_timeout_s`.
        """
        await cancel_and_wait(self._leaving)
        phases = (WorkerPhase.READY, WorkerPhase.LEAVING)
        ending = {
            asyncio.create_task(self._end(w, w.is_placed and not w.is_silent and w.phase in phases), name=str(w))
            for w in self.workers.values()
        }
        if ending:
            _, late = await asyncio.wait(ending, timeout=self._config.stop_timeout_s)
            if late:
                names = ", ".join(sorted(task.get_name() for task in late))
                logger.warning("%s may still run: Ray does not end them in time", names)
            await cancel_and_wait(late)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                while left := await self._actors.ids():
                    for worker_id in left:
                        await self._kill(asyncio.ensure_future(self._actors.get(worker_id)))
                    await asyncio.sleep(GONE_POLL_S)

    async def let_go(self) -> None:
        """Stop following the workers, which keep running."""
        await cancel_and_wait(self._leaving)
        await cancel_and_wait({worker.task for worker in self.workers.values() if worker.task})

    async def settled(self, workers: Sequence[ManagedWorker]) -> None:
        """Wait until none of the workers is starting, for at most `ADOPTION_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADOPTION_S), self.changed:
                await self.changed.wait_for(lambda: all(w.phase is not WorkerPhase.STARTING for w in workers))

    # -- what happens to a worker --------------------------------------------------------------------------------------

    def _begin(self, worker: ManagedWorker, actor: Coroutine[Any, Any, Any]) -> None:
        worker.phase, worker.is_placed, worker.since_s = WorkerPhase.STARTING, False, time.monotonic()
        worker.is_wait_logged = worker.is_silent = worker.is_given_up = worker.is_draining = False
        worker.draining_since_s = worker.waits_for_turn_since_s = worker.orphan_since_s = None
        worker.incarnation = ""
        worker.actor = asyncio.ensure_future(actor)
        worker.task = self._spawn(self._tend(worker), worker.id)

    async def _tend(self, worker: ManagedWorker) -> None:
        """Follow the worker from its start until its process has ended, for any reason."""
        try:
            while True:
                try:
                    assert worker.actor is not None
                    await self._follow(worker, await asyncio.shield(worker.actor))
                except ActorLost as error:
                    if not worker.incarnation:  # it does not serve yet
                        raise
                    logger.warning("%s has lost its Ray actor, and serves on (%s)", worker, first_line(error))
                    worker.orphan_since_s = time.monotonic()
                    worker.actor = asyncio.ensure_future(self._successor(worker, error))
        except BatonError as error:
            if worker.phase is WorkerPhase.LEAVING:
                return  # `leave` does the rest
            self.failures[worker.role] += 1
            is_stable = worker.phase is WorkerPhase.READY and time.monotonic() - worker.since_s > STABLE_S
            worker.num_failures = 0 if is_stable else worker.num_failures + 1
            worker.failure = first_line(error)
            if worker.phase is WorkerPhase.READY:
                logger.warning("%s is gone (%s); starting it again", worker, first_line(error))
            else:
                logger.error("%s does not start: %s", worker, first_line(error))
                if self.must_start:
                    self._fail(error)
        wait_s = RESTART_BACKOFF_S[min(worker.num_failures, len(RESTART_BACKOFF_S) - 1)]
        worker.phase, worker.start_at_s = WorkerPhase.DOWN, time.monotonic() + wait_s
        worker.orphan_since_s = None
        if worker.actor:
            await self._kill(worker.actor)
        await self._notify()

    async def _follow(self, worker: ManagedWorker, actor: Any) -> None:
        """Wait until the worker is ready, if it is not yet, and then until it has ended.

        Raises:
            ActorLost: Ray has lost the actor.
            BatonError: the worker cannot start, or has ended.
        """
        await self._actors.placed(actor)
        if worker.phase is WorkerPhase.STARTING:
            worker.is_placed, worker.waits_for_turn_since_s = True, time.monotonic()
            await self._actors.turn(actor)
            worker.waits_for_turn_since_s = None
        started = await self._started(worker, actor)
        worker.pid, worker.address, worker.pod = started.pid, started.address, started.pod
        worker.incarnation = started.incarnation
        how = "is ready" if worker.orphan_since_s is None else "is adopted by a new Ray actor"
        worker.orphan_since_s = None
        if worker.phase is WorkerPhase.STARTING:
            worker.phase = WorkerPhase.READY
            worker.since_s = worker.leased_s = time.monotonic()
        logger.info("%s %s, pid %d, at %s", worker, how, worker.pid, worker.address)
        await self._notify()
        await self._actors.ended(actor)

    async def _successor(self, worker: ManagedWorker, lost: ActorLost) -> Any:
        """Wait until Ray has the worker's node again, and return a new actor that has adopted the worker's process.

        If the caller cancels this, the next controller finds the actor by its name.

        Raises:
            WorkerFailed: the process has ended, or hangs.
        """
        host = host_of(worker.address)
        dead = asyncio.create_task(self._until_dead(worker))
        try:
            while not (await asyncio.wait([dead], timeout=ADOPT_S))[0]:
                with contextlib.suppress(ConfigError):  # Ray does not answer
                    if node_id := await self._actors.node_at(host):
                        coming = self._actors.create(worker.id, worker.role, worker.pool, node_id)
                        if actor := await self._adopter(worker, asyncio.ensure_future(coming), dead):
                            return actor
            raise WorkerFailed(f"it does not answer health checks, and its actor is lost: {first_line(lost)}")
        finally:
            await cancel_and_wait([dead])

    async def _adopter(self, worker: ManagedWorker, coming: asyncio.Future[Any], dead: asyncio.Task[None]) -> Any:
        """Wait until the actor has adopted the worker, and return it; None: Ray has lost it, or the worker is dead.

        Args:
            coming: future of the new actor.
            dead: task that ends if the worker is dead.

        Raises:
            WorkerFailed: the worker's process does not run on the actor's node, or the actor cannot be created.
        """

        async def adopt() -> Any:
            actor = await asyncio.shield(coming)
            if (await self._actors.start(actor)).incarnation != worker.incarnation:
                raise WorkerFailed("another process has its name")
            return actor

        adopting = asyncio.create_task(adopt())
        try:
            await asyncio.wait([adopting, dead], return_when=asyncio.FIRST_COMPLETED)
            if adopting.done():
                return adopting.result()
        except ActorLost as error:
            logger.debug("%s is not adopted yet: %s", worker, error)
            self._send_off(self._end_actor(coming), f"the actor of {worker.id} is ended")
            return None
        except BatonError:
            self._send_off(self._kill(coming), f"the actor of {worker.id} is killed")
            raise
        finally:
            await cancel_and_wait([adopting])
        self._send_off(self._kill(coming), f"the actor of {worker.id} is killed")
        return None

    async def _until_dead(self, worker: ManagedWorker) -> None:
        """Return when the worker has failed `MAX_FAILED_CHECKS` health checks in a row."""
        num_failures = 0
        while num_failures < MAX_FAILED_CHECKS:
            await asyncio.sleep(ADOPT_S)
            num_failures = 0 if await _is_well(worker.address, self._link.tls) else num_failures + 1

    async def _started(self, worker: ManagedWorker, actor: Any) -> Started:
        timeout_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._actors.start(actor)
        except TimeoutError:
            raise WorkerFailed(f"{worker} was not ready within {timeout_s:g} s (cluster.start_timeout_s)") from None

    async def _drain(self, worker: ManagedWorker) -> None:
        """Drain the worker as far as possible; remaining requests are recomputed elsewhere."""
        timeout_s = self._drain_timeout_s(worker.role)
        async with channel(worker.address, self._link.tls) as link:
            request = worker_pb2.DrainRequest(timeout_s=timeout_s)
            try:
                answer = await worker_pb2_grpc.WorkerControlStub(link).Drain(
                    request, timeout=timeout_s + RPC_SLACK_S, metadata=self._proof("Drain", worker)
                )
            except grpc.aio.AioRpcError as error:
                logger.warning("%s is not drained: %s", worker, from_rpc_error(error, worker.id))
            else:
                if answer.num_left:
                    logger.warning("%s leaves with %d calls that others take over", worker, answer.num_left)

    def _proof(self, method: str, worker: ManagedWorker) -> tuple[tuple[str, bytes], ...]:
        return member_metadata(self._link.keys, f"/baton.v1.WorkerControl/{method}", worker.incarnation)

    def _drain_timeout_s(self, role: Role) -> float:
        own_s = self._specs.drain_timeout_s(role)
        return self._config.drain_timeout_s if own_s is None else own_s

    async def _end(self, worker: ManagedWorker, can_answer: bool) -> None:
        """End the process and its actor. A worker that cannot answer has nothing to transfer.

        If Ray has lost the actor, the next one ends the process: without an order it would stay on its node.
        """
        await cancel_and_wait([worker.task] if worker.task else [])
        while worker.actor:
            try:
                if can_answer:
                    await self._actors.stop(await asyncio.shield(worker.actor), self._config.stop_timeout_s / 2)
            except ActorLost as error:
                if worker.incarnation:
                    worker.actor = asyncio.ensure_future(self._successor(worker, error))
                    continue
            except BatonError:
                pass  # the process has ended
            await self._kill(worker.actor)
            return

    async def _kill(self, coming: asyncio.Future[Any]) -> None:
        try:
            actor = await asyncio.shield(coming)
        except BatonError:
            return  # there is none
        await self._actors.kill(actor)

    async def _end_actor(self, coming: asyncio.Future[Any]) -> None:
        """End an actor whose answer is lost. It may have adopted the worker, which serves on."""
        with contextlib.suppress(BatonError):  # there is none
            await self._actors.end_only(await asyncio.shield(coming))

    def _send_off(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._spawn(work, name)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task whose unexpected errors end the controller."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                self._fail(error)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _notify(self) -> None:
        self.due.set()
        async with self.changed:
            self.changed.notify_all()


def _learn(worker: ManagedWorker, info: WorkerInfo | None) -> None:
    """Copy the process id, the address and the incarnation from a worker's lease, if it has one."""
    if info is not None:
        worker.pid, worker.address, worker.incarnation = info.pid, info.address, info.incarnation


async def _is_well(address: str, tls: Tls | None) -> bool:
    """Return whether the worker at this address answers a health check, also if it takes no new work."""
    async with channel(address, tls) as link:
        stub: Any = health_pb2_grpc.HealthStub(link)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_S)
        except grpc.aio.AioRpcError:
            return False
    return True
