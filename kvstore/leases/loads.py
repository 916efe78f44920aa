"""Loads that workers have reported with their events since they signed their leases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.cluster import MAX_WORKERS, Worker, WorkerLoad
from kvstore.leases.codec import decode_load

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvstore.index.connection import RedisConnection


@dataclass(slots=True)
class _Reported:
    epoch: int
    load: WorkerLoad
    worker: Worker | None = None
    """The worker of the latest lease, with this load."""


class ReportedLoads:
    """Newest load of each worker. An event that was read late, or replayed, replaces no newer load.

    Args:
        connection: counts the loads that cannot be read.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._reported: dict[str, _Reported] = {}

    def report(self, worker_id: str, epoch: int, load: bytes) -> None:
        """Record the load that an event of a worker has reported."""
        try:
            found = decode_load(load)
        except ValueError as error:
            self._connection.garbage.note("event", f"load of {worker_id}", error)
            return
        last = self._reported.get(worker_id)
        if last is not None and (epoch, found.number) <= (last.epoch, last.load.number):
            return
        if last is not None or len(self._reported) < 2 * MAX_WORKERS:
            self._reported[worker_id] = _Reported(epoch, found)

    def newest(self, worker: Worker) -> Worker:
        """Return a worker with the load of its lease, or the reported one if that is newer.

        The result is the same object until the worker reports again.
        """
        info, last = worker.info, self._reported.get(worker.info.id)
        if last is None or last.epoch != info.epoch or last.load.number <= worker.load.number:
            return worker
        if last.worker is None or last.worker.info is not info:
            last.worker = Worker(info, last.load)
        return last.worker

    def keep(self, worker_ids: Collection[str]) -> None:
        """Forget all other workers."""
        self._reported = {each: found for each, found in self._reported.items() if each in worker_ids}
