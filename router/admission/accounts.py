"""Holds tenants to their limits, over all routers.

A request of a tenant with limits costs one entry in the ledger on its way: itself, its prompt and the answers that it
asks for, once the prompt's tokens are counted. What the ledger has said before is known here: while a limit leaves no
room, requests are refused when they arrive, and cost nothing. What the answers used is recorded along with the tenant's
next request, or by `run` if none comes at once; `run` also keeps the answers in flight alive in the ledger, one entry
a tenant for all of them.

A router says how many answers of a tenant it has in flight, not that there is one more or less. So nothing has to be
taken back: what was lost on the way is right with the next entry, and a router that dies counts for a lease's length.

Without Redis each router goes on with its share of each limit, by the number of routers that were last known. What it
books meanwhile is recorded in Redis afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.errors import BatonError, InvalidRequest, QuotaExceeded, StoreUnavailable
from baton.quota import UNLIMITED, Quota, RateLimit
from baton.telemetry.instruments import Instruments
from router.admission.account import SEATS, WINDOWS_MS, LedgerAnswer, LedgerEntry
from router.admission.ledger import Ledger, MemoryLedger
from router.admission.tenants import Tenant

logger = logging.getLogger(__name__)
TIMEOUT_S = 0.5
"""How long a request waits for the ledger. After that the router goes by its share until the ledger answers again."""
RETRY_S = 0.5
"""Pause between two tries while the ledger is away."""
LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_in_flight")
"""Names of a tenant's limits, by the index in `LedgerAnswer.refused_by`."""
NOTHING = (0, 0, 0)
KNOWN_S = 1.0
"""How long a router goes by a refusal of the ledger: windows move on, and the next request may be smaller."""
DEBT_S = 0.02
"""How long what answers used waits for the tenant's next request. Where most of the answers that a tenant may have in
flight are, it does not wait: another router may refuse a request for want of those that have ended."""
LONGEST_HEEDED_S = 60.0
"""The longest wait that clients heed: after a longer one they ask again at once."""
BUSY_RETRY_S = 1.0
"""When to try again after a refusal because of the answers in flight: nobody knows when one ends."""


@dataclass(slots=True, kw_only=True)
class _Holding:
    """What this router holds and owes of one tenant."""

    tenant: Tenant
    num_held: int = 0
    """Answers in flight, and those that are being asked for."""
    num_requests: int = 0
    """Requests that the ledger has not recorded yet, nor the tokens below."""
    num_tokens: int = 0
    num_reserved: int = 0
    """Tokens that the answers in flight may still be computed for."""
    has_changed: bool = False
    """True if the ledger has to learn of it soon."""
    renewed_s: float = 0.0
    exhausted_by: int | None = None
    """Index of a limit that leaves no room for anybody, until the time below on the monotonic clock; None: of none."""
    exhausted_until_s: float = 0.0
    retry_s: float = 0.0
    """When to try again, as that limit's refusal had it."""
    quota: Quota | None = None
    """What was left after the latest entry."""
    num_in_flight: int = 0
    """Answers in flight at all routers, after the latest entry."""

    @property
    def is_crowded(self) -> bool:
        """True if more than half of the answers that the tenant may have in flight are."""
        most = self.tenant.max_in_flight
        return most is not None and self.num_in_flight * 2 > most

    @property
    def has_token_limit(self) -> bool:
        return any(limit is not None for limit in self.tenant.windows[1:])

    def hold(self, charge: Charge, sign: int = 1) -> None:
        """Count a request's answers among those in flight, or with -1, no more."""
        self.num_held += sign * charge.num_answers
        self.num_reserved += sign * charge.num_reserved

    def take(self) -> tuple[int, int]:
        """Return the requests and tokens that are owed, which an entry is about to book."""
        owed, self.num_requests, self.num_tokens = (self.num_requests, self.num_tokens), 0, 0
        self.has_changed = False
        return owed

    def owe(self, num_requests: int, num_tokens: int) -> None:
        """Owes requests and tokens that no entry has recorded."""
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        self.has_changed = True


@dataclass(slots=True, kw_only=True)
class Charge:
    """What one request is charged, from its admission to its end."""

    accounts: Accounts | None = None
    """None, as `holding`: its tenant has no limits."""
    holding: _Holding | None = None
    num_answers: int = 0
    num_reserved: int = 0
    """Tokens that are reserved for the answers."""
    quota: Quota | None = None
    """What the tenant has left, once it is recorded; None: it has no rates."""
    is_open: bool = False
    """True if it is recorded, or being recorded, and not settled."""

    async def book(self, num_tokens: int, num_to_reserve: int = 0) -> None:
        """Record the request with its prompt, takes its part of the answers in flight, and reserves what they may be.

        Args:
            num_tokens: of the prompt, for which there has to be room.
            num_to_reserve: tokens that may be computed for the answers: there is no room for others while they are.

        Raises:
            QuotaExceeded: a limit of the tenant leaves no room.
            InvalidRequest: the prompt is longer than it ever may be.
        """
        if self.accounts is not None and self.holding is not None:
            self.is_open = True
            self.num_reserved = num_to_reserve if self.holding.has_token_limit else 0
            try:
                self.quota = await self.accounts.book(self.holding, self, num_tokens)
            except BatonError:
                self.is_open = False  # nothing is recorded, and the ledger knows
                raise

    def settle(self, num_tokens: int) -> None:
        """Charge the tokens of the answers, and gives up the request's part of the answers in flight; idempotent."""
        if self.accounts is not None and self.holding is not None and self.is_open:
            self.is_open = False
            self.accounts.settle(self.holding, self, num_tokens)


