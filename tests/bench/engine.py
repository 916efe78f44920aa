"""Our engine, as `engine.runner: auto` chooses, against its transformers runner, `generate` and engines of other makes.

The same with weights made smaller (`model.weights`) is a side of its own, whose predictions are compared in the run.
All have the same weights, prompts, steps and one thread, and take turns in each round. Decoding is timed from the
moment every stream has its first token, over the same number of steps at full batch; prefill from the prompt to its
first token. The tokens are compared too: all must do the same work. A case during which other processes were busy is
measured again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve
from router.prompt import Tokenizer
from tests.bench import engine_peers, quality, roofline
from tests.bench.engine_sides import PROMPT_TOKENS, TEXT, Baton, Measured, Side, Transformers
from tests.bench.report import Report, Table
from tests.bench.stats import OtherWork, Spread, interleaved, ratio, spread

NUM_STREAMS = (1, 8, 16)
LONG_PROMPTS = (512, 2048)
QUIET_CORES = 0.2
"""Most that other processes may use during a case that decides anything."""
NUM_TRIES = 5
OURS, ROUNDED, RUNNER, GENERATE = "baton", "baton, int8g", "baton on transformers", "generate"
EXACT_GATES = {1: 1.6, 8: 1.3, 16: 1.3, **dict.fromkeys(LONG_PROMPTS, 1.05)}
"""Times the best float32 engine of others, by streams or tokens of the prompt."""
RUNNER_GATES = {1: 4.0, 8: 2.5, 16: 2.0, **dict.fromkeys(LONG_PROMPTS, 1.3)}


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts, and for how many steps they are answered; none of a prefill."""

    name: str
    prompts: list[list[int]]
    num_steps: int

    @property
    def size(self) -> int:
        """Streams of a decode, tokens of a prefill."""
        return len(self.prompts) if self.num_steps else len(self.prompts[0])

    def measure(self, side: Side) -> Measured:
        return side.decode(self.prompts, self.num_steps) if self.num_steps else side.prefill(self.prompts)


@dataclass(frozen=True, slots=True)
class Found:
    """What a case's rounds gave each side, and how busy others were meanwhile."""

    runs: dict[str, list[Measured]]
    foreign_cores: float
    num_tries: int

    @property
    def is_decided(self) -> bool:
        return self.foreign_cores <= QUIET_CORES

    @property
    def load(self) -> str:
        tries = f", try {self.num_tries}" if self.num_tries > 1 else ""
        return f"{self.foreign_cores:.2f}{tries}{'' if self.is_decided else ', not decided'}"

    def rates(self, side: str) -> list[float]:
        return [run.tokens_per_s for run in self.runs[side]]

    def ratio(self, side: str, ours: str = OURS) -> Spread:
        """Ours to another's."""
        return ratio(self.rates(ours), self.rates(side))

    def best(self, sides: list[str]) -> str:
        return max(sides, key=lambda side: spread(self.rates(side)).median)


def run(quick: bool) -> Report:
    cache = cache_dir(load().cluster)
    path = resolve(ModelConfig(), cache).path
    num_rounds, num_steps = (2, 12) if quick else (5, 32)
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode(TEXT * 60)
    cases = [
        Case(f"decode, streams: {count}", [ids[7 * i :][:PROMPT_TOKENS] for i in range(count)], num_steps)
        for count in NUM_STREAMS
    ]
    cases += [Case(f"prefill, {count} tokens", [ids[:count]], 0) for count in LONG_PROMPTS]
    with ExitStack() as stack:
        ours, rounded = Baton(path), Baton(path, weights="int8g")
        sides: dict[str, Side] = {OURS: ours, ROUNDED: rounded}
        sides |= {RUNNER: Baton(path, "transformers"), GENERATE: Transformers(path)}
        peers = stack.enter_context(engine_peers.started(path, cache))
        sides |= peers.sides
        found = {case.name: _measure(case, sides, num_rounds, 1 if quick else NUM_TRIES) for case in cases}
    decodes = {
        (case.size, PROMPT_TOKENS + 1 + num_steps / 2): found[case.name].runs[OURS] for case in cases if case.num_steps
    }
    prefills = {case.size: found[case.name].runs[OURS] for case in cases if not case.num_steps}
    title = (
        f"Engine: SmolLM2-135M, 1 thread each, {PROMPT_TOKENS}-token prompts, {num_steps} steps, {num_rounds} rounds"
    )
    tables = [_measurements(title, cases, found, sides), _gates(cases, found, sides)]
    texts = quality.passages()[: 4 if quick else quality.NUM_PASSAGES]
    tables.append(quality.table(ours.runner, rounded.runner, [tokenizer.encode(text) for text in texts]))
    tables += [roofline.table(ours.runner, decodes, prefills, quick), _absent(peers)]
    return Report("engine", tables)


