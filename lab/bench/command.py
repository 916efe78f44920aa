"""`baton bench`: from options to a table or JSON."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.say import say
from deploy.terminal import Terminal
from lab.bench.connection import BenchConnection
from lab.bench.fit import cost_model
from lab.bench.options import BenchOptions
from lab.bench.prompts import Prompts
from lab.bench.replay import Load, check, replay
from lab.bench.report import measured, notes_of, table_of
from lab.simulate.costs import Bench
from lab.traces.fit_to_model import plan_for
from router.placement import Objective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.bench.replay import ReplayedRequest
    from lab.bench.report import BenchReport
    from lab.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Benched:
    """The result of a benchmark."""

    figures: BenchReport
    workers: Bench | None
    """The workers' costs; None: this client may not read the status."""


def run(options: BenchOptions, as_json: bool, log: Console) -> bool:
    """Print the result on standard output, and progress on `log`.

    Returns:
        True if any request was served.

    Raises:
        ConfigError: an option is invalid, or the trace cannot be read.
        NoWorker: no router responds. Other errors of the tree: the router refuses the first request.
    """
    trace = options.trace.trace()
    result = uvloop.run(bench(trace, options, log))
    if as_json:
        say(json.dumps(_document(options, trace, result), indent=2))
    else:
        out = Terminal(soft_wrap=True, highlight=False)
        out.print(table_of(_title(trace, options), result.figures))
        for note in notes_of(result.figures):
            out.print(note)
    return result.figures.num_served > 0


def objective_of(options: BenchOptions) -> Objective:
    return Objective(options.ttft_ms / 1e3, options.itl_ms / 1e3)


async def bench(trace: Trace, options: BenchOptions, log: Console) -> Benched:
    """Replay a trace on the cluster of the options. Raises the errors of `run`."""
    connection = BenchConnection(options.address, options.api_key, options.trust.read())
    try:
        model, workers = await connection.model(), await connection.workers()
        plan = plan_for(trace, model.max_model_len, options.max_output)
        prompts = Prompts(options.trace.seed, options.vocab_size, trace.block_tokens)
        await check(connection, prompts, objective_of(options))
        by_role: dict[str, list[str]] = {}
        for worker in workers:
            by_role.setdefault(worker.role, []).append(worker.id)
        pools = " and ".join(f"{len(ids)} {role}" for role, ids in sorted(by_role.items(), reverse=True))
        log.print(
            f"{trace.name}: {len(plan.trace.requests)} requests in {plan.trace.requests[-1].arrival_s:.0f} s to "
            f"{model.id} at {options.address}" + (f", {pools} workers" if pools else "")
        )
        with _progress(log, len(plan.trace.requests)) as progress:
            load = Load(
                trace=plan.trace,
                prompts=prompts,
                objective=objective_of(options),
                concurrency=options.concurrency,
            )
            result = await replay(load, connection, progress.count)
        workers = await connection.workers()
    finally:
        await connection.close()
    costs = cost_model([one for one in result.observed if one.outcome == "served"], workers)
    shape = workers[0] if workers else None
    bench = (
        Bench(
            costs=costs,
            num_blocks=shape.num_blocks,
            block_tokens=shape.block_tokens,
            chunk_tokens=shape.chunk_tokens,
            max_model_len=model.max_model_len,
        )
        if costs and shape
        else None
    )
    return Benched(measured(result, plan, by_role, objective_of(options)), bench)


@contextlib.contextmanager
def _progress(log: Console, num_requests: int) -> Iterator[_RequestBar]:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=log, transient=True, refresh_per_second=4) as progress:
        yield _RequestBar(progress, num_requests)


class _RequestBar:
    def __init__(self, progress: Progress, num_requests: int) -> None:
        self._progress = progress
        self._task = progress.add_task("requests", total=num_requests)
        self._num_refused = 0

    def count(self, one: ReplayedRequest) -> None:
        self._num_refused += one.error is not None
        refused = f", {self._num_refused} refused" if self._num_refused else ""
        self._progress.update(self._task, advance=1, description=f"requests{refused}")


def _title(trace: Trace, options: BenchOptions) -> str:
    scale = f", 1/{options.trace.scale} of its lengths" if options.trace.scale != 1 else ""
    return f"{trace.name}{scale}, {options.trace.speed:g} times its speed, at {options.address}"


def _document(options: BenchOptions, trace: Trace, result: Benched) -> dict[str, object]:
    return {
        "trace": trace.name,
        **options.trace.as_dict(),
        "block": trace.block_tokens,
        "max_output": options.max_output,
        "concurrency": options.concurrency,
        "vocab": options.vocab_size,
        "address": options.address,
        "objective": {"ttft_ms": options.ttft_ms, "itl_ms": options.itl_ms},
        **result.figures.as_dict(),
        **(result.workers.as_dict() if result.workers else {"costs": None, "worker": None}),
    }
