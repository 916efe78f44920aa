"""Enforces the tenants' limits over all routers.

A request of a tenant with limits writes one entry to the ledger, after its prompt is tokenized: the request, its prompt
tokens and the number of answers that it asks for. If the tenant also has limits for the requested model, the request
writes a second entry to the account of that model, and the ledger records both entries or none. The router caches the
ledger's refusals, so while a limit is exhausted, it refuses requests on arrival without asking the ledger. The tokens
of the answers are recorded with the account's next request, or by `run` if none follows at once. `run` also renews the
answers in flight in the ledger, with one entry per account.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from baton.errors import BatonError, InvalidRequest, QuotaExceeded, StoreUnavailable
from baton.quota import UNLIMITED, Quota, RateLimit
from baton.telemetry.instruments import Instruments
from kvstore.index import RedisConnection
from kvstore.index.connection import Script
from kvstore.index.keys import Keys
from router.admission.account import SEATS, SPANS, WINDOWS_MS, Account, LedgerAnswer, LedgerEntry, book
from router.admission.limits import LIMITS, Limits
from router.admission.tenants import Tenant

logger = logging.getLogger(__name__)
TIMEOUT_S = 0.5
"""Timeout of a request to the ledger. After a timeout the router enforces its share until the ledger answers again."""
RETRY_S = 0.5
"""Pause between two attempts while the ledger is away."""
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
    """One account's answers in flight on this router, and the amounts that it has not yet recorded in the ledger."""

    tenant_id: str
    model: str = ""
    """Model whose account it is; empty: the tenant's account over all models."""
    limits: Limits
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
        """True if more than half of the account's answers are in flight."""
        most = self.limits.max_in_flight
        return most is not None and self.num_in_flight * 2 > most

    @property
    def has_token_limit(self) -> bool:
        return any(limit is not None for limit in self.limits.windows[1:])

    @property
    def of_model(self) -> str:
        """The model as errors name it, after the tenant."""
        return f" for the model {self.model!r}" if self.model else ""

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
    """None if the tenant has no limits."""
    holdings: tuple[_Holding, ...] = ()
    """The accounts that it is charged to: the tenant's over all models, the one for the requested model, or both."""
    num_answers: int = 0
    num_reserved: int = 0
    """Tokens reserved for the answers."""
    quota: Quota | None = None
    """The smaller remaining quota of its accounts, after the request is recorded; None: they have no rate limits."""
    is_open: bool = False
    """True while the charge is recorded, or being recorded, and not settled."""

    async def book(self, num_tokens: int, num_to_reserve: int = 0) -> None:
        """Record the request and its prompt, count its answers as in flight, and reserve tokens for them.

        Args:
            num_tokens: number of prompt tokens; the limits must have room for them.
            num_to_reserve: maximum number of tokens of the answers, which count as used until the request is settled.

        Raises:
            QuotaExceeded: a limit of the tenant, over all models or with the requested one, is exhausted.
            InvalidRequest: the prompt alone exceeds a limit.
        """
        if self.accounts is not None:
            self.is_open = True
            self.num_reserved = num_to_reserve if any(each.has_token_limit for each in self.holdings) else 0
            try:
                self.quota = await self.accounts.book(self, num_tokens)
            except BatonError:
                self.is_open = False  # nothing is recorded, so there is nothing to settle
                raise

    def settle(self, num_tokens: int) -> None:
        """Charge the tokens of the answers, and stop counting the answers as in flight; idempotent."""
        if self.accounts is not None and self.is_open:
            self.is_open = False
            self.accounts.settle(self, num_tokens)


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
        self._holdings: dict[tuple[str, str], _Holding] = {}
        self._own_share = MemoryLedger()
        """Requests that this router has admitted while the ledger was away."""
        self._is_away = False
        self._changed = asyncio.Event()

    def arrive(self, tenant: Tenant, num_answers: int, model: str) -> Charge:
        """Check a new request against the cached limits, before it costs anything.

        Args:
            model: name of the served model or adapter that it requests. It is part of a key in Redis, so the caller
                must have checked that such a model exists.

        Raises:
            QuotaExceeded: a limit of the tenant is known to be exhausted.
            InvalidRequest: the request asks for more answers than the tenant may have in flight.
        """
        assert model, "the name of a served model"
        limited = [
            (name, limits)
            for name, limits in (("", tenant), (model, tenant.limits_of(model)))
            if limits.need_an_account
        ]
        if not limited:
            return Charge()
        holdings = tuple(self._holding(tenant.id, name, limits) for name, limits in limited)
        for holding in holdings:
            most = holding.limits.max_in_flight
            if most is not None and num_answers > most:
                raise InvalidRequest(
                    f"the request asks for {num_answers} answers at a time, but max_in_flight of tenant {tenant.id!r}"
                    f"{holding.of_model} is {most}; lower n and best_of",
                    "n",
                )
            if holding.exhausted_by is not None and time.monotonic() < holding.exhausted_until_s:
                raise self._refusal(holding, holding.exhausted_by, holding.retry_s, holdings)
            if most is not None and holding.num_held + num_answers > most:
                raise self._refusal(holding, SEATS, BUSY_RETRY_S, holdings)
        return Charge(accounts=self, holdings=holdings, num_answers=num_answers)

    def _holding(self, tenant_id: str, model: str, limits: Limits) -> _Holding:
        """Return the holding of an account, under the limits that now apply."""
        key = (tenant_id, model)
        holding = self._holdings.get(key)
        if holding is None:
            holding = self._holdings[key] = _Holding(tenant_id=tenant_id, model=model, limits=limits)
        elif holding.limits != limits:
            holding.limits, holding.exhausted_by = limits, None
        return holding

    async def book(self, charge: Charge, num_tokens: int) -> Quota | None:
        """See `Charge.book`."""
        for holding in charge.holdings:
            limits = [limit for limit in holding.limits.windows[1:] if limit is not None]
            if limits and num_tokens > min(limits):
                raise InvalidRequest(
                    f"the prompt has {num_tokens} tokens, but the smallest token limit of tenant "
                    f"{holding.tenant_id!r}{holding.of_model} is {min(limits)}; shorten the prompt",
                    "input",
                )
        for holding in charge.holdings:
            holding.hold(charge)
        entries, answers = await self._recorded(charge, num_tokens)
        if answers is None:
            amounts = (1, num_tokens, num_tokens)
            entries = [self._shared(self._entry(holding, amounts, amounts, charge)) for holding in charge.holdings]
            answers = self._own_share.book_now(entries)
            if not is_refused(answers):
                for holding in charge.holdings:
                    holding.owe(1, num_tokens)
        for holding, entry, answer in zip(charge.holdings, entries, answers, strict=True):
            holding.quota, holding.num_in_flight = quota_of(entry, answer), answer.num_in_flight
        if is_refused(answers):
            for holding in charge.holdings:
                holding.hold(charge, -1)
            raise self._learnt(charge.holdings, entries, answers)
        return tightest(holding.quota for holding in charge.holdings)

    async def _recorded(
        self, charge: Charge, num_tokens: int
    ) -> tuple[list[LedgerEntry], Sequence[LedgerAnswer] | None]:
        """Record a request in the ledger, together with unrecorded amounts.

        If it is cancelled, the entries count as recorded, because they were sent.

        Returns:
            The entries and the ledger's answers; None: the ledger is away.
        """
        owed = [(0, 0) if self._is_away else holding.take() for holding in charge.holdings]
        entries = []
        for holding, (num_requests, num_owed) in zip(charge.holdings, owed, strict=True):
            amounts = (1 + num_requests, num_tokens + num_owed, num_tokens + num_owed)
            entries.append(self._entry(holding, amounts, amounts, charge))
        answers = None if self._is_away else await self._ask(entries)
        if answers is None or is_refused(answers):
            for holding, unrecorded in zip(charge.holdings, owed, strict=True):
                if any(unrecorded):
                    holding.owe(*unrecorded)
                    self._changed.set()
        return entries, answers

    def settle(self, charge: Charge, num_computed: int) -> None:
        """See `Charge.settle`."""
        for holding in charge.holdings:
            holding.hold(charge, -1)
            holding.owe(0, num_computed)
        if any(holding.is_crowded for holding in charge.holdings):
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
            answers = await self._ask([self._entry(holding, NOTHING, (owed[0], owed[1], owed[1]), Charge())])
            if answers is None:
                holding.owe(*owed)
                self._changed.set()
                return
            holding.num_in_flight = answers[0].num_in_flight

    async def close(self) -> None:
        await self.flush()
        await self._ledger.close()

    async def _ask(self, entries: Sequence[LedgerEntry]) -> Sequence[LedgerAnswer] | None:
        """Ask the ledger; None: it has not answered in time."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answers = await self._ledger.book(entries)
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
        return answers

    def _entry(
        self, holding: _Holding, needs: tuple[int, int, int], amounts: tuple[int, int, int], charge: Charge
    ) -> LedgerEntry:
        self._version += 1
        return LedgerEntry(
            tenant_id=holding.tenant_id,
            model=holding.model,
            limits=holding.limits.windows,
            max_in_flight=holding.limits.max_in_flight,
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

    def _learnt(
        self, holdings: Sequence[_Holding], entries: Sequence[LedgerEntry], answers: Sequence[LedgerAnswer]
    ) -> QuotaExceeded:
        """Return the error for a refusal by the ledger, and cache which limits are exhausted.

        If both accounts refuse, the error names the one that would admit the request later.
        """
        refusals = []
        for holding, entry, answer in zip(holdings, entries, answers, strict=True):
            if (refused_by := answer.refused_by) is None:
                continue
            retry_s = max(0.1, answer.retry_ms / 1e3) if answer.retry_ms else BUSY_RETRY_S
            if refused_by != SEATS and WINDOWS_MS[refused_by] <= LONGEST_HEEDED_S * 1e3:
                retry_s = min(retry_s, LONGEST_HEEDED_S)
            limit = None if refused_by == SEATS else entry.limits[refused_by]
            if limit is not None and answer.used[refused_by] >= limit:
                holding.exhausted_by, holding.retry_s = refused_by, retry_s
                holding.exhausted_until_s = time.monotonic() + min(retry_s, KNOWN_S)
            refusals.append((retry_s, holding, refused_by))
        retry_s, holding, refused_by = max(refusals, key=lambda refusal: refusal[0])
        return self._refusal(holding, refused_by, retry_s, holdings)

    def _refusal(
        self, holding: _Holding, refused_by: int, retry_s: float, holdings: Iterable[_Holding]
    ) -> QuotaExceeded:
        """Count a refusal by one of a request's accounts and return its error."""
        name = LIMITS[refused_by]
        self._instruments.tenant_refusals.add(1, {"tenant": holding.tenant_id, "limit": name})
        return QuotaExceeded(
            f"tenant {holding.tenant_id!r} has used up its {name} of {getattr(holding.limits, name)}"
            f"{holding.of_model}; try again later",
            retry_s,
            tightest(each.quota for each in holdings) or UNLIMITED,
        )


