"""The arithmetic of a tenant's limits: how much of each window is used, and whether an entry fits. Pure; time is given.

A window is cut into SPANS spans, and what is recorded counts until its whole span has left the window: so no more than
the limit is ever recorded within any window's length, wherever it begins, and what leaves is a sixtieth late at most.
`ledger.lua` is the same in Redis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SPANS = 60
WINDOWS_MS = (60_000, 60_000, 86_400_000)
"""Lengths of the windows: requests a minute, tokens a minute, tokens a day."""
NUM_WINDOWS = len(WINDOWS_MS)
OF_TOKENS = (1, 2)
"""Indices of the windows of tokens."""
SEATS = NUM_WINDOWS
"""Index of the limit of answers in flight among a tenant's limits; the windows' come before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """What a router books for a tenant: all of it, or nothing."""

    tenant_id: str
    limits: tuple[int | None, int | None, int | None]
    """Limit of each window; None: none, and nothing is counted."""
    max_in_flight: int | None = None
    needs: tuple[int, int, int] = (0, 0, 0)
    """Room that each window must have left; 0: it is not asked."""
    amounts: tuple[int, int, int] = (0, 0, 0)
    """What is recorded in each window."""
    writer: str = ""
    """Name of the router's process."""
    version: int = 0
    """Number of the entry among the writer's: what an older one says of its answers in flight is late."""
    num_held: int = 0
    """Answers of the tenant that the writer has in flight, with those that this entry asks for."""
    num_asked: int = 0
    """Answers that this entry asks for."""
    num_reserved: int = 0
    """Tokens that the writer's answers in flight may still be computed for, with those that this entry asks for."""
    num_to_reserve: int = 0
    """The part of them that this entry asks for."""
    lease_ms: int = 10_000
    """How long the writer's answers count if it is not heard of again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnswer:
    """What became of an entry, and how the tenant's windows are afterwards."""

    refused_by: int | None
    """Index of the limit that left no room; None: the entry is recorded."""
    retry_ms: int
    """Milliseconds until there is room in that window, if nobody takes it; 0 where answers in flight have to end."""
    used: tuple[int, ...]
    """What each window counts."""
    reset_ms: tuple[int, ...]
    """Milliseconds until each window counts nothing, if nothing is added."""
    num_in_flight: int
    """Answers of the tenant that all routers have in flight, as far as it is counted."""
    num_reserved: int
    """Tokens that all routers have reserved for them."""


@dataclass(slots=True)
class Seats:
    """The answers that one router has in flight."""

    version: int
    num_held: int
    until_ms: int
    num_reserved: int = 0


@dataclass(slots=True)
class Account:
    """What is recorded of one tenant."""

    windows: tuple[dict[int, int], ...] = field(default_factory=lambda: tuple({} for _ in WINDOWS_MS))
    """Amounts of each window by the number of their span, counted from 1970."""
    seats: dict[str, Seats] = field(default_factory=dict)
    """Answers in flight by router."""

    def book(self, entry: LedgerEntry, now_ms: int) -> LedgerAnswer:
        """Record the entry if there is room for all of it."""
        self._forget(now_ms)
        refused_by, retry_ms = self._refusal(entry, now_ms)
        if refused_by is None:
            for window, length_ms, limit, amount in zip(
                self.windows, WINDOWS_MS, entry.limits, entry.amounts, strict=True
            ):
                if limit is not None and amount:
                    span = now_ms // (length_ms // SPANS)
                    window[span] = window.get(span, 0) + amount
        self._seat(entry, now_ms, is_refused=refused_by is not None)
        return LedgerAnswer(
            refused_by=refused_by,
            retry_ms=retry_ms,
            used=tuple(sum(window.values()) for window in self.windows),
            reset_ms=tuple(
                _leaves_ms(max(window), length_ms) - now_ms if window else 0
                for window, length_ms in zip(self.windows, WINDOWS_MS, strict=True)
            ),
            num_in_flight=sum(seats.num_held for seats in self.seats.values()),
            num_reserved=sum(seats.num_reserved for seats in self.seats.values()),
        )

    def _forget(self, now_ms: int) -> None:
        """Drop what has left the windows, or lies in the future because the clock was set back; and lapsed seats."""
        for window, length_ms in zip(self.windows, WINDOWS_MS, strict=True):
            current = now_ms // (length_ms // SPANS)
            for span in [span for span in window if not current - SPANS <= span <= current]:
                del window[span]
        for writer in [writer for writer, seats in self.seats.items() if seats.until_ms <= now_ms]:
            del self.seats[writer]

    def _refusal(self, entry: LedgerEntry, now_ms: int) -> tuple[int | None, int]:
        """Index of the limit that leaves no room, or None; and milliseconds until it does."""
        for index, (window, limit, need) in enumerate(zip(self.windows, entry.limits, entry.needs, strict=True)):
            if limit is None or not need:
                continue
            excess = sum(window.values()) + need - limit
            if excess > 0:
                return index, wait_ms(window, excess, WINDOWS_MS[index], now_ms)
            if index in OF_TOKENS and excess + self._reserved_before(entry) > 0:
                return index, 0
        if entry.num_asked and entry.max_in_flight is not None:
            others = sum(seats.num_held for writer, seats in self.seats.items() if writer != entry.writer)
            if others + self._own(entry) > entry.max_in_flight:
                return SEATS, 0
        return None, 0

    def _own(self, entry: LedgerEntry) -> int:
        """The writer's answers in flight, by its latest entry."""
        noted = self.seats.get(entry.writer)
        return noted.num_held if noted is not None and noted.version > entry.version else entry.num_held

    def _reserved_before(self, entry: LedgerEntry) -> int:
        """The tokens that are reserved without those that the entry asks for."""
        others = sum(seats.num_reserved for name, seats in self.seats.items() if name != entry.writer)
        noted = self.seats.get(entry.writer)
        is_late = noted is not None and noted.version > entry.version
        return others + (noted.num_reserved if noted and is_late else entry.num_reserved - entry.num_to_reserve)

    def _seat(self, entry: LedgerEntry, now_ms: int, is_refused: bool) -> None:
        noted = self.seats.get(entry.writer)
        if noted is not None and noted.version > entry.version:
            return
        num_reserved = entry.num_reserved - entry.num_to_reserve * is_refused
        if entry.max_in_flight is not None or num_reserved or noted is not None:
            # None in flight is noted, too: an older entry may still be on its way.
            num_held = entry.num_held - entry.num_asked * is_refused
            self.seats[entry.writer] = Seats(entry.version, num_held, now_ms + entry.lease_ms, num_reserved)


def wait_ms(window: Mapping[int, int], excess: int, length_ms: int, now_ms: int) -> int:
    """Return the milliseconds until `excess` has left a window; those until it is empty, if it never holds so much."""
    last = 0
    for span, amount in sorted(window.items()):
        last, excess = span, excess - amount
        if excess <= 0:
            break
    return max(0, _leaves_ms(last, length_ms) - now_ms)


def _leaves_ms(span: int, length_ms: int) -> int:
    """When a span has left the window: its end lies a window's length back."""
    return (span + SPANS + 1) * (length_ms // SPANS)
