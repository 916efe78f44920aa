"""Where routers put what they count, for one another's history: in Redis, or in memory for one router."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from kvstore.index import RedisConnection, Seal
from kvstore.index.connection import WrongType
from kvstore.index.keys import Keys

Counts = Mapping[str, float]
"""Numbers by name."""
TTL_MS = 3_900_000
"""Life of a slot in Redis: an hour, and a while for clocks that differ."""
MAX_WRITERS, MAX_COUNTS, MAX_BYTES = 256, 2048, 65_536
"""Most writers of a slot, counts of a writer, and bytes of them, that are read."""


class HistoryStore(Protocol):
    """The store of what routers counted. Every method raises `StoreUnavailable` when it cannot be reached."""

    async def write(self, slot: int, writer: str, counts: Counts) -> None:
        """Puts a router's counts of a slot in the place of those that it has written before."""

    async def read(self, slots: Iterable[int]) -> dict[int, dict[str, Counts]]:
        """Returns the counts of slots, by writer; nothing for slots in which nobody has written."""

    async def close(self) -> None:
        """Closes the store."""


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
        seal: seals what is written; None: it lies open, and everything that can be read is believed.
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
        if isinstance(written, WrongType):
            self._connection.note(key, written.reason)
            await self._connection.pipeline([("UNLINK", key), *put])

    async def read(self, slots: Iterable[int]) -> dict[int, dict[str, Counts]]:
        wanted = {slot: self._keys.history(slot) for slot in slots}
        found = await self._connection.pipeline([("HGETALL", key) for key in wanted.values()])
        read = {slot: self._of(key, fields) for (slot, key), fields in zip(wanted.items(), found, strict=True)}
        return {slot: writers for slot, writers in read.items() if writers}

    async def close(self) -> None:
        await self._connection.close()

    def _of(self, key: str, fields: Any) -> dict[str, Counts]:
        """The counts under a key, by writer, without those that cannot be read."""
        if isinstance(fields, WrongType):
            self._connection.note(key, fields.reason)
            return {}
        writers: dict[str, Counts] = {}
        for writer, stored in list(fields.items())[:MAX_WRITERS]:
            try:
                value = stored if self._seal is None else self._seal.open(key, writer, stored)
                writers[writer.decode()] = _decoded(value)
            except ValueError as error:
                self._connection.note(key, error)
        return writers


def _decoded(value: bytes) -> Counts:
    """Raises ValueError: it is no counts of a router."""
    counts = json.loads(value) if len(value) <= MAX_BYTES else None
    if not isinstance(counts, dict) or len(counts) > MAX_COUNTS or not all(map(_is_count, counts.values())):
        raise ValueError("it is no counts of a router")
    return counts


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