class Accounts:
    """One router's. Owns `ledger`: `close` closes it.

    Args:
        num_routers: how many routers are known to be alive.
        lease_s: how long answers in flight count if this router is not heard of again.
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
        """What this router has admitted while the ledger was away."""
        self._is_away = False
        self._changed = asyncio.Event()

    def arrive(self, tenant: Tenant, num_answers: int) -> Charge:
        """Looks at a request that has arrived, before it costs anything.

        Raises:
            QuotaExceeded: it is known that a limit of the tenant leaves no room.
            InvalidRequest: it asks for more answers than the tenant may ever have in flight.
        """
        if tenant.max_in_flight is None and tenant.windows == (None, None, None):
            return Charge()
        if tenant.max_in_flight is not None and num_answers > tenant.max_in_flight:
            raise InvalidRequest(
                f"the request asks for {num_answers} answers at a time, and {tenant.id!r} may have "
                f"{tenant.max_in_flight} in flight; lower n and best_of",
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
                f"the prompt has {num_tokens} tokens, more than the {min(limits)} that {tenant.id!r} may ever use at "
                "a time; shorten the prompt",
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
        """Record a request in the ledger, and what is owed along with it; None: the ledger is away.

        Cancelled, it is taken to be recorded: it was sent.
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
        """Record what has changed, at once, and renews what goes on, in time, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 4):
                    await self._changed.wait()
            self._changed.clear()
            await self.flush()
            if self._is_away:
                await asyncio.sleep(RETRY_S)

    async def flush(self) -> None:
        """Record what is owed, and renews the answers in flight."""
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
        """Ask the ledger; None: it does not answer in time."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._ledger.book(entry)
        except (StoreUnavailable, TimeoutError) as error:
            if not self._is_away:
                reason = error if isinstance(error, StoreUnavailable) else f"no answer within {TIMEOUT_S} s"
                logger.warning("tenants' limits: each router goes by its share until Redis answers again: %s", reason)
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
        """Return the entry with this router's share of the limits, which is at least 1."""
        num_routers = max(1, self._num_routers())

        def share(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // num_routers)

        requests, minute, day = map(share, entry.limits)
        return replace(entry, limits=(requests, minute, day), max_in_flight=share(entry.max_in_flight))

    def _learnt(self, holding: _Holding, entry: LedgerEntry, answer: LedgerAnswer, refused_by: int) -> QuotaExceeded:
        """Return a refusal by the ledger, and keeps it for those who come next, if nobody can be served."""
        retry_s = max(0.1, answer.retry_ms / 1e3) if answer.retry_ms else BUSY_RETRY_S
        if refused_by != SEATS and WINDOWS_MS[refused_by] <= LONGEST_HEEDED_S * 1e3:
            retry_s = min(retry_s, LONGEST_HEEDED_S)
        limit = None if refused_by == SEATS else entry.limits[refused_by]
        if limit is not None and answer.used[refused_by] >= limit:
            holding.exhausted_by, holding.retry_s = refused_by, retry_s
            holding.exhausted_until_s = time.monotonic() + min(retry_s, KNOWN_S)
        return self._refusal(holding.tenant, refused_by, retry_s, holding.quota)

    def _refusal(self, tenant: Tenant, refused_by: int, retry_s: float, quota: Quota | None) -> QuotaExceeded:
        """Count a refusal, and returns it."""
        name = LIMITS[refused_by]
        self._instruments.tenant_refusals.add(1, {"tenant": tenant.id, "limit": name})
        return QuotaExceeded(
            f"{tenant.id!r} has used up its {name} of {getattr(tenant, name)}; try again later",
            retry_s,
            quota or UNLIMITED,
        )


def quota_of(entry: LedgerEntry, answer: LedgerAnswer) -> Quota | None:
    """Return what is left of an entry's limits after it; None: none of them is a rate."""
    taken = (answer.used[0], *(used + answer.num_reserved for used in answer.used[1:]))
    rates = [
        None if limit is None else RateLimit(limit, max(0, limit - num), reset_ms / 1e3)
        for limit, num, reset_ms in zip(entry.limits, taken, answer.reset_ms, strict=True)
    ]
    tokens = [rate for rate in rates[1:] if rate is not None]
    if rates[0] is None and not tokens:
        return None
    return Quota(rates[0], min(tokens, key=lambda rate: rate.remaining, default=None))
