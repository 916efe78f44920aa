"""Nothing grows with the number of requests: memory of every process, and what Redis keeps.

The ledger is written after each part of the requests. Caches fill in the first half; over the second everything must be
flat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pytest
import redis

from baton import wire
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos import asks
from tests.chaos.asks import listen
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import is_idle
from tests.support.asking import prompt_of
from tests.support.waiting import wait_until

NUM_CLIENTS = 8
NUM_PARTS = 8
NUM_BLOCKS = 128
"""So few that the caches are full, and blocks change hands, soon after the start."""
STREAM_MAX_EVENTS = 150
"""Reached in the first half: what is kept of the index's history has a bound."""
MAX_PROMPT_TOKENS = 200
STEP_MS = 4.0
LEASE_S = 60.0
"""A worker that stands still for seconds keeps its lease: with a new one, the keys of the old one stay for a minute."""
NUM_TOKENS, NUM_LONG_TOKENS, LONG_EVERY = 4, 100, 16
"""Tokens of an answer, and of one in so many, which takes so long that routers note it in Redis."""
LEAVES_EVERY = 5
"""One client in so many leaves after the first token."""
FORGOTTEN_S = 30.0
"""What a router notes of a request in flight lives for twice as long, unless it is told that the request has ended."""
MIB = 2**20
UNTRIMMED = 100
"""Redis keeps as many events more than it is told: it trims by whole nodes of a hundred."""
MOST_RSS_MIB = 4.0
"""Memory by which a process may grow over the second half: allocators take it in steps."""
MOST_REDIS_MIB = 0.5


@dataclass(frozen=True)
class Entry:
    """What there is after a part of the requests."""

    rss_mib: dict[str, float]
    """Resident memory of each process, by name."""
    num_keys: int
    """In Redis, without those of requests whose client has left, which stay for a minute, and of the page's history,
    one for each 10 s of the last hour.
    """
    num_events: int
    redis_mib: float


class Ledger:
    """Counts what a fleet has."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._redis = redis.Redis.from_url(fleet.redis.url)

    def entry(self) -> Entry:
        """Counts once all workers are idle."""
        fleet, store = self._fleet, self._redis
        wait_until(lambda: all(map(_is_free, fleet.client.status()["workers"])), seen=fleet.client.status)
        wait_until(lambda: all(map(_is_left, self._records())), FORGOTTEN_S, seen=self._records)
        pids = {name: process.pid for name, process in fleet.workers.items()}
        pids |= {router.id: router.process.pid for router in fleet.routers}
        return Entry(
            rss_mib={name: psutil.Process(pid).memory_info().rss / MIB for name, pid in pids.items()},
            num_keys=sum(b":req:" not in key and b":hist:" not in key for key in set(store.scan_iter())),
            num_events=sum(store.xlen(key) for key in store.scan_iter(match="kv:*:ev", _type="stream")),
            redis_mib=store.info("memory")["used_memory"] / MIB,
        )

    def _records(self) -> list[bytes]:
        """What routers have noted of requests in flight, by name."""
        return list(self._redis.scan_iter(match="kv:*:req:*"))


def _is_free(worker: dict[str, Any]) -> bool:
    """Idle, with no staging slot in use."""
    return is_idle(worker) and not worker["transfers"]["slots_in_use"]


def leaves(number: int) -> bool:
    """Whether the client of that request leaves."""
    return number % LEAVES_EVERY == 0


def _is_left(record: bytes) -> bool:
    return leaves(int(record.rpartition(b"-")[2]))


class Load:
    """Asks for short answers to prompts of which most share a beginning with others, and checks the tokens."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def ask(self, number: int) -> None:
        prompt = prompt_of(number % 7, 64) + prompt_of(number, 16 + number % MAX_PROMPT_TOKENS)
        num_tokens = NUM_TOKENS if number % LONG_EVERY else NUM_LONG_TOKENS
        request = replace(asks.seeded(prompt, num_tokens, seed=number), request_id=f"endures-{number}")
        parts = self._fleet.inference.Generate(wire.generate_request(request), timeout=60)
        if leaves(number):
            next(parts)
            parts.cancel()
            return
        heard = listen(parts)
        assert [choice.token_ids for choice in heard.answer.choices] == asks.expected(request)


@pytest.mark.parametrize(
    "num_requests",
    [
        pytest.param(250, marks=pytest.mark.full),
        pytest.param(10_000, marks=[pytest.mark.chaos, pytest.mark.timeout(900)]),
    ],
)
def test_nothing_grows_with_the_number_of_requests(num_requests: int) -> None:
    transfer, router = (
        TransferConfig(op_timeout_s=3.0, ping_s=0.5),
        RouterConfig(mode="disaggregated", cache_secret="endures"),
    )
    with (
        running_fleet(transfer, router, num_blocks=NUM_BLOCKS, step_ms=STEP_MS, lease_s=LEASE_S) as fleet,
        ThreadPoolExecutor(NUM_CLIENTS) as clients,
    ):
        index = replace(fleet.config.index, stream_max_events=STREAM_MAX_EVENTS)
        config = replace(fleet.config, index=index)
        fleet.wait_for(*[fleet.add(role, config=config) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)])
        load, ledger, entries = Load(fleet), Ledger(fleet), []
        per_part = num_requests // NUM_PARTS
        for part in range(NUM_PARTS):
            for _ in clients.map(load.ask, range(part * per_part, (part + 1) * per_part)):
                pass
            entries.append(ledger.entry())
    print(*entries, sep="\n")
    first, second = entries[: NUM_PARTS // 2], entries[NUM_PARTS // 2 :]
    assert growth(first, second, lambda entry: entry.num_keys) <= 0
    assert max(entry.num_events for entry in second) <= STREAM_MAX_EVENTS + UNTRIMMED
    assert first[-1].num_events >= STREAM_MAX_EVENTS, "too few events for the bound to be met"
    assert growth(first, second, lambda entry: entry.redis_mib) <= MOST_REDIS_MIB
    for name in second[0].rss_mib:
        grown = growth(second[:1], second[1:], lambda entry, name=name: entry.rss_mib[name])  # type: ignore[misc]
        assert grown <= MOST_RSS_MIB, name


def growth(before: Sequence[Entry], after: Sequence[Entry], of: Callable[[Entry], float]) -> float:
    """From the most before to the most after."""
    return max(map(of, after)) - max(map(of, before))
