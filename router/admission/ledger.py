"""Ledgers of the tenants' use of their limits: in Redis, shared by all routers, or in memory for one router."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from kvstore.index import RedisConnection
from kvstore.index.connection import Script
from kvstore.index.keys import Keys
from router.admission.account import SPANS, WINDOWS_MS, Account, LedgerAnswer, LedgerEntry

BOOK = Script("router.admission", "ledger.lua")


class Ledger(Protocol):
    """Interface to the tenants' accounts."""

    async def book(self, entry: LedgerEntry) -> LedgerAnswer:
        """Record an entry atomically.

        Raises:
            StoreUnavailable: the store cannot be reached. The entry may or may not be recorded.
        """

    async def close(self) -> None:
        """Close the ledger."""


class MemoryLedger:
    """A `Ledger` in memory.

    Args:
        clock: wall time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._accounts: dict[str, Account] = {}
        self._clock = clock

    async def book(self, entry: LedgerEntry) -> LedgerAnswer:
        return self.book_now(entry)

    def book_now(self, entry: LedgerEntry) -> LedgerAnswer:
        """Record without waiting; see `Ledger.book`."""
        return self._accounts.setdefault(entry.tenant_id, Account()).book(entry, int(self._clock() * 1000))

    async def close(self) -> None:
        """Nothing to close."""


class RedisLedger:
    """A `Ledger` in Redis: one script call per entry. Owns `connection`: `close` closes it.

    Args:
        clock: wall time in seconds; None: the clock of Redis, which all routers share.
    """

    def __init__(self, connection: RedisConnection, namespace: str, clock: Callable[[], float] | None = None) -> None:
        self._connection = connection
        self._keys = Keys(namespace)
        self._clock = clock

    async def book(self, entry: LedgerEntry) -> LedgerAnswer:
        now = int(self._clock() * 1000) if self._clock is not None else ""
        windows = zip(WINDOWS_MS, entry.limits, entry.needs, entry.amounts, strict=True)
        refused_by, retry_ms, used, reset_ms, num_in_flight, num_reserved = await self._connection.run(
            BOOK,
            [self._keys.account(entry.tenant_id)],
            *(now, SPANS, entry.writer, entry.version, entry.num_held, entry.num_asked),
            *("" if entry.max_in_flight is None else entry.max_in_flight, entry.lease_ms),
            *(entry.num_reserved, entry.num_to_reserve),
            *("" if value is None else value for window in windows for value in window),
        )
        return LedgerAnswer(
            refused_by=refused_by - 1 if refused_by else None,
            retry_ms=retry_ms,
            used=tuple(used),
            reset_ms=tuple(reset_ms),
            num_in_flight=num_in_flight,
            num_reserved=num_reserved,
        )

    async def close(self) -> None:
        await self._connection.close()
