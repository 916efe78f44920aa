"""Load of a worker as one router knows it, from the jobs that it sent there and from the worker's reports.

The router's own jobs count at once. Jobs of other routers show only in the report, so the load is the greater of the
two. Time is an argument.

`LoadOrders` has the workers of a large pool in the order of their loads, so that placement examines few of them.

The orders are sorted lists. A worker whose load changes is marked, and takes its new place when the order is read next:
a change costs microseconds, and a decision does not walk over all workers. There is an order by waiting time for every
turn that requests have, and one by KV for workers that decode. Each role and each sampler has its own orders, because a
request may need a worker of one of them.

A wait gets shorter while the worker computes, without any event. So a worker that computes stands in a list of its own
by the time at which its queue will be empty, which does not change. Once the prompt that it computes takes longer than
predicted, the wait no longer falls; the worker is then found among the first and takes its place by its wait.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter

import xxhash

from baton.cluster import Role, Worker, WorkerState
from baton.costs import PRIOR, StepCosts, believed
from router.placement.policy import Candidate

UNLIMITED_TOKENS = 10**9
RESIDENCE_S = 10.0
"""Assumed time for which a sequence holds its KV on a decode worker, until a sequence has ended."""
RECENT_S = 300.0
"""Time constant of a worker's recent computing."""
SMOOTHING = 0.05
"""Weight of the newest residence time in the moving average."""

Turn = tuple[int, bool]
"""Rank of a prompt, lowest first: (-priority, deadline is out of reach). Workers compute prompts in this order."""
LEAST_LOADED = 16
"""Number of workers that are examined of each order."""
MAX_TURNS = 8
"""Maximum number of turns with an order of their own. Requests of other turns use the order of the nearest turn."""
TURN_S = 60.0
"""An order by a turn that no request has had for this long is dropped."""
RESORT_SHARE = 0.06
"""If a greater share of the workers has moved, sorting all of them again takes less time than moving each."""


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """Work of one choice on workers."""

    turn: Turn
    compute_s: float
    """Predicted time on the worker that computes its prompt."""
    num_prompt_tokens: int
    num_expected_tokens: int
    queued_at: LoadTracker | None = None
    """Set until its prompt is computed."""
    decoding_at: LoadTracker | None = None
    """Set until its decoding ends."""
    began_s: float = 0.0


@dataclass(slots=True)
class Residence:
    """Mean time for which sequences hold their KV."""

    mean_s: float = RESIDENCE_S

    def observe(self, seconds: float) -> None:
        self.mean_s += SMOOTHING * (seconds - self.mean_s)


