"""Stores for the counts that routers share for their history: in Redis, or in memory for one router."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import starmap
from typing import Protocol

from kvstore.index import RedisConnection, Seal
from kvstore.index.connection import BadValue
from kvstore.index.keys import Keys
from kvstore.index.reads import HashBounds, pairs
from kvstore.index.values import MAX_NAME_BYTES

Counts = Mapping[str, float]
"""Numbers by name."""
TTL_MS = 3_900_000
"""Lifetime of a slot in Redis: an hour, plus a margin for clocks that differ."""
MAX_COUNTS, MAX_COUNT_NAME, MAX_COUNT = 2048, 128, 1e18
"""Limits when reading: counts of a slot, characters of a count's name, value of a count."""
SLOT_BOUNDS = HashBounds(num_fields=2048, name_bytes=MAX_NAME_BYTES, value_bytes=2**16, num_bytes=2**22)
"""Limits of a slot, which has one field per router process."""


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
