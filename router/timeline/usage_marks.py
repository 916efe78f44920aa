"""Stores of the marks of `router.timeline.usage_record`: in Redis, or in memory for one router."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvstore.index import RedisConnection, Seal
from kvstore.index.connection import BadValue, Script
from kvstore.index.keys import Keys
from kvstore.index.reads import string
from kvstore.leases import RecordKey
from router.timeline.usage_record import HOLD_S, UsageMark

SWAP = Script("router.timeline", "usage_swap.lua")
DUE = Script("router.timeline", "usage_due.lua")
MARK_TTL_MS = 3_600_000
HELD_TTL_MS = 7 * 86_400_000
"""Lifetime of a mark that holds a record: all routers may be down for a while."""
MAX_DUE = 100
"""Maximum number of marks per sweep."""
MARK_BYTES = 2**16
"""Maximum size of a mark."""
MEMBER_BYTES = 2**14
"""Maximum size of a member of the list of marks that hold a record."""


class FoundMark(NamedTuple):
    """A mark as read from the store."""

    stored: bytes | None = None
    """The stored bytes; None: there are none."""
    mark: UsageMark | None = None
    """The decoded mark; None: there is none, or it is unreadable and the next one replaces it."""


class MarkStore(Protocol):
    """Interface to a store of marks.

    Every method raises `StoreUnavailable` if the store cannot be reached. It may or may not have had an effect then.
    """

    async def get(self, key: RecordKey) -> FoundMark:
        """Return the mark of a request."""

    async def swap(self, key: RecordKey, old: FoundMark, new: UsageMark) -> bool:
        """Replace the mark `old` by `new`; return False if the stored mark is no longer `old`."""

    async def due(self) -> list[RecordKey]:
        """Return up to MAX_DUE requests whose marks have held a record for HOLD_S; some may no longer hold one."""

    async def forget_due(self, key: RecordKey) -> None:
        """Remove a request whose mark holds no record from the list of due requests."""

    async def close(self) -> None:
        """Close the store."""


class MemoryMarks:
    """A `MarkStore` in memory.

    Args:
        clock: wall time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._marks: dict[RecordKey, bytes] = {}
        self._due_s: dict[RecordKey, float] = {}

    async def get(self, key: RecordKey) -> FoundMark:
        stored = self._marks.get(key)
        return FoundMark() if stored is None else FoundMark(stored, UsageMark.decode(stored))

    async def swap(self, key: RecordKey, old: FoundMark, new: UsageMark) -> bool:
        if self._marks.get(key) != old.stored:
            return False
        self._marks[key] = new.encode()
        self._due_s.pop(key, None)
        if new.held is not None:
            self._due_s[key] = self._clock() + HOLD_S
        return True

    async def due(self) -> list[RecordKey]:
        now = self._clock()
        return [key for key, due_s in self._due_s.items() if due_s <= now][:MAX_DUE]

    async def forget_due(self, key: RecordKey) -> None:
        self._due_s.pop(key, None)

    async def close(self) -> None:
        """Nothing to close."""


class RedisMarks:
    """A `MarkStore` in Redis. Owns `connection`: `close` closes it.

    Args:
        clock: wall time in seconds.
        seal: encrypts and authenticates the marks; None: they are stored in plain text and not verified.
    """

    def __init__(
        self,
        connection: RedisConnection,
        namespace: str,
        clock: Callable[[], float] = time.time,
        *,
        seal: Seal | None = None,
    ) -> None:
        self._connection = connection
        self._seal = seal
        self._keys = Keys(namespace)
        self._clock = clock

    async def get(self, key: RecordKey) -> FoundMark:
        name = self._name(key)
        found = await string(self._connection, name, MARK_BYTES)
        if isinstance(found, BadValue):
            self._connection.note(name, found.reason)
            return FoundMark()
        if found is None:
            return FoundMark()
        try:
            opened = found if self._seal is None else self._seal.open(name, b"", found)
            return FoundMark(found, UsageMark.decode(opened))
        except ValueError as error:
            self._connection.note(name, error)
            return FoundMark(found)

    async def swap(self, key: RecordKey, old: FoundMark, new: UsageMark) -> bool:
        name = self._name(key)
        stored = new.encode() if self._seal is None else self._seal.close(name, b"", new.encode())
        due_ms = "" if new.held is None else int((self._clock() + HOLD_S) * 1000)
        life_ms = MARK_TTL_MS if new.held is None else HELD_TTL_MS
        (has_changed,) = await self._connection.run(
            SWAP, [name, self._keys.held], old.stored or b"", stored, life_ms, _member(key), due_ms, MARK_BYTES
        )
        return bool(has_changed)

    async def due(self) -> list[RecordKey]:
        now_ms = int(self._clock() * 1000)
        (found,) = await self._connection.run(DUE, [self._keys.held], now_ms, MAX_DUE, MEMBER_BYTES)
        keys = []
        for member in found:
            try:
                tenant_id, request_id = json.loads(member)
                keys.append(RecordKey(str(tenant_id), str(request_id)))
            except (ValueError, TypeError, RecursionError) as error:
                self._connection.note(self._keys.held, error)
                await self._connection.call("ZREM", self._keys.held, member)
        return keys

    async def forget_due(self, key: RecordKey) -> None:
        await self._connection.call("ZREM", self._keys.held, _member(key))

    async def close(self) -> None:
        await self._connection.close()

    def _name(self, key: RecordKey) -> str:
        return self._keys.usage(key.tenant_id, key.request_id)


def _member(key: RecordKey) -> str:
    return json.dumps([key.tenant_id, key.request_id])
