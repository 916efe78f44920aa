"""Commands to the controller: each is validated, recorded, and carried out.

Every method raises errors with messages for operators: InvalidRequest if a command is impossible, Conflict if it is
impossible at the moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from baton.cluster import PoolStatus, Role, Worker, with_role
from baton.errors import BatonError, Conflict, InvalidRequest
from baton.tasks import cancel_and_wait
from deploy.controller.controller import Controller
from deploy.controller.kubernetes_side import Kubernetes
from deploy.controller.reconcile import ObservedWorker, WorkerPhase, is_serving
from deploy.controller.sleeping import EMPTY, fallen_asleep, resized, wake_sizes
from deploy.controller.state import RoleChange, min_workers

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Interval between attempts to wake a model that must not sleep."""
AskForRoom = Callable[[Mapping[Role, int], Mapping[Role, int]], Awaitable[str]]
"""Returns the reason why the pools cannot grow from the first sizes to the second ones here; empty: they can."""


class Orders:
    """Commands to the controller. Call `resume` first. A change of role continues after its caller has left.

    Args:
        kubernetes: keeps the sizes in ServingPools; None: the controller's own state has them.
        room: checks that pools of these sizes fit; None: more nodes may join.
    """

    def __init__(
        self, controller: Controller, kubernetes: Kubernetes | None = None, room: AskForRoom | None = None
    ) -> None:
        self._controller = controller
        self._kubernetes = kubernetes
        self._room = room
        self._changing: asyncio.Task[None] | None = None
        self._waking: asyncio.Task[None] | None = None
        self._sizing = asyncio.Lock()
        """Held while sizes change: a wake-up waits until the model sleeps, and many wake-ups start the workers once."""

    def resume(self) -> None:
        """Continue what the previous controller has started.

        For a change of role, the worker's answer shows the outcome. The controller wakes a model that sleeps if the
        model may no longer sleep, or if the copy of its files is lost, which routers need to serve it.
        """
        controller = self._controller
        if controller.state.sleep and not (controller.config.autoscale.may_sleep and controller.has_copy):
            self._waking = asyncio.create_task(self._wake_anyway(), name="wake-up")
        if (change := controller.state.role_change) is None:
            return
        worker = controller.observed().get(change.worker_id)
        if worker is not None and worker.phase is WorkerPhase.READY:
            self._begin_change(change)
        else:
            controller.record(replace(controller.state, role_change=None))

    async def close(self) -> None:
        """Stop following a change of role in progress, which stays in the state for the next controller."""
        await cancel_and_wait([task for task in (self._changing, self._waking) if task])

    async def scale(self, pool: str, num_workers: int, is_forced: bool = False) -> PoolStatus:
        """Set the desired number of workers of a pool. Returns immediately.

        Args:
            pool: prefill or decode.
            num_workers: its new size.
            is_forced: accept the command even if the workers do not fit.
        """
        role = _role(pool, "pool")
        async with self._sizing:
            return await self._scale(role, num_workers, is_forced)

    async def _scale(self, role: Role, num_workers: int, is_forced: bool) -> PoolStatus:
        controller, pool = self._controller, role.value
        if reason := controller.sizes_problem({role: num_workers}):
            raise InvalidRequest(f"{pool} cannot have {num_workers} workers: {reason}", "desired")
        self._refuse_during_the_start()
        self._refuse_during_a_change_of_role()
        if self._room and not is_forced:
            before = controller.state.desired
            if reason := await self._room(before, {**before, role: num_workers}):
                raise Conflict(f"{pool} cannot have {num_workers} workers: {reason}; use --force to scale anyway")
        if self._kubernetes:
            await self._kubernetes.set_sizes(controller, {role: num_workers})
        state = resized(controller.state, {**controller.state.desired, role: num_workers}, time.time())
        if role is Role.DECODE and not num_workers:  # it stays down: no request wakes it
            state = replace(state, sleep=None)
        controller.record(state)
        logger.info("%s: %d workers are desired", pool, num_workers)
        controller.step()
        return controller.pool(role)

    async def sleep(self) -> None:
        """Stop all workers until a request wakes the model. Returns when they leave.

        The controller writes the sleep to the state file before it changes the ServingPools. If it dies in between, its
        successor finds sizes above 0 in the ServingPools, and they wake the model.

        Raises:
            Conflict: the model must not sleep now.
            StoreUnavailable: Kubernetes has not taken the sizes; the model stays awake.
        """
        async with self._sizing:
            controller, awake = self._controller, self._controller.state
            if not awake.desired[Role.DECODE]:
                return
            self._refuse_during_the_start()
            self._refuse_during_a_change_of_role()
            if not controller.has_copy:
                raise Conflict("the model cannot sleep: the controller has no copy of its files yet, for routers")
            if reason := controller.sizes_problem(EMPTY):
                raise Conflict(f"the model cannot sleep: {reason}")
            controller.record(fallen_asleep(awake))
            try:
                if self._kubernetes:
                    with controller.own_sizes():
                        await self._kubernetes.set_sizes(controller, EMPTY)
            except BatonError:
                controller.record(replace(controller.state, desired=awake.desired, sleep=None))
                raise
            logger.info("the model sleeps: its workers leave, and the next request starts workers")
            controller.step()

    async def wake(self) -> None:
        """Start workers for a model that sleeps, and return immediately. Do nothing if it is awake or already wakes.

        Raises:
            Conflict: the workers do not fit, or must not be started. The reason is announced.
            StoreUnavailable: Kubernetes has not taken the sizes.
        """
        async with self._sizing:
            controller = self._controller
            if (sleep := controller.state.sleep) is None or controller.state.desired[Role.DECODE]:
                return
            sizes = wake_sizes(controller.state, sleep, controller.config)
            try:
                reason = controller.sizes_problem(sizes)
                if self._room and not reason:
                    reason = await self._room(controller.state.desired, sizes)
                if reason:
                    raise Conflict(f"the model cannot wake: {reason}")
                if self._kubernetes:
                    await self._kubernetes.set_sizes(controller, sizes)
            except BatonError as error:
                controller.refuse_to_wake(str(error))
                raise
            controller.record(resized(controller.state, sizes, time.time()))
            logger.info("the model wakes, with %s", ", ".join(f"{size} {role}" for role, size in sizes.items()))
            controller.step()

    async def drain(self, worker_id: str) -> Worker:
        """Replace a worker. Returns when it starts to drain, or waits for its replacement."""
        controller = self._controller
        worker = self._required(worker_id)
        self._refuse_during_the_start()
        if controller.state.role_change and controller.state.role_change.worker_id == worker_id:
            self._refuse_during_a_change_of_role()
        controller.record(replace(controller.state, retiring=controller.state.retiring | {worker_id}))
        logger.info("%s is to leave", with_role(worker_id, worker.role))
        before = controller.worker(worker_id)
        controller.step()
        return controller.worker(worker_id) if worker_id in controller.ids else before

    async def set_role(self, worker_id: str, role: str) -> Worker:
        """Move a worker with its cache to the other pool. Returns when done.

        Raises:
            InvalidRequest: the pools have different engines, or there is no such worker or role.
            BatonError: including the worker's own error if it cannot change; it keeps its role.
        """
        controller = self._controller
        target = _role(role, "role")
        worker = self._required(worker_id)
        self._refuse_during_the_start()
        self._refuse_during_a_change_of_role()
        if worker.role is target:
            return controller.worker(worker_id)
        if differing := controller.config.engine_differences:
            raise InvalidRequest(
                f"{worker_id} cannot become a {target} worker: it keeps its engine, and the pools' engines differ in "
                f"{', '.join(differing)}; change the sizes of both pools with `baton scale` instead",
                "role",
            )
        if not is_serving(worker):
            state = "hanging" if worker.is_silent else controller.worker(worker_id).load.state.value
            state = "draining" if worker.is_draining else state
            state = "leaving" if worker.is_retiring else state
            raise Conflict(f"{worker_id} is {state}; only a ready worker can change its role")
        pool = controller.pool(worker.role)
        if min(pool.ready, pool.desired) <= min_workers(worker.role, controller.config):
            raise Conflict(
                f"{worker_id} is the last ready worker of the {worker.role} pool; add one first with "
                f"`baton scale {worker.role} {pool.desired + 1}`"
            )
        change = RoleChange(worker_id, target)
        if reason := controller.sizes_problem(controller.sizes_after(change)):
            raise Conflict(f"{worker_id} cannot become a {target} worker: {reason}")
        controller.record(replace(controller.state, role_change=change))
        logger.info("%s is to become a %s worker", with_role(worker_id, worker.role), target)
        await asyncio.shield(self._begin_change(change))
        return controller.worker(worker_id)

    async def _wake_anyway(self) -> None:
        """Wake the model without a request."""
        while True:
            try:
                return await self.wake()
            except BatonError as error:
                logger.debug("trying again to wake the model: %s", error)
            await asyncio.sleep(RETRY_S)

    def _begin_change(self, change: RoleChange) -> asyncio.Task[None]:
        """Start the change as a task, which continues if its caller stops waiting."""
        self._changing = asyncio.create_task(self._change_role(change), name="change of role")
        self._changing.add_done_callback(_log_failure)
        return self._changing

    async def _change_role(self, change: RoleChange) -> None:
        """Request the change, again after a restart: a worker that already has the role answers immediately."""
        controller = self._controller
        try:
            await controller.ask_for_role(change)
        except BatonError:
            controller.record(replace(controller.state, role_change=None))
            raise
        if self._kubernetes:
            await self._keep_changed_sizes(self._kubernetes, change)
        controller.set_role(change.worker_id, change.role)
        logger.info("%s is a %s worker now", change.worker_id, change.role)

    async def _keep_changed_sizes(self, kubernetes: Kubernetes, change: RoleChange) -> None:
        """Write the changed sizes. If this fails, the sizes stay: one pool stops a worker, and the other starts one."""
        try:
            await kubernetes.set_sizes(self._controller, self._controller.sizes_after(change))
        except BatonError as error:
            logger.warning("%s is a %s worker, but the sizes are unchanged: %s", change.worker_id, change.role, error)

    def _required(self, worker_id: str) -> ObservedWorker:
        observed = self._controller.observed()
        if worker_id not in observed:
            known = ", ".join(with_role(name, worker.role) for name, worker in sorted(observed.items()))
            raise InvalidRequest(f"no worker is called {worker_id!r}; there are {known}", "worker_id")
        return observed[worker_id]

    def _refuse_during_the_start(self) -> None:
        if self._controller.is_starting:
            raise Conflict("the cluster is still starting; try again when it is ready")

    def _refuse_during_a_change_of_role(self) -> None:
        if change := self._controller.state.role_change:
            raise Conflict(f"{change.worker_id} is becoming a {change.role} worker; try again when it is done")


def _role(name: str, param: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        known = ", ".join(role.value for role in Role)
        raise InvalidRequest(f"no {param} is called {name!r}; there are {known}", param) from None


def _log_failure(changing: asyncio.Task[None]) -> None:
    if not changing.cancelled() and (error := changing.exception()):
        logger.warning("a change of role failed: %s", error)