@dataclass(slots=True, eq=False, kw_only=True)
class LoadTracker:
    """Load of one incarnation of a worker. `candidate` is current, except for fields that depend on the request."""

    worker_id: str
    epoch: int
    block_size: int
    candidate: Candidate
    residence: Residence
    sampler: str = ""
    """Name of the worker's sampler."""
    place: int = 0
    """Place among equally loaded workers: a hash of 64 bits."""
    moved: set[LoadTracker] | None = None
    """Set to which the worker is added when its wait or its KV changes; see `LoadOrders`."""
    _queue_s: dict[Turn, float] = field(default_factory=dict)
    _jobs: dict[Job, None] = field(default_factory=dict)
    """Queued jobs, oldest first."""
    _since_s: float = 0.0
    """Estimated start of the oldest job."""
    _others_s: float = 0.0
    """Time to compute the queued prompts of other routers."""
    _recent_at_s: float = 0.0
    """Time of the last update of `candidate.recent_s`; the field below is the time of the next one."""
    _recent_until_s: float = 0.0
    _num_decoding: int = 0
    _num_kv_tokens: int = 0
    _num_reserved_tokens: int = 0
    _reported: Worker | None = None

    @classmethod
    def of(cls, worker: Worker, residence: Residence) -> LoadTracker:
        info = worker.info
        book = cls(
            worker_id=info.id,
            epoch=info.epoch,
            block_size=info.block_size,
            candidate=Candidate(worker_id=info.id, role=info.role),
            residence=residence,
            sampler=info.sampler,
            place=xxhash.xxh64_intdigest(f"{info.id}/{info.epoch}".encode()),
        )
        book.report(worker)
        return book

    @property
    def incarnation(self) -> tuple[str, int]:
        return self.worker_id, self.epoch

    def report(self, worker: Worker, usual: StepCosts = PRIOR) -> None:
        """Update the load from a worker's lease.

        Args:
            usual: typical costs of steps in its pool.
        """
        self._reported = worker
        candidate, load = self.candidate, worker.load
        candidate.takes_work = load.state is WorkerState.READY
        candidate.role = worker.info.role  # the role may change; jobs already placed on it stay
        candidate.costs = believed(load.costs, usual)
        candidate.chunk_tokens = worker.info.chunk_tokens
        others_s = max(0.0, load.queued_tokens * candidate.costs.s_per_token - sum(self._queue_s.values()))
        if others_s != self._others_s:
            self._others_s = others_s
            if self.moved is not None:
                self.moved.add(self)
        self._refresh()

    def seen(self, turn: Turn, num_cached_tokens: int, now: float) -> Candidate:
        """Return the worker as a candidate for a request of this turn. The result is valid until the next call."""
        candidate = self.candidate
        candidate.num_cached_tokens = num_cached_tokens
        if now > self._recent_until_s:
            self._note_recent(0.0, now)
        candidate.wait_s = self.wait_s(turn, now) if self._jobs or self._others_s else 0.0
        return candidate

    def wait_s(self, turn: Turn, now: float) -> float:
        """Return the time to compute the queued prompts whose turn is not after `turn`."""
        wait_s = self._others_s
        for other, seconds in self._queue_s.items():
            if other <= turn:
                wait_s += seconds
        if self._jobs and (eldest := next(iter(self._jobs))).turn <= turn:
            wait_s -= min(now - self._since_s, eldest.compute_s)
        return max(0.0, wait_s)

    def standing(self, turn: Turn, now: float) -> tuple[float, bool]:
        """Return `wait_s` and False, or the time at which it will be 0 and True, if it falls while time passes."""
        if self._jobs and (eldest := next(iter(self._jobs))).turn <= turn and now - self._since_s < eldest.compute_s:
            return now + self.wait_s(turn, now), True
        return self.wait_s(turn, now), False

    @property
    def is_busy(self) -> bool:
        """True if the worker has a job of this router."""
        return bool(self._jobs or self._num_decoding)

    def queue(self, job: Job, now: float) -> None:
        """Record a prompt that was sent to the worker."""
        if not self._jobs:
            self._since_s = now
        self._jobs[job] = None
        self._queue_s[job.turn] = self._queue_s.get(job.turn, 0.0) + job.compute_s
        job.queued_at = self
        self._note_recent(job.compute_s, now)
        if self.moved is not None:
            self.moved.add(self)

    def computed(self, job: Job, now: float) -> None:
        """Remove a job from the queue when its prompt is computed or it is cancelled; idempotent."""
        if job.queued_at is self:
            job.queued_at = None
            del self._jobs[job]
            self._since_s = now
            self._queue_s[job.turn] -= job.compute_s
            if not any(other.turn == job.turn for other in self._jobs):
                del self._queue_s[job.turn]
            if self.moved is not None:
                self.moved.add(self)

    def decode(self, job: Job, now: float) -> None:
        """Record a sequence that was sent to the worker for decoding."""
        job.decoding_at, job.began_s = self, now
        self._book(job, 1)

    def finished(self, job: Job, now: float) -> None:
        """Remove a job from the decoding sequences when it is complete or cancelled; idempotent."""
        if job.decoding_at is self:
            job.decoding_at = None
            self.residence.observe(now - job.began_s)
            self._book(job, -1)

    def _note_recent(self, compute_s: float, now: float) -> None:
        faded = math.exp((self._recent_at_s - now) / RECENT_S)
        self.candidate.recent_s = self.candidate.recent_s * faded + compute_s
        self._recent_at_s, self._recent_until_s = now, now + RECENT_S / 20

    def _book(self, job: Job, sign: int) -> None:
        self._num_decoding += sign
        self._num_kv_tokens += sign * job.num_prompt_tokens
        self._num_reserved_tokens += sign * (job.num_prompt_tokens + job.num_expected_tokens)
        self._refresh()

    def _refresh(self) -> None:
        if self.candidate.role is not Role.DECODE or self._reported is None:
            return
        candidate, load = self.candidate, self._reported.load
        num_in_use = load.blocks.in_use * self.block_size
        candidate.num_decoding = max(self._num_decoding, load.running)
        num_kv_tokens = max(self._num_kv_tokens, num_in_use if load.running else 0)
        if num_kv_tokens != candidate.num_kv_tokens:
            candidate.num_kv_tokens = num_kv_tokens
            if self.moved is not None:
                self.moved.add(self)
        held = max(self._num_reserved_tokens, num_in_use)
        # An empty worker accepts any sequence that fits at all. A worker that reports no blocks has unknown room.
        is_known = held and load.blocks.total
        candidate.room_tokens = load.blocks.total * self.block_size - held if is_known else UNLIMITED_TOKENS
        candidate.freed_tokens_per_s = held / max(self.residence.mean_s, 1e-3)


