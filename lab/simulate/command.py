"""`baton simulate`: from options to a table or JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.config import EngineConfig
from baton.errors import ConfigError
from deploy.say import say
from deploy.terminal import Terminal
from lab.simulate.costs import PROFILES, read_bench
from lab.simulate.grid import Cell, Setting, grid_table, pools_of, run_grid
from lab.simulate.options import SimulateOptions
from lab.simulate.plot import plot
from lab.simulate.report import table_of
from lab.simulate.run import POLICIES, Scenario
from lab.simulate.scaler import Scaling
from lab.simulate.worker import WorkerShape
from lab.traces.fit_to_model import plan_for
from router.placement import Objective

if TYPE_CHECKING:
    from lab.simulate.costs import Bench, CostModel
    from lab.traces.trace import Trace

DEFAULT_BLOCKS = 5000


def run(options: SimulateOptions, as_json: bool, log: Console) -> None:
    """Print the results on standard output, and progress on `log`.

    Raises:
        ConfigError: an option is invalid, or the trace cannot be read.
    """
    if options.profile == "list" or "list" in options.policies:
        say(f"profiles: {' '.join(PROFILES)}")
        say(f"policies: {' '.join(POLICIES)}")
        return
    settings = settings_of(options)
    scenario = replace(scenario_of(options), tells_all=options.tells_all, error=options.error)
    scenario = replace(scenario, scaling=scaling_of(options, scenario.objective, scenario.router.mode))
    policies = options.policies or POLICIES
    log.print(
        f"{scenario.trace.name}: {len(scenario.trace.requests)} requests, prefill:decode workers "
        f"{', '.join(dict.fromkeys(s.pools for s in settings))}, {options.costs or options.profile}"
    )
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=log, transient=True) as progress:
        task = progress.add_task("runs", total=len(policies) * len(settings))
        cells = list(progress.track(run_grid(policies, settings, scenario, options.jobs), task_id=task))
    title = f"{scenario.trace.name}, {options.trace.speed:g} times its speed"
    if options.plot is not None:
        for file in plot(options.plot, title, cells):
            log.print(f"wrote {file}")
    ceiling = scenario.trace.ceiling
    if as_json:
        say(json.dumps(_document(options, scenario, ceiling, cells), indent=2))
    elif len(settings) > 1:
        Terminal(soft_wrap=True).print(grid_table(title, cells))
    else:
        Terminal(soft_wrap=True).print(table_of(title, ceiling, [cell.result for cell in cells]))
    if not as_json and options.autoscale is not None:
        _print_changes(cells)


def _print_changes(cells: list[Cell]) -> None:
    """Print the autoscaler's decisions and their reasons."""
    out = Terminal(soft_wrap=True, highlight=False)
    for cell in cells:
        result = cell.result
        out.print(
            f"\n{cell.name}, load {cell.setting.load:g}: {result.num_actions} workers started, stopped or given "
            f"another role, {result.mean_workers:.1f} workers on average, {result.num_moved} responses migrated"
        )
        for change in result.changes:
            out.print(f"{change.at_s:.0f} s: {change.before} -> {change.sizes}. {' '.join(change.reasons)}")


def settings_of(options: SimulateOptions) -> list[Setting]:
    """Return every combination of load and pools. Raise ConfigError for invalid options."""
    pools = [pools_of(text) for text in options.pools] or [(options.prefill, options.decode)]
    if not options.error > 0:
        raise ConfigError(f"--error must be more than 0, got {options.error}")
    for load in options.loads:
        if not load > 0:
            raise ConfigError(f"--load must be more than 0, got {load}")
    return [Setting(load, *pool) for load in options.loads or (1.0,) for pool in pools]


def scaling_of(options: SimulateOptions, objective: Objective, mode: str) -> Scaling | None:
    """Return the autoscaler of the runs; None: the pools stay as they are. Raise ConfigError for invalid options."""
    if (config := options.autoscale) is None:
        return None
    if not options.start_s >= 0:
        raise ConfigError(f"--start-s must be at least 0, got {options.start_s}")
    if options.max_workers is not None:
        config = replace(config, max_workers=options.max_workers)
    may_flip = not options.prefill_profile and options.prefill_blocks is None
    return Scaling(config=config, objective=objective, mode=mode, may_flip=may_flip, start_s=options.start_s)


