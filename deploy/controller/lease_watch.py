"""What the controller exchanges with Redis: it announces itself and the sizes, and reads the workers' leases.

From the leases it sees which worker hangs (no lease for long, though its process runs) and which one drains without an
order. While Redis is away everything stays as it was last known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.cluster import ControllerInfo, Role, Worker, WorkerState
from baton.config import IndexConfig
from baton.errors import StoreUnavailable
from deploy.controller.reconcile import WorkerPhase
from deploy.controller.state import StateFile
from deploy.controller.worker_life import ManagedWorker, WorkerLives
from kvstore.leases import LeaseStore

logger = logging.getLogger(__name__)

SILENT_LEASES = 2
"""A ready worker without a lease for this many lease durations counts as hanging: it serves nobody, though it runs. It
is killed, and started again, unless it answers a health check."""
GIVEN_UP_LEASES = 8
"""Lease durations after which a silent worker is killed though it answers: it may be Redis that it does not reach."""


@dataclass(slots=True, kw_only=True)
class _LastAnswer:
    """What Redis answered last."""

    leases: dict[str, Worker] = field(default_factory=dict)
    boot: str = ""
    at_s: float = 0.0
    """The time of the answer."""
    steady_since_s: float = 0.0
    """The time since which Redis has answered without a gap and kept its data, so that well workers have leases."""
    published: tuple[str, Mapping[Role, int]] | None = None
    """The boot token and the sizes that Redis holds from this process."""


class LeaseWatch:
    """Follows the leases and flags the workers in `lives` accordingly.

    Attributes:
        me: the controller as routers find it; announced with every round.
        publish_due: set when the sizes in `state` have changed and Redis should learn of it at once.
    """

    def __init__(
        self, config: IndexConfig, me: ControllerInfo, leases: LeaseStore, lives: WorkerLives, state: StateFile
    ) -> None:
        self.me = me
        self.publish_due = asyncio.Event()
        self._config = config
        self._leases = leases
        self._lives = lives
        self._state = state
        self._last = _LastAnswer()

    def lease_of(self, worker_id: str) -> Worker | None:
        """The worker's lease as last read; None: it had none, or none that can be read."""
        return self._last.leases.get(worker_id)

    async def run(self) -> None:
        """Announces and reads until cancelled.

        Redis holds a copy of the sizes. It gets them again where its copy differs, or after it has lost its data (a new
        boot token).
        """
        while True:
            self.publish_due.clear()
            try:
                await self._leases.announce_controller(self.me)
                current = (await self._leases.boot(), self._state.current.desired)
                sizes = {role.value: size for role, size in current[1].items()}
                if current != self._last.published or not sizes.items() <= (await self._leases.get_desired()).items():
                    await self._leases.set_desired(sizes)
                    self._last.published = current
                self._learn(await self._leases.list_leases(), current[0], time.monotonic())
            except StoreUnavailable as error:
                logger.debug("Redis is away; going on with what is known: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.renew_s):
                    await self.publish_due.wait()

    def _learn(self, leases: Mapping[str, Worker | None], boot: str, now_s: float) -> None:
        """Flags workers that are silent, gives up those that stay silent, and flags those that drain by themselves.

        A lease that cannot be read (None) still is a lease: a worker that hangs does not renew one.
        """
        last, lease_s = self._last, self._config.lease_s
        if boot != last.boot or now_s - last.at_s > lease_s:
            last.steady_since_s = now_s
        last.leases = {worker_id: worker for worker_id, worker in leases.items() if worker is not None}
        last.boot, last.at_s = boot, now_s
        for worker in self._lives.workers.values():
            self._note_draining(worker, leases.get(worker.id), now_s)
            if worker.phase is not WorkerPhase.READY or worker.id in leases:
                worker.leased_s, worker.is_silent = now_s, False
                continue
            silent_s = now_s - max(worker.leased_s, last.steady_since_s)
            if silent_s > SILENT_LEASES * lease_s and not worker.is_silent:
                worker.is_silent = True
                logger.warning("%s has had no lease for %.0f s: it does not serve, though it runs", worker, silent_s)
                self._lives.give_up_unless_well(worker)
            if silent_s > GIVEN_UP_LEASES * lease_s and not worker.is_given_up and worker.actor:
                logger.error("%s has had no lease for %.0f s: it is killed", worker, silent_s)
                self._lives.give_up(worker)

    def _note_draining(self, worker: ManagedWorker, lease: Worker | None, now_s: float) -> None:
        """Flags a worker that drains because of a signal, or of an order that is not the controller's.

        Just after a change of role the lease may still hold the state from before: hence the wait of one lease.
        """
        drains = lease is not None and lease.info.pid == worker.pid and lease.load.state is WorkerState.DRAINING
        if worker.phase is not WorkerPhase.READY or self._state.current.is_changing_role(worker.id) or not drains:
            worker.draining_since_s, worker.is_draining = None, False
            return
        if worker.draining_since_s is None:
            worker.draining_since_s = now_s
        if now_s - worker.draining_since_s > self._config.lease_s and not worker.is_draining:
            worker.is_draining = True
            if worker.id not in self._state.current.retiring:
                logger.warning("%s drains without an order from here: another worker takes its place", worker)
