"""Checks of the Redis with leases and owners. They write nothing.

What workers and routers report of it is in `baton status` and in alerts: whether it answers, its memory, evicted keys,
values that cannot be read, workers that cannot exchange KV.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from baton.config import without_password
from baton.errors import BatonError, StoreUnavailable
from baton.tls import Tls
from deploy.doctor.checks import Check, judged
from kvstore.index import RedisConnection

OLDEST = (6, 2)
PINGS = 5
SLOW_RTT_S = 0.01
CLOCK_SKEW_S = 2.0
TIMEOUT_S = 3.0
"""Timeout of all replies together, in seconds."""
NEVER_EVICT = "noeviction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Properties that a Redis reports."""

    product: str
    version: str
    """Version of Redis, or the one that it is compatible with."""
    policy: str
    appends: bool
    """Redis appends every change to a file."""
    saves: str
    """Snapshot rules, as in `CONFIG GET save`; empty: none, or unknown."""
    round_trip_s: float
    ahead_s: float
    """Seconds by which Redis' clock is ahead of ours."""


def look(url: str, tls: Tls | None = None) -> Facts:
    """Read the facts of a Redis. Raises StoreUnavailable or ConfigError."""
    return asyncio.run(_look(url, tls))


async def _look(url: str, tls: Tls | None = None) -> Facts:
    connection = RedisConnection(url, tls=tls)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _facts(connection)
    except TimeoutError:
        raise StoreUnavailable(f"Redis: no answer within {TIMEOUT_S:g} s") from None
    finally:
        await connection.close()


async def _facts(connection: RedisConnection) -> Facts:
    await connection.call("PING")  # connects
    trips, aheads = [], []
    for _ in range(PINGS):
        begin, begin_wall = time.monotonic(), time.time()
        seconds, microseconds = await connection.call("TIME")
        trips.append(time.monotonic() - begin)
        aheads.append(int(seconds) + int(microseconds) / 1e6 - begin_wall - trips[-1] / 2)
    info = await connection.call("INFO")  # CONFIG GET is often forbidden
    try:
        answer = await connection.call("CONFIG", "GET", "save")
        saves = {_text(name): _text(value) for name, value in _pairs(answer)}.get("save", "")
    except StoreUnavailable:
        saves = ""
    return Facts(
        product="Valkey" if "valkey_version" in info else "Redis",
        version=str(info["redis_version"]),
        policy=str(info["maxmemory_policy"]),
        appends=bool(int(info.get("aof_enabled", 0))),
        saves=saves,
        round_trip_s=statistics.median(trips),
        ahead_s=statistics.median(aheads),
    )


def _pairs(answer: object) -> list[tuple[object, object]]:
    if isinstance(answer, dict):
        return list(answer.items())
    assert isinstance(answer, list)
    return list(zip(answer[::2], answer[1::2], strict=True))


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def server(url: str, facts: Facts | BatonError) -> Iterator[Check]:
    """Check a Redis by its facts, or by the reason that there are none."""
    if isinstance(facts, BatonError):
        # This check stands for all others of the server.
        fix = f"start Redis, or run this where {without_password(url)} can be reached; a NetworkPolicy may block it"
        yield Check("redis eviction", "warn", f"not checked: {facts}", fix)
        return
    version = (
        f"{facts.product} {facts.version}" if facts.product == "Redis" else f"{facts.product} (as {facts.version})"
    )
    numbers = tuple(int(part) for part in facts.version.split(".")[:2])
    yield judged("redis version", numbers >= OLDEST, version, "Baton needs Redis 6.2 or newer, or Valkey")
    # Under any other policy Redis silently drops leases and owners when memory is short.
    yield judged(
        "redis eviction",
        facts.policy == NEVER_EVICT,
        f"maxmemory-policy is {facts.policy}",
        f"CONFIG SET maxmemory-policy {NEVER_EVICT}: evicted keys make the index wrong",
    )
    yield judged(
        "redis persistence",
        not facts.saves,
        f'save "{facts.saves}"' if facts.saves else "appendonly" if facts.appends else "off",
        'CONFIG SET save "": only accounts are worth keeping, and an old copy of them is wrong; appendonly keeps them',
        "warn",
    )
    yield judged(
        "redis round trip",
        facts.round_trip_s < SLOW_RTT_S,
        f"{facts.round_trip_s * 1e3:.1f} ms",
        "place Redis close to the workers and routers, on a dedicated CPU",
        "warn",
    )
    unsure_s = facts.round_trip_s / 2
    relation = "ahead of" if facts.ahead_s > 0 else "behind"
    yield judged(
        "clock",
        abs(facts.ahead_s) - unsure_s < CLOCK_SKEW_S,
        f"Redis' is {abs(facts.ahead_s):.3f} s {relation} this machine's (+-{unsure_s:.3f})",
        "set both clocks by NTP (`timedatectl`, chrony); workers' epochs and traces depend on them",
        "warn",
    )
