"""`baton bench`: from options to a table or JSON."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.errors import ConfigError
from deploy.lab.bench.connection import Connection
from deploy.lab.bench.fit import cost_model
from deploy.lab.bench.prompts import Prompts
from deploy.lab.bench.replay import check, replay
from deploy.lab.bench.report import measured, notes_of, table_of
from deploy.lab.simulate.costs import Bench
from deploy.lab.traces.fit_to_model import plan_for
from router.placement import Objective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.lab.bench.replay import Observed
    from deploy.lab.bench.report import Measured
    from deploy.lab.traces.shape import TraceOptions
    from deploy.lab.traces.trace import Trace

DEFAULT_VOCAB = 32_000
"""Of Llama 1 and 2, Mistral and their descendants. SmolLM2 has 49,152 tokens, later families more than 100,000. No call
tells a client how many; a model with fewer is found before the replay begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As `baton bench --help` tells them."""

    trace: TraceOptions
    address: str
    api_key: str
    max_output: int
    concurrency: int
    vocab: int | None
    """DEFAULT_VOCAB where none is given."""
    ttft_ms: float
    itl_ms: float

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(self, name)}")
        for name in ("max_output", "concurrency"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(self, name)}")
        if self.vocab is not None and not 1 <= self.vocab <= 2**32:
            raise ConfigError(f"--vocab must be 1 to {2**32}, got {self.vocab}")

    @property
    def vocab_size(self) -> int:
        return DEFAULT_VOCAB if self.vocab is None else self.vocab

    @property
    def objective(self) -> Objective:
        return Objective(self.ttft_ms / 1e3, self.itl_ms / 1e3)


@dataclass(frozen=True, slots=True)
class Benched:
    """What came of it."""

    figures: Measured
    workers: Bench | None
    """None where the operators' service is not for this client."""


def run(options: Options, as_json: bool, log: Console) -> bool:
    """Prints the result on standard output, and progress on `log`.

    Returns:
        Whether any request was served.

    Raises:
        ConfigError: an option does not fit, or the trace cannot be read.
        NoWorker: no router answers. Other errors of the tree: it refuses the first request.
    """
    trace = options.trace.trace()
    result = uvloop.run(bench(trace, options, log))
    if as_json:
        print(json.dumps(_document(options, trace, result), indent=2))  # noqa: T201
    else:
        out = Console(soft_wrap=True, highlight=False)
        out.print(table_of(_title(trace, options), result.figures))
        for note in notes_of(result.figures):
            out.print(note, markup=False)
    return result.figures.num_served > 0


async def bench(trace: Trace, options: Options, log: Console) -> Benched:
    """Replays a trace on the cluster of the options. Raises as `run`."""
    connection = Connection(options.address, options.api_key)
    try:
        model, workers = await connection.model(), await connection.workers()
        plan = plan_for(trace, model.max_model_len, options.max_output)
        prompts = Prompts(options.trace.seed, options.vocab_size, trace.block_tokens)
        await check(connection, prompts, options.objective)
        by_role: dict[str, list[str]] = {}
        for worker in workers:
            by_role.setdefault(worker.role, []).append(worker.id)
        pools = " and ".join(f"{len(ids)} {role}" for role, ids in sorted(by_role.items(), reverse=True))
        log.print(
            f"{trace.name}: {len(plan.trace.requests)} requests in {plan.trace.requests[-1].arrival_s:.0f} s to "
            f"{model.id} at {options.address}" + (f", {pools} workers" if pools else "")
        )
        with _progress(log, len(plan.trace.requests)) as progress:
            result = await replay(
                plan.trace, connection, prompts, options.objective, options.concurrency, progress.count
            )
        workers = await connection.workers()
    finally:
        await connection.close()
    costs = cost_model([one for one in result.observed if one.outcome == "served"], workers)
    shape = workers[0] if workers else None
    told = (
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
    return Benched(measured(result, plan, by_role, options.objective), told)


@contextlib.contextmanager
def _progress(log: Console, num_requests: int) -> Iterator[_Bar]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=log, transient=True, refresh_per_second=4) as progress:
        yield _Bar(progress, num_requests)


class _Bar:
    def __init__(self, progress: Progress, num_requests: int) -> None:
        self._progress = progress
        self._task = progress.add_task("requests", total=num_requests)
        self._num_refused = 0

    def count(self, one: Observed) -> None:
        self._num_refused += one.error is not None
        refused = f", {self._num_refused} refused" if self._num_refused else ""
        self._progress.update(self._task, advance=1, description=f"requests{refused}")


def _title(trace: Trace, options: Options) -> str:
    scale = f", 1/{options.trace.scale} of its lengths" if options.trace.scale != 1 else ""
    return f"{trace.name}{scale}, {options.trace.speed:g} times its speed, at {options.address}"


def _document(options: Options, trace: Trace, result: Benched) -> dict[str, object]:
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
