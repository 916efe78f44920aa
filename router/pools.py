"""The router's view of the workers: their leases, what it sent them itself, and whom it mistrusts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from baton.cluster import Role, Worker, WorkerState
from router.placement import Candidate, Prompt

SUSPICION_S = 10.0
"""A worker whose stream broke is passed over for so long, unless it comes back as a new incarnation."""


@dataclass(slots=True)
class _Entry:
    worker: Worker
    load_tokens: int = 0
    """Of requests this router placed there and that are not done."""


class PoolView:
    """Snapshot of the pools, fed by `update` (leases) and by the router's own placements.

    Args:
        lookup: prompt keys -> leading blocks that each worker is believed to hold.
        clock: monotonic seconds.
    """

    def __init__(self, lookup: Callable[[tuple[bytes, ...]], dict[str, int]], clock: Callable[[], float]) -> None:
        self._lookup = lookup
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._suspects: dict[tuple[str, int], float] = {}
        self._changed = asyncio.Condition()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(entry.worker for entry in self._entries.values())

    async def update(self, workers: Collection[Worker]) -> None:
        """Takes over what the leases say; whoever has none is gone."""
        old = self._entries
        self._entries = {}
        for worker in sorted(workers, key=lambda w: w.info.id):
            entry = old.get(worker.info.id)
            same = entry is not None and entry.worker.info.epoch == worker.info.epoch
            self._entries[worker.info.id] = _Entry(worker, entry.load_tokens if entry and same else 0)
        now = self._clock()
        self._suspects = {who: until for who, until in self._suspects.items() if until > now}
        async with self._changed:
            self._changed.notify_all()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns after the next `update`, or after the time given."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait()

    def get(self, worker_id: str) -> Worker:
        return self._entries[worker_id].worker

    def suspect(self, worker: Worker) -> None:
        """Passes this incarnation over for a while: its stream broke, though its lease may still live."""
        self._suspects[worker.info.id, worker.info.epoch] = self._clock() + SUSPICION_S

    def is_trusted(self, worker: Worker) -> bool:
        until = self._suspects.get((worker.info.id, worker.info.epoch), 0.0)
        return worker.load.state is WorkerState.READY and until <= self._clock()

    def is_ready(self, role: Role) -> bool:
        return any(w.info.role is role and self.is_trusted(w) for w in self.workers)

    def candidates(self, prompt: Prompt, excluded: Collection[str] = ()) -> list[Candidate]:
        """The workers that could take a request now, with what they hold of its prompt."""
        held = self._lookup(prompt.block_keys)
        return [
            Candidate(
                worker_id,
                entry.worker.info.role,
                # Other routers' work shows in the worker's own report, this router's at once.
                max(entry.load_tokens, entry.worker.load.queued_tokens),
                min(held.get(worker_id, 0) * entry.worker.info.block_size, prompt.num_tokens),
            )
            for worker_id, entry in self._entries.items()
            if worker_id not in excluded and self.is_trusted(entry.worker)
        ]

    @contextlib.contextmanager
    def working(self, worker_id: str, num_tokens: int) -> Iterator[None]:
        """Books `num_tokens` of load on a worker while the block is entered."""
        entry = self._entries[worker_id]
        epoch = entry.worker.info.epoch
        entry.load_tokens += num_tokens
        try:
            yield
        finally:
            current = self._entries.get(worker_id)
            if current is not None and current.worker.info.epoch == epoch:
                current.load_tokens -= num_tokens
