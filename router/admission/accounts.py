"""Enforces the tenants' limits over all routers.

A request of a tenant with limits writes one entry to the ledger, after its prompt is tokenized: the request, its prompt
tokens and the number of answers that it asks for. The router caches the ledger's refusals, so while a limit is
exhausted, it refuses requests on arrival without asking the ledger. The tokens of the answers are recorded with the
tenant's next request, or by `run` if none follows at once. `run` also renews the answers in flight in the ledger, with
one entry per tenant.

A router records its total number of answers in flight, not increments. So nothing needs a rollback: the next entry
corrects a lost one, and the answers of a dead router expire with its lease.

While Redis is away, each router enforces its share of each limit, by the last known number of routers. It records its
requests in Redis afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from baton.errors import BatonError, InvalidRequest, QuotaExceeded, StoreUnavailable
from baton.quota import UNLIMITED, Quota, RateLimit
from baton.telemetry.instruments import Instruments
from kvstore.index import RedisConnection
from kvstore.index.connection import Script
from kvstore.index.keys import Keys
from router.admission.account import SEATS, SPANS, WINDOWS_MS, Account, LedgerAnswer, LedgerEntry
from router.admission.tenants import Tenant

logger = logging.getLogger(__name__)
TIMEOUT_S = 0.5
"""Timeout of a request to the ledger. After a timeout the router enforces its share until the ledger answers again."""
RETRY_S = 0.5
"""Pause between two attempts while the ledger is away."""
LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_in_flight")
"""Names of a tenant's limits, by the index in `LedgerAnswer.refused_by`."""
NOTHING = (0, 0, 0)
KNOWN_S = 1.0
"""Maximum time for which a router caches a refusal: windows move on, and the next request may be smaller."""
DEBT_S = 0.02
"""Time for which the tokens of answers wait for the tenant's next request. They do not wait if the tenant uses more
than half of its answers in flight: another router could refuse a request because of answers that have ended."""
LONGEST_HEEDED_S = 60.0
"""Maximum Retry-After that clients respect: they ignore a longer one and retry at once."""
BUSY_RETRY_S = 1.0
"""Retry-After of a refusal because of answers in flight, whose end cannot be predicted."""
BOOK = Script("router.admission", "ledger.lua")


@dataclass(slots=True, kw_only=True)
class _Holding:
    """One tenant's answers in flight on this router, and the amounts that it has not yet recorded in the ledger."""

    tenant: Tenant
    num_held: int = 0
    """Answers in flight, including those that are being requested."""
    num_requests: int = 0
    """Requests that are not yet recorded in the ledger; likewise the tokens below."""
    num_tokens: int = 0
    num_reserved: int = 0
    """Tokens reserved for the answers in flight."""
    has_changed: bool = False
    """True if there is something to record in the ledger soon."""
    renewed_s: float = 0.0
    exhausted_by: int | None = None
    """Index of an exhausted limit, until the time below on the monotonic clock; None: no limit is exhausted."""
    exhausted_until_s: float = 0.0
    retry_s: float = 0.0
    """Retry-After of that limit's refusal, in seconds."""
    quota: Quota | None = None
    """Remaining quota after the latest entry."""
    num_in_flight: int = 0
    """Answers in flight on all routers after the latest entry."""

    @property
    def is_crowded(self) -> bool:
        """True if the tenant uses more than half of its answers in flight."""
        most = self.tenant.max_in_flight
        return most is not None and self.num_in_flight * 2 > most

    @property
    def has_token_limit(self) -> bool:
        return any(limit is not None for limit in self.tenant.windows[1:])

    def hold(self, charge: Charge, sign: int = 1) -> None:
        """Add a request's answers to those in flight, or with a sign of -1 remove them."""
        self.num_held += sign * charge.num_answers
        self.num_reserved += sign * charge.num_reserved

    def take(self) -> tuple[int, int]:
        """Return and clear the unrecorded requests and tokens, which the caller is about to record."""
        owed, self.num_requests, self.num_tokens = (self.num_requests, self.num_tokens), 0, 0
        self.has_changed = False
        return owed

    def owe(self, num_requests: int, num_tokens: int) -> None:
        """Add requests and tokens that must still be recorded."""
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        self.has_changed = True


