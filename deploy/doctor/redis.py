"""Checks of the Redis with leases and owners, and of the leases in it. They write nothing."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from redis.exceptions import NoPermissionError

from baton.blocks import KEY_BYTES
from baton.cluster import StoreGarbage, Worker
from baton.config import without_password
from baton.errors import BatonError, StoreUnavailable
from baton.tls import Tls
from deploy.doctor.checks import Check, judged, names
from kvstore.index import RedisConnection, reads
from kvstore.index.connection import BadValue
from kvstore.index.keys import Keys
from kvstore.index.values import MAX_NAME_BYTES
from kvstore.leases.codec import MAX_BYTES, decode_worker

OLDEST = (6, 2)
PINGS = 5
SLOW_RTT_S = 0.01
CLOCK_SKEW_S = 2.0
FULL = 0.9
TIMEOUT_S = 3.0
"""Timeout of one reply of Redis, in seconds."""
SCANS, SCAN_KEYS = 50, 1000
"""Limits of the search for clusters: number of steps, and keys per step."""
WORKER_SETS = Keys("?" * 2 * KEY_BYTES).workers
"""Pattern of the keys of worker sets; keys of another length do not match."""
MAX_SETS, MAX_NAMES, MAX_LEASES = 64, 20_000, 512
"""Limits: number of clusters, names in one cluster's set, and leases of one cluster."""
LEASE_FIELDS = {"info": MAX_BYTES, "load": MAX_BYTES}
NO_KEY = -2
"""PTTL of a key that does not exist."""
NEVER_EVICT = "noeviction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Properties that a Redis reports."""

    product: str
    version: str
    """Version of Redis, or the one that it is compatible with."""
    policy: str
    evicted: int
    used_bytes: int
    limit_bytes: int
    """0: no limit."""
    appends: bool
    """Redis appends every change to a file."""
    saves: str
    """Snapshot rules, as in `CONFIG GET save`; empty: none, or unknown."""
    round_trip_s: float
    ahead_s: float
    """Seconds by which Redis' clock is ahead of ours."""


@dataclass(frozen=True, slots=True)
class FoundLease:
    """Worker that has a lease in Redis."""

    worker: Worker
    left_s: float
    """Time until the lease expires, in seconds."""
    version: str
    """Baton's version of the worker; empty: unknown."""


@dataclass(frozen=True, slots=True)
class Look:
    """Snapshot of a Redis."""

    facts: Facts
    leases: tuple[FoundLease, ...]
    """Leases of every cluster in this Redis."""
    garbage: tuple[StoreGarbage, ...] = ()
    """Leases that cannot be parsed."""


def look(url: str, tls: Tls | None = None) -> Look:
    """Read the facts and leases of a Redis. Raises StoreUnavailable or ConfigError."""
    return asyncio.run(_look(url, tls))


async def _look(url: str, tls: Tls | None = None) -> Look:
    connection = RedisConnection(url, tls=tls)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            facts, leases = await _facts(connection), await _leases(connection)
            return Look(facts, tuple(leases), connection.garbage.seen())
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
        evicted=int(info["evicted_keys"]),
        used_bytes=int(info["used_memory"]),
        limit_bytes=int(info["maxmemory"]),
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


async def _worker_sets(connection: RedisConnection) -> list[str]:
    """Return the keys of all namespaces' worker sets; none if the Redis user may not scan keys."""
    found, cursor = set(), 0
    for _ in range(SCANS):
        try:
            cursor, keys = await connection.call("SCAN", cursor, "MATCH", WORKER_SETS, "COUNT", SCAN_KEYS)
        except StoreUnavailable as error:
            if isinstance(error.__cause__, NoPermissionError):
                return []
            raise
        found |= {_text(key) for key in keys}
        cursor = int(cursor)
        if not cursor or len(found) >= MAX_SETS:
            break
    return sorted(found)[:MAX_SETS]


