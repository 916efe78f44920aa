"""One router's books of the tenants' limits, with a ledger that can be away or hang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.errors import InvalidRequest, QuotaExceeded, StoreUnavailable
from baton.quota import UNLIMITED, RateLimit
from baton.telemetry.instruments import Instruments
from router.admission import Accounts, Charge, MemoryLedger, accounts
from router.admission.account import LedgerAnswer, LedgerEntry
from router.admission.limits import Limits
from router.admission.tenants import Tenant
from tests.support.builders import cluster_status
from tests.support.waiting import until

NOW = 1_800_000_000.0


class Shared(MemoryLedger):
    """The ledger of all routers."""

    def __init__(self) -> None:
        super().__init__(lambda: NOW)
        self.entries: list[LedgerEntry] = []
        self.num_calls = 0
        self.is_away = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def book(self, entries: Sequence[LedgerEntry]) -> Sequence[LedgerAnswer]:
        self.entries.extend(entries)
        self.num_calls += 1
        await self.gate.wait()
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().book(entries)


@pytest.fixture
def ledger() -> Shared:
    return Shared()


def router(ledger: Shared, num_routers: int = 2) -> Accounts:
    return Accounts(ledger, Instruments(cluster_status), lambda: num_routers)


async def used(ledger: Shared, tenant: Tenant, model: str = "") -> tuple[int, ...]:
    return (await state(ledger, tenant, model)).used


async def state(ledger: Shared, tenant: Tenant, model: str = "") -> LedgerAnswer:
    ledger.is_away = False
    entry = LedgerEntry(tenant_id=tenant.id, model=model, limits=(10**9, 10**9, 10**9))
    (answer,) = await MemoryLedger.book(ledger, [entry])
    return answer


async def test_a_tenant_without_limits_costs_no_entry(ledger: Shared) -> None:
    books = router(ledger)
    charge = books.arrive(Tenant(id="acme", max_answer_tokens=5), 3, "tiny")
    await charge.book(10**6)
    charge.settle(5)
    await books.flush()
    assert (ledger.entries, charge.quota) == ([], None)


async def test_a_request_is_two_entries_and_its_headers_say_what_is_left(ledger: Shared) -> None:
    books = router(ledger)
    tenant = Tenant(id="acme", requests_per_minute=5, tokens_per_minute=100, tokens_per_day=90, max_in_flight=2)
    charge = books.arrive(tenant, 2, "tiny")
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
    again = books.arrive(tenant, 1, "tiny")
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
    first = books.arrive(tenant, 1, "tiny")
    await first.book(10)
    second = others.arrive(tenant, 1, "tiny")
    with pytest.raises(QuotaExceeded, match=limit) as caught:
        await second.book(1)
    assert caught.value.retry_after_s == retry_s
    second.settle(0)
    if retry_s > 1:
        with pytest.raises(QuotaExceeded, match=limit) as caught:
            others.arrive(tenant, 1, "tiny")
        assert (caught.value.retry_after_s, len(ledger.entries)) == (retry_s, 2)
        assert caught.value.quota != UNLIMITED
        others.arrive(replace(tenant, weight=2.0), 1, "tiny")  # the tenants' file has changed
    else:
        with pytest.raises(QuotaExceeded, match=limit):
            books.arrive(tenant, 1, "tiny")
        assert len(ledger.entries) == 2
    first.settle(0)
    await books.flush()
    await others.flush()
    assert (len(ledger.entries), ledger.entries[-1].num_held) == (3, 0), "what was refused holds nothing"
    larger = replace(tenant, requests_per_minute=9, tokens_per_minute=99, tokens_per_day=99)
    await others.arrive(larger, 1, "tiny").book(1)


async def test_a_prompt_that_finds_no_room_is_refused_and_one_that_never_will_is_invalid(ledger: Shared) -> None:
    books, tenant = router(ledger), Tenant(id="acme", tokens_per_minute=100, tokens_per_day=200, max_in_flight=1)
    with pytest.raises(InvalidRequest, match="the prompt has 101 tokens"):
        await books.arrive(tenant, 1, "tiny").book(101)
    charge = books.arrive(tenant, 1, "tiny")
    await charge.book(60)
    charge.settle(0)
    large = books.arrive(tenant, 1, "tiny")
    with pytest.raises(QuotaExceeded, match="tokens_per_minute"):
        await large.book(60)
    large.settle(0)
    small = books.arrive(tenant, 1, "tiny")
    await small.book(40)
    small.settle(0)
    with pytest.raises(InvalidRequest, match="asks for 2 answers at a time"):
        books.arrive(tenant, 2, "tiny")
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
    charge = books.arrive(tenant, 1, "tiny")
    asking = asyncio.create_task(charge.book(1))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    charge.settle(0)
    ledger.gate.set()
    await books.flush()
    await router(ledger).arrive(tenant, 1, "tiny").book(1)


async def test_answers_in_flight_are_renewed_while_they_go_on(ledger: Shared) -> None:
    books = Accounts(ledger, Instruments(cluster_status), lambda: 1, lease_s=0.05)
    charge = books.arrive(Tenant(id="acme", max_in_flight=3), 2, "tiny")
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
        charge = books.arrive(tenant, 1, "tiny")
        await charge.book(num_tokens)
        charge.settle(7)
    assert [entry.amounts[1] for entry in ledger.entries] == [10, 27, 37]
    large = books.arrive(tenant, 1, "tiny")
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
    await others.arrive(tenant, 1, "tiny").book(1)
    charge = books.arrive(tenant, 1, "tiny")
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
    first = books.arrive(tenant, 1, "tiny")
    await first.book(10)
    first.settle(20)
    ledger.gate.clear()
    booking = asyncio.create_task(books.arrive(tenant, 1, "tiny").book(1))
    flushing = asyncio.create_task(books.flush())
    await asyncio.sleep(0)
    ledger.gate.set()
    await asyncio.gather(booking, flushing)
    await books.flush()
    assert await used(ledger, tenant) == (0, 31, 0)


async def test_what_an_answer_may_be_is_reserved_until_it_has_ended_and_headers_say_so(ledger: Shared) -> None:
    books, others = router(ledger), router(ledger)
    tenant = Tenant(id="acme", tokens_per_minute=300, tokens_per_day=10**6)
    charge = books.arrive(tenant, 16, "tiny")
    await charge.book(2, 960)
    assert charge.quota is not None
    assert charge.quota.tokens is not None
    assert (charge.quota.tokens.limit, charge.quota.tokens.remaining) == (300, 0)
    for each in (books, others):
        second = each.arrive(tenant, 1, "tiny")
        with pytest.raises(QuotaExceeded, match="tokens_per_minute of 300") as caught:
            await second.book(1, 1)
        assert caught.value.retry_after_s == accounts.BUSY_RETRY_S
        second.settle(0)
    charge.settle(40)
    await books.flush()
    third = others.arrive(tenant, 1, "tiny")
    await third.book(1, 100)
    assert third.quota is not None
    assert third.quota.tokens is not None
    assert third.quota.tokens.remaining == 300 - 2 - 40 - 1 - 100
    fourth = books.arrive(tenant, 1, "tiny")
    await fourth.book(100, 50)
    assert fourth.quota is not None
    assert fourth.quota.tokens is not None
    assert fourth.quota.tokens.remaining == 300 - 42 - 101 - 100 - 50


async def test_a_tenant_without_a_limit_of_tokens_reserves_none(ledger: Shared) -> None:
    books = router(ledger)
    charge = books.arrive(Tenant(id="acme", requests_per_minute=5), 1, "tiny")
    await charge.book(10, 10**6)
    assert ledger.entries[-1].num_reserved == 0


async def test_what_is_refused_or_cancelled_reserves_nothing(ledger: Shared) -> None:
    books, tenant = router(ledger), Tenant(id="acme", requests_per_minute=1, tokens_per_minute=100)
    first = books.arrive(tenant, 1, "tiny")
    await first.book(1, 10)
    second = books.arrive(tenant, 1, "tiny")
    with pytest.raises(QuotaExceeded, match="requests_per_minute"):
        await second.book(1, 50)
    second.settle(0)
    first.settle(3)
    await books.flush()
    assert (ledger.entries[-1].num_reserved, ledger.entries[-1].amounts) == (0, (0, 3, 3))
    assert (await state(ledger, tenant)).num_reserved == 0


@pytest.fixture
def away(ledger: Shared) -> Shared:
    ledger.is_away = True
    return ledger


async def served(books: Accounts, tenant: Tenant, num_requests: int, num_tokens: int = 1, model: str = "tiny") -> int:
    num_served = 0
    for _ in range(num_requests):
        charge = Charge()
        with contextlib.suppress(QuotaExceeded):
            charge = books.arrive(tenant, 1, model)
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
    charges = [books.arrive(tenant, 1, "tiny") for _ in range(3)]
    for charge in charges[:2]:
        await charge.book(1)
    with pytest.raises(QuotaExceeded):
        await charges[2].book(1)
    charges[0].settle(0)
    charges[2].settle(0)
    await books.arrive(tenant, 1, "tiny").book(1)


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


LARGE = Limits(requests_per_minute=2, tokens_per_minute=100, max_in_flight=2)
BOTH = Tenant(
    id="acme", requests_per_minute=3, tokens_per_minute=1000, max_in_flight=3, model_limits=(("large*", LARGE),)
)


async def test_a_request_counts_for_the_model_and_over_all_models_in_one_call(ledger: Shared) -> None:
    books = router(ledger)
    charge = books.arrive(BOTH, 1, "large-1")
    await charge.book(30, 20)
    assert ledger.num_calls == 1
    assert charge.quota is not None
    assert (charge.quota.requests, charge.quota.tokens) == (RateLimit(2, 1, 61.0), RateLimit(100, 50, 61.0))
    in_flight = [
        (each.num_in_flight, each.num_reserved) for each in [await state(ledger, BOTH, m) for m in ("", "large-1")]
    ]
    assert in_flight == [(1, 20), (1, 20)]
    charge.settle(5)
    await books.flush()
    other = books.arrive(BOTH, 1, "small")
    await other.book(7)
    assert other.quota is not None
    assert other.quota.requests == RateLimit(3, 1, 61.0)
    assert [await used(ledger, BOTH, model) for model in ("", "large-1", "small")] == [
        (2, 42, 0), (1, 35, 0), (0, 0, 0)
    ]  # fmt: skip


async def test_each_model_that_a_pattern_matches_has_the_limits_of_its_own(ledger: Shared) -> None:
    books = router(ledger)
    assert [await served(books, replace(BOTH, requests_per_minute=None), 4, model=f"large-{i}") for i in "12"] == [2, 2]


@pytest.mark.parametrize(
    ("limit", "large", "num_tokens"),
    [
        ("requests_per_minute of 2", LARGE, 1),
        ("tokens_per_minute of 100", replace(LARGE, requests_per_minute=None), 50),
    ],
)
async def test_what_a_model_refuses_counts_nowhere_and_the_error_names_the_model(
    ledger: Shared, limit: str, large: Limits, num_tokens: int
) -> None:
    tenant = replace(BOTH, model_limits=(("large*", large),))
    assert await served(router(ledger), tenant, 2, num_tokens, "large-1") == 2
    for books in (router(ledger), router(ledger)):
        for num_calls in (1, 0):  # the second time, the router knows of the refusal
            before = ledger.num_calls
            with pytest.raises(QuotaExceeded, match=f"{limit} for the model 'large-1'") as caught:
                await books.arrive(tenant, 1, "large-1").book(num_tokens, 9)
            assert (ledger.num_calls - before, caught.value.retry_after_s) == (num_calls, 60.0)
            rates = (caught.value.quota.requests, caught.value.quota.tokens)
            assert min(rate.remaining for rate in rates if rate is not None) == 0
        await books.flush()
        found = await state(ledger, tenant)
        assert (found.used[:2], found.num_reserved) == ((2, 2 * num_tokens), 0)
    assert await served(router(ledger), tenant, 9, model="small") == 1, "of three requests, the third is left"


async def test_what_the_tenant_has_used_up_counts_nothing_for_the_model(ledger: Shared) -> None:
    books, tenant = router(ledger), replace(BOTH, requests_per_minute=1)
    assert await served(books, tenant, 1, model="small") == 1
    with pytest.raises(QuotaExceeded, match="requests_per_minute of 1; try") as caught:
        await books.arrive(tenant, 1, "large-1").book(5, 5)
    assert caught.value.quota.requests == RateLimit(1, 0, 61.0)
    await books.flush()
    found = await state(ledger, tenant, "large-1")
    assert (found.used, found.num_in_flight, found.num_reserved) == ((0, 0, 0), 0, 0)


async def test_if_both_refuse_the_error_names_the_one_that_has_room_later(ledger: Shared) -> None:
    books = router(ledger)
    daily = Limits(tokens_per_day=10)
    tenant = Tenant(id="acme", requests_per_minute=1, model_limits=(("m", daily),))
    assert await served(books, tenant, 1, 10, "m") == 1
    with pytest.raises(QuotaExceeded, match="tokens_per_day of 10 for the model 'm'") as caught:
        await books.arrive(tenant, 1, "m").book(1)
    assert caught.value.retry_after_s > 60
    assert caught.value.quota.requests == RateLimit(1, 0, 61.0)
    assert caught.value.quota.tokens is not None


async def test_answers_in_flight_of_a_model_hold_over_two_routers(ledger: Shared) -> None:
    one, other = router(ledger), router(ledger)
    tenant = Tenant(id="acme", max_in_flight=3, model_limits=(("large*", Limits(max_in_flight=2)),))
    charges = [one.arrive(tenant, 1, "large-1"), other.arrive(tenant, 1, "large-1")]
    for charge in charges:
        await charge.book(1)
    with pytest.raises(QuotaExceeded, match="max_in_flight of 2 for the model 'large-1'"):
        await one.arrive(tenant, 1, "large-1").book(1)
    await one.arrive(tenant, 1, "small").book(1)
    with pytest.raises(QuotaExceeded, match="max_in_flight of 3; try"):
        await other.arrive(tenant, 1, "small").book(1)
    charges[1].settle(0)
    await other.flush()
    assert [(await state(ledger, tenant, model)).num_in_flight for model in ("", "large-1")] == [2, 1]
    await one.arrive(tenant, 1, "large-1").book(1)


async def test_what_a_model_can_never_admit_is_invalid(ledger: Shared) -> None:
    books = router(ledger)
    with pytest.raises(InvalidRequest, match="max_in_flight of tenant 'acme' for the model 'large-1' is 2"):
        books.arrive(BOTH, 3, "large-1")
    with pytest.raises(InvalidRequest, match="smallest token limit of tenant 'acme' for the model 'large-1' is 100"):
        await books.arrive(BOTH, 1, "large-1").book(101)
    assert (await served(books, BOTH, 1, 101, "small"), ledger.num_calls) == (1, 1)


@pytest.mark.parametrize(("of_tenant", "of_model"), [(7, 5), (5, 7), (5, 5)])
async def test_routers_that_race_exceed_neither_of_two_limits(ledger: Shared, of_tenant: int, of_model: int) -> None:
    """All of them ask at once; the sum over the models never exceeds the tenant's limit."""
    tenant = Tenant(
        id="acme", requests_per_minute=of_tenant, model_limits=(("*", Limits(requests_per_minute=of_model)),)
    )
    routers = [router(ledger) for _ in range(2)]
    ledger.gate.clear()
    tasks = [
        asyncio.create_task(books.arrive(tenant, 1, model).book(1))
        for _ in range(10) for books in routers for model in ("a", "b")
    ]  # fmt: skip
    await asyncio.sleep(0)
    ledger.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {type(None), QuotaExceeded}
    counts = [(await used(ledger, tenant, model))[0] for model in ("", "a", "b")]
    assert counts[0] == counts[1] + counts[2] == results.count(None) == of_tenant
    assert max(counts[1:]) <= of_model


