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
        self._queued_tokens: Counter[tuple[str, int]] = Counter()
        """Prompt tokens that an incarnation has to compute for requests which this router placed there."""
        self._active_tokens: Counter[tuple[str, int]] = Counter()
        """Prompt tokens of the requests that this router placed on an incarnation to be decoded, and that are not
        done."""
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
            self._candidate(worker, min(held.get(worker.info.id, 0) * worker.info.block_size, prompt.num_tokens))
            for worker in self.workers
            if worker.info.id not in excluded and self.is_trusted(worker)
        ]

    def _candidate(self, worker: Worker, num_cached_tokens: int) -> Candidate:
        """Other routers' work shows in the worker's own report, this router's at once."""
        info, load = worker.info, worker.load
        incarnation = info.id, info.epoch
        decodes = info.role is Role.DECODE
        return Candidate(
            info.id,
            info.role,
            max(self._queued_tokens[incarnation], load.queued_tokens),
            max(self._active_tokens[incarnation], load.blocks.in_use * info.block_size if decodes else 0),
            num_cached_tokens,
        )

    def computing(self, worker: Worker, num_tokens: int) -> contextlib.AbstractContextManager[None]:
        """Books `num_tokens` uncached prompt tokens as queued on a worker's incarnation while the block is entered."""
        return _booked(self._queued_tokens, worker, num_tokens)

    def decoding(self, worker: Worker, num_tokens: int) -> contextlib.AbstractContextManager[None]:
        """Books a sequence with `num_tokens` prompt tokens on the incarnation that decodes it, while the block is
        entered."""
        return _booked(self._active_tokens, worker, num_tokens)


@contextlib.contextmanager
def _booked(books: Counter[tuple[str, int]], worker: Worker, num_tokens: int) -> Iterator[None]:
    incarnation = worker.info.id, worker.info.epoch
    books[incarnation] += num_tokens
    try:
        yield
    finally:
        books[incarnation] -= num_tokens
        if not books[incarnation]:
            del books[incarnation]