async def _leases(connection: RedisConnection) -> list[FoundLease]:
    """Return the leases of every namespace; a router sees only those of its own model."""
    leases = []
    for key in await _worker_sets(connection):
        keys_of = Keys(key[key.index("{") + 1 : key.rindex("}")])
        left_ms = await _lives(connection, key, keys_of)
        found = reads.hashes(connection, [keys_of.lease(each) for each in left_ms], LEASE_FIELDS)
        names = iter(left_ms)
        async for row in found:
            worker_id = next(names)
            if row is None or (not isinstance(row, BadValue) and None in row):
                continue
            try:
                if isinstance(row, BadValue):
                    raise ValueError(row.reason)
                info, load = row
                worker = decode_worker(info or b"", load or b"")
            except ValueError as error:
                connection.note(keys_of.lease(worker_id), error)
            else:
                leases.append(FoundLease(worker, left_ms[worker_id] / 1e3, worker.info.version))
    return leases


async def _lives(connection: RedisConnection, key: str, keys_of: Keys) -> dict[str, int]:
    """Return the remaining lifetime in ms of the leases whose ids are in a set."""
    found: dict[str, int] = {}
    num_seen = 0
    async for members in reads.members(connection, key, MAX_NAME_BYTES):
        if isinstance(members, BadValue):
            connection.note(key, members.reason)
            continue
        ids = [each.decode(errors="replace") for each in members]  # an invalid name has no lease
        lives = await connection.pipeline([("PTTL", keys_of.lease(each)) for each in ids])
        found |= {each: max(0, life) for each, life in zip(ids, lives, strict=True) if life != NO_KEY}
        num_seen += len(members)
        if num_seen >= MAX_NAMES or len(found) >= MAX_LEASES:
            break
    return dict(sorted(found.items()))


def server(url: str, seen: Look | BatonError) -> Iterator[Check]:
    if isinstance(seen, BatonError):
        # This check stands for all others of the server.
        fix = f"start Redis, or run this where {without_password(url)} can be reached; a NetworkPolicy may block it"
        yield Check("redis eviction", "warn", f"not checked: {seen}", fix)
        return
    facts = seen.facts
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
    if facts.evicted:
        yield Check(
            "redis evicted keys",
            "warn",
            f"{facts.evicted} since it started",
            f"set maxmemory-policy {NEVER_EVICT} from the start, and use a separate Redis for Baton",
        )
    if facts.limit_bytes:
        share = facts.used_bytes / facts.limit_bytes
        yield judged(
            "redis memory",
            share < FULL,
            f"{share:.0%} of {facts.limit_bytes / 2**20:,.0f} MiB",
            "raise maxmemory: when Redis is full, workers cannot publish their cached prefixes",
            "warn",
        )
    kept = [what for what, is_so in (("appendonly", facts.appends), (f'save "{facts.saves}"', facts.saves)) if is_so]
    yield judged(
        "redis persistence",
        not kept,
        " and ".join(kept) or "off",
        'CONFIG SET save "" and appendonly no: old state is useless after a restart, and writing it costs time',
        "warn",
    )
    yield judged(
        "redis round trip",
        facts.round_trip_s < SLOW_RTT_S,
        f"{facts.round_trip_s * 1e3:.1f} ms",
        "place Redis close to the workers and routers, on a dedicated CPU",
        "warn",
    )
    yield clock(facts)


def clock(facts: Facts) -> Check:
    """Return the check of Redis' clock, within the accuracy of the round trip."""
    unsure_s = facts.round_trip_s / 2
    is_good = abs(facts.ahead_s) - unsure_s < CLOCK_SKEW_S
    relation = "ahead of" if facts.ahead_s > 0 else "behind"
    return judged(
        "clock",
        is_good,
        f"Redis' is {abs(facts.ahead_s):.3f} s {relation} this machine's (+-{unsure_s:.3f})",
        "set both clocks by NTP (`timedatectl`, chrony); workers' epochs and traces depend on them",
        "warn",
    )


