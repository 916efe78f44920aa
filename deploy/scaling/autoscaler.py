"""Loop around the policy: observes a window, decides, scales. The controller runs it.

    observe -> window_s -> observe -> measure -> decide -> log -> orders: role changes, one at a time; then sizes
       ^                                                              |
       +--------------------------------------------------------------+

A model that may sleep does so as soon as no request has arrived for `autoscale.idle_s`, regardless of the cool-down.

If a command fails, its reason is logged and the rest of that decision is dropped; the next decision follows after the
cool-down. A new controller has all its data after one cool-down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from baton.cluster import ClusterStatus, Role, Worker, WorkerState
from baton.errors import BatonError
from deploy.scaling.idleness import UNKNOWN, activity_of, observed
from deploy.scaling.policy import decide, to_sleep
from deploy.scaling.values import Flips, PolicyState, ScalingDecision
from deploy.scaling.window import measure
from router.placement import Objective

if TYPE_CHECKING:
    from baton.config import Config, RouterConfig

logger = logging.getLogger(__name__)
ObserveCluster = Callable[[], Awaitable[ClusterStatus]]
"""Returns the current state of the cluster. Raises BatonError while it cannot be observed."""
OnDecided = Callable[[ScalingDecision], None]
"""Called with every decision before it is carried out."""


class ScalingOrders(Protocol):
    """Commands of the autoscaler to the controller. All raise BatonError if they cannot be carried out."""

    async def scale(self, pool: Role, num_workers: int) -> object:
        """Set the desired number of workers of a pool."""

    async def set_role(self, worker_id: str, role: Role) -> object:
        """Move a worker to the other pool and adjust both desired sizes. Returns when done."""

    async def sleep(self) -> object:
        """Stop all workers until a request wakes the model."""


class Autoscaler:
    """Loop around the policy.

    Args:
        observe: returns the cluster; while it raises BatonError there are no windows.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        observe: ObserveCluster,
        orders: ScalingOrders,
        *,
        on_decided: OnDecided = lambda decision: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config.autoscale
        self._mode = config.router.mode
        self._may_flip = not config.engine_differences
        self._objective = strictest(config.router)
        self._observe = observe
        self._orders = orders
        self._on_decided = on_decided
        self._clock = clock
        self._state = PolicyState.fresh(clock())
        self._before: tuple[float, ClusterStatus] | None = None
        self._idleness = UNKNOWN

    async def run(self) -> None:
        """Measure, decide and scale until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self._config.window_s)

    async def step(self) -> ScalingDecision | None:
        """End a window, and carry out its decision. None: the first window has only started."""
        try:
            status = await self._observe()
        except BatonError as error:
            logger.warning("autoscaler: the cluster cannot be observed: %s", error)
            self._before, self._idleness = None, UNKNOWN
            return None
        now = self._clock()
        self._idleness = observed(self._idleness, activity_of(status), now)
        before, self._before = self._before, (now, status)
        if before is None:
            return None
        measured = measure(before[1], status, now - before[0])
        decision = decide(measured, self._state, self._config, self._objective, now, mode=self._mode)
        # The configuration of `baton autoscale` may lack the pools' settings; then the status has them.
        may_flip = self._may_flip and not any(pool.engine for pool in status.pools.values())
        decision = replace(decision, may_flip=may_flip)
        idle_s = self._idleness.seconds(now)
        if self._config.may_sleep and idle_s >= self._config.idle_s:
            decision = to_sleep(decision, idle_s, now)
        self._state = decision.state
        self._on_decided(decision)
        if decision.num_actions:
            logger.info("autoscaler: %s -> %s. %s", decision.before, decision.sizes, " ".join(decision.reasons))
            if not self._config.dry_run:
                await self._carry_out(decision, status)
                # Both the cool-down and the next window start after the changes, which may take a while.
                self._state, self._before = replace(self._state, acted_s=self._clock()), None
            if decision.is_sleep:
                self._idleness = UNKNOWN  # if the order was refused, it is given again after as long
        return decision

    async def _carry_out(self, decision: ScalingDecision, status: ClusterStatus) -> None:
        orders: list[tuple[str, Callable[[], Awaitable[object]]]] = []
        if decision.is_sleep:
            orders.append(("the model sleeps", self._orders.sleep))
        if flips := decision.flips:
            for worker in to_flip(flips, status):
                give = partial(self._orders.set_role, worker.info.id, flips.role)
                orders.append((f"{worker.info.id} becomes a {flips.role} worker", give))
        # A pool that stops workers comes first: those of the other pool may need their room.
        for role in () if decision.is_sleep else sorted(Role, key=lambda role: not decision.stops.of(role)):
            if decision.starts.of(role) or decision.stops.of(role):
                size = decision.sizes.of(role)
                orders.append((f"{size} {role} workers", partial(self._orders.scale, role, size)))
        for number, (name, order) in enumerate(orders):
            try:
                await order()
            except BatonError as error:
                dropped = ", ".join(name for name, _ in orders[number + 1 :]) or "nothing"
                logger.warning(
                    "autoscaler: refused: %s: %s; dropped, until the next decision: %s", name, error, dropped
                )
                return


def to_flip(flips: Flips, status: ClusterStatus) -> list[Worker]:
    """Return the ready workers with the least work, at most the requested number."""
    ready = [w for w in status.workers if w.info.role is not flips.role and w.load.state is WorkerState.READY]
    return sorted(ready, key=lambda w: (w.load.running + w.load.waiting, w.load.queued_tokens, w.info.id))[: flips.num]


def strictest(config: RouterConfig) -> Objective:
    """Return the strictest objective of all classes: pools that meet it also meet the others."""
    classes = config.slo_classes.values()
    return Objective(min(slo.ttft_ms for slo in classes) / 1e3, min(slo.itl_ms for slo in classes) / 1e3)