async def test_a_tenant_with_limits_of_models_only_costs_no_entry_with_the_others(ledger: Shared) -> None:
    books, tenant = router(ledger), Tenant(id="acme", model_limits=(("large*", Limits(tokens_per_day=99)),))
    assert await served(books, tenant, 5, model="small") == 5
    assert ledger.entries == []
    charge = books.arrive(tenant, 1, "large")
    await charge.book(1, 7)
    assert [(each.model, each.num_reserved) for each in ledger.entries] == [("large", 7)]


async def test_without_the_ledger_a_router_goes_by_its_share_of_both_limits(away: Shared) -> None:
    books, tenant = router(away), replace(BOTH, requests_per_minute=8, max_in_flight=None)
    assert await served(books, tenant, 9, model="large-1") == 1, "half of two"
    assert await served(books, tenant, 9, model="small") == 3, "of four, one was the large model's"
    assert await used(away, tenant) == (0, 0, 0)
    await books.flush()
    assert [(await used(away, tenant, model))[0] for model in ("", "large-1")] == [4, 1]


async def test_a_changed_limit_of_a_model_holds_at_once(ledger: Shared) -> None:
    books = router(ledger)
    assert await served(books, BOTH, 3, model="large-1") == 2
    more = replace(BOTH, model_limits=(("large-1", replace(LARGE, requests_per_minute=3)), *BOTH.model_limits))
    assert await served(books, more, 3, model="large-1") == 1
    assert await served(books, replace(BOTH, model_limits=(), requests_per_minute=4), 3, model="large-1") == 1