_Entry = tuple[float, int, int, LoadTracker]
"""Load, or time; the worker's place among equals; its identity, so that no two entries are equal; the worker."""
_Load = Callable[[LoadTracker, float], tuple[float, bool]]


class _Order:
    """Workers in the order of one load.

    Args:
        load: worker and time -> its load and False, or the time at which its load will be 0 and True.
    """

    def __init__(self, load: _Load, workers: Iterable[LoadTracker], now: float) -> None:
        self._load = load
        self.used_s = now
        self._places: dict[LoadTracker, tuple[list[_Entry], _Entry]] = {}
        self._steady: list[_Entry] = []
        self._falling: list[_Entry] = []
        self._sort(workers, now)

    def move(self, moved: Collection[LoadTracker], now: float) -> None:
        """Give workers their new places."""
        if len(moved) > RESORT_SHARE * len(self._places) + 1:
            self._sort({**self._places, **dict.fromkeys(moved)}, now)
            return
        for worker in moved:
            self.discard(worker)
            entries, entry = self._places[worker] = self._place(worker, now)
            insort(entries, entry)

    def discard(self, worker: LoadTracker) -> None:
        """Remove a worker, if it is there."""
        if (place := self._places.pop(worker, None)) is not None:
            entries, entry = place
            del entries[bisect_left(entries, entry)]

    def least(self, session: int, now: float) -> Iterator[LoadTracker]:
        """Yield the workers, the least loaded one first. Of equal ones, different sessions begin with different ones.

        A session begins with the same ones while the other workers' loads change, as in consistent hashing.
        """
        self.used_s = now
        while late := [worker for *_, worker in self._falling[:LEAST_LOADED] if not self._load(worker, now)[1]]:
            self.move(late, now)
        steady = _in_turn(self._steady, session)
        if not self._falling:
            return (worker for _, worker in steady)
        falling = ((until_s - now, worker) for until_s, *_, worker in self._falling)
        return (worker for _, worker in heapq.merge(steady, falling, key=itemgetter(0)))

    def _place(self, worker: LoadTracker, now: float) -> tuple[list[_Entry], _Entry]:
        value, is_falling = self._load(worker, now)
        return self._falling if is_falling else self._steady, (value, worker.place, id(worker), worker)

    def _sort(self, workers: Iterable[LoadTracker], now: float) -> None:
        self._steady, self._falling = [], []
        self._places = {worker: self._place(worker, now) for worker in workers}
        for entries, entry in self._places.values():
            entries.append(entry)
        self._steady.sort()
        self._falling.sort()


def _in_turn(entries: list[_Entry], session: int) -> Iterator[tuple[float, LoadTracker]]:
    start = 0
    while start < len(entries):
        load, *_, worker = entries[start]
        end = start + 1
        if end == len(entries) or entries[end][0] != load:
            yield load, worker
        else:
            end = bisect_right(entries, load, start, key=itemgetter(0))
            first = bisect_left(entries, session, start, end, key=itemgetter(1))
            for index in chain(range(first, end), range(start, first)):
                yield load, entries[index][3]
        start = end