@dataclass(slots=True, kw_only=True)
class Charge:
    """Charge of one request to its tenant, from admission to the end."""

    accounts: Accounts | None = None
    """None, like `holding`, if the tenant has no limits."""
    holding: _Holding | None = None
    num_answers: int = 0
    num_reserved: int = 0
    """Tokens reserved for the answers."""
    quota: Quota | None = None
    """The tenant's remaining quota after the request is recorded; None: it has no rate limits."""
    is_open: bool = False
    """True while the charge is recorded, or being recorded, and not settled."""

    async def book(self, num_tokens: int, num_to_reserve: int = 0) -> None:
        """Record the request and its prompt, count its answers as in flight, and reserve tokens for them.

        Args:
            num_tokens: number of prompt tokens; the limits must have room for them.
            num_to_reserve: maximum number of tokens of the answers, which count as used until the request is settled.

        Raises:
            QuotaExceeded: a limit of the tenant is exhausted.
            InvalidRequest: the prompt alone exceeds a limit.
        """
        if self.accounts is not None and self.holding is not None:
            self.is_open = True
            self.num_reserved = num_to_reserve if self.holding.has_token_limit else 0
            try:
                self.quota = await self.accounts.book(self.holding, self, num_tokens)
            except BatonError:
                self.is_open = False  # nothing is recorded, so there is nothing to settle
                raise

    def settle(self, num_tokens: int) -> None:
        """Charge the tokens of the answers, and stop counting the answers as in flight; idempotent."""
        if self.accounts is not None and self.holding is not None and self.is_open:
            self.is_open = False
            self.accounts.settle(self.holding, self, num_tokens)


