"""Two threads of a worker against one, and two workers of one thread each against one worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from operator import itemgetter
from typing import Any

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve
from router.prompt import Tokenizer
from tests.bench.engine_cases import LONG_TEXT, PARTS, Case, cases
from tests.bench.engine_sides import PROMPT_TOKENS
from tests.bench.peer import Peer
from tests.bench.report import Report, Table
from tests.bench.stats import NUM_TRIES, describe_load, interleaved, ratio, spread, until_quiet, verdict

ARMS = {"one": ("worker",), "threads": ("threads",), "workers": ("worker", "other")}
"""The processes that work at the same time."""
THREADS_GATES = {1: 1.6, 8: 1.6, 512: 1.8, 2048: 1.8}
WORKERS_GATE = 1.8


def run(quick: bool, parts: Collection[str] = PARTS) -> Report:
    path = resolve(ModelConfig(), cache_dir(load().cluster)).path
    num_rounds, num_tries, num_steps = (2, 1, 12) if quick else (5, NUM_TRIES, 64)
    table = Table(
        f"Threads: SmolLM2-135M, float32, {PROMPT_TOKENS}-token prompts, {num_steps} steps, {num_rounds} rounds",
        (
            "",
            "1 thread tok/s",
            "2 threads, times",
            "gate",
            "kept",
            "2 workers, times",
            "gate",
            "kept",
            "other work, cores",
        ),
    )
    with ExitStack() as stack:
        started = {"worker": "1", "other": "1", "threads": "2"}
        peers = {
            name: stack.enter_context(Peer("tests.bench.threads_peer", str(path), num)) for name, num in started.items()
        }
        for case in cases(Tokenizer.load(path).encode(LONG_TEXT), parts, num_steps):
            table.rows.append(_row(case, peers, num_rounds, num_tries))
    table.note = "Two workers have twice the work of one, each its own streams or prompt."
    return Report("threads", [table])


def _row(case: Case, peers: dict[str, Peer], num_rounds: int, num_tries: int) -> tuple[Any, ...]:
    """Measures a case, again while others are busy; the quietest try counts."""
    for names in ARMS.values():
        _rate(case, [peers[name] for name in names])  # warm up
    tries: list[tuple[float, dict[str, list[float]]]] = []
    for others in until_quiet(num_tries):
        rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        with others:
            for arm in interleaved(tuple(ARMS), num_rounds):
                rates[arm].append(_rate(case, [peers[name] for name in ARMS[arm]]))
        tries.append((others.cores, rates))
    cores, rates = min(tries, key=itemgetter(0))
    cells: list[Any] = [case.name, spread(rates["one"])]
    for arm, gate in (("threads", THREADS_GATES.get(case.size)), ("workers", WORKERS_GATE)):
        times = ratio(rates[arm], rates["one"])
        cells += [times, f">= {gate}" if gate else "", verdict(times.median >= gate, cores) if gate else ""]
    return (*cells, describe_load(cores, len(tries)))


def _rate(case: Case, peers: Sequence[Peer]) -> float:
    """Returns the tokens a second of all together, from the moment when the first one began to the last one's end."""
    for peer in peers:
        peer.tell("measure", prompts=case.prompts, num_steps=case.num_steps)
    found = [peer.answer() for peer in peers]
    took_s = max(each["ended_s"] for each in found) - min(each["began_s"] for each in found)
    return float(sum(each["num_tokens"] for each in found) / took_s)