class _Group:
    """Orders of the workers of one role and sampler."""

    def __init__(self, role: Role) -> None:
        self.workers: dict[LoadTracker, None] = {}
        self.by_wait: dict[Turn, _Order] = {}
        self.by_kv = _Order(_kv_tokens, (), 0.0) if role is Role.DECODE else None

    @property
    def orders(self) -> Iterator[_Order]:
        yield from self.by_wait.values()
        if self.by_kv is not None:
            yield self.by_kv

    def of_turn(self, turn: Turn, now: float) -> _Order:
        """Return the order by the wait of a request of this turn."""
        if (order := self.by_wait.get(turn)) is None:
            if len(self.by_wait) >= MAX_TURNS:
                return self.by_wait[min(self.by_wait, key=lambda other: abs(other[0] - turn[0]))]
            order = self.by_wait[turn] = _Order(lambda worker, at: worker.standing(turn, at), self.workers, now)
        return order


class LoadOrders:
    """Orders of the workers that take work. Time is an argument."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Role, str], _Group] = {}
        self._group_of: dict[LoadTracker, _Group] = {}
        self._moved: set[LoadTracker] = set()

    def __contains__(self, worker: object) -> bool:
        return worker in self._group_of

    def adopt(self, workers: Collection[LoadTracker], now: float) -> None:
        """Set which workers there are, with their current roles and samplers."""
        for worker in self._group_of.keys() - set(workers):
            self._discard(worker)
            worker.moved = None
        for worker in workers:
            key = worker.candidate.role, worker.sampler
            group = self._groups.get(key) or self._groups.setdefault(key, _Group(worker.candidate.role))
            if self._group_of.get(worker) is not group:
                self._discard(worker)
                self._group_of[worker] = group
                group.workers[worker] = None
                worker.moved = self._moved
                self._moved.add(worker)
        self._groups = {key: group for key, group in self._groups.items() if group.workers}
        for group in self._groups.values():
            for turn in [turn for turn, order in group.by_wait.items() if order.used_s < now - TURN_S]:
                del group.by_wait[turn]

    def close(self) -> None:
        """Let go of all workers."""
        self.adopt((), 0.0)

    def least(
        self, turn: Turn, session: int, now: float, accepts: Callable[[LoadTracker], bool], most: int = LEAST_LOADED
    ) -> Iterator[LoadTracker]:
        """Yield the workers of each role and sampler that have the least load, some of them twice.

        Args:
            turn: that of the request; see `router.placement.Turn`.
            session: number of the request's session, below 2**64.
            accepts: whether the request may go to a worker.
            most: number of workers of each order.
        """
        self._catch_up(now)
        for group in self._groups.values():
            yield from islice(filter(accepts, group.of_turn(turn, now).least(session, now)), most)
            if group.by_kv is not None:
                yield from islice(filter(accepts, group.by_kv.least(session, now)), most)

    def least_kv(self, now: float) -> Iterator[LoadTracker]:
        """Yield the workers that decode, of each sampler those with the least KV first."""
        self._catch_up(now)
        for group in self._groups.values():
            if group.by_kv is not None:
                yield from group.by_kv.least(0, now)

    def _catch_up(self, now: float) -> None:
        if not self._moved:
            return
        moved: defaultdict[_Group, list[LoadTracker]] = defaultdict(list)
        for worker in self._moved:
            moved[self._group_of[worker]].append(worker)
        for group, workers in moved.items():
            for order in group.orders:
                order.move(workers, now)
        self._moved.clear()

    def _discard(self, worker: LoadTracker) -> None:
        self._moved.discard(worker)
        if (group := self._group_of.pop(worker, None)) is not None:
            del group.workers[worker]
            for order in group.orders:
                order.discard(worker)


def _kv_tokens(worker: LoadTracker, now: float) -> tuple[float, bool]:
    return worker.candidate.num_kv_tokens, False
