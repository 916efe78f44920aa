"""How soon a cluster recovers: from clients that leave, and from workers that die, freeze or leave.

On the arithmetic engine, whose steps are slept: what is timed is Baton, not a model. Router, Redis and workers are
processes of their own; only for cancels the workers run here, so that it can be seen from within when they are free.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from baton import wire
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.bench import leaving
from tests.bench.report import Report, Table
from tests.chaos import asks
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.phases import LINK_DELAY_MS, STEP_S, Phase, cancel_bench, cancel_fleet
from tests.support.asking import prompt_of

WORKER_STEP_MS = 10.0
NUM_PROMPT_TOKENS = (100, 2000)
NUM_TOKENS = 60
KILL_AT = 20
PLACED_AGAIN = re.compile(r"^(\S+ \S+) WARNING .*?(\S+)/0/0 is placed again", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from the fault on."""

    noticed_s: float
    """Until the router places the request again."""
    resumed_s: float
    """Until the client has the next token."""


def run(quick: bool) -> Report:
    num_cancels, num_kills, num_freezes = (10, 6, 2) if quick else (100, 40, 6)
    return Report("recovery", [_cancels(num_cancels), _faults(num_kills, num_freezes), leaving.table(quick)])


def _cancels(num_times: int) -> Table:
    table = Table(
        f"A client leaves: until both workers hold nothing for it, {num_times} times each",
        ("", "ms p50", "ms p99", "ms at most"),
        note=f"Gate: a step and 50 ms at p99. A step takes {STEP_S * 1e3:.0f} ms, with 512 prompt tokens about half "
        f"more; a chunk of KV waits {LINK_DELAY_MS} ms before it leaves.",
    )
    with cancel_fleet() as fleet:
        for phase, seconds in asyncio.run(_measured(fleet, num_times)).items():
            table.rows.append((phase.value, *_tail(seconds)))
    return table


async def _measured(fleet: Fleet, num_times: int) -> dict[Phase, list[float]]:
    async with cancel_bench(fleet) as bench:
        return {phase: [(await bench.left_in(phase)).seconds for _ in range(num_times)] for phase in Phase}


def _faults(num_kills: int, num_freezes: int) -> Table:
    table = Table(
        f"The decode worker fails after {KILL_AT} of {NUM_TOKENS} tokens, a step every {WORKER_STEP_MS:.0f} ms",
        ("", "noticed, ms p50", "p99", "at most", "next token, ms p50", "p99", "at most"),
        note="From the signal on. The next token comes after the prompt and all tokens so far were computed again, "
        "but for what a cache holds, and transferred.",
    )
    for mode in ("disaggregated", "aggregated"):
        for num_prompt_tokens in NUM_PROMPT_TOKENS:
            found = _recoveries(mode, num_prompt_tokens, signal.SIGKILL, num_kills)
            table.rows.append(_row(f"SIGKILL, {mode}, {num_prompt_tokens} prompt tokens, {num_kills} times", found))
    found = _recoveries("disaggregated", NUM_PROMPT_TOKENS[0], signal.SIGSTOP, num_freezes)
    table.rows.append(_row(f"SIGSTOP, disaggregated, {NUM_PROMPT_TOKENS[0]} prompt tokens, {num_freezes} times", found))
    return table


def _row(name: str, found: list[Recovery]) -> tuple[str, ...]:
    return (name, *_tail([each.noticed_s for each in found]), *_tail([each.resumed_s for each in found]))


def _tail(seconds: Sequence[float]) -> tuple[str, str, str]:
    """Milliseconds: median, 99th percentile (nearest rank) and maximum."""
    ordered = sorted(seconds)
    ranks = [max(0, -(-len(ordered) * percent // 100) - 1) for percent in (50, 99, 100)]
    p50, p99, most = (f"{ordered[rank] * 1e3:.1f}" for rank in ranks)
    return p50, p99, most


def _recoveries(mode: str, num_prompt_tokens: int, number: signal.Signals, num_times: int) -> list[Recovery]:
    with running_fleet(
        TransferConfig(ping_s=0.5), RouterConfig(mode=mode, cache_secret="recovery"), step_ms=WORKER_STEP_MS
    ) as fleet:
        fleet.wait_for(fleet.add(Role.PREFILL), fleet.add(Role.DECODE), fleet.add(Role.DECODE))
        return [_recovery(fleet, f"fails-{index}", num_prompt_tokens, number) for index in range(num_times)]


def _recovery(fleet: Fleet, request_id: str, num_prompt_tokens: int, number: signal.Signals) -> Recovery:
    """Afterwards the worker is gone, and another one is ready in its place."""
    prompt = prompt_of(zlib.crc32(request_id.encode()), num_prompt_tokens)
    request = replace(asks.greedy(prompt, NUM_TOKENS), request_id=request_id)
    num_tokens, victim, failed_at = 0, "", 0.0
    heard_s: list[float] = []
    """First the moment of the fault, then of each message after it."""
    for part in fleet.inference.Generate(wire.generate_request(request), timeout=120):
        num_tokens += len(part.token_ids)
        if victim:
            heard_s.append(time.monotonic())
        elif num_tokens >= KILL_AT:
            victim = fleet.client.explain(request_id)[0].decode_worker
            failed_at = time.time()
            heard_s.append(time.monotonic())
            fleet.send(victim, number)
    fleet.remove(victim, signal.SIGKILL)
    fleet.wait_for(fleet.add(Role.DECODE))
    noticed_at = next(at for at, name in PLACED_AGAIN.findall(fleet.log) if name == request_id)
    # What had left the worker before is heard at once; the stream has resumed after the longest gap.
    _, resumed_s = max((after - before, after) for before, after in itertools.pairwise(heard_s))
    noticed_s = datetime.strptime(noticed_at, "%Y-%m-%d %H:%M:%S,%f").timestamp() - failed_at
    return Recovery(noticed_s, resumed_s - heard_s[0])
