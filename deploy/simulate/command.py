"""`baton simulate`: from options to a table or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.errors import ConfigError
from deploy.simulate.costs import PROFILES
from deploy.simulate.generator import Conversations, generate
from deploy.simulate.report import Objective, Result, table_of
from deploy.simulate.run import POLICIES, Scenario, run_policies
from deploy.simulate.trace_files import read_trace
from deploy.simulate.trace_shape import faster, first
from deploy.simulate.worker import WorkerShape

if TYPE_CHECKING:
    from pathlib import Path

    from deploy.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class Options:
    """As `baton simulate --help` tells them."""

    trace: Path | None
    prefill: int
    decode: int
    blocks: int
    profile: str
    policies: tuple[str, ...]
    speed: float
    requests: int
    ttft_ms: float
    itl_ms: float
    seed: int
    jobs: int


def run(options: Options, as_json: bool, log: Console) -> None:
    """Prints the results on standard output, and progress on `log`.

    Raises:
        ConfigError: an option does not fit, or the trace cannot be read.
    """
    if options.profile == "list" or "list" in options.policies:
        print("profiles:", *PROFILES)  # noqa: T201
        print("policies:", *POLICIES)  # noqa: T201
        return
    scenario = scenario_of(options)
    policies = options.policies or POLICIES
    log.print(
        f"{scenario.trace.name}: {len(scenario.trace.requests)} requests, {options.prefill} prefill and "
        f"{options.decode} decode workers, {options.profile}"
    )
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=log, transient=True) as progress:
        task = progress.add_task("policies", total=len(policies))
        results = run_policies(policies, scenario, lambda _: progress.advance(task), options.jobs)
    ceiling = scenario.trace.ceiling
    if as_json:
        print(json.dumps(_document(options, scenario.trace, ceiling, results), indent=2))  # noqa: T201
    else:
        title = f"{scenario.trace.name}, {options.speed:g} times its speed"
        Console(soft_wrap=True).print(table_of(title, ceiling, results))


def scenario_of(options: Options) -> Scenario:
    """Raises ConfigError, as `run`."""
    if options.profile not in PROFILES:
        raise ConfigError(f"no profile is called {options.profile!r}; there are {', '.join(PROFILES)}")
    for name in ("blocks", "ttft_ms", "itl_ms"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(options, name)}")
    trace = (
        read_trace(options.trace, spread_seed=options.seed)
        if options.trace
        else generate(Conversations(), options.seed)
    )
    trace = faster(first(trace, options.requests) if options.requests else trace, options.speed)
    return Scenario(
        trace,
        WorkerShape(options.blocks, trace.block_tokens),
        PROFILES[options.profile],
        options.prefill,
        options.decode,
        Objective(options.ttft_ms / 1e3, options.itl_ms / 1e3),
        options.seed,
    )


def _document(options: Options, trace: Trace, ceiling: float, results: list[Result]) -> dict[str, object]:
    return {
        "trace": trace.name,
        "num_requests": len(trace.requests),
        "speed": options.speed,
        "ceiling": ceiling,
        "profile": options.profile,
        "prefill": options.prefill,
        "decode": options.decode,
        "blocks": options.blocks,
        "objective": {"ttft_ms": options.ttft_ms, "itl_ms": options.itl_ms},
        "policies": [result.as_dict() for result in results],
    }
