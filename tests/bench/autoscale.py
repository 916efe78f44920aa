"""The autoscaler against every static split of the same workers, chosen in hindsight, in virtual time.

`python -m tests.bench.autoscale --conversation TRACE --code TRACE` replays parts of real traces; without them a
generated conversation stands in for the first, and there is no second.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from baton.config import AutoscaleConfig
from lab.simulate.command import DEFAULT_BLOCKS
from lab.simulate.costs import PROFILES
from lab.simulate.report import Result
from lab.simulate.run import Scenario, run_all
from lab.simulate.scaler import Scaling
from lab.simulate.worker import WorkerShape
from lab.traces.shape import TraceOptions, faster
from lab.traces.trace import Trace
from router.placement import Objective
from tests.bench.report import Report, Table, show

NUM_WORKERS = 8
SPLITS = [(prefill, NUM_WORKERS - prefill) for prefill in range(7)]
BAD_SPLITS = ((6, 2), (1, 7))
OBJECTIVES = (Objective(5.0, 0.1), Objective(2.0, 0.03))
PROFILE = "llama-3-70b@8xa100"
POLICY = "baton"


@dataclass(frozen=True, slots=True)
class Part:
    """Of a trace."""

    name: str
    path: Path | None
    from_s: float
    loads: tuple[float, ...]
    """Times the trace's own rate."""

    def trace(self, load: float, seconds: float) -> Trace:
        """So many requests that they arrive in `seconds` at that load, as far as the trace goes."""
        return faster(TraceOptions(path=self.path, from_s=self.from_s, seconds=seconds * load).trace(), load)


def run(quick: bool) -> Report:
    return measure([Part("generated", None, 600.0, (1.6,))], 120.0 if quick else 600.0)


def measure(parts: list[Part], seconds: float, jobs: int = 0) -> Report:
    columns = [f"from {p}:{d}: good, of best, actions" for p, d in BAD_SPLITS]
    table = Table(
        f"Autoscaler: {NUM_WORKERS} workers of {PROFILE}, {seconds:g} s of each trace",
        ("trace, load, TTFT/ITL", "best split", "good", "worst split", "good", *columns),
        note="good: share of the requests that met both objectives. The controller restarts in the middle and forgets "
        "what it knew. Actions: workers that changed their role. All requests that were admitted were served.",
    )
    for part in parts:
        for load in part.loads:
            for objective in OBJECTIVES:
                table.rows.append(_row(part, load, objective, seconds, jobs))
    return Report("autoscale", [table])


def _row(part: Part, load: float, objective: Objective, seconds: float, jobs: int) -> tuple[str, ...]:
    trace = part.trace(load, seconds)
    shape = WorkerShape(num_blocks=DEFAULT_BLOCKS, block_tokens=trace.block_tokens)
    static = Scenario(
        trace=trace, shape=shape, costs=PROFILES[PROFILE], prefill=0, decode=NUM_WORKERS, objective=objective
    )
    half_s = trace.requests[-1].arrival_s / 2
    scaling = Scaling(config=AutoscaleConfig(), objective=objective, restarts_s=(half_s,))
    runs = [replace(static, prefill=p, decode=d) for p, d in SPLITS]
    runs += [replace(static, prefill=p, decode=d, scaling=scaling) for p, d in BAD_SPLITS]
    results = list(run_all([(POLICY, scenario) for scenario in runs], jobs=jobs))
    statics = sorted(zip(SPLITS, results[: len(SPLITS)], strict=True), key=lambda pair: pair[1].good_share)
    (worst, least), (best, most) = statics[0], statics[-1]
    return (
        f"{part.name}, {load:g}, {objective.ttft_s:g} s/{objective.itl_s * 1e3:g} ms",
        _split(best),
        f"{most.good_share:.1%}",
        _split(worst),
        f"{least.good_share:.1%}",
        *(_scaled(result, most.good_share) for result in results[len(SPLITS) :]),
    )


def _split(pools: tuple[int, int]) -> str:
    return f"{pools[0]}:{pools[1]}"


def _scaled(result: Result, best: float) -> str:
    last = result.changes[-1].sizes if result.changes else "stays"
    share = result.good_share / best if best else math.nan
    return f"{result.good_share:.1%}, {share:.3f}, {result.num_actions} ({last})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.autoscale")
    parser.add_argument("--conversation", type=Path, help="trace of a conversation; a generated one without it")
    parser.add_argument("--code", type=Path, help="trace of code completion")
    parser.add_argument("--seconds", type=float, default=900.0, help="of virtual time, at most")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time; 0: one a core")
    options = parser.parse_args()
    name = options.conversation.name.partition(".")[0] if options.conversation else "generated"
    parts = [Part(name, options.conversation, 600.0, (1.0, 1.6))]
    if options.code:
        parts.append(Part(options.code.name.partition(".")[0], options.code, 0.0, (2.0, 4.0)))
    show(measure(parts, options.seconds, options.jobs), Console(width=200))


if __name__ == "__main__":
    main()
