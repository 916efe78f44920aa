"""Counts of all routers over the last hour, for the web page.

Time is divided into slots of `SLOT_S` seconds of the wall clock. Every two seconds a router writes its counts of the
current slot to the store (`HistoryStore`) and reads the other routers' counts of the latest slots. So
every router has the history of all routers, including stopped ones, and a new router has the history before its start.
While the store is away, a router keeps its own counts, and writes them when the store is back.

An hour is `NUM_SLOTS` slots; older slots are dropped here and in the store. No count names a request or a tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Protocol

from baton.errors import StoreUnavailable
from baton.telemetry.prometheus import Histogram
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
TTL_MS = 3_900_000
"""Lifetime of a slot in Redis: an hour, plus a margin for clocks that differ."""
MAX_COUNTS, MAX_COUNT_NAME, MAX_COUNT = 2048, 128, 1e18
"""Limits when reading: counts of a slot, characters of a count's name, value of a count."""
SLOT_BOUNDS = HashBounds(num_fields=2048, name_bytes=MAX_NAME_BYTES, value_bytes=2**16, num_bytes=2**22)
"""Limits of a slot, which has one field per router process."""


@dataclass(frozen=True, slots=True)
class HistorySlot:
    """Sums of the routers' counts in one slot."""

    num_routers: int = 0
    """Number of routers that ran in it."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Sums by name, see `counted`."""


def counted(metrics: RequestMetrics) -> dict[str, float]:
    """Return a router's counts since its start, by name, without zeros.

    Names are, for example, `requests/met/CLASS`, `misses/STAGE` and `ttft/BOUND`, which counts values up to that bound
    and above the previous one. `ttft_of/PROMPTS/BOUND` does so for a class of prompts, see `PROMPT_CLASSES`.
    """
    counts = {
        **{f"requests/{outcome}/{name}": n for (outcome, name), n in _by(metrics, "outcome", "slo_class").items()},
        **{f"misses/{stage}": number for (stage,), number in metrics.slo_misses.totals("stage").items()},
        **{
            f"{prefix}/{bound}": number
            for prefix, histogram in _histograms(metrics).items()
            for bound, number in histogram.totals().items()
        },
        **{
            f"ttft_of/{prompts}/{bound}": number
            for prompts in (*map(str, PROMPT_CLASSES), "+Inf")
            for bound, number in metrics.time_to_first_token.totals({TO_COMPUTE: prompts}).items()
        },
        "prompt_tokens": metrics.prompt_tokens.totals().get((), 0.0),
        "cached_tokens": metrics.prefix_hit_tokens.totals().get((), 0.0),
        "seen_tokens": metrics.prefix_ceiling_tokens.totals().get((), 0.0),
        "generated_tokens": metrics.generation_tokens.totals().get((), 0.0),
        "kv_bytes": metrics.transfer_bytes.totals().get((), 0.0),
        "retries": metrics.retries.totals().get((), 0.0),
    }
    return {name: number for name, number in counts.items() if number}


def _histograms(metrics: RequestMetrics) -> dict[str, Histogram]:
    """Return the histograms whose buckets are counted, by the prefix of their counts."""
    return {
        "ttft": metrics.time_to_first_token,
        "itl": metrics.inter_token_latency,
        "duration": metrics.request_duration,
    }


