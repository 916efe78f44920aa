"""How soon a decode worker is free of its running choices, when it drains or changes its role; part of `recovery`.

Two decode workers; the one that leaves has all streams, and the other one takes them over. Steps are slept, so what is
timed is Baton, and the copying of KV between two processes.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.v1 import worker_pb2
from tests.bench.report import Table
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import is_idle, request

STEP_MS = 10.0
NUM_STREAMS = 16
NUM_PROMPT_TOKENS = 500
NUM_BEFORE = 20
"""Tokens that every stream has when its worker is told to leave."""
NUM_LEFT = (100, 500)


@dataclass(slots=True)
class Departure:
    """Seconds."""

    free_s: float
    """From the order on, until no call is left on the worker."""
    gaps_s: list[float]
    """Longest time between two messages, of each stream."""
    num_recomputed: float
    """Tokens, of a stream."""


@dataclass(slots=True)
class Stream:
    num_tokens: int = 0
    heard_s: list[float] = field(default_factory=list)

    def longest_gap_s(self) -> float:
        return max(after - before for before, after in pairwise(self.heard_s))


def table(quick: bool) -> Table:
    found = Table(
        f"A decode worker with {NUM_STREAMS} streams leaves, a step every {STEP_MS:.0f} ms",
        ("", "free after, ms p50", "p99", "longest gap of a stream, ms p50", "p99", "tokens computed again, a stream"),
        note="The gap includes a step. Prompts have 500 tokens. A block has 16.",
    )
    num_times = 2 if quick else 12
    with _fleet() as fleet:
        for num_left in NUM_LEFT:
            departures = [_departure(fleet, num_left, _drain) for _ in range(num_times)]
            found.rows.append(_row(f"drain, {num_left} tokens left of each, {num_times} times", departures))
        departures = [_departure(fleet, NUM_LEFT[-1], _set_role) for _ in range(num_times)]
        found.rows.append(_row(f"change of role, {NUM_LEFT[-1]} tokens left of each, {num_times} times", departures))
    return found


def _row(name: str, departures: Sequence[Departure]) -> tuple[str, ...]:
    free_s = [departure.free_s for departure in departures]
    gaps_s = [gap_s for departure in departures for gap_s in departure.gaps_s]
    again = sum(departure.num_recomputed for departure in departures) / len(departures)
    return (name, *(f"{_rank(values, p) * 1e3:.0f}" for values in (free_s, gaps_s) for p in (50, 99)), f"{again:.1f}")


def _rank(values: Sequence[float], percent: int) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


@contextmanager
def _fleet() -> Iterator[Fleet]:
    """With a prefill and a decode worker."""
    router = RouterConfig(mode="disaggregated", cache_secret="leaving")
    with running_fleet(TransferConfig(), router, step_ms=STEP_MS, num_blocks=4096) as fleet:
        fleet.wait_for(fleet.add(Role.PREFILL), fleet.add(Role.DECODE))
        yield fleet


def _drain(worker: Any) -> None:
    assert worker.Drain(worker_pb2.DrainRequest(timeout_s=60)).num_left == 0


def _set_role(worker: Any) -> None:
    worker.SetRole(worker_pb2.SetRoleRequest(role="prefill", timeout_s=60))


def _departure(fleet: Fleet, num_left: int, leave: Callable[[Any], None]) -> Departure:
    """Of the only decode worker there is, to one that has just come."""
    (worker,) = _decode_workers(fleet)
    before = _computed(fleet)
    rng = random.Random(before)
    streams = [Stream() for _ in range(NUM_STREAMS)]
    prompts = [[rng.randrange(1, 40_000) for _ in range(NUM_PROMPT_TOKENS)] for _ in streams]
    num_tokens = NUM_BEFORE + num_left
    threads = [
        threading.Thread(target=_read, args=(fleet, prompt, num_tokens, stream))
        for prompt, stream in zip(prompts, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    while any(stream.num_tokens < NUM_BEFORE for stream in streams):
        time.sleep(0.005)
    fleet.wait_for(fleet.add(Role.DECODE))
    with fleet.control(worker["id"]) as control:
        began_s = time.monotonic()
        leave(control)
        free_s = time.monotonic() - began_s
    for thread in threads:
        thread.join(120)
    while not all(is_idle(each) for each in fleet.client.status()["workers"]):
        time.sleep(0.1)
    time.sleep(0.5)  # a renewal later the counters are there too
    num_known = NUM_STREAMS * (NUM_PROMPT_TOKENS + num_tokens - 1)
    recomputed = (_computed(fleet) - before - num_known) / NUM_STREAMS
    fleet.remove(worker["id"], signal.SIGTERM)
    while len(fleet.client.status()["workers"]) > 2:
        time.sleep(0.05)
    return Departure(free_s, [stream.longest_gap_s() for stream in streams], recomputed)


def _read(fleet: Fleet, prompt: list[int], num_tokens: int, stream: Stream) -> None:
    message = request(token_ids=prompt, sampling={"max_tokens": num_tokens, "ignore_eos": True})
    for part in fleet.inference.Generate(message, timeout=120):
        stream.num_tokens += len(part.token_ids)
        stream.heard_s.append(time.monotonic())


def _decode_workers(fleet: Fleet) -> list[dict[str, Any]]:
    return [worker for worker in fleet.client.status()["workers"] if worker["role"] == "decode"]


def _computed(fleet: Fleet) -> int:
    return sum(worker["computed_tokens"] for worker in fleet.client.status()["workers"])
