"""One router's books of the tenants' limits, with a ledger that can be away or hang."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from baton.errors import InvalidRequest, QuotaExceeded, StoreUnavailable
from baton.quota import UNLIMITED, RateLimit
from baton.telemetry.instruments import Instruments
from router.admission import Accounts, Charge, MemoryLedger, accounts
from router.admission.account import LedgerAnswer, LedgerEntry
from router.admission.tenants import Tenant
from tests.support.builders import cluster_status
from tests.support.waiting import until

NOW = 1_800_000_000.0


class Shared(MemoryLedger):
    """The ledger of all routers."""

    def __init__(self) -> None:
        super().__init__(lambda: NOW)
        self.entries: list[LedgerEntry] = []
        self.is_away = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def book(self, entry: LedgerEntry) -> LedgerAnswer:
        self.entries.append(entry)
        await self.gate.wait()
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().book(entry)


@pytest.fixture
def ledger() -> Shared:
    return Shared()


def router(ledger: Shared, num_routers: int = 2) -> Accounts:
    return Accounts(ledger, Instruments(cluster_status), lambda: num_routers)


async def used(ledger: Shared, tenant: Tenant) -> tuple[int, ...]:
    ledger.is_away = False
    entry = LedgerEntry(tenant_id=tenant.id, limits=(10**9, 10**9, 10**9))
    return (await MemoryLedger.book(ledger, entry)).used


async def test_a_tenant_without_limits_costs_no_entry(ledger: Shared) -> None:
    books = router(ledger)
    charge = books.arrive(Tenant(id="acme", max_answer_tokens=5), 3)
    await charge.book(10**6)
    charge.settle(5)
    await books.flush()
    assert (ledger.entries, charge.quota) == ([], None)


async def test_a_request_is_two_entries_and_its_headers_say_what_is_left(ledger: Shared) -> None:
    books = router(ledger)
    tenant = Tenant(id="acme", requests_per_minute=5, tokens_per_minute=100, tokens_per_day=90, max_in_flight=2)
    charge = books.arrive(tenant, 2)
    await charge.book(30)
    assert charge.quota is not None
    assert charge.quota.requests == RateLimit(5, 4, 61.0)
    assert charge.quota.tokens == RateLimit(90, 60, 86_400.0 * 61 / 60)
    for _ in range(2):
        charge.settle(20)
    await books.flush()
    assert len(ledger.entries) == 2
    assert (ledger.entries[-1].num_held, ledger.entries[-1].amounts) == (0, (0, 20, 20))
    assert await used(ledger, tenant) == (1, 50, 50)
    await books.flush()
    assert len(ledger.entries) == 2
    again = books.arrive(tenant, 1)
    await again.book(1)
    again.settle(2)
    await books.flush()
    assert await used(ledger, tenant) == (2, 53, 53)


@pytest.mark.parametrize(
    ("tenant", "limit", "retry_s"),
    [
        (Tenant(id="acme", requests_per_minute=1), "requests_per_minute of 1", 60.0),
        (Tenant(id="acme", tokens_per_minute=10), "tokens_per_minute of 10", 60.0),
        (Tenant(id="acme", tokens_per_day=10), "tokens_per_day of 10", 87_840.0),
        (Tenant(id="acme", max_in_flight=1), "max_in_flight of 1", 1.0),
    ],
)
async def test_a_limit_that_is_used_up_refuses_and_then_at_arrival(
    ledger: Shared, tenant: Tenant, limit: str, retry_s: float
) -> None:
    books, others = router(ledger), router(ledger)
    first = books.arrive(tenant, 1)
    await first.book(10)
    second = others.arrive(tenant, 1)
    with pytest.raises(QuotaExceeded, match=limit) as caught:
        await second.book(1)
    assert caught.value.retry_after_s == retry_s
    second.settle(0)
    if retry_s > 1:
        with pytest.raises(QuotaExceeded, match=limit) as caught:
            others.arrive(tenant, 1)
        assert (caught.value.retry_after_s, len(ledger.entries)) == (retry_s, 2)
        assert caught.value.quota != UNLIMITED
        others.arrive(replace(tenant, weight=2.0), 1)  # the tenants' file has changed
    else:
        with pytest.raises(QuotaExceeded, match=limit):
            books.arrive(tenant, 1)
        assert len(ledger.entries) == 2
    first.settle(0)
    await books.flush()
    await others.flush()
    assert (len(ledger.entries), ledger.entries[-1].num_held) == (3, 0), "what was refused holds nothing"
    larger = replace(tenant, requests_per_minute=9, tokens_per_minute=99, tokens_per_day=99)
    await others.arrive(larger, 1).book(1)


async def test_a_prompt_that_finds_no_room_is_refused_and_one_that_never_will_is_invalid(ledger: Shared) -> None:
    books, tenant = router(ledger), Tenant(id="acme", tokens_per_minute=100, tokens_per_day=200, max_in_flight=1)
    with pytest.raises(InvalidRequest, match="the prompt has 101 tokens"):
        await books.arrive(tenant, 1).book(101)
    charge = books.arrive(tenant, 1)
    await charge.book(60)
    charge.settle(0)
    large = books.arrive(tenant, 1)
    with pytest.raises(QuotaExceeded, match="tokens_per_minute"):
        await large.book(60)
    large.settle(0)
    small = books.arrive(tenant, 1)
    await small.book(40)
    small.settle(0)
    with pytest.raises(InvalidRequest, match="asks for 2 answers at a time"):
        books.arrive(tenant, 2)
    assert await used(ledger, tenant) == (0, 100, 100)


async def test_what_is_known_of_a_limit_is_asked_again_after_a_while(
    ledger: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "KNOWN_S", 0.0)
    books, tenant = router(ledger), Tenant(id="acme", requests_per_minute=1)
    assert await served(books, tenant, 3) == 1
    assert len(ledger.entries) == 3


async def test_a_request_that_is_cancelled_while_it_asks_holds_nothing(ledger: Shared) -> None:
    books, tenant = router(ledger), Tenant(id="acme", max_in_flight=1)
    ledger.gate.clear()
    charge = books.arrive(tenant, 1)
    asking = asyncio.create_task(charge.book(1))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    charge.settle(0)
    ledger.gate.set()
    await books.flush()
    await router(ledger).arrive(tenant, 1).book(1)


async def test_answers_in_flight_are_renewed_while_they_go_on(ledger: Shared) -> None:
    books = Accounts(ledger, Instruments(cluster_status), lambda: 1, lease_s=0.05)
    charge = books.arrive(Tenant(id="acme", max_in_flight=3), 2)
    await charge.book(1)
    running = asyncio.create_task(books.run())
    await until(lambda: sum(entry.num_asked == 0 and entry.num_held == 2 for entry in ledger.entries) >= 3)
    charge.settle(0)
    await until(lambda: ledger.entries[-1].num_held == 0)
    running.cancel()
    assert [entry.version for entry in ledger.entries] == list(range(1, len(ledger.entries) + 1))


async def test_the_next_request_records_what_the_answer_before_it_used(ledger: Shared) -> None:
    books, tenant = router(ledger), Tenant(id="acme", requests_per_minute=9, tokens_per_minute=100, max_in_flight=9)
    for num_tokens in (10, 20, 30):
        charge = books.arrive(tenant, 1)
        await charge.book(num_tokens)
        charge.settle(7)
    assert [entry.amounts[1] for entry in ledger.entries] == [10, 27, 37]
    large = books.arrive(tenant, 1)
    with pytest.raises(QuotaExceeded, match="tokens_per_minute"):
        await large.book(20)  # 74 are recorded, and 7 are owed
    large.settle(0)
    await books.flush()
    assert (len(ledger.entries), ledger.entries[-1].amounts) == (5, (0, 7, 7)), "what was refused books nothing"
    assert await used(ledger, tenant) == (3, 81, 0)


@pytest.mark.parametrize(("max_in_flight", "is_at_once"), [(None, False), (4, False), (3, True)])
async def test_answers_that_end_are_recorded_at_once_only_where_others_may_wait_for_them(
    ledger: Shared, monkeypatch: pytest.MonkeyPatch, max_in_flight: int | None, is_at_once: bool
) -> None:
    monkeypatch.setattr(accounts, "DEBT_S", 0.3)
    books, others = router(ledger), router(ledger)
    tenant = Tenant(id="acme", tokens_per_minute=100, max_in_flight=max_in_flight)
    running = asyncio.create_task(books.run())
    await others.arrive(tenant, 1).book(1)
    charge = books.arrive(tenant, 1)
    await charge.book(1)
    charge.settle(5)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(ledger.entries) == (3 if is_at_once else 2)
    await until(lambda: len(ledger.entries) == 3)
    assert (ledger.entries[-1].amounts, ledger.entries[-1].num_held) == ((0, 5, 5), 0)
    running.cancel()


async def test_what_a_request_owes_is_recorded_once_while_the_ledger_hangs(ledger: Shared) -> None:
    books, tenant = router(ledger), Tenant(id="acme", tokens_per_minute=100)
    first = books.arrive(tenant, 1)
    await first.book(10)
    first.settle(20)
    ledger.gate.clear()
    booking = asyncio.create_task(books.arrive(tenant, 1).book(1))
    flushing = asyncio.create_task(books.flush())
    await asyncio.sleep(0)
    ledger.gate.set()
    await asyncio.gather(booking, flushing)
    await books.flush()
    assert await used(ledger, tenant) == (0, 31, 0)


async def test_what_an_answer_may_be_is_reserved_until_it_has_ended_and_headers_say_so(ledger: Shared) -> None:
    books, others = router(ledger), router(ledger)
    tenant = Tenant(id="acme", tokens_per_minute=300, tokens_per_day=10**6)
    charge = books.arrive(tenant, 16)
    await charge.book(2, 960)
    assert charge.quota is not None
    assert charge.quota.tokens is not None
    assert (charge.quota.tokens.limit, charge.quota.tokens.remaining) == (300, 0)
    for each in (books, others):
        second = each.arrive(tenant, 1)
        with pytest.raises(QuotaExceeded, match="tokens_per_minute of 300") as caught:
            await second.book(1, 1)
        assert caught.value.retry_after_s == accounts.BUSY_RETRY_S
        second.settle(0)
    charge.settle(40)
    await books.flush()
    third = others.arrive(tenant, 1)
    await third.book(1, 100)
    assert third.quota is not None
    assert third.quota.tokens is not None
    assert third.quota.tokens.remaining == 300 - 2 - 40 - 1 - 100
    fourth = books.arrive(tenant, 1)
    await fourth.book(100, 50)
    assert fourth.quota is not None
    assert fourth.quota.tokens is not None
    assert fourth.quota.tokens.remaining == 300 - 42 - 101 - 100 - 50


async def test_a_tenant_without_a_limit_of_tokens_reserves_none(ledger: Shared) -> None:
    books = router(ledger)
    charge = books.arrive(Tenant(id="acme", requests_per_minute=5), 1)
    await charge.book(10, 10**6)
    assert ledger.entries[-1].num_reserved == 0


async def test_what_is_refused_or_cancelled_reserves_nothing(ledger: Shared) -> None:
    books, tenant = router(ledger), Tenant(id="acme", requests_per_minute=1, tokens_per_minute=100)
    first = books.arrive(tenant, 1)
    await first.book(1, 10)
    second = books.arrive(tenant, 1)
    with pytest.raises(QuotaExceeded, match="requests_per_minute"):
        await second.book(1, 50)
    second.settle(0)
    first.settle(3)
    await books.flush()
    assert (ledger.entries[-1].num_reserved, ledger.entries[-1].amounts) == (0, (0, 3, 3))
    entry = LedgerEntry(tenant_id="acme", limits=(None, 100, None))
    assert (await ledger.book(entry)).num_reserved == 0


@pytest.fixture
def away(ledger: Shared) -> Shared:
    ledger.is_away = True
    return ledger


async def served(books: Accounts, tenant: Tenant, num_requests: int, num_tokens: int = 1) -> int:
    num_served = 0
    for _ in range(num_requests):
        charge = Charge()
        with contextlib.suppress(QuotaExceeded):
            charge = books.arrive(tenant, 1)
            await charge.book(num_tokens)
            num_served += 1
        charge.settle(0)
    return num_served


async def test_without_the_ledger_each_router_goes_by_its_share(away: Shared, caplog: pytest.LogCaptureFixture) -> None:
    a, b = router(away), router(away)
    tenant = Tenant(id="acme", requests_per_minute=11, tokens_per_minute=10**6)
    assert [await served(books, tenant, 20, 7) for books in (a, b)] == [5, 5]
    assert len(away.entries) == 2, "of each router the first request alone has waited"
    assert caplog.text.count("enforces its share") == 2
    assert await used(away, tenant) == (0, 0, 0)
    await a.flush()
    await b.flush()
    assert await used(away, tenant) == (10, 70, 0), "what was served meanwhile"
    assert [await served(books, tenant, 3) for books in (a, b)] == [0, 0], "known of when the share was used up"
    assert [await served(router(away), tenant, 3)] == [1]


async def test_a_share_is_at_least_one_and_answers_in_flight_have_one_too(away: Shared) -> None:
    assert await served(router(away, 5), Tenant(id="acme", requests_per_minute=2), 3) == 1
    books, tenant = router(away, 3), Tenant(id="acme", max_in_flight=6)
    charges = [books.arrive(tenant, 1) for _ in range(3)]
    for charge in charges[:2]:
        await charge.book(1)
    with pytest.raises(QuotaExceeded):
        await charges[2].book(1)
    charges[0].settle(0)
    charges[2].settle(0)
    await books.arrive(tenant, 1).book(1)


async def test_a_ledger_that_hangs_holds_up_one_request_for_a_moment(
    ledger: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(accounts, "RETRY_S", 0.01)
    ledger.gate.clear()
    books, tenant = router(ledger), Tenant(id="acme", requests_per_minute=100)
    assert await served(books, tenant, 60) == 50
    assert len(ledger.entries) == 1
    running = asyncio.create_task(books.run())
    await until(lambda: len(ledger.entries) >= 3)
    ledger.gate.set()
    await until(lambda: not books._is_away)
    running.cancel()
    assert await served(router(ledger), tenant, 60) == 50, "of 100 for all routers"


async def test_refusals_are_counted_by_tenant_and_limit(ledger: Shared) -> None:
    instruments = Instruments(cluster_status)
    books = Accounts(ledger, instruments, lambda: 1)
    await served(books, Tenant(id="acme", requests_per_minute=1), 3)
    shown = instruments.exposition().decode()
    assert 'baton_tenant_refusals_total{limit="requests_per_minute",tenant="acme"} 2.0' in shown


def test_a_charge_of_nobody_can_be_settled() -> None:
    Charge().settle(3)
