"""Counts of all routers over the last hour, by model, for the web page.

Time is divided into slots of `SLOT_S` seconds of the wall clock. Every two seconds a router writes its counts of the
current slot to the store (`HistoryStore`) and reads the other routers' counts of the latest slots. So
every router has the history of all routers, including stopped ones, and a new router has the history before its start.
While the store is away, a router keeps its own counts, and writes them when the store is back.

An hour is `NUM_SLOTS` slots; older slots are dropped here and in the store. No count names a request or a tenant.
Counts are kept by release of a model, so that those of one model are right for the whole hour, whenever others came.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Protocol

from baton.errors import StoreUnavailable
from baton.telemetry.prometheus import Counter, Histogram
from baton.telemetry.request_metrics import PROMPT_CLASSES, TO_COMPUTE, RequestMetrics
from kvstore.index import RedisConnection, Seal
from kvstore.index.connection import BadValue
from kvstore.index.keys import Keys
from kvstore.index.reads import HashBounds, pairs
from kvstore.index.values import MAX_NAME_BYTES

SLOT_S = 10
NUM_SLOTS = 360
LATE_SLOTS = 6
"""Number of latest slots that are read repeatedly: other routers still write to them, some with a slow clock."""
PERIOD_S = 2.0
Counts = Mapping[str, float]
"""Numbers by name."""
ModelCounts = Mapping[str, Counts]
"""Counts by release of a model; empty: of no model, or of a release of Baton that served one."""
TTL_MS = 3_900_000
"""Lifetime of a slot in Redis: an hour, plus a margin for clocks that differ."""
MAX_RELEASES, MAX_COUNTS, MAX_COUNT_NAME, MAX_COUNT = 256, 8192, 128, 1e18
"""Limits when reading: releases of a slot, their counts, characters of a count's name, value of a count.

A busy model has about 100 counts, and only models with requests in a slot have any.
"""
SLOT_BOUNDS = HashBounds(num_fields=2048, name_bytes=MAX_NAME_BYTES, value_bytes=2**18, num_bytes=2**22)
"""Limits of a slot, which has one field per router process."""


@dataclass(frozen=True, slots=True)
class HistorySlot:
    """Sums of the routers' counts in one slot."""

    num_routers: int = 0
    """Number of routers that ran in it."""
    counts: Counts = field(default_factory=dict)
    """Sums by name, see `counted`."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The sums of the counts of one slot."""

    num_routers: int = 0
    models: ModelCounts = field(default_factory=dict)
    whole: Counts = field(default_factory=dict)
    """Sums over all models, which are added up once, and not for each reader."""

    @staticmethod
    def of(parts: Collection[ModelCounts]) -> _Kept:
        """Return the sums of the counts of several routers."""
        models = merged(parts)
        return _Kept(len(parts), models, sums(models.values()))

    def of_releases(self, releases: Collection[str]) -> Counts:
        """Return the sums over some releases; none: over all models."""
        return sums(self.models[each] for each in releases if each in self.models) if releases else self.whole


def counted(metrics: RequestMetrics) -> dict[str, dict[str, float]]:
    """Return a router's counts since its start, by release and name, without zeros.

    Names are, for example, `requests/met/CLASS`, `misses/STAGE` and `ttft/BOUND`, which counts values up to that bound
    and above the previous one. `ttft_of/PROMPTS/BOUND` does so for a class of prompts, see `PROMPT_CLASSES`.
    """
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for release, name, number in _counts(metrics):
        if number:
            found[release][name] = found[release].get(name, 0.0) + number
    return dict(found)


def _counts(metrics: RequestMetrics) -> Iterator[tuple[str, str, float]]:
    """Yield releases, names and numbers; a pair may come more than once."""
    for (release, outcome, slo_class), number in metrics.requests_slo.totals("release", "outcome", "slo_class").items():
        yield release, f"requests/{outcome}/{slo_class}", number
    for (release, stage), number in metrics.slo_misses.totals("release", "stage").items():
        yield release, f"misses/{stage}", number
    for prefix, histogram in _histograms(metrics).items():
        for (release, prompts), buckets in histogram.totals("release", TO_COMPUTE).items():
            for bound, number in buckets.items():
                yield release, f"{prefix}/{bound}", number
                if prefix == "ttft" and prompts:
                    yield release, f"ttft_of/{prompts}/{bound}", number
    for name, counter in _counters(metrics).items():
        for (release,), number in counter.totals("release").items():
            yield release, name, number


