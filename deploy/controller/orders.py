"""Orders to the controller: each is checked, written down, and carried out.

Every method raises typed errors with sentences for operators: InvalidRequest for what cannot be, Conflict for what
cannot be now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from baton.cluster import PoolStatus, Role, Worker
from baton.errors import BatonError, Conflict, InvalidRequest
from baton.tasks import cancel_and_wait
from deploy.controller.controller import Controller
from deploy.controller.reconcile import Phase, Seen, is_serving
from deploy.controller.state import Flip, least

logger = logging.getLogger(__name__)


class Orders:
    """`resume` comes first. They outlive whoever gave them: a change of role goes on when its caller has left.

    Args:
        keep_sizes: has those sizes written down where they are kept, if that is not here: in Kubernetes.
    """

    def __init__(
        self, controller: Controller, keep_sizes: Callable[[Mapping[Role, int]], Awaitable[None]] | None = None
    ) -> None:
        self._controller = controller
        self._keep_sizes = keep_sizes
        self._flipping: asyncio.Task[None] | None = None

    def resume(self) -> None:
        """A change of role that the controller before this one began: the worker's answer tells what became of it."""
        controller = self._controller
        if (flip := controller.state.flip) is None:
            return
        worker = controller.seen().get(flip.worker_id)
        if worker is not None and worker.phase is Phase.READY:
            self._begin_flip(flip)
        else:
            controller.record(replace(controller.state, flip=None))

    async def close(self) -> None:
        """A change of role under way stays in the state, for the next controller."""
        if self._flipping:
            await cancel_and_wait([self._flipping])

    async def scale(self, pool: str, num_workers: int) -> PoolStatus:
        """Sets how many workers a pool should have. Answers at once."""
        controller = self._controller
        role = _role(pool, "pool")
        if reason := controller.why_not({role: num_workers}):
            raise InvalidRequest(f"{pool} cannot have {num_workers} workers: {reason}", "desired")
        self._refuse_during_the_start()
        self._refuse_during_a_flip()
        if self._keep_sizes:
            await self._keep_sizes({role: num_workers})
        controller.record(replace(controller.state, desired={**controller.state.desired, role: num_workers}))
        logger.info("%s: %d workers are wanted", pool, num_workers)
        controller.step()
        return controller.pool(role)

    async def drain(self, worker_id: str) -> Worker:
        """Has a worker leave, and another one take its place. Answers as it begins, or has to wait for the other."""
        controller = self._controller
        self._known(worker_id)
        self._refuse_during_the_start()
        if controller.state.flip and controller.state.flip.worker_id == worker_id:
            self._refuse_during_a_flip()
        controller.record(replace(controller.state, retiring=controller.state.retiring | {worker_id}))
        logger.info("%s is to leave", worker_id)
        before = controller.worker(worker_id)
        controller.step()
        return controller.worker(worker_id) if worker_id in controller.ids else before

    async def set_role(self, worker_id: str, role: str) -> Worker:
        """Moves a worker to the other pool, with its cache. Answers once it is done.

        Raises:
            BatonError: also what the worker says when it cannot; it keeps its role.
        """
        controller = self._controller
        target = _role(role, "role")
        worker = self._known(worker_id)
        self._refuse_during_the_start()
        self._refuse_during_a_flip()
        if worker.role is target:
            return controller.worker(worker_id)
        if not is_serving(worker):
            state = "hanging" if worker.is_silent else controller.worker(worker_id).load.state.value
            state = "draining" if worker.is_draining else state
            state = "leaving" if worker.is_retiring else state
            raise Conflict(f"{worker_id} is {state}; only a worker that is ready can change its role")
        pool = controller.pool(worker.role)
        if min(pool.ready, pool.desired) <= least(worker.role, controller.config):
            raise Conflict(
                f"{worker_id} is the last ready worker of the {worker.role} pool; add one first with "
                f"`baton scale {worker.role} {pool.desired + 1}`"
            )
        flip = Flip(worker_id, target)
        if reason := controller.why_not(controller.sizes_after(flip)):
            raise Conflict(f"{worker_id} cannot become a {target} worker: {reason}")
        controller.record(replace(controller.state, flip=flip))
        logger.info("%s is to become a %s worker", worker_id, target)
        await asyncio.shield(self._begin_flip(flip))
        return controller.worker(worker_id)

    def _begin_flip(self, flip: Flip) -> asyncio.Task[None]:
        """Goes on when nobody waits for it any more."""
        self._flipping = asyncio.create_task(self._flip(flip), name="change of role")
        self._flipping.add_done_callback(_log_failure)
        return self._flipping

    async def _flip(self, flip: Flip) -> None:
        """Asking again is no harm: a worker that has the role says so at once."""
        controller = self._controller
        try:
            await controller.ask_for_role(flip)
        except BatonError:
            controller.record(replace(controller.state, flip=None))
            raise
        if self._keep_sizes:
            await self._keep_flipped_sizes(flip)
        controller.set_role(flip.worker_id, flip.role)
        logger.info("%s is a %s worker now", flip.worker_id, flip.role)

    async def _keep_flipped_sizes(self, flip: Flip) -> None:
        """Where that fails, the sizes are as they were before, and a worker of each pool starts and leaves for it."""
        assert self._keep_sizes is not None
        try:
            await self._keep_sizes(self._controller.sizes_after(flip))
        except BatonError as error:
            logger.warning("%s is a %s worker, and the sizes stay: %s", flip.worker_id, flip.role, error)

    def _known(self, worker_id: str) -> Seen:
        seen = self._controller.seen()
        if worker_id not in seen:
            raise InvalidRequest(
                f"no worker is called {worker_id!r}; there are {', '.join(self._controller.ids)}", "worker_id"
            )
        return seen[worker_id]

    def _refuse_during_the_start(self) -> None:
        if self._controller.is_starting:
            raise Conflict("the cluster is still starting; try again when it is ready")

    def _refuse_during_a_flip(self) -> None:
        if flip := self._controller.state.flip:
            raise Conflict(f"{flip.worker_id} is becoming a {flip.role} worker; try again when it is done")


def _role(name: str, param: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        known = ", ".join(role.value for role in Role)
        raise InvalidRequest(f"no {param} is called {name!r}; there are {known}", param) from None


def _log_failure(flipping: asyncio.Task[None]) -> None:
    if not flipping.cancelled() and (error := flipping.exception()):
        logger.warning("a change of role was given up: %s", error)
