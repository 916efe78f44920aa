"""Exchange of the controller with Redis: announces itself, its model and the sizes, and reads the workers' leases.

The leases show the workers that hang (no lease for a long time, although the process runs) and the workers that drain
without the controller's command. While Redis is unreachable, the last known state stays in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.cluster import ControllerInfo, Role, Worker, WorkerInfo, WorkerState
from baton.config import IndexConfig
from baton.errors import StoreUnavailable
from deploy.controller.announcement import ModelAnnouncer
from deploy.controller.claim import Claim
from deploy.controller.reconcile import WorkerPhase
from deploy.controller.worker_life import ManagedWorker, WorkerLives
from kvstore.leases import LeaseStore

logger = logging.getLogger(__name__)

SILENT_LEASES = 2
"""A ready worker without a lease for this many lease durations counts as hanging: it runs, but serves no requests. It
is killed and restarted unless it answers a health check."""
GIVEN_UP_LEASES = 8
"""Lease durations after which a silent worker is killed although it answers: it may be unable to reach Redis."""


@dataclass(slots=True, kw_only=True)
class _LastAnswer:
    """Latest data from Redis."""

    leases: dict[str, Worker] = field(default_factory=dict)
    boot: str = ""
    at_s: float = 0.0
    """Time of the data."""
    steady_since_s: float = 0.0
    """Time since which Redis has answered without a gap and kept its data, so that healthy workers have leases."""
    published: tuple[str, Mapping[Role, int]] | None = None
    """Boot token and sizes that this process has written to Redis."""


class LeaseWatch:
    """Follower of the leases. It flags the workers in `lives` that are silent or that drain on their own.

    Attributes:
        me: the controller's address and identity for routers; announced in every round.
        model: announcer of the model; it announces in every round, too.
        publish_due: set when the sizes or the announcement have changed and must be published immediately.
    """

    def __init__(
        self, config: IndexConfig, me: ControllerInfo, leases: LeaseStore, *, model: ModelAnnouncer, lives: WorkerLives
    ) -> None:
        self.me = me
        self.model = model
        self.publish_due = asyncio.Event()
        self._config = config
        self._leases = leases
        self._claim = Claim(leases, me, config.lease_s)
        self._lives = lives
        self._state = model.state
        self._last = _LastAnswer()

    def lease_of(self, worker_id: str) -> Worker | None:
        """Return the worker's latest lease; None: it had none, or an invalid one."""
        return self._last.leases.get(worker_id)

    def providers(self, digest: str) -> list[WorkerInfo]:
        """Return the ready workers that have the model's files with this digest, the newest one first."""
        leases = self._last.leases.values()
        ready = [each.info for each in leases if each.load.state is WorkerState.READY and each.info.files == digest]
        return sorted(ready, key=lambda info: -info.epoch)

    def num_sequences(self) -> int:
        """Return the number of sequences that run or wait on the workers, as of the latest leases."""
        return sum(each.load.running + each.load.waiting for each in self._last.leases.values())

    async def claim(self) -> None:
        """Make sure that no other cluster serves this model in the same Redis, if Redis answers.

        Raises:
            ConfigError: one does.
        """
        try:
            await self._claim.hold()
        except StoreUnavailable as error:
            logger.warning("Redis is unreachable; whether another cluster serves this model is unknown: %s", error)

    async def run(self) -> None:
        """Announce and read until cancelled.

        Raises:
            ConfigError: another cluster serves this model in the same Redis, or the state file cannot be written.
        """
        while True:
            self.publish_due.clear()
            try:
                await self.exchange()
            except StoreUnavailable as error:
                logger.debug("Redis is unreachable; continuing with the last known state: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._config.renew_s, self._config.poll_s)):
                    await self.publish_due.wait()

    async def exchange(self) -> None:
        """Announce and read once.

        Redis holds a copy of the sizes. They are rewritten if the copy differs, or after Redis has lost its data (a new
        boot token). The model is announced before the sizes: routers then hold requests for a model that falls asleep,
        instead of refusing them because its pools are empty.

        Raises:
            StoreUnavailable: Redis does not answer.
            ConfigError: see `run`.
        """
        await self._claim.hold()
        await self._leases.announce_controller(self.me)
        current = (await self._leases.boot(), self._state.current.desired)
        await self.model.announce(current[0])
        sizes = {role.value: size for role, size in current[1].items()}
        if current != self._last.published or not sizes.items() <= (await self._leases.get_desired()).items():
            await self._leases.set_desired(sizes)
            self._last.published = current
        self._learn(await self._leases.list_leases(), current[0], time.monotonic())
        if self.model.learn(self._last.leases.values()):
            self.publish_due.set()

    def _learn(self, leases: Mapping[str, Worker | None], boot: str, now_s: float) -> None:
        """Flag silent workers, kill those that stay silent, and flag those that drain on their own.

        An invalid lease (None) still counts as a lease, because a worker that hangs does not renew it.
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
        """Flag a worker that drains because of a signal, or a command from another process.

        Just after a change of role the lease may still hold the previous state, hence the wait of one lease.
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