def scenario_of(options: SimulateOptions) -> Scenario:
    """Return the scenario of the first pools. Raise ConfigError, as `run` does."""
    for profile in filter(None, (options.profile, options.prefill_profile)):
        if profile not in PROFILES:
            raise ConfigError(f"no profile is called {profile!r}; there are {', '.join(PROFILES)}")
    if options.costs and options.prefill_profile:
        raise ConfigError("--costs are measured on workers of both pools; omit --prefill-profile")
    for name in ("blocks", "prefill_blocks", "ttft_ms", "itl_ms", "snapshot_tokens"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be more than 0, got {value}")
    for name, value in (("window", options.window), ("state-tokens", options.state_tokens)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"--{name} must be at least 0, got {value}")
    if not 0 <= options.full_share <= 1:
        raise ConfigError(f"--full-share must be from 0 to 1, got {options.full_share}")
    trace, objective = options.trace.trace(), Objective(options.ttft_ms / 1e3, options.itl_ms / 1e3)
    if options.costs is not None:
        scenario = measured_scenario(
            trace, read_bench(options.costs), options.prefill, options.decode, objective,
            max_output=options.max_output, num_blocks=options.blocks, seed=options.trace.seed,
        )  # fmt: skip
        scenario = replace(scenario, shape=_with_layers(scenario.shape, scenario.trace, options))
        return replace(scenario, of_prefill=_of_prefill(options, scenario.shape, scenario.costs))
    num_blocks = options.blocks or DEFAULT_BLOCKS
    trace = plan_for(trace, num_blocks * trace.block_tokens, options.max_output).trace if options.max_output else trace
    shape = _with_layers(WorkerShape(num_blocks=num_blocks, block_tokens=trace.block_tokens), trace, options)
    costs = PROFILES[options.profile].with_layers(options.full_share, options.window, options.state_tokens)
    return Scenario(
        trace=trace,
        shape=shape,
        costs=costs,
        of_prefill=_of_prefill(options, shape, costs),
        prefill=options.prefill,
        decode=options.decode,
        objective=objective,
        seed=options.trace.seed,
    )


def _of_prefill(options: SimulateOptions, shape: WorkerShape, costs: CostModel) -> tuple[WorkerShape, CostModel] | None:
    """Return the shape and the costs of the prefill pool's workers; None: they are as the others."""
    if not options.prefill_profile and options.prefill_blocks is None:
        return None
    if options.prefill_profile:
        profile = PROFILES[options.prefill_profile]
        costs = profile.with_layers(options.full_share, options.window, options.state_tokens)
    return replace(shape, num_blocks=options.prefill_blocks or shape.num_blocks), costs


def _with_layers(shape: WorkerShape, trace: Trace, options: SimulateOptions) -> WorkerShape:
    return replace(
        shape,
        window=options.window,
        has_states=options.state_tokens > 0,
        snapshot_tokens=options.snapshot_tokens,
        longest=max(request.num_prompt_tokens + request.num_output_tokens for request in trace.requests),
    )


def measured_scenario(
    trace: Trace,
    bench: Bench,
    prefill: int,
    decode: int,
    objective: Objective,
    *,
    max_output: int = 0,
    num_blocks: int | None = None,
    seed: int = 0,
) -> Scenario:
    """Return the requests that `baton bench` sends, on workers as measured. Raise ConfigError if a trace does not
    fit.
    """
    if trace.block_tokens != bench.block_tokens:
        raise ConfigError(
            f"the trace has blocks of {trace.block_tokens} tokens, but the measured workers have blocks of "
            f"{bench.block_tokens}; set --block {bench.block_tokens}, and --scale as in the measurement"
        )
    plan = plan_for(trace, bench.max_model_len, max_output)
    engine = EngineConfig()
    shape = WorkerShape(
        num_blocks=num_blocks or bench.num_blocks,
        block_tokens=bench.block_tokens,
        max_num_seqs=engine.batch(on_gpu=False).max_num_seqs,
        max_num_batched_tokens=bench.chunk_tokens,
        output_reservation=engine.output_reservation,
    )
    return Scenario(
        trace=plan.trace,
        shape=shape,
        costs=bench.costs,
        prefill=prefill,
        decode=decode,
        objective=objective,
        seed=seed,
        knows_lengths=True,
    )


def _document(options: SimulateOptions, scenario: Scenario, ceiling: float, cells: list[Cell]) -> dict[str, object]:
    trace = scenario.trace
    return {
        "trace": trace.name,
        "num_requests": len(trace.requests),
        **options.trace.as_dict(),
        "block": trace.block_tokens,
        "max_output": options.max_output,
        "ceiling": ceiling,
        "profile": None if options.costs else options.profile,
        "prefill_profile": options.prefill_profile or None,
        "costs": scenario.costs.as_dict(),
        "blocks": scenario.shape.num_blocks,
        "prefill_blocks": options.prefill_blocks,
        "window": options.window,
        "full_share": options.full_share,
        "state_tokens": options.state_tokens,
        "snapshot_tokens": options.snapshot_tokens,
        "tell_all": options.tells_all,
        "error": options.error,
        "objective": {"ttft_ms": options.ttft_ms, "itl_ms": options.itl_ms},
        "policies": [cell.as_dict() for cell in cells],
    }
