"""Textbook routing policies, and the common base of all baselines.

They differ in where the prompt goes; all of them decode on the worker with the smallest share of its KV pool in use.
Ties are broken at random, so that no result depends on the order of the workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.simulate.policy import WorkerView
    from lab.traces.trace import TraceRequest

SESSION_BLOCKS = 2
"""Number of leading blocks that identify a session: the first alone is often a shared system prompt."""


class Baseline:
    """Common part of most baselines: random ties, and the decode worker with the smallest share of its KV pool in
    use.
    """

    name: str

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._least(workers, lambda w: (w.kv_use,)).index

    def _least(self, workers: Sequence[WorkerView], cost: Callable[[WorkerView], tuple[float, ...]]) -> WorkerView:
        """Return the worker of least cost, a random one among equals."""
        costs = [cost(worker) for worker in workers]
        lowest = min(costs)
        return self._rng.choice([w for w, c in zip(workers, costs, strict=True) if c == lowest])

    def _lesser_of_two(self, workers: Sequence[WorkerView]) -> WorkerView:
        """Power of two choices: of two random workers, return the one with fewer requests."""
        return self._least(self._rng.sample(workers, min(2, len(workers))), lambda w: (w.num_requests,))


class RandomWorker(Baseline):
    """A uniformly random worker."""

    name = "random"

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._rng.choice(workers).index


class RoundRobin(Baseline):
    """The worker whose index follows that of the last choice, and the first after the last."""

    name = "round_robin"

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._last = -1

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        self._last = following(self._last, workers)
        return self._last


class LeastLoad(Baseline):
    """Least queued prompt tokens, then fewest requests."""

    name = "least_load"

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._least(workers, lambda w: (w.queued_tokens, w.num_requests)).index


class SessionHash(Baseline):
    """min over workers of hash(first two block ids, worker): rendezvous hashing, Thaler and Ravishankar 1998.

    If a worker joins n others, only 1/(n+1) of the sessions move, all of them to it. A prompt without a full block has
    no session: its arrival time and lengths are hashed instead.
    """

    name = "session_hash"

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        session = repr(request.block_ids[:SESSION_BLOCKS] or request).encode()
        return min(workers, key=lambda w: hashlib.blake2b(b"%b/%d" % (session, w.index), digest_size=8).digest()).index


class Greedy(Baseline):
    """cost = queued_tokens + weight * uncached prompt tokens: the work before the first token at weight 1."""

    def __init__(self, rng: Random, weight: int) -> None:
        super().__init__(rng)
        self.name = f"greedy_{weight}"
        self._weight = weight

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._least(workers, lambda w: (w.queued_tokens + self._weight * num_uncached(request, w),)).index


def following(last: int, workers: Sequence[WorkerView]) -> int:
    return next((w.index for w in workers if w.index > last), workers[0].index)


def num_uncached(request: TraceRequest, worker: WorkerView) -> int:
    return request.num_prompt_tokens - worker.num_cached_tokens
