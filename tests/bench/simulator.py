"""The simulator against the real cluster: one trace replayed on `baton up`, and in virtual time with the costs that the
replay has fitted.

    warm-up replay -> costs -> how fast the trace must run for each load
    each round, each load:  replay, with prompts that no cache has -> figures, costs -> simulation of the same requests

    python -m tests.bench --only simulator
    python -m tests.bench.simulator conversation.jsonl.gz --from 600 --seconds 30 --scale 64
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import uvloop
from rich.console import Console

from lab.bench.command import Benched, bench
from lab.bench.options import BenchOptions
from lab.simulate.command import measured_scenario
from lab.simulate.costs import CostModel
from lab.simulate.report import Figures, Result
from lab.simulate.run import run_policy
from lab.traces.generator import Conversations, LogNormal, generate
from lab.traces.shape import TraceOptions, faster, first
from lab.traces.trace import Trace, TraceRequest
from router.placement import Objective
from tests.bench.report import Report, Table, show
from tests.bench.stats import Spread, difference, ratio, spread
from tests.integration.cluster import running_cluster

POOLS = ((1, 1), (0, 2))
"""Workers that prefill and that decode; none that prefills: all do both."""
LOADS = (0.5, 0.8)
TALK = Conversations(
    duration_s=60.0, sessions_per_s=0.8, continue_p=0.6, think_s=LogNormal(10.0, 0.5), system_tokens=64,
    first_message_tokens=LogNormal(200.0, 0.8), message_tokens=LogNormal(60.0, 0.8), output_tokens=LogNormal(20.0, 0.5),
    max_prompt_tokens=1500, block_tokens=16,
)  # fmt: skip
"""As long as SmolLM2 and two cores can bear: Mooncake's conversation, in small."""
OBJECTIVE = Objective(30.0, 1.0)
"""The default class of a cluster."""
WARM_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Round:
    real: Benched
    simulated: Result


def run(quick: bool = False, trace: Trace | None = None) -> Report:
    torch.set_num_threads(1)
    trace = trace or generate(TALK)
    if quick:
        trace = first(trace, 40)
    table = Table(
        f"The simulator against the real cluster: {trace.name}, {len(trace.requests)} requests, "
        f"{sum(r.num_prompt_tokens for r in trace.requests)} prompt and "
        f"{sum(r.num_output_tokens for r in trace.requests)} output tokens",
        ("workers", "TTFT p50, s", "simulated", "sim/real", "p90 sim/real", "ITL p50, ms", "simulated", "sim/real",
         "hit rate, %", "simulated", "points"),
        note="Gates: p50 within 15 %, hit rate within 2 points.",
    )  # fmt: skip
    fitted = Table(
        "Costs fitted from the replays, ms", ("workers", "a prompt token", "a step of one sequence", "a further one",
                                              "request's overhead", "KV transfer"),
    )  # fmt: skip
    for prefill, decode in POOLS:
        for load, rounds in _measure(trace, prefill, decode, 1 if quick else 3).items():
            name = f"{prefill} prefill, {decode} decode" if prefill else f"{decode} that do both"
            table.rows.append((f"{name}, load {load:g}", *_compared(rounds)))
            fitted.rows.append((f"{name}, load {load:g}", *_costs(rounds)))
    return Report("simulator", [table, fitted])


def _measure(trace: Trace, prefill: int, decode: int, num_rounds: int) -> dict[float, list[Round]]:
    rounds: dict[float, list[Round]] = {load: [] for load in LOADS}
    with running_cluster("--prefill", str(prefill), "--decode", str(decode)) as cluster:
        seeds = iter(range(1, 1000))
        slow = faster(trace, trace.requests[-1].arrival_s / WARM_UP_S)
        costs = _costs_of(_replayed(slow, cluster.grpc, next(seeds)))
        for _ in range(num_rounds):
            for load in LOADS:
                cluster.wait_until_idle()
                at_load = faster(trace, load / load_of(trace, costs, prefill + decode))
                real = _replayed(at_load, cluster.grpc, next(seeds))
                if real.figures.num_served < real.figures.num_requests:
                    raise RuntimeError(f"at load {load:g} some were refused: others use the machine too")
                costs = _costs_of(real)
                assert real.workers is not None
                scenario = measured_scenario(at_load, real.workers, prefill, decode, OBJECTIVE)
                rounds[load].append(Round(real, run_policy("baton", scenario)))
    return rounds


