"""Two threads of a worker against one, and two workers of one thread each against one worker; the former also beside
programs that keep every core busy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve
from deploy.processes import tied
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
BUSY_GATE = 1.3
"""Most that two threads may take, of the wall time of one, while others keep every core busy."""


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
    beside = Table(
        f"The same beside {os.cpu_count()} programs that never wait",
        ("", "1 thread tok/s", "2 threads, of one's wall time", "gate", "kept"),
    )
    with ExitStack() as stack:
        started = {"worker": "1", "other": "1", "threads": "2"}
        peers = {
            name: stack.enter_context(Peer("tests.bench.threads_peer", str(path), num)) for name, num in started.items()
        }
        for case in cases(Tokenizer.load(path).encode(LONG_TEXT), parts, num_steps):
            table.rows.append(_row(case, peers, num_rounds, num_tries))
            with _busy_programs():
                beside.rows.append(_row_beside(case, peers, num_rounds))
    table.note = "Two workers have twice the work of one, each its own streams or prompt."
    return Report("threads", [table, beside])


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


def _row_beside(case: Case, peers: dict[str, Peer], num_rounds: int) -> tuple[Any, ...]:
    rates: dict[str, list[float]] = {"worker": [], "threads": []}
    for name in interleaved(tuple(rates), num_rounds):
        rates[name].append(_rate(case, [peers[name]]))
    wall = ratio(rates["worker"], rates["threads"])
    return case.name, spread(rates["worker"]), wall, f"<= {BUSY_GATE}", "yes" if wall.median <= BUSY_GATE else "no"


@contextmanager
def _busy_programs() -> Iterator[None]:
    """As many as there are cores run while the block is entered."""
    command = tied([sys.executable, "-S", "-c", "while True: pass"])
    programs = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def _rate(case: Case, peers: Sequence[Peer]) -> float:
    """Returns the tokens a second of all together, from the moment when the first one began to the last one's end."""
    for peer in peers:
        peer.tell("measure", prompts=case.prompts, num_steps=case.num_steps)
    found = [peer.answer() for peer in peers]
    took_s = max(each["ended_s"] for each in found) - min(each["began_s"] for each in found)
    return float(sum(each["num_tokens"] for each in found) / took_s)
