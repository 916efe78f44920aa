"""Compares a custom placement policy with two others, in virtual time and without a model.

    python examples/placement_policy.py

A policy gets a `WorkerView` of every worker and returns the index of one. This policy scores each worker by the share
of the prompt that it has cached, minus the share of its KV cache that is in use. To compare a policy with all others,
add it to `BASELINES` in lab/simulate/baselines.py; `baton simulate --policy prefix_less_load` then runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from lab.simulate.baselines import BASELINES
from lab.simulate.costs import PROFILES
from lab.simulate.policy import WorkerView
from lab.simulate.run import Scenario, run_policy
from lab.simulate.worker import WorkerShape
from lab.traces.generator import Conversations, generate
from lab.traces.trace import TraceRequest
from router.placement import Objective


class PrefixLessLoad:
    name = "prefix_less_load"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        """Return the index of the worker that computes the prompt and, in aggregated mode, also decodes."""

        def score(worker: WorkerView) -> float:
            return worker.num_cached_tokens / request.num_prompt_tokens - worker.kv_use

        best = max(map(score, workers))
        return self._rng.choice([worker for worker in workers if score(worker) == best]).index

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        """Return the index of the worker that decodes in disaggregated mode."""
        return min(workers, key=lambda worker: worker.kv_use).index


def main() -> None:
    trace = generate(Conversations(duration_s=200.0), seed=1)
    scenario = Scenario(
        trace=trace,
        shape=WorkerShape(num_blocks=2000, block_tokens=trace.block_tokens),
        costs=PROFILES["llama-3-8b@h200"],
        prefill=0,
        decode=4,
        objective=Objective(ttft_s=5.0, itl_s=0.05),
    )
    BASELINES[PrefixLessLoad.name] = lambda seed, block_tokens: PrefixLessLoad(Random(seed))
    print(f"{'policy':18} {'hit rate':>8} {'TTFT p50':>9} {'p99':>6} {'goodput/s':>9}")
    for policy in ("round_robin", PrefixLessLoad.name, "baton"):
        figures = run_policy(policy, scenario)
        median_s, _, p99_s = figures.ttft_s
        print(f"{policy:18} {figures.hit_rate:8.3f} {median_s:8.2f}s {p99_s:5.1f}s {figures.goodput_per_s:9.2f}")


if __name__ == "__main__":
    main()
