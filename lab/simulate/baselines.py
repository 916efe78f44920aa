"""Baseline routing policies: textbook policies, and those of other serving stacks, reimplemented from their formulas.

The latter see the leading tokens that a worker really holds, instead of their project's prefix tree, index or estimate,
and every view is fresh. Both favour the baselines: a real router estimates from its own past decisions, and polls. Ties
that the source does not break are broken at random. Thresholds are the projects' defaults. A policy only chooses a
worker: shedding, queueing at the router and the choice to compute a prompt on its decode worker are not modelled.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from lab.simulate.textbook import (
    Baseline,
    Greedy,
    LeastLoad,
    RandomWorker,
    RoundRobin,
    SessionHash,
    following,
    num_uncached,
)

if TYPE_CHECKING:
    from lab.simulate.policy import Policy, WorkerView
    from lab.traces.trace import TraceRequest


class Dynamo(Baseline):
    """NVIDIA Dynamo's KV router.

    cost = max(0, active_prefill_blocks + prompt_blocks - overlap_blocks) + decode_blocks, ties at random; decode: the
    same without overlap, which is the load alone. Prefill scale 1 and request weight 0 are its defaults.

    Approximations: blocks are tokens / block size, active_prefill_blocks those of queued_tokens, decode_blocks the
    blocks in use. Of the overlap's tiers (device 1, host 0.75, disk 0.25) only the device exists; an overlap is part of
    the prompt, so the maximum has no effect.
    """

    name = "dynamo"

    def __init__(self, rng: Random, block_tokens: int) -> None:
        super().__init__(rng)
        self._block_tokens = block_tokens

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._least(workers, lambda w: (self._cost(request, w, w.num_cached_tokens),)).index

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._least(workers, lambda w: (self._cost(request, w, 0),)).index

    def _cost(self, request: TraceRequest, worker: WorkerView, overlap_tokens: int) -> float:
        tokens = worker.queued_tokens + request.num_prompt_tokens - overlap_tokens
        return tokens / self._block_tokens + worker.used_blocks


class LlmD(Baseline):
    """llm-d's endpoint picker with its default profile, on both legs.

    score = 3 * prefix + 2 * queue + 2 * kv, the highest wins, ties at random;
    prefix = matched blocks / blocks of the prompt; queue = (max_q - q) / (max_q - min_q), 1 if all are equal;
    kv = 1 - KV use.

    Approximations: q is num_waiting; only the device tier exists (weight 1). The load-aware scorer, 0.5 * (1 - q/128),
    stands in for the queue scorer in other profiles and is not part of this one.
    """

    name = "llm_d"

    def __init__(self, rng: Random, block_tokens: int) -> None:
        super().__init__(rng)
        self._block_tokens = block_tokens

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        longest = max(w.num_waiting for w in workers)
        spread = longest - min(w.num_waiting for w in workers)

        def score(worker: WorkerView) -> float:
            num_matched = worker.num_cached_tokens // self._block_tokens
            prefix = num_matched / max(1, len(request.block_ids))
            queue = (longest - worker.num_waiting) / spread if spread else 1.0
            return 3 * prefix + 2 * queue + 2 * (1 - worker.kv_use)

        return self._least(workers, lambda w: (-score(w),)).index

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self.choose(request, workers)


class Smg(Baseline):
    """SGLang's gateway (smg): the longest prefix while its owner is not overloaded, then the least expected wait.

    overloaded = load > 1.5 * mean and load > mean + min(64, max(4, ceil(2 * sqrt(mean)))), load in requests;
    wait = (queued + running + unaccounted + in-flight tokens) / throughput + 0.15 * k / (1 - k) seconds, k = KV use, at
    most 0.999. Among equal prefixes the owner with the least load; without a prefix, and for decoding, the least wait.

    Approximations: the tokens are queued_tokens, which includes all prompt tokens sent and not computed; the remaining
    output of running requests is not known. Throughput is tokens_per_s. The 64 would only apply above a mean of 1024,
    where 1.5 * mean is the higher limit.
    """

    name = "smg"

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        owner = self._least(workers, lambda w: (-w.num_cached_tokens, w.num_requests))
        mean = statistics.fmean(w.num_requests for w in workers)
        slack = max(4, math.ceil(2 * math.sqrt(mean)))
        is_overloaded = owner.num_requests > 1.5 * mean and owner.num_requests > mean + slack
        if owner.num_cached_tokens == 0 or is_overloaded:
            return self.choose_decode(request, workers)
        return owner.index

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._least(workers, lambda w: (_expected_wait_s(w),)).index


def _expected_wait_s(worker: WorkerView) -> float:
    kv_use = min(worker.kv_use, 0.999)
    return worker.queued_tokens / worker.tokens_per_s + 0.15 * kv_use / (1 - kv_use)


class SglangRouter(Baseline):
    """The older sglang-router's cache-aware policy.

    Imbalanced (max - min > 64 and max > 1.5 * min, in requests): least load. Otherwise, if the best match is more than
    0.3 of the prompt: its owner, among equals the least loaded. Otherwise the worker with the smallest tree. Decode:
    least load.

    Approximation: a worker's tree is the uncached tokens that were sent to it; nothing is evicted from it.
    """

    name = "sglang_router"

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._tree_tokens: Counter[int] = Counter()

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        chosen = self._place(request, workers)
        self._tree_tokens[chosen.index] += num_uncached(request, chosen)
        return chosen.index

    def _place(self, request: TraceRequest, workers: Sequence[WorkerView]) -> WorkerView:
        low, high = extremes(workers)
        if high - low > 64 and high > 1.5 * low:
            return self._least(workers, lambda w: (w.num_requests,))
        if best_match(request, workers) > 0.3:
            return self._least(workers, lambda w: (-w.num_cached_tokens, w.num_requests))
        return self._least(workers, lambda w: (self._tree_tokens[w.index],))

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._least(workers, lambda w: (w.num_requests,)).index


class VllmRouter(Baseline):
    """vllm-router's prefill cost.

    cost = (uncached_prefill_tokens + active_prefill_tokens) * (active_requests + 1); the last prompt token never counts
    as cached, so a request that hits in full still has a cost. Decode: fewest requests.

    Approximations: active_prefill_tokens are queued_tokens, active_requests num_requests.
    """

    name = "vllm_router"

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        def cost(worker: WorkerView) -> float:
            return (max(1, num_uncached(request, worker)) + worker.queued_tokens) * (worker.num_requests + 1)

        return self._least(workers, lambda w: (cost(w),)).index

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._least(workers, lambda w: (w.num_requests,)).index


class Aibrix(Baseline):
    """AIBrix's prefix-cache scorer of the prefill leg and load-balancing scorer of the decode leg; the lowest wins.

    prefill = (100 - match%) * 0.1 + requests / max_requests, over the workers with at most mean + 2 * sigma requests;
    decode = (requests / max_requests + 1 - throughput / max_throughput) / (free / max_free), where free is the unused
    share of the KV pool, at least 0.001. The maxima of requests are at least 1, match% is an integer.

    Approximation: throughput is tokens_per_s, where the project measures generated tokens.
    """

    name = "aibrix"

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        loads = [w.num_requests for w in workers]
        limit = statistics.fmean(loads) + 2 * statistics.pstdev(loads)
        busiest = max(1, *loads)

        def score(worker: WorkerView) -> float:
            match_percent = 100 * worker.num_cached_tokens // max(1, request.num_prompt_tokens)
            return (100 - match_percent) * 0.1 + worker.num_requests / busiest

        return self._least([w for w in workers if w.num_requests <= limit], lambda w: (score(w),)).index

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        busiest = max(1, *(w.num_requests for w in workers))
        fastest = max(w.tokens_per_s for w in workers)
        freest = max(_free_share(w) for w in workers)

        def score(worker: WorkerView) -> float:
            load = worker.num_requests / busiest + 1 - worker.tokens_per_s / fastest
            return load / (_free_share(worker) / freest)

        return self._least(workers, lambda w: (score(w),)).index


def _free_share(worker: WorkerView) -> float:
    return max(0.001, 1 - worker.kv_use)


class ProductionStack(RoundRobin):
    """vLLM production-stack with prefill and decode pools: independent round robin on both legs."""

    name = "production_stack"

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._last_decode = -1

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        self._last_decode = following(self._last_decode, workers)
        return self._last_decode


class RayPrefixAffinity(Baseline):
    """Ray Serve LLM's PrefixCacheAffinityRouter.

    If the longest and the shortest queue differ by more than 10 requests: power of two choices. Otherwise, if the best
    match is at least 0.1 of the prompt: its owner. Otherwise the smallest tenant of the prefix tree. Among several the
    shortest queue. Decode: Ray Serve's power of two choices.

    The limit of 10 is the documented default; the code's own, infinity, would never use the queues.
    Approximation: a tenant's size is the uncached tokens that were sent to it, which is the tree without eviction,
    Ray's default.
    """

    name = "ray_prefix_affinity"

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._tenant_tokens: Counter[int] = Counter()

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        chosen = self._place(request, workers)
        self._tenant_tokens[chosen.index] += num_uncached(request, chosen)
        return chosen.index

    def _place(self, request: TraceRequest, workers: Sequence[WorkerView]) -> WorkerView:
        low, high = extremes(workers)
        if high - low > 10:
            return self._lesser_of_two(workers)
        if best_match(request, workers) >= 0.1:
            return self._least(workers, lambda w: (-w.num_cached_tokens, w.num_requests))
        return self._least(workers, lambda w: (self._tenant_tokens[w.index], w.num_requests))

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        return self._lesser_of_two(workers).index


def best_match(request: TraceRequest, workers: Sequence[WorkerView]) -> float:
    """Return the longest prefix that any worker holds, as a share of the prompt."""
    return max(w.num_cached_tokens for w in workers) / max(1, request.num_prompt_tokens)


def extremes(workers: Sequence[WorkerView]) -> tuple[int, int]:
    """Return the fewest and the most requests at a worker."""
    loads = [w.num_requests for w in workers]
    return min(loads), max(loads)


BASELINES: dict[str, Callable[[int, int], Policy]] = {
    "random": lambda seed, _: RandomWorker(Random(seed)),
    "round_robin": lambda seed, _: RoundRobin(Random(seed)),
    "least_load": lambda seed, _: LeastLoad(Random(seed)),
    "session_hash": lambda seed, _: SessionHash(Random(seed)),
    "greedy_1": lambda seed, _: Greedy(Random(seed), 1),
    "greedy_4": lambda seed, _: Greedy(Random(seed), 4),
    "greedy_8": lambda seed, _: Greedy(Random(seed), 8),
    "dynamo": lambda seed, block_tokens: Dynamo(Random(seed), block_tokens),
    "llm_d": lambda seed, block_tokens: LlmD(Random(seed), block_tokens),
    "smg": lambda seed, _: Smg(Random(seed)),
    "sglang_router": lambda seed, _: SglangRouter(Random(seed)),
    "vllm_router": lambda seed, _: VllmRouter(Random(seed)),
    "aibrix": lambda seed, _: Aibrix(Random(seed)),
    "production_stack": lambda seed, _: ProductionStack(Random(seed)),
    "ray_prefix_affinity": lambda seed, _: RayPrefixAffinity(Random(seed)),
}
"""Constructors of policies by name; each takes a seed and the tokens per block."""
