"""The router's view of the workers: their leases, what it sent them itself, and which of them it mistrusts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mode

from baton import wire
from baton.blocks import HASH_BLOCK
from baton.cluster import Role, Worker, WorkerInfo, WorkerState
from baton.costs import StepCosts, least_of, lifted, typical
from baton.messages import SequenceSpec
from router.placement import Candidate, Job, LoadTracker, Prompt, Residence, Turn

UNKNOWN_LENGTH = 2**31 - 1
"""Context of a model that does not say its own: then the workers' limit is what counts."""
SUSPICION_S = 10.0
"""Least time for which a worker whose stream broke is passed over, unless it comes back as a new incarnation."""
SHORT = 8
"""A worker that holds less than one such part of the sequence that most of its role hold is broken, or its lease is: it
takes only what fits it, and what the others hold stays the limit of all requests. A prefill worker is also judged by
the decode workers, which could do without it."""
LEAVING_S = 3.0
"""Time for which a worker that asked on a stream to have its choices moved gets no work; by then its lease says that it
leaves its role."""


class PoolView:
    """Snapshot of the pools, fed by `update` (leases) and by the router's own placements.

    Args:
        lookup: prompt keys -> leading blocks that each worker is believed to hold.
        clock: monotonic seconds.
        longest: sequence that the model takes; a worker that holds more is believed to hold this.
        lease_s: time for which a dead worker may be listed; it is passed over until then.
    """

    def __init__(
        self,
        lookup: Callable[[tuple[bytes, ...]], dict[str, int]],
        clock: Callable[[], float],
        longest: int = UNKNOWN_LENGTH,
        lease_s: float = 0.0,
    ) -> None:
        self._suspicion_s = max(SUSPICION_S, lease_s)
        self._lookup = lookup
        self._clock = clock
        self._longest = longest
        self._workers: dict[str, Worker] = {}
        self._max_model_len: int | None = None
        self._short: dict[str, int] = {}
        """Workers that hold much less than others do -> the longest sequence that each of them holds."""
        self._block_size = HASH_BLOCK
        self._loads: dict[tuple[str, int], LoadTracker] = {}
        """Load by worker and epoch: an incarnation's jobs are none of the next one's."""
        self._ready: list[LoadTracker] = []
        """Load of the workers that take traffic."""
        self._draining: list[LoadTracker] = []
        """Load of the workers that drain: only prefixes can be had from them."""
        self._lacking: dict[str, frozenset[str]] = {}
        """Workers of an older release -> fields that they do not know."""
        self._samplers: tuple[str, ...] = ()
        self._residence = Residence()
        self._suspects: dict[tuple[str, int], float] = {}
        self._leaving: dict[tuple[str, int, Role], float] = {}
        self._changed = asyncio.Condition()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers that have a lease, by id."""
        return tuple(self._workers.values())

    def max_model_len(self) -> int | None:
        """Longest sequence that every worker can hold, but for those far below the others; None while none is known."""
        return self._max_model_len

    @property
    def block_size(self) -> int:
        """The block size of most workers, in tokens; a hash block while none is known."""
        return self._block_size

    async def update(self, workers: Collection[Worker]) -> None:
        """Take over the leases; a worker without one is gone."""
        least = least_of([worker.load.costs for worker in workers])
        bounded = (_bounded(worker, least) for worker in workers)
        self._workers = {worker.info.id: worker for worker in sorted(bounded, key=lambda worker: worker.info.id)}
        infos = [worker.info for worker in self._workers.values()]
        lengths = {info.id: min(info.max_model_len, self._longest) for info in infos}
        self._short = self._much_shorter(infos, lengths)
        self._max_model_len = min((lengths[worker_id] for worker_id in lengths.keys() - self._short), default=None)
        self._block_size = mode(info.block_size for info in infos) if infos else HASH_BLOCK
        lacking = {info.id: wire.fields_unknown_to(info.known_fields) for info in infos}
        self._lacking = {worker_id: fields for worker_id, fields in lacking.items() if fields}
        self._samplers = tuple(sorted({info.sampler for info in infos}))
        usual = {role: typical([w.load.costs for w in self._workers.values() if w.info.role is role]) for role in Role}
        known = self._loads
        # A lease that is missing once must not make a worker look idle.
        self._loads = {incarnation: book for incarnation, book in known.items() if book.is_busy}
        for worker in self._workers.values():
            incarnation = worker.info.id, worker.info.epoch
            book = self._loads[incarnation] = known.get(incarnation) or LoadTracker.of(worker, self._residence)
            book.report(worker, usual[worker.info.role])
        self._ready, self._draining = (
            [
                self._loads[worker.info.id, worker.info.epoch]
                for worker in self._workers.values()
                if worker.load.state is state
            ]
            for state in (WorkerState.READY, WorkerState.DRAINING)
        )
        now = self._clock()
        self._suspects = {who: until for who, until in self._suspects.items() if until > now}
        self._leaving = {who: until for who, until in self._leaving.items() if until > now}
        async with self._changed:
            self._changed.notify_all()

    def _much_shorter(self, infos: Sequence[WorkerInfo], lengths: Mapping[str, int]) -> dict[str, int]:
        usual = {role: _upper_median([lengths[info.id] for info in infos if info.role is role]) for role in Role}
        usual[Role.PREFILL] = max(usual.values())
        return {info.id: lengths[info.id] for info in infos if lengths[info.id] * SHORT < usual[info.role]}

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return after the next `update`, or after the time given."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait()

    def get(self, worker_id: str) -> Worker:
        """The worker of this id. Raises KeyError where it has no lease."""
        return self._workers[worker_id]

    def suspect(self, worker: Worker) -> None:
        """Pass this incarnation over for a while: its stream broke, though its lease may still live."""
        self._suspects[worker.info.id, worker.info.epoch] = self._clock() + self._suspicion_s

    def leaves(self, worker: Worker) -> None:
        """Record that a worker takes no new work in its role; its lease may not say so yet."""
        info = worker.info
        self._leaving[info.id, info.epoch, info.role] = self._clock() + LEAVING_S

    def stays(self, worker: Worker) -> bool:
        """Return whether a worker that announced to leave its role has stayed, according to its lease."""
        now = self._workers.get(worker.info.id)
        return now is not None and now.info.role is worker.info.role and self.is_trusted(now)

    def unfit(self, spec: SequenceSpec) -> dict[str, set[str]]:
        """Workers that do not know all that is set in the sequence -> the fields that they do not know."""
        if not self._lacking:
            return {}
        used = wire.fields_of(spec)
        return {worker_id: unknown for worker_id, fields in self._lacking.items() if (unknown := used & fields)}

    @property
    def samplers(self) -> tuple[str, ...]:
        """Names of the workers' samplers; the empty one stands for those that do not say theirs."""
        return self._samplers

    def alike(self, candidates: Sequence[Candidate], only: str | None = None) -> list[Sequence[Candidate]]:
        """Group candidates that may share an answer that is drawn: those of one sampler. A KV transfer, a move and a
        retry then give the tokens that one worker alone would have given.

        Args:
            only: the sampler that has drawn a part of the answer; None: nothing is drawn yet.
        """
        names = self._samplers if only is None else (only,)
        if names == self._samplers and len(names) < 2:  # as nearly always
            return [candidates]
        return [[c for c in candidates if self._workers[c.worker_id].info.sampler == name] for name in names]

    def too_short(self, spec: SequenceSpec) -> set[str]:
        """Workers that cannot hold the sequence and all of its answer, though it is no longer than `max_model_len`."""
        num_tokens = spec.num_prompt_tokens + spec.max_tokens
        return {worker_id for worker_id, length in self._short.items() if length < num_tokens}

    def with_room(self, num_tokens: int, excluded: Collection[str]) -> set[str]:
        """The decode workers that have room for `num_tokens`, as far as is known, if none of them is cached there."""
        return {
            book.worker_id
            for book in self._ready
            if book.candidate.role is Role.DECODE
            and book.candidate.room_tokens >= num_tokens
            and book.worker_id not in excluded
            and self._is_trusted(book.worker_id, book.epoch)
        }

    def is_trusted(self, worker: Worker) -> bool:
        """Return whether a worker takes work, and neither broke off nor leaves its role."""
        return worker.load.state is WorkerState.READY and self._is_trusted(worker.info.id, worker.info.epoch)

    def _is_trusted(self, worker_id: str, epoch: int) -> bool:
        now = self._clock()
        if self._suspects.get((worker_id, epoch), 0.0) > now:
            return False
        role = self._workers[worker_id].info.role
        return self._leaving.get((worker_id, epoch, role), 0.0) <= now

    def is_ready(self, role: Role) -> bool:
        """Return whether a worker of this role takes work."""
        return any(w.info.role is role and self.is_trusted(w) for w in self.workers)

    def candidates(self, prompt: Prompt, turn: Turn, excluded: Collection[str] = ()) -> list[Candidate]:
        """The workers that could take a request now, or be the source of its prefix, with what they hold of its prompt.
        Valid until the next call.

        Args:
            turn: of the request; see `router.placement.Turn`.
        """
        held = self._lookup(prompt.block_keys)
        now = self._clock()
        ready = self._ready
        if excluded or self._suspects or self._leaving:
            ready = [
                book
                for book in ready
                if book.worker_id not in excluded and self._is_trusted(book.worker_id, book.epoch)
            ]
        num_tokens = prompt.num_tokens
        if self._draining:
            ready = ready + self._draining
        return [book.seen(turn, min(held.get(book.worker_id, 0) * book.block_size, num_tokens), now) for book in ready]

    def wait_s(self, worker: Worker, turn: Turn) -> float:
        """Seconds of computing the prompts whose turn is not after `turn`."""
        return self._loads[worker.info.id, worker.info.epoch].wait_s(turn, self._clock())

    @contextlib.contextmanager
    def computing(self, worker: Worker, job: Job) -> Iterator[None]:
        """The job's prompt is queued on a worker's incarnation while the block is entered."""
        book = self._loads.get((worker.info.id, worker.info.epoch))
        if book is not None:
            book.queue(job, self._clock())
        try:
            yield
        finally:
            if book is not None:
                book.computed(job, self._clock())

    def computed(self, job: Job) -> None:
        """The job's prompt is computed, though the block of `computing` is entered still; idempotent."""
        if job.queued_at is not None:
            job.queued_at.computed(job, self._clock())

    @contextlib.contextmanager
    def decoding(self, worker: Worker, job: Job) -> Iterator[None]:
        """The job's sequence is on the incarnation that decodes it, while the block is entered."""
        book = self._loads.get((worker.info.id, worker.info.epoch))
        if book is not None:
            book.decode(job, self._clock())
        try:
            yield
        finally:
            if book is not None:
                book.finished(job, self._clock())


def _bounded(worker: Worker, least: StepCosts) -> Worker:
    """The worker with costs that are not believed to be less than the least."""
    costs = lifted(worker.load.costs, least)
    return worker if costs is worker.load.costs else replace(worker, load=replace(worker.load, costs=costs))


def _upper_median(lengths: Sequence[int]) -> int:
    return sorted(lengths)[len(lengths) // 2] if lengths else 0