def _by(metrics: RequestMetrics, *labels: str) -> Mapping[tuple[str, ...], float]:
    return metrics.requests_slo.totals(*labels)


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
        self._own: dict[int, Counts] = {}
        """This router's counts, by slot."""
        self._others: dict[int, HistorySlot] = {}
        """The other routers' counts by slot, as last read."""
        self._unwritten: set[int] = set()
        self._read_to = 0
        """The slot in which the store was last read; 0: not yet."""
        self._seen: Counts = {}
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
            await self._store.write(each, self._writer, self._own[each])
            self._unwritten.discard(each)
        first = max(slot - NUM_SLOTS + 1, self._read_to - LATE_SLOTS + 1)
        for number, found in (await self._store.read(range(first, slot + 1))).items():
            others = {writer: counts for writer, counts in found.items() if writer != self._writer}
            self._others[number] = HistorySlot(len(others), sums(others))
        self._read_to = slot
        self._forget(slot)

    def slots(self, since: int = 0) -> dict[int, HistorySlot]:
        """Return the counts of all routers by slot, oldest first.

        Args:
            since: the first slot to return.
        """
        self._forget(self._note())
        numbers = sorted(number for number in self._own.keys() | self._others.keys() if number >= since)
        return {number: self._slot(number) for number in numbers}

    def _slot(self, number: int) -> HistorySlot:
        others, own = self._others.get(number, HistorySlot()), self._own.get(number)
        if own is None:
            return others
        return HistorySlot(others.num_routers + 1, sums({"": others.counts, self._writer: own}))

    def _note(self) -> int:
        """Add the counts since the last call to the current slot, and return the slot."""
        slot = int(self._clock() // SLOT_S)
        now = counted(self._metrics)
        new = {name: number - self._seen.get(name, 0.0) for name, number in now.items()}
        self._seen = now
        self._own[slot] = sums({"": self._own.get(slot, {}), "new": {name: n for name, n in new.items() if n}})
        self._unwritten.add(slot)
        return slot

    def _forget(self, slot: int) -> None:
        oldest = slot - NUM_SLOTS + 1
        for kept in (self._own, self._others):
            for number in [number for number in kept if number < oldest]:
                del kept[number]
        self._unwritten &= self._own.keys()


def sums(parts: Mapping[str, Counts]) -> dict[str, float]:
    """Return the sums of the counts of several routers."""
    added: Counter[str] = Counter()
    for counts in parts.values():
        added.update(counts)
    return dict(added)


class HistoryStore(Protocol):
    """Interface to a store of the routers' counts. All methods raise `StoreUnavailable` if it cannot be reached."""

    async def write(self, slot: int, writer: str, counts: Counts) -> None:
        """Replace a router's counts of a slot."""

    async def read(self, slots: Iterable[int]) -> dict[int, dict[str, Counts]]:
        """Return the counts of slots by writer, without empty slots."""

    async def close(self) -> None:
        """Close the store."""


class MemoryHistory:
    """A `HistoryStore` in memory."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[str, Counts]] = {}

    async def write(self, slot: int, writer: str, counts: Counts) -> None:
        self._slots.setdefault(slot, {})[writer] = dict(counts)

    async def read(self, slots: Iterable[int]) -> dict[int, dict[str, Counts]]:
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

    async def write(self, slot: int, writer: str, counts: Counts) -> None:
        key, field = self._keys.history(slot), writer.encode()
        value = json.dumps(counts, separators=(",", ":")).encode()
        stored = value if self._seal is None else self._seal.close(key, field, value)
        put = ("HSET", key, field, stored), ("PEXPIRE", key, TTL_MS)
        written, _ = await self._connection.pipeline(list(put))
        if isinstance(written, BadValue):
            self._connection.note(key, written.reason)
            await self._connection.pipeline([("UNLINK", key), *put])

    async def read(self, slots: Iterable[int]) -> dict[int, dict[str, Counts]]:
        read = {slot: await self._of(self._keys.history(slot)) for slot in slots}
        return {slot: writers for slot, writers in read.items() if writers}

    async def close(self) -> None:
        await self._connection.close()

    async def _of(self, key: str) -> dict[str, Counts]:
        """Return the counts under a key by writer, without unreadable ones."""
        writers: dict[str, Counts] = {}
        names: set[str] = set()
        async for found in pairs(self._connection, key, SLOT_BOUNDS):
            try:
                if isinstance(found, BadValue):
                    raise ValueError(found.reason)
                writer, stored = found
                counts = _decoded(stored if self._seal is None else self._seal.open(key, writer, stored))
                if len(names.union(counts)) > MAX_COUNTS:
                    raise ValueError(f"the slot has more than {MAX_COUNTS} counts")
                writers[writer.decode()] = counts
                names.update(counts)
            except ValueError as error:
                self._connection.note(key, error)
        return writers


def _decoded(value: bytes) -> Counts:
    """Decode the counts of a router.

    Raises:
        ValueError: the value is malformed.
    """
    try:
        counts = json.loads(value)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    if not isinstance(counts, dict) or not all(starmap(_is_count, counts.items())):
        raise ValueError("malformed counts of a router")
    return counts


def _is_count(name: str, value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= MAX_COUNT and len(name) <= MAX_COUNT_NAME