def _replayed(trace: Trace, address: str, seed: int) -> Benched:
    options = BenchOptions(
        trace=TraceOptions(path=None, seed=seed),
        address=address,
        api_key="",
        max_output=0,
        concurrency=0,
        vocab=None,
        ttft_ms=OBJECTIVE.ttft_s * 1e3,
        itl_ms=OBJECTIVE.itl_s * 1e3,
    )
    return uvloop.run(bench(trace, options, Console(file=io.StringIO())))


def _costs_of(real: Benched) -> CostModel:
    assert real.workers is not None, "a cluster without tenants tells everybody"
    return real.workers.costs


def load_of(trace: Trace, costs: CostModel, num_workers: int) -> float:
    """What there is to compute, were all caches unlimited and all steps full, over what the workers can in that time.

    Steps are never full, so workers are busy for a larger share of the time.
    """
    computing, decoding = costs.of_prefill().steps, costs.steps
    work_s = 0.0
    for request, num_cached in _with_cached_tokens(trace):
        context = request.num_prompt_tokens + request.num_output_tokens / 2
        work_s += computing.prefill_s(request.num_prompt_tokens, num_cached, 512)
        work_s += request.num_output_tokens * (decoding.s_per_sequence + decoding.s_per_kv_token * context)
    return work_s / (num_workers * trace.requests[-1].arrival_s)


def _with_cached_tokens(trace: Trace) -> Iterator[tuple[TraceRequest, int]]:
    seen: set[int] = set()
    for request in trace.requests:
        fresh = (n for n, block in enumerate(request.block_ids) if block not in seen)
        num_blocks = next(fresh, len(request.block_ids))
        seen.update(request.block_ids)
        yield request, min(num_blocks * trace.block_tokens, request.num_prompt_tokens - 1)


def _compared(rounds: Sequence[Round]) -> Iterator[Spread]:
    for name, unit in (("ttft_s", 1.0), ("itl_s", 1e3)):
        real, simulated = ([getattr(f, name)[0] for f in side] for side in _sides(rounds))
        yield spread([value * unit for value in real])
        yield spread([value * unit for value in simulated])
        yield ratio(simulated, real)
        if name == "ttft_s":
            real, simulated = ([f.ttft_s[1] for f in side] for side in _sides(rounds))
            yield ratio(simulated, real)
    real, simulated = ([100 * f.hit_rate for f in side] for side in _sides(rounds))
    yield from (spread(real), spread(simulated), difference(simulated, real))


def _sides(rounds: Sequence[Round]) -> tuple[list[Figures], list[Figures]]:
    return [one.real.figures for one in rounds], [one.simulated for one in rounds]


def _costs(rounds: Sequence[Round]) -> Iterator[Spread]:
    models = [_costs_of(one.real) for one in rounds]
    yield spread([m.of_prefill().steps.s_per_token * 1e3 for m in models])
    yield spread([m.steps.step_s(1, 0, 1, 0) * 1e3 for m in models])
    yield spread([m.steps.s_per_sequence * 1e3 for m in models])
    yield spread([m.request_overhead_s * 1e3 for m in models])
    yield spread([m.transfer_latency_s * 1e3 for m in models])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.simulator", description="With a trace of your own.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--from", dest="from_s", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--scale", type=int, default=64)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    part = TraceOptions(path=options.trace, from_s=options.from_s, seconds=options.seconds, scale=options.scale)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    show(run(options.quick, part.trace()), Console(width=None if os.isatty(1) else 200))


if __name__ == "__main__":
    main()