def is_refused(answers: Iterable[LedgerAnswer]) -> bool:
    """Return whether one of the accounts of a request has no room for it."""
    return any(answer.refused_by is not None for answer in answers)


def tightest(quotas: Iterable[Quota | None]) -> Quota | None:
    """Return for each rate limit the quota with the smallest remainder; None: there are no rate limits."""
    known = [quota for quota in quotas if quota is not None]
    if not known:
        return None
    return Quota(
        _tightest(quota.requests for quota in known),
        _tightest(quota.tokens for quota in known),
    )


def _tightest(rates: Iterable[RateLimit | None]) -> RateLimit | None:
    return min((rate for rate in rates if rate is not None), key=lambda rate: rate.remaining, default=None)


def quota_of(entry: LedgerEntry, answer: LedgerAnswer) -> Quota | None:
    """Return the remaining quota of an account after an entry; None: it has no rate limits."""
    taken = (answer.used[0], *(used + answer.num_reserved for used in answer.used[1:]))
    rates = [
        None if limit is None else RateLimit(limit, max(0, limit - num), reset_ms / 1e3)
        for limit, num, reset_ms in zip(entry.limits, taken, answer.reset_ms, strict=True)
    ]
    quota = Quota(rates[0], _tightest(rates[1:]))
    return None if quota == UNLIMITED else quota


