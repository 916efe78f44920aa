"""Arithmetic of a tenant's limits: use of each sliding window, and whether an entry fits. Pure: time is an argument.

A tenant has an account over all models, and one for each model with limits of its own. `book` records a request in
both or in none.

A window is divided into SPANS spans, and an amount counts until its whole span has left the window. So no interval of a
window's length ever holds more than the limit, and an amount expires at most a sixtieth of the window late.
`ledger.lua` implements the same in Redis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SPANS = 60
WINDOWS_MS = (60_000, 60_000, 86_400_000)
"""Lengths of the windows: requests a minute, tokens a minute, tokens a day."""
NUM_WINDOWS = len(WINDOWS_MS)
OF_TOKENS = (1, 2)
"""Indices of the windows that count tokens."""
SEATS = NUM_WINDOWS
"""Index of the limit on answers in flight among a tenant's limits; the limits of the windows come before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Amounts that a router records in one account of a tenant."""

    tenant_id: str
    model: str = ""
    """Model whose account it is; empty: the tenant's account over all models."""
    limits: tuple[int | None, int | None, int | None]
    """Limit of each window; None: no limit, and nothing is counted."""
    max_in_flight: int | None = None
    needs: tuple[int, int, int] = (0, 0, 0)
    """Room that each window must have; 0: not checked."""
    amounts: tuple[int, int, int] = (0, 0, 0)
    """Amounts to record in each window."""
    writer: str = ""
    """Name of the router's process."""
    version: int = 0
    """Sequence number of the writer's entries. An entry older than the latest does not change its answers in flight."""
    num_held: int = 0
    """Answers of the tenant that the writer has in flight, including those that this entry asks for."""
    num_asked: int = 0
    """Answers that this entry asks for."""
    num_reserved: int = 0
    """Tokens reserved for the writer's answers in flight, including those that this entry asks for."""
    num_to_reserve: int = 0
    """Tokens that this entry asks to reserve."""
    lease_ms: int = 10_000
    """Time after which the writer's answers no longer count unless it records another entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnswer:
    """Outcome of an entry, and the account's windows after it."""

    refused_by: int | None
    """Index of the limit that the entry would exceed; None: none. The ledger records entries that are sent together
    only if it refuses none of them."""
    retry_ms: int
    """Milliseconds until that window has room, if no other request takes it; 0 if answers in flight must end first."""
    used: tuple[int, ...]
    """Amount counted in each window."""
    reset_ms: tuple[int, ...]
    """Milliseconds until each window is empty, if nothing is added."""
    num_in_flight: int
    """Answers of the tenant in flight on all routers that have recorded them."""
    num_reserved: int
    """Tokens reserved for these answers on all routers."""


@dataclass(slots=True)
class Seats:
    """Answers of one tenant that one router has in flight."""

    version: int
    num_held: int
    until_ms: int
    num_reserved: int = 0


@dataclass(slots=True)
class Account:
    """Usage of one tenant, over all models or with one model."""

    windows: tuple[dict[int, int], ...] = field(default_factory=lambda: tuple({} for _ in WINDOWS_MS))
    """Amounts of each window, by span number since 1970."""
    seats: dict[str, Seats] = field(default_factory=dict)
    """Answers in flight by router."""

    def refusal(self, entry: LedgerEntry, now_ms: int) -> tuple[int | None, int]:
        """Return the index of the limit that an entry would exceed or None, and the milliseconds until there is room.

        Expired amounts are dropped.
        """
        self._forget(now_ms)
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

    def record(
        self, entry: LedgerEntry, now_ms: int, refused_by: int | None, retry_ms: int, *, is_refused: bool
    ) -> LedgerAnswer:
        """Record an entry after `refusal`, and return the ledger's answer.

        Args:
            refused_by, retry_ms: the result of `refusal`.
            is_refused: record only which answers are in flight, because this account or another has no room.
        """
        if not is_refused:
            for window, length_ms, limit, amount in zip(
                self.windows, WINDOWS_MS, entry.limits, entry.amounts, strict=True
            ):
                if limit is not None and amount:
                    span = now_ms // (length_ms // SPANS)
                    window[span] = window.get(span, 0) + amount
        self._seat(entry, now_ms, is_refused=is_refused)
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
        """Drop expired amounts and seats, and amounts in the future, which a clock that was set back leaves."""
        for window, length_ms in zip(self.windows, WINDOWS_MS, strict=True):
            current = now_ms // (length_ms // SPANS)
            for span in [span for span in window if not current - SPANS <= span <= current]:
                del window[span]
        for writer in [writer for writer, seats in self.seats.items() if seats.until_ms <= now_ms]:
            del self.seats[writer]

    def _own(self, entry: LedgerEntry) -> int:
        """Return the writer's answers in flight according to its latest entry."""
        noted = self.seats.get(entry.writer)
        return noted.num_held if noted is not None and noted.version > entry.version else entry.num_held

    def _reserved_before(self, entry: LedgerEntry) -> int:
        """Return the reserved tokens without those that the entry asks for."""
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
            # Zero answers in flight are recorded as well, so that an older entry that arrives later is recognized.
            num_held = entry.num_held - entry.num_asked * is_refused
            self.seats[entry.writer] = Seats(entry.version, num_held, now_ms + entry.lease_ms, num_reserved)


def book(accounts: Sequence[Account], entries: Sequence[LedgerEntry], now_ms: int) -> list[LedgerAnswer]:
    """Record one entry in each account if there is room for all of them; otherwise record none."""
    refusals = [account.refusal(entry, now_ms) for account, entry in zip(accounts, entries, strict=True)]
    is_refused = any(refused_by is not None for refused_by, _ in refusals)
    return [
        account.record(entry, now_ms, *refusal, is_refused=is_refused)
        for account, entry, refusal in zip(accounts, entries, refusals, strict=True)
    ]


def wait_ms(window: Mapping[int, int], excess: int, length_ms: int, now_ms: int) -> int:
    """Return the milliseconds until `excess` has left a window, or until the window is empty if it holds less."""
    last = 0
    for span, amount in sorted(window.items()):
        last, excess = span, excess - amount
        if excess <= 0:
            break
    return max(0, _leaves_ms(last, length_ms) - now_ms)


def _leaves_ms(span: int, length_ms: int) -> int:
    """Return the time at which a span has left the window: one window length after the span's end."""
    return (span + SPANS + 1) * (length_ms // SPANS)
