"""What a step costs beside its computing: schedule, packing, sampling and commit.

First as a share of an exact native step, then in milliseconds as the sequences of a step become more, with the
arithmetic engine, which computes nothing here. All of it is CPU time of one thread, and of the engine alone: neither an
event loop nor what waits for the tokens is in it.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from baton import garbage
from baton.config import EngineConfig, ModelConfig, load
from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from deploy.models import cache_dir, resolve
from engine.core.engine import Engine
from engine.core.runner import OnLayerDone, StepInput, StepPart
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.model.rank_step import RankStep, order_for_packing
from engine.native.runner import NativeRunner
from engine.sampling.steps import Row
from engine.testing import ArithmeticRunner
from router.prompt import Tokenizer
from tests.bench.engine_sides import GREEDY, PROMPT_TOKENS, TEXT
from tests.bench.report import Report, Table
from tests.bench.stats import Spread, interleaved, ratio, spread

P = ParamSpec("P")
T = TypeVar("T")
NUM_STREAMS = (1, 8, 16)
SIZES = (16, 64, 256, 512)
WAYS: dict[str, tuple[SamplingParams, str]] = {
    "greedy": (GREEDY, "< 4 %"),
    "temperature 1, top-p 0.95": (replace(GREEDY, temperature=1.0, top_p=0.95), "< 8 %"),
}
GATE_MS = 1.5
"""Most that the books of a step of `SIZES[-1]` sequences may take."""
WARM_UP_STEPS = 5
BLOCK = 16
_RUNS = itertools.count()
clock = time.process_time_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """CPU nanoseconds of one step, or a median of several."""

    schedule: float
    packing: float
    """What a runner does beside computing and sampling."""
    sampling: float
    commit: float
    computing: float

    @property
    def books(self) -> float:
        """All of the step but computing."""
        return self.schedule + self.packing + self.sampling + self.commit

    @property
    def share(self) -> float:
        """That, as a share of the step in percent."""
        return 100 * self.books / (self.books + self.computing)


class Meter:
    """CPU time of the calls of one function."""

    def __init__(self) -> None:
        self._ns = 0

    def around(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began = clock()
            result = call(*args, **kwargs)
            self._ns += clock() - began
            return result

        return timed

    def take(self) -> int:
        """Returns what the calls since the last time took."""
        took, self._ns = self._ns, 0
        return took


class Blank(ArithmeticRunner):
    """Packs a step as the runners of models do, and computes nothing: every answer is 1."""

    def _compute(self, step: StepInput, on_layer_done: OnLayerDone) -> None:
        packed = [step.parts[index] for index in order_for_packing(step.parts)]
        sampling = [row for row, part in enumerate(packed) if part.sample]
        assert len(RankStep(packed, sampling).logit_rows) == len(sampling)

    def _answers(self, parts: Sequence[StepPart], rows: Sequence[Row]) -> list[int]:
        return [1] * len(rows)


@dataclass(frozen=True, slots=True)
class Steps:
    """An engine, and what is measured of its runner."""

    engine: Engine
    computing: Meter
    sampling: Meter

    @classmethod
    def of(cls, runner: NativeRunner | ArithmeticRunner, most: int) -> Steps:
        """Args:
        most: sequences; a step takes all their prompts.
        """
        limits = SchedulerLimits(
            max_num_seqs=most, max_num_batched_tokens=most * PROMPT_TOKENS, output_reservation=2 * PROMPT_TOKENS
        )
        return cls(Engine(runner, limits), Meter(), Meter())

    def decode(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, num_steps: int) -> list[Spent]:
        """Computes the prompts, and returns what as many steps behind them take, of all together."""
        most, run = WARM_UP_STEPS + num_steps + 1, next(_RUNS)
        sequences = [
            self.engine.add(
                SequenceSpec(
                    request_id=f"{run}/{index}",
                    choice_index=0,
                    token_ids=tuple(prompt),
                    num_prompt_tokens=len(prompt),
                    sampling=replace(sampling, max_tokens=most + 1, seed=index),
                    cache_seed=f"{run}/{index}".encode(),  # no run finds what another one has computed
                ),
                Purpose.GENERATE,
                time.monotonic(),
            )
            for index, prompt in enumerate(prompts)
        ]
        self._step()
        found = [self._step() for _ in range(WARM_UP_STEPS + num_steps)][WARM_UP_STEPS:]
        for sequence in sequences:
            assert sequence.num_generated_tokens == most, "not at full batch"
            self.engine.end(sequence)
        return found

    def _step(self) -> Spent:
        self.computing.take(), self.sampling.take()
        began = clock()
        step, _ = self.engine.schedule(time.monotonic())
        scheduled = clock()
        output = self.engine.runner.execute(step)
        executed = clock()
        self.engine.commit(step, output, time.monotonic())
        ended = clock()
        self.engine.take_block_events()
        computing, sampling = self.computing.take(), self.sampling.take()
        return Spent(
            schedule=scheduled - began,
            packing=executed - scheduled - computing - sampling,
            sampling=sampling,
            commit=ended - executed,
            computing=computing,
        )


def median(found: Sequence[Spent]) -> Spent:
    """Returns the median of each part of some steps."""
    return Spent(
        schedule=statistics.median(spent.schedule for spent in found),
        packing=statistics.median(spent.packing for spent in found),
        sampling=statistics.median(spent.sampling for spent in found),
        commit=statistics.median(spent.commit for spent in found),
        computing=statistics.median(spent.computing for spent in found),
    )


@contextmanager
def collected_as_in_a_worker() -> Iterator[None]:
    """Has the garbage collector work as `baton worker` has it, for a while."""
    thresholds = gc.get_threshold()
    garbage.keep_what_is_loaded()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _us(found: Sequence[Spent]) -> tuple[Spread, ...]:
    return (
        spread([spent.schedule / 1e3 for spent in found]),
        spread([spent.packing / 1e3 for spent in found]),
        spread([spent.sampling / 1e3 for spent in found]),
        spread([spent.commit / 1e3 for spent in found]),
    )


def shares(path: Path, num_rounds: int, num_steps: int) -> Table:
    """Returns what the books of an exact native step are of all of it."""
    most = NUM_STREAMS[-1]
    config = EngineConfig(
        num_threads=1, kv_cache_gib=0.5, max_num_seqs=most, max_num_batched_tokens=most * PROMPT_TOKENS
    )
    model = ModelConfig(path=str(path), dtype="float32", device="cpu")
    runner = NativeRunner(model, config, cache_dir(load().cluster) / "native")
    ids = Tokenizer.load(path).encode(TEXT * 40)
    steps = Steps.of(runner, most)
    cases = {f"{way}, {number}": (way, number) for way in WAYS for number in NUM_STREAMS}
    found: dict[str, list[Spent]] = {name: [] for name in cases}
    compute, sample = runner._library.baton_step, runner._sampler.sample_and_score
    with (
        patch.object(runner._library, "baton_step", steps.computing.around(compute)),
        patch.object(runner._sampler, "sample_and_score", steps.sampling.around(sample)),
    ):
        for name in interleaved(tuple(cases), num_rounds):
            way, number = cases[name]
            prompts = [ids[7 * i : 7 * i + PROMPT_TOKENS] for i in range(number)]
            found[name].append(median(steps.decode(prompts, WAYS[way][0], num_steps)))
    runner.close()
    table = Table(
        f"Books of an exact native step: SmolLM2-135M, 1 thread, CPU time, {num_steps} steps, {num_rounds} rounds",
        ("", "streams", "schedule µs", "packing µs", "sampling µs", "commit µs", "step ms", "books %", "gate"),
    )
    for name, (way, number) in cases.items():
        runs = found[name]
        step_ms = spread([(spent.books + spent.computing) / 1e6 for spent in runs])
        share = spread([spent.share for spent in runs])
        table.rows.append((way, str(number), *_us(runs), step_ms, share, WAYS[way][1]))
    return table


def growth(sizes: Sequence[int], num_rounds: int, num_steps: int) -> Table:
    """Returns what the books of a step take for these numbers of sequences, the first of which is what all are compared
    with."""
    found: dict[str, list[Spent]] = {str(size): [] for size in sizes}
    for name in interleaved(tuple(found), num_rounds):
        runner = Blank(num_blocks=32 * max(sizes), vocab_size=1 << 14, max_num_seqs=max(sizes))
        steps = Steps.of(runner, max(sizes))
        with patch.object(runner._sampler, "sample_and_score", steps.sampling.around(runner._sampler.sample_and_score)):
            # Prompts of all lengths, so that as many sequences fill a block in one step as in the next.
            prompts = [range(i, i + 2 * BLOCK + i % BLOCK) for i in range(int(name))]
            found[name].append(median(steps.decode(prompts, GREEDY, num_steps)))
    table = Table(
        f"Books of a step of the arithmetic engine: CPU time, {num_steps} steps, {num_rounds} rounds",
        ("sequences", "schedule µs", "packing, sampling µs", "commit µs", "ms a step", "to linear", "gate"),
        note=f"to linear: to what {sizes[0]} sequences take, for as many",
    )
    least = [spent.books / sizes[0] for spent in found[str(sizes[0])]]
    for size in sizes:
        runs = found[str(size)]
        schedule, packing, _, commit = _us(runs)
        gate = f"< {GATE_MS} ms, <= 1" if size == SIZES[-1] else "<= 1"
        to_linear = ratio([spent.books / size for spent in runs], least)
        books = spread([spent.books / 1e6 for spent in runs])
        table.rows.append((str(size), schedule, packing, commit, books, to_linear, "" if size == sizes[0] else gate))
    return table


def run(quick: bool) -> Report:
    path = Path(resolve(ModelConfig(), cache_dir(load().cluster)).path)
    with collected_as_in_a_worker():
        tables = [
            shares(path, 2 if quick else 5, 16 if quick else 32),
            growth(SIZES, 2 if quick else 7, 32 if quick else 64),
        ]
    return Report("bookkeeping", tables)