def _counters(metrics: RequestMetrics) -> dict[str, Counter]:
    """Return the counters whose values are counted, by the name of their counts."""
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.prefix_hit_tokens,
        "seen_tokens": metrics.prefix_ceiling_tokens,
        "generated_tokens": metrics.generation_tokens,
        "kv_bytes": metrics.transfer_bytes,
        "retries": metrics.retries,
    }


def _histograms(metrics: RequestMetrics) -> dict[str, Histogram]:
    """Return the histograms whose buckets are counted, by the prefix of their counts."""
    return {
        "ttft": metrics.time_to_first_token,
        "itl": metrics.inter_token_latency,
        "duration": metrics.request_duration,
    }


class ClusterHistory:
    """Keeps the history current while `run` runs. Owns `store`: `close` closes it.

    Args:
        writer: name of this process, unique among all that have written in the last hour.
        metrics: the metrics of this router.
        clock: wall time in seconds.
    """

    def __init__(
        self, store: HistoryStore, writer: str, metrics: RequestMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._own: dict[int, _Kept] = {}
        """This router's counts, by slot."""
        self._others: dict[int, _Kept] = {}
        """The other routers' counts by slot, as last read."""
        self._unwritten: set[int] = set()
        self._read_to = 0
        """The slot in which the store was last read; 0: not yet."""
        self._seen: ModelCounts = {}
        """The metrics' values at the last look."""

    @property
    def bounds(self) -> dict[str, list[float]]:
        """Upper bounds of the histograms and of the classes of prompts by prefix, without the infinite ones."""
        bounds = {prefix: list(histogram.bounds) for prefix, histogram in _histograms(self._metrics).items()}
        return {**bounds, "ttft_of": list(map(float, PROMPT_CLASSES))}

    async def run(self) -> None:
        """Exchange counts every `PERIOD_S` until cancelled. While the store is away, keep the router's own counts."""
        while True:
            with contextlib.suppress(StoreUnavailable):  # the registry reports it
                await self.look()
            await asyncio.sleep(PERIOD_S)

    async def close(self) -> None:
        """Write new counts if the store can be reached, and close it."""
        with contextlib.suppress(StoreUnavailable):
            await self.look()
        await self._store.close()

    async def look(self) -> None:
        """Write the counts since the last look, and read those of other routers.

        Raises:
            StoreUnavailable: the new counts are kept, and are written at the next look.
        """
        slot = self._note()
        for each in sorted(self._unwritten):
            await self._store.write(each, self._writer, self._own[each].models)
            self._unwritten.discard(each)
        first = max(slot - NUM_SLOTS + 1, self._read_to - LATE_SLOTS + 1)
        for number, found in (await self._store.read(range(first, slot + 1))).items():
            self._others[number] = _Kept.of([each for writer, each in found.items() if writer != self._writer])
        self._read_to = slot
        self._forget(slot)

    def slots(self, since: int = 0, releases: Collection[str] = ()) -> dict[int, HistorySlot]:
        """Return the counts of all routers by slot, oldest first.

        Args:
            since: the first slot to return.
            releases: releases of models whose counts are returned; none: those of all models.
        """
        self._forget(self._note())
        numbers = sorted(number for number in self._own.keys() | self._others.keys() if number >= since)
        return {number: self._slot(number, releases) for number in numbers}

    def _slot(self, number: int, releases: Collection[str]) -> HistorySlot:
        kept = [slots[number] for slots in (self._others, self._own) if number in slots]
        return HistorySlot(sum(each.num_routers for each in kept), sums(each.of_releases(releases) for each in kept))

    def _note(self) -> int:
        """Add the counts since the last call to the current slot, and return the slot."""
        slot = int(self._clock() // SLOT_S)
        now = counted(self._metrics)
        new = {release: _grown(counts, self._seen.get(release, {})) for release, counts in now.items()}
        self._seen = now
        before = self._own.get(slot, _Kept())
        self._own[slot] = _Kept.of([merged((before.models, {release: each for release, each in new.items() if each}))])
        self._unwritten.add(slot)
        return slot

    def _forget(self, slot: int) -> None:
        oldest = slot - NUM_SLOTS + 1
        for kept in (self._own, self._others):
            for number in [number for number in kept if number < oldest]:
                del kept[number]
        self._unwritten &= self._own.keys()


def sums(parts: Iterable[Counts]) -> Counts:
    """Return the sums of counts."""
    given = [each for each in parts if each]
    if len(given) == 1:
        return given[0]
    added: defaultdict[str, float] = defaultdict(float)
    for counts in given:
        for name, number in counts.items():
            added[name] += number
    return dict(added)


def merged(parts: Iterable[ModelCounts]) -> ModelCounts:
    """Return the sums of counts by release."""
    by_release: defaultdict[str, list[Counts]] = defaultdict(list)
    for models in parts:
        for release, counts in models.items():
            by_release[release].append(counts)
    return {release: sums(each) for release, each in by_release.items()}


def _grown(now: Counts, before: Counts) -> dict[str, float]:
    """Return the differences between two looks at counters, without zeros."""
    new = {name: number - before.get(name, 0.0) for name, number in now.items()}
    return {name: number for name, number in new.items() if number}


class HistoryStore(Protocol):
    """Interface to a store of the routers' counts. All methods raise `StoreUnavailable` if it cannot be reached."""

    async def write(self, slot: int, writer: str, models: ModelCounts) -> None:
        """Replace a router's counts of a slot."""

    async def read(self, slots: Iterable[int]) -> dict[int, dict[str, ModelCounts]]:
        """Return the counts of slots by writer, without empty slots."""

    async def close(self) -> None:
        """Close the store."""


class MemoryHistory:
    """A `HistoryStore` in memory."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[str, ModelCounts]] = {}

    async def write(self, slot: int, writer: str, models: ModelCounts) -> None:
        self._slots.setdefault(slot, {})[writer] = dict(models)

    async def read(self, slots: Iterable[int]) -> dict[int, dict[str, ModelCounts]]:
        return {slot: dict(self._slots[slot]) for slot in slots if slot in self._slots}

    async def close(self) -> None:
        """Nothing to close."""


class RedisHistory:
    """A `HistoryStore` in Redis. Owns `connection`: `close` closes it.

    Args:
        seal: encrypts and authenticates the counts; None: they are stored in plain text and not verified.
    """

    def __init__(self, connection: RedisConnection, namespace: str, *, seal: Seal | None = None) -> None:
        self._connection = connection
        self._keys = Keys(namespace)
        self._seal = seal

    async def write(self, slot: int, writer: str, models: ModelCounts) -> None:
        key, field = self._keys.history(slot), writer.encode()
        value = json.dumps(models, separators=(",", ":")).encode()
        stored = value if self._seal is None else self._seal.close(key, field, value)
        put = ("HSET", key, field, stored), ("PEXPIRE", key, TTL_MS)
        written, _ = await self._connection.pipeline(list(put))
        if isinstance(written, BadValue):
            self._connection.note(key, written.reason)
            await self._connection.pipeline([("UNLINK", key), *put])

    async def read(self, slots: Iterable[int]) -> dict[int, dict[str, ModelCounts]]:
        read = {slot: await self._of(self._keys.history(slot)) for slot in slots}
        return {slot: writers for slot, writers in read.items() if writers}

    async def close(self) -> None:
        await self._connection.close()

    async def _of(self, key: str) -> dict[str, ModelCounts]:
        """Return the counts under a key by writer, without unreadable ones."""
        writers: dict[str, ModelCounts] = {}
        names: set[tuple[str, str]] = set()
        async for found in pairs(self._connection, key, SLOT_BOUNDS):
            try:
                if isinstance(found, BadValue):
                    raise ValueError(found.reason)
                writer, stored = found
                models = _decoded(stored if self._seal is None else self._seal.open(key, writer, stored))
                own = {(release, name) for release, counts in models.items() for name in counts}
                if len(names | own) > MAX_COUNTS or len({release for release, _ in names | own}) > MAX_RELEASES:
                    raise ValueError(f"the slot has more than {MAX_COUNTS} counts, or {MAX_RELEASES} releases")
                writers[writer.decode()] = models
                names |= own
            except ValueError as error:
                self._connection.note(key, error)
        return writers


def _decoded(value: bytes) -> ModelCounts:
    """Decode the counts of a router: by release, or plain ones of a router that served one model.

    Raises:
        ValueError: the value is malformed.
    """
    try:
        decoded = json.loads(value)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    if not isinstance(decoded, dict):
        raise ValueError("malformed counts of a router")
    models = decoded if all(isinstance(each, dict) for each in decoded.values()) else {"": decoded}
    if any(len(release) > MAX_NAME_BYTES for release in models):
        raise ValueError("the name of a release is too long")
    return {release: _checked(counts) for release, counts in models.items() if counts}


def _checked(counts: dict[str, object]) -> Counts:
    """Return counts as they are kept. Raises ValueError if they are malformed."""
    if not all(starmap(_is_count, counts.items())):
        raise ValueError("malformed counts of a router")
    # One copy of each name: a router keeps the counts of an hour.
    return {sys.intern(name): number for name, number in counts.items()}  # type: ignore[misc]


def _is_count(name: str, value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= MAX_COUNT and len(name) <= MAX_COUNT_NAME
