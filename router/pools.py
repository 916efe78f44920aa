"""The router's view of the workers: their leases, what it sent them itself, and whom it mistrusts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from baton.cluster import Role, Worker, WorkerState
from router.placement import Candidate, Prompt

SUSPICION_S = 10.0
"""A worker whose stream broke is passed over for so long, unless it comes back as a new incarnation."""


class PoolView:
    """Snapshot of the pools, fed by `update` (leases) and by the router's own placements.

    Args:
        lookup: prompt keys -> leading blocks that each worker is believed to hold.
        clock: monotonic seconds.
    """

    def __init__(self, lookup: Callable[[tuple[bytes, ...]], dict[str, int]], clock: Callable[[], float]) -> None:
        self._lookup = lookup
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._load_tokens: Counter[tuple[str, int]] = Counter()
        """Of requests this router placed on an incarnation and that are not done."""
        self._suspects: dict[tuple[str, int], float] = {}
        self._changed = asyncio.Condition()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    def max_model_len(self) -> int | None:
        """Longest sequence that every known worker can hold; None while none is known."""
        return min((worker.info.max_model_len for worker in self.workers), default=None)

    async def update(self, workers: Collection[Worker]) -> None:
        """Takes over what the leases say; whoever has none is gone."""
        self._workers = {worker.info.id: worker for worker in sorted(workers, key=lambda worker: worker.info.id)}
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
        return self._workers[worker_id]

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
                worker.info.id,
                worker.info.role,
                # Other routers' work shows in the worker's own report, this router's at once.
                max(self._load_tokens[worker.info.id, worker.info.epoch], worker.load.queued_tokens),
                min(held.get(worker.info.id, 0) * worker.info.block_size, prompt.num_tokens),
            )
            for worker in self.workers
            if worker.info.id not in excluded and self.is_trusted(worker)
        ]

    @contextlib.contextmanager
    def working(self, worker: Worker, num_tokens: int) -> Iterator[None]:
        """Books `num_tokens` of load on a worker's incarnation while the block is entered."""
        incarnation = worker.info.id, worker.info.epoch
        self._load_tokens[incarnation] += num_tokens
        try:
            yield
        finally:
            self._load_tokens[incarnation] -= num_tokens
            if not self._load_tokens[incarnation]:
                del self._load_tokens[incarnation]