class Ledger(Protocol):
    """Interface to the tenants' accounts."""

    async def book(self, entries: Sequence[LedgerEntry]) -> Sequence[LedgerAnswer]:
        """Record entries of one writer in different accounts, atomically: all of them, or none if one is refused.

        Raises:
            StoreUnavailable: the store cannot be reached. The entries may or may not be recorded.
        """

    async def close(self) -> None:
        """Close the ledger."""


class MemoryLedger:
    """A `Ledger` in memory.

    Args:
        clock: wall time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._accounts: dict[tuple[str, str], Account] = {}
        self._clock = clock

    async def book(self, entries: Sequence[LedgerEntry]) -> Sequence[LedgerAnswer]:
        return self.book_now(entries)

    def book_now(self, entries: Sequence[LedgerEntry]) -> Sequence[LedgerAnswer]:
        """Record without waiting; see `Ledger.book`."""
        accounts = [self._accounts.setdefault((entry.tenant_id, entry.model), Account()) for entry in entries]
        return book(accounts, entries, int(self._clock() * 1000))

    async def close(self) -> None:
        """Nothing to close."""


class RedisLedger:
    """A `Ledger` in Redis: one script call per request. Owns `connection`: `close` closes it.

    Args:
        clock: wall time in seconds; None: the clock of Redis, which all routers share.
    """

    def __init__(self, connection: RedisConnection, namespace: str, clock: Callable[[], float] | None = None) -> None:
        self._connection = connection
        self._keys = Keys(namespace)
        self._clock = clock

    async def book(self, entries: Sequence[LedgerEntry]) -> Sequence[LedgerAnswer]:
        now = int(self._clock() * 1000) if self._clock is not None else ""
        answers = await self._connection.run(
            BOOK,
            [self._keys.account(entry.tenant_id, entry.model) for entry in entries],
            *(now, SPANS, entries[0].writer),
            *(argument for entry in entries for argument in _arguments(entry)),
        )
        return [
            LedgerAnswer(
                refused_by=refused_by - 1 if refused_by else None,
                retry_ms=retry_ms,
                used=tuple(used),
                reset_ms=tuple(reset_ms),
                num_in_flight=num_in_flight,
                num_reserved=num_reserved,
            )
            for refused_by, retry_ms, used, reset_ms, num_in_flight, num_reserved in answers
        ]

    async def close(self) -> None:
        await self._connection.close()


def _arguments(entry: LedgerEntry) -> Iterator[str | int]:
    """Yield the arguments of the script for one account."""
    yield from (entry.version, entry.num_held, entry.num_asked)
    yield from ("" if entry.max_in_flight is None else entry.max_in_flight, entry.lease_ms)
    yield from (entry.num_reserved, entry.num_to_reserve)
    for window in zip(WINDOWS_MS, entry.limits, entry.needs, entry.amounts, strict=True):
        yield from ("" if value is None else value for value in window)