def _measure(case: Case, sides: Mapping[str, Side], num_rounds: int, num_tries: int) -> Found:
    """Measures all sides, again while others are busy, and returns the quietest try."""
    tries: list[Found] = []
    for side in sides.values():
        case.measure(side)  # warm up
    while len(tries) < num_tries and not (tries and tries[-1].is_decided):
        runs: dict[str, list[Measured]] = {name: [] for name in sides}
        with OtherWork() as others:
            for name in interleaved(tuple(sides), num_rounds):
                runs[name].append(case.measure(sides[name]))
        tries.append(Found(runs, others.cores, len(tries) + 1))
    return min(tries, key=lambda found: found.foreign_cores)


def _measurements(title: str, cases: list[Case], found: Mapping[str, Found], sides: Mapping[str, Side]) -> Table:
    columns = (
        "",
        "precision",
        "tokens/s",
        "ours to it",
        "CPU ms/token",
        "same tokens as generate",
        "other work, cores",
    )
    table = Table(title, columns)
    for case in cases:
        of_case = found[case.name]
        expected = of_case.runs[GENERATE][0].answers
        for name, side in sides.items():
            runs = of_case.runs[name]
            num_same = sum(a == b for a, b in zip(runs[0].answers, expected, strict=True))
            table.rows.append((
                f"{case.name}: {name}",
                side.precision,
                spread(of_case.rates(name)),
                of_case.ratio(name),
                spread([run.cpu_ms_per_token for run in runs]),
                f"{num_same} of {len(expected)}",
                of_case.load,
            ))  # fmt: skip
    names = [f"{name} is {side.name}" for name, side in sides.items() if isinstance(side, engine_peers.PeerSide)]
    table.note = "; ".join(names)
    return table


def _gates(cases: list[Case], found: Mapping[str, Found], sides: Mapping[str, Side]) -> Table:
    """What the design asks for, each in the rounds of one case."""
    table = Table("Gates: ours as a multiple of", ("", "which", "times", "gate", "kept"))
    others = [name for name in sides if name not in (OURS, ROUNDED, RUNNER)]
    exact = [name for name in others if sides[name].precision.startswith("float32")]
    for case in cases:
        of_case = found[case.name]
        best = of_case.best(others)
        rows = [(OURS, "the best float32 engine of others", of_case.best(exact), EXACT_GATES[case.size])]
        if case.num_steps and case.size == 1:
            rows.append((OURS, "the best of others at any precision", best, 1.0))
        rows.append((OURS, "our transformers runner", RUNNER, RUNNER_GATES[case.size]))
        rows.append((ROUNDED, "int8g to the best of others at any precision", best, 1.0))
        rows.append((ROUNDED, "int8g to our exact weights", OURS, 1.0))
        for ours, what, name, gate in rows:
            times = of_case.ratio(name, ours)
            verdict = ("yes" if times.median >= gate else "no") if of_case.is_decided else "not decided"
            table.rows.append((f"{case.name}: {what}", name, times, f">= {gate}", verdict))
    return table


def _absent(peers: engine_peers.Peers) -> Table:
    table = Table("Engines of other makes that were not compared", ("", "why"))
    table.rows += [(name, why) for name, why in peers.absent.items()]
    if os.environ.get(engine_peers.VARIABLE) is None:
        table.note = f"{engine_peers.VARIABLE}=openvino=PYTHON,llama.cpp=PYTHON names the Pythons that have them"
    return table
