"""Orders to the controller: each is checked, written down, and carried out.

Every method raises typed errors with sentences for operators: InvalidRequest for what is impossible, Conflict for what
is impossible now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from baton.cluster import PoolStatus, Role, Worker, with_role
from baton.errors import BatonError, Conflict, InvalidRequest
from baton.tasks import cancel_and_wait
from deploy.controller.controller import Controller
from deploy.controller.kubernetes_side import Kubernetes
from deploy.controller.reconcile import ObservedWorker, WorkerPhase, is_serving
from deploy.controller.state import RoleChange, min_workers

logger = logging.getLogger(__name__)

AskForRoom = Callable[[Mapping[Role, int], Mapping[Role, int]], Awaitable[str]]
"""The reason why pools of the first sizes cannot come to have the second ones here; empty: they can."""


class Orders:
    """`resume` comes first. An order outlives its caller: a change of role continues when the caller has left.

    Args:
        kubernetes: keeps the sizes in ServingPools; None: the controller's own state has them.
        room: asks whether pools of these sizes fit; None: nodes may be still to come.
    """

    def __init__(
        self, controller: Controller, kubernetes: Kubernetes | None = None, room: AskForRoom | None = None
    ) -> None:
        self._controller = controller
        self._kubernetes = kubernetes
        self._room = room
        self._changing: asyncio.Task[None] | None = None

    def resume(self) -> None:
        """Continues a change of role that the previous controller began: the worker's answer shows how it ended."""
        controller = self._controller
        if (change := controller.state.role_change) is None:
            return
        worker = controller.observed().get(change.worker_id)
        if worker is not None and worker.phase is WorkerPhase.READY:
            self._begin_change(change)
        else:
            controller.record(replace(controller.state, role_change=None))

    async def close(self) -> None:
        """Stops following a change of role under way; it stays in the state, for the next controller."""
        if self._changing:
            await cancel_and_wait([self._changing])

    async def scale(self, pool: str, num_workers: int, is_forced: bool = False) -> PoolStatus:
        """Sets how many workers a pool should have. Returns at once.

        Args:
            pool: prefill or decode.
            num_workers: its new size.
            is_forced: whether the order is taken even if they do not fit.
        """
        controller = self._controller
        role = _role(pool, "pool")
        if reason := controller.sizes_problem({role: num_workers}):
            raise InvalidRequest(f"{pool} cannot have {num_workers} workers: {reason}", "desired")
        self._refuse_during_the_start()
        self._refuse_during_a_change_of_role()
        if self._room and not is_forced:
            before = controller.state.desired
            if reason := await self._room(before, {**before, role: num_workers}):
                raise Conflict(f"{pool} cannot have {num_workers} workers: {reason}; --force orders them all the same")
        if self._kubernetes:
            await self._kubernetes.set_sizes(controller, {role: num_workers})
        controller.record(replace(controller.state, desired={**controller.state.desired, role: num_workers}))
        logger.info("%s: %d workers are wanted", pool, num_workers)
        controller.step()
        return controller.pool(role)

    async def drain(self, worker_id: str) -> Worker:
        """Has a worker leave and another one take its place. Returns once it has begun, or waits for the other one."""
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
        """Moves a worker to the other pool, with its cache. Returns once it is done.

        Raises:
            BatonError: also the worker's own error when it cannot; it keeps its role.
        """
        controller = self._controller
        target = _role(role, "role")
        worker = self._required(worker_id)
        self._refuse_during_the_start()
        self._refuse_during_a_change_of_role()
        if worker.role is target:
            return controller.worker(worker_id)
        if not is_serving(worker):
            state = "hanging" if worker.is_silent else controller.worker(worker_id).load.state.value
            state = "draining" if worker.is_draining else state
            state = "leaving" if worker.is_retiring else state
            raise Conflict(f"{worker_id} is {state}; only a worker that is ready can change its role")
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

    def _begin_change(self, change: RoleChange) -> asyncio.Task[None]:
        """The change as a task, which continues when no caller waits for it any more."""
        self._changing = asyncio.create_task(self._change_role(change), name="change of role")
        self._changing.add_done_callback(_log_failure)
        return self._changing

    async def _change_role(self, change: RoleChange) -> None:
        """Asks the worker, once more after a restart: one that already has the role answers at once."""
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
        """If this fails, the sizes stay as before, so that one pool stops a worker and the other starts one."""
        try:
            await kubernetes.set_sizes(self._controller, self._controller.sizes_after(change))
        except BatonError as error:
            logger.warning("%s is a %s worker, and the sizes stay: %s", change.worker_id, change.role, error)

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
        logger.warning("a change of role was given up: %s", error)
