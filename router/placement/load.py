"""Load of a worker as one router knows it, from the jobs that it sent there and from the worker's reports.

The router's own jobs count at once. Jobs of other routers show only in the report, so the load is the greater of the
two. Time is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
    """Set to which the worker is added when its wait or its KV changes; see `router.placement.order`."""
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