class Accounts:
    """The tenants' accounts, as one router uses them. Owns `ledger`: `close` closes it.

    Args:
        num_routers: returns the number of routers that are known to be alive.
        lease_s: time after which answers in flight no longer count if this router dies.
    """

    def __init__(
        self, ledger: Ledger, instruments: Instruments, num_routers: Callable[[], int], lease_s: float = 10.0
    ) -> None:
        self._ledger = ledger
        self._instruments = instruments
        self._num_routers = num_routers
        self._lease_s = lease_s
        self._writer = secrets.token_hex(8)
        self._version = 0
        self._holdings: dict[str, _Holding] = {}
        self._own_share = MemoryLedger()
        """Requests that this router has admitted while the ledger was away."""
        self._is_away = False
        self._changed = asyncio.Event()

    def arrive(self, tenant: Tenant, num_answers: int) -> Charge:
        """Check a new request against the cached limits, before it costs anything.

        Raises:
            QuotaExceeded: a limit of the tenant is known to be exhausted.
            InvalidRequest: the request asks for more answers than the tenant may have in flight.
        """
        if tenant.max_in_flight is None and tenant.windows == (None, None, None):
            return Charge()
        if tenant.max_in_flight is not None and num_answers > tenant.max_in_flight:
            raise InvalidRequest(
                f"the request asks for {num_answers} answers at a time, but max_in_flight of tenant {tenant.id!r} is "
                f"{tenant.max_in_flight}; lower n and best_of",
                "n",
            )
        holding = self._holdings.setdefault(tenant.id, _Holding(tenant=tenant))
        if holding.tenant != tenant:
            holding.tenant, holding.exhausted_by = tenant, None
        if holding.exhausted_by is not None and time.monotonic() < holding.exhausted_until_s:
            raise self._refusal(tenant, holding.exhausted_by, holding.retry_s, holding.quota)
        if tenant.max_in_flight is not None and holding.num_held + num_answers > tenant.max_in_flight:
            raise self._refusal(tenant, SEATS, BUSY_RETRY_S, holding.quota)
        return Charge(accounts=self, holding=holding, num_answers=num_answers)

    async def book(self, holding: _Holding, charge: Charge, num_tokens: int) -> Quota | None:
        """See `Charge.book`."""
        tenant = holding.tenant
        limits = [limit for limit in tenant.windows[1:] if limit is not None]
        if limits and num_tokens > min(limits):
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, but the smallest token limit of tenant {tenant.id!r} is "
                f"{min(limits)}; shorten the prompt",
                "input",
            )
        holding.hold(charge)
        entry, answer = await self._recorded(holding, charge, num_tokens)
        if answer is None:
            amounts = (1, num_tokens, num_tokens)
            entry = self._shared(self._entry(holding, amounts, amounts, charge))
            answer = self._own_share.book_now(entry)
            if answer.refused_by is None:
                holding.owe(1, num_tokens)
        holding.quota, holding.num_in_flight = quota_of(entry, answer), answer.num_in_flight
        if answer.refused_by is not None:
            holding.hold(charge, -1)
            raise self._learnt(holding, entry, answer, answer.refused_by)
        return holding.quota

    async def _recorded(
        self, holding: _Holding, charge: Charge, num_tokens: int
    ) -> tuple[LedgerEntry, LedgerAnswer | None]:
        """Record a request in the ledger, together with unrecorded amounts.

        If it is cancelled, the entry counts as recorded, because it was sent.

        Returns:
            The entry and the ledger's answer; None: the ledger is away.
        """
        owed = (0, 0) if self._is_away else holding.take()
        amounts = (1 + owed[0], num_tokens + owed[1], num_tokens + owed[1])
        entry = self._entry(holding, amounts, amounts, charge)
        answer = None if self._is_away else await self._ask(entry)
        if any(owed) and (answer is None or answer.refused_by is not None):
            holding.owe(*owed)
            self._changed.set()
        return entry, answer

    def settle(self, holding: _Holding, charge: Charge, num_computed: int) -> None:
        """See `Charge.settle`."""
        holding.hold(charge, -1)
        holding.owe(0, num_computed)
        if holding.is_crowded:
            self._changed.set()
        else:
            asyncio.get_running_loop().call_later(DEBT_S, self._changed.set)

    async def run(self) -> None:
        """Record changes at once, and renew answers in flight before their lease ends, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 4):
                    await self._changed.wait()
            self._changed.clear()
            await self.flush()
            if self._is_away:
                await asyncio.sleep(RETRY_S)

    async def flush(self) -> None:
        """Record all unrecorded amounts, and renew the answers in flight."""
        now = time.monotonic()
        for holding in list(self._holdings.values()):
            is_due = holding.num_held and now - holding.renewed_s >= self._lease_s / 5
            if not (holding.has_changed or is_due or self._is_away):
                continue
            holding.renewed_s = now
            owed = holding.take()
            answer = await self._ask(self._entry(holding, NOTHING, (owed[0], owed[1], owed[1]), Charge()))
            if answer is None:
                holding.owe(*owed)
                self._changed.set()
                return
            holding.num_in_flight = answer.num_in_flight

    async def close(self) -> None:
        await self.flush()
        await self._ledger.close()

    async def _ask(self, entry: LedgerEntry) -> LedgerAnswer | None:
        """Ask the ledger; None: it has not answered in time."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._ledger.book(entry)
        except (StoreUnavailable, TimeoutError) as error:
            if not self._is_away:
                reason = error if isinstance(error, StoreUnavailable) else f"no answer within {TIMEOUT_S} s"
                logger.warning("tenants' limits: each router enforces its share until Redis answers again: %s", reason)
            self._is_away = True
            self._changed.set()
            return None
        if self._is_away:
            logger.info("tenants' limits are counted for all routers again")
        self._is_away = False
        return answer

    def _entry(
        self, holding: _Holding, needs: tuple[int, int, int], amounts: tuple[int, int, int], charge: Charge
    ) -> LedgerEntry:
        self._version += 1
        return LedgerEntry(
            tenant_id=holding.tenant.id,
            limits=holding.tenant.windows,
            max_in_flight=holding.tenant.max_in_flight,
            needs=needs,
            amounts=amounts,
            writer=self._writer,
            version=self._version,
            num_held=holding.num_held,
            num_asked=charge.num_answers,
            num_reserved=holding.num_reserved,
            num_to_reserve=charge.num_reserved,
            lease_ms=round(self._lease_s * 1000),
        )

    def _shared(self, entry: LedgerEntry) -> LedgerEntry:
        """Return the entry with this router's share of the limits, at least 1 each."""
        num_routers = max(1, self._num_routers())

        def share(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // num_routers)

        requests, minute, day = map(share, entry.limits)
        return replace(entry, limits=(requests, minute, day), max_in_flight=share(entry.max_in_flight))

    def _learnt(self, holding: _Holding, entry: LedgerEntry, answer: LedgerAnswer, refused_by: int) -> QuotaExceeded:
        """Return the error for a refusal by the ledger, and cache the refusal if the limit is exhausted."""
        retry_s = max(0.1, answer.retry_ms / 1e3) if answer.retry_ms else BUSY_RETRY_S
        if refused_by != SEATS and WINDOWS_MS[refused_by] <= LONGEST_HEEDED_S * 1e3:
            retry_s = min(retry_s, LONGEST_HEEDED_S)
        limit = None if refused_by == SEATS else entry.limits[refused_by]
        if limit is not None and answer.used[refused_by] >= limit:
            holding.exhausted_by, holding.retry_s = refused_by, retry_s
            holding.exhausted_until_s = time.monotonic() + min(retry_s, KNOWN_S)
        return self._refusal(holding.tenant, refused_by, retry_s, holding.quota)

    def _refusal(self, tenant: Tenant, refused_by: int, retry_s: float, quota: Quota | None) -> QuotaExceeded:
        """Count a refusal and return its error."""
        name = LIMITS[refused_by]
        self._instruments.tenant_refusals.add(1, {"tenant": tenant.id, "limit": name})
        return QuotaExceeded(
            f"tenant {tenant.id!r} has used up its {name} of {getattr(tenant, name)}; try again later",
            retry_s,
            quota or UNLIMITED,
        )


def quota_of(entry: LedgerEntry, answer: LedgerAnswer) -> Quota | None:
    """Return the remaining quota after an entry; None: the tenant has no rate limits."""
    taken = (answer.used[0], *(used + answer.num_reserved for used in answer.used[1:]))
    rates = [
        None if limit is None else RateLimit(limit, max(0, limit - num), reset_ms / 1e3)
        for limit, num, reset_ms in zip(entry.limits, taken, answer.reset_ms, strict=True)
    ]
    tokens = [rate for rate in rates[1:] if rate is not None]
    if rates[0] is None and not tokens:
        return None
    return Quota(rates[0], min(tokens, key=lambda rate: rate.remaining, default=None))


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