def leases(seen: Look, lease_s: float, now_s: Callable[[], float] = time.time) -> Iterator[Check]:
    """Checks of the workers, from their leases.

    Args:
        lease_s: the setting `index.lease_s`.
        now_s: this machine's wall clock.
    """
    for each in seen.garbage:
        yield Check(
            "redis values",
            "warn",
            f"{each.what} cannot be read: {each.latest}",
            "its worker rewrites it within seconds; if it stays, another program writes to this Redis: DEL it",
        )
    if not seen.leases:
        return
    late = {
        f"{lease.worker.info.label}: {lease.left_s:.1f} s left" for lease in seen.leases if lease.left_s < lease_s / 2
    }
    yield judged(
        "leases",
        not late,
        f"{len(seen.leases)}, all renewed in time" if not late else f"renewed late: {names(late)} of {lease_s:g}",
        "these workers or their connections to Redis are overloaded: check their nodes' CPU and network",
        "warn",
    )
    # A worker's epoch is its own clock's milliseconds when it joined.
    redis_now_s = now_s() + seen.facts.ahead_s
    ahead: dict[str, float] = {}
    for lease in seen.leases:
        info = lease.worker.info
        if (by_s := info.epoch / 1e3 - redis_now_s) > CLOCK_SKEW_S:
            ahead[info.node] = max(by_s, ahead.get(info.node, 0.0))
    fast = {f"{node} by {by_s:.0f} s or more" for node, by_s in ahead.items()}
    yield judged(
        "clocks of the nodes",
        not fast,
        f"ahead: {names(fast)}" if fast else "none is ahead",
        "set the clocks of these nodes by NTP",
        "warn",
    )
    yield from kv_compatibility([lease.worker for lease in seen.leases])


def kv_compatibility(workers: Sequence[Worker]) -> Iterator[Check]:
    """Check that the workers can exchange KV and share cached prefixes."""
    by_content: dict[str, list[Worker]] = defaultdict(list)
    for worker in workers:
        by_content[worker.info.content_id].append(worker)
    if len(by_content) > 1:
        groups = "; ".join(
            f"{content[:8]}: {names(w.info.label for w in group)}" for content, group in by_content.items()
        )
        yield Check(
            "model of the workers",
            "warn",
            f"{len(by_content)} models in one Redis ({groups})",
            "expected during an upgrade to another model; otherwise give each cluster a separate Redis (or DB)",
        )
    for group in by_content.values():
        kinds = by_value((w.info.label, w.info.wire_compat[:8]) for w in group)
        yield kv_kinds(kinds)
        yield from shapes([(w.info.id, w.info.role.value, w.info.block_size, w.info.chunk_tokens) for w in group])
        lengths = by_value((w.info.label, str(w.info.max_model_len)) for w in group)
        if len(lengths) > 1:
            yield Check(
                "context of the workers",
                "warn",
                listed(lengths),
                "the smallest value limits the cluster: set the same engine.max_model_len and engine.kv_cache_gib for "
                "all workers",
            )


def kv_kinds(kinds: dict[str, list[str]]) -> Check:
    """Args:
    kinds: wire_compat -> workers.
    """
    if len(kinds) > 1:
        return Check(
            "kv compatibility",
            "fail",
            f"{len(kinds)} kinds of KV: {listed(kinds)}",
            "workers of different kinds refuse each other's KV, and such requests are recomputed: use the same "
            "release, model revision and engine.kv_dtype for all (helm upgrade, or `baton drain` one after the other)",
        )
    return Check("kv compatibility", "ok", "all workers can transfer KV to each other")


def shapes(workers: Sequence[tuple[str, str, int, int]]) -> Iterator[Check]:
    """Args:
    workers: id, role, block size, chunk tokens.
    """
    for name, column in (("block size", 2), ("chunk tokens", 3)):
        for role in sorted({worker[1] for worker in workers}):
            found = by_value((worker[0], str(worker[column])) for worker in workers if worker[1] == role)
            if len(found) > 1:
                yield Check(
                    f"{name} in pool {role}",
                    "warn",
                    listed(found),
                    "they work together, but not at the same speed: use one configuration per pool",
                )


def by_value(pairs: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Group names by value: value -> names."""
    found: dict[str, list[str]] = defaultdict(list)
    for who, value in pairs:
        found[value].append(who)
    return dict(found)


def listed(found: dict[str, list[str]]) -> str:
    return "; ".join(f"{value}: {names(who)}" for value, who in sorted(found.items()))
