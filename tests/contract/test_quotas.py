"""The ledger of the tenants' limits: one suite for memory and for every Redis."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from baton.errors import StoreUnavailable
from kvstore.index import RedisConnection
from kvstore.index.keys import Keys
from router.admission import Ledger, MemoryLedger, RedisLedger
from router.admission.account import SEATS, Account, LedgerAnswer, LedgerEntry
from router.admission.account import book as book_all

if TYPE_CHECKING:
    from tests.contract.conftest import Backend, RedisServer

ENTRY = LedgerEntry(tenant_id="acme", limits=(2, 100, 1000), max_in_flight=2, writer="a", version=1)
ARRIVAL = replace(ENTRY, needs=(1, 1, 1), amounts=(1, 0, 0), num_held=1, num_asked=1)


@pytest.fixture
def ledger(backend: Backend) -> Ledger:
    if backend.store:
        return MemoryLedger(backend.clock)
    assert backend.router
    return RedisLedger(backend.router, backend.namespace, backend.clock)


async def book(ledger: Ledger, entry: LedgerEntry) -> LedgerAnswer:
    (answer,) = await ledger.book([entry])
    return answer


async def test_requests_of_two_routers_count_together(ledger: Ledger, backend: Backend) -> None:
    assert (await book(ledger, ARRIVAL)).refused_by is None
    assert (await book(ledger, replace(ARRIVAL, writer="b"))).used == (2, 0, 0)
    refused = await book(ledger, replace(ARRIVAL, writer="c", max_in_flight=9))
    assert (refused.refused_by, refused.used) == (0, (2, 0, 0))
    assert (await book(ledger, replace(ARRIVAL, tenant_id="zeta"))).refused_by is None
    backend.clock.now += refused.retry_ms / 1000
    assert (await book(ledger, replace(ARRIVAL, writer="c", max_in_flight=9))).used == (1, 0, 0)


async def test_answers_in_flight_end_with_their_lease(ledger: Ledger, backend: Backend) -> None:
    entry = replace(ARRIVAL, limits=(None, None, None))
    assert (await book(ledger, replace(entry, num_held=2, num_asked=2))).refused_by is None
    assert (await book(ledger, replace(entry, writer="b"))).refused_by == SEATS
    backend.clock.now += 8
    await book(ledger, replace(entry, version=2, num_held=2, num_asked=0))
    backend.clock.now += 8
    assert (await book(ledger, replace(entry, writer="b", version=2))).refused_by == SEATS
    backend.clock.now += 2
    assert (await book(ledger, replace(entry, writer="b", version=3))).refused_by is None


async def test_what_answers_of_another_router_may_still_be_leaves_no_room(ledger: Ledger, backend: Backend) -> None:
    entry = replace(ARRIVAL, max_in_flight=None, limits=(None, 100, None), needs=(0, 10, 0), amounts=(0, 10, 0))
    first = await book(ledger, replace(entry, num_reserved=90, num_to_reserve=90))
    assert (first.refused_by, first.used, first.num_reserved) == (None, (0, 10, 0), 90)
    other = replace(entry, writer="b", num_reserved=5, num_to_reserve=5)
    refused = await book(ledger, other)
    assert (refused.refused_by, refused.retry_ms, refused.num_reserved) == (1, 0, 90)
    await book(ledger, replace(ENTRY, max_in_flight=None, limits=entry.limits, version=2, amounts=(0, 30, 0)))
    assert (await book(ledger, replace(other, version=2))).refused_by is None
    backend.clock.now += 10  # a router that is not heard of
    assert (await book(ledger, replace(entry, writer="c", num_held=0, num_asked=0))).num_reserved == 0


@pytest.mark.parametrize("seed", range(3))
async def test_every_ledger_answers_as_the_arithmetic_does(ledger: Ledger, backend: Backend, seed: int) -> None:
    rng, account, versions, refusals = random.Random(seed), Account(), dict.fromkeys("abc", 5), set()
    for _ in range(250):
        backend.clock.now = round(backend.clock.now + rng.choice((0.0, 0.1, 0.7, 1.0, 5.0, 30.0, 2000.0)), 3)
        writer = rng.choice("abc")
        versions[writer] += 1
        num_held, num_reserved = rng.randrange(4), rng.randrange(120)
        entry = LedgerEntry(
            tenant_id="acme",
            limits=(rng.choice((None, 2)), rng.choice((None, 200)), rng.choice((None, 2000))),
            max_in_flight=rng.choice((None, 4)),
            needs=(rng.randrange(2), rng.randrange(100), rng.randrange(100)),
            amounts=(rng.randrange(2), rng.randrange(100), rng.randrange(100)),
            writer=writer,
            version=versions[writer] - rng.choice((0, 0, 0, 3)),
            num_held=num_held,
            num_asked=rng.randrange(num_held + 1),
            num_reserved=num_reserved,
            num_to_reserve=rng.randrange(num_reserved + 1),
            lease_ms=10_000,
        )
        (expected,) = book_all([account], [entry], int(backend.clock.now * 1000))
        assert await book(ledger, entry) == expected
        refusals.add(expected.refused_by)
    assert refusals == {None, 0, 1, 2, SEATS}


@pytest.mark.parametrize("seed", range(2))
async def test_two_accounts_are_booked_as_the_arithmetic_does(ledger: Ledger, backend: Backend, seed: int) -> None:
    """Two accounts of a tenant, over all models and with one model: both record an entry, or none does."""
    rng, accounts, refusals = random.Random(seed), {name: Account() for name in ("", "a", "b")}, set()
    for version in range(4, 204):
        backend.clock.now = round(backend.clock.now + rng.choice((0.0, 0.1, 1.0, 5.0, 30.0, 2000.0)), 3)
        writer, amount, held = rng.choice("xyz"), rng.randrange(80), rng.randrange(3)
        common = LedgerEntry(
            tenant_id="acme", limits=(4, 400, None), max_in_flight=4, needs=(1, amount, amount),
            amounts=(1, amount, amount), writer=writer, version=version - rng.choice((0, 0, 0, 3)), num_held=held,
            num_asked=rng.randrange(held + 1), num_reserved=held * 20, num_to_reserve=held * 10,
        )  # fmt: skip
        model = rng.choice("ab")
        of_model = replace(common, model=model, limits=(3, 150, 900), max_in_flight=3, num_held=held and held - 1)
        entries = [common, replace(of_model, num_asked=min(common.num_asked, of_model.num_held))]
        expected = book_all([accounts[""], accounts[model]], entries, int(backend.clock.now * 1000))
        assert list(await ledger.book(entries)) == expected
        refusals.add(tuple(answer.refused_by is None for answer in expected))
    assert refusals == {(True, True), (True, False), (False, True), (False, False)}


async def test_what_one_account_refuses_is_recorded_in_neither_and_holds_nothing(ledger: Ledger) -> None:
    narrow = replace(ARRIVAL, model="m", limits=(1, None, None), num_reserved=9, num_to_reserve=9)
    wide = replace(ARRIVAL, max_in_flight=9, num_reserved=9, num_to_reserve=9)
    assert [answer.refused_by for answer in await ledger.book([wide, narrow])] == [None, None]
    later = [replace(entry, version=2, num_held=2, num_reserved=18) for entry in (wide, narrow)]
    for entries in (later, later[::-1]):
        answers = await ledger.book(entries)
        assert sorted(answer.refused_by == 0 for answer in answers) == [False, True]
        assert [(each.used, each.num_in_flight, each.num_reserved) for each in answers] == [((1, 0, 0), 1, 9)] * 2


async def test_routers_that_ask_at_once_exceed_neither_limit(ledger: Ledger) -> None:
    def entries(writer: str, model: str) -> list[LedgerEntry]:
        entry = replace(ARRIVAL, writer=writer, limits=(7, None, None), max_in_flight=None)
        return [entry, replace(entry, model=model, limits=(4, None, None))]

    asked = [(writer, model) for writer in "vwxyz" for model in ("m", "n")]
    answers = await asyncio.gather(*(ledger.book(entries(*each)) for each in asked * 2))
    assert sum(all(answer.refused_by is None for answer in each) for each in answers) == 7
    free = replace(ENTRY, limits=(99, None, None))
    counts = [(await book(ledger, replace(free, model=model))).used[0] for model in ("", "m", "n")]
    assert counts[0] == counts[1] + counts[2] == 7
    assert max(counts) <= 7
    assert max(counts[1:]) <= 4


def test_no_two_accounts_have_one_key() -> None:
    keys = Keys("ns")
    names = ("a", "a:b", "b", "1:a", "3:a:b", "a:", ":")
    found = [keys.account(tenant, model) for tenant in names for model in ("", *names)]
    assert len(set(found)) == len(found)


async def test_an_account_lives_until_nothing_of_it_counts(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    assert backend.connection
    ledger, name = RedisLedger(backend.connection, namespace), Keys(namespace).account("acme")
    await book(ledger, replace(ENTRY, max_in_flight=None))
    assert await backend.connection.call("EXISTS", name) == 0
    await book(ledger, replace(ARRIVAL, max_in_flight=None))
    assert 59_000 < await backend.connection.call("PTTL", name) <= 61_000
    await book(ledger, replace(ENTRY, amounts=(0, 5, 5)))
    assert 86_000_000 < await backend.connection.call("PTTL", name) <= 87_840_000


async def test_what_cannot_be_read_of_an_account_counts_nothing_and_is_noted(
    server: RedisServer, namespace: str
) -> None:
    backend = server.backend(namespace)
    assert backend.connection
    ledger, name = RedisLedger(backend.connection, namespace), Keys(namespace).account("acme")
    garbage = (b"x", b"\xc1", b"\x93\x01\x02\x03", b"\x92\x93\x81\xa1x\x01\x80\x80\x81\xa1w\x05", b"\x92\x80\x90")
    for value in garbage:
        await backend.connection.call("SET", name, value)
        assert (await book(ledger, ARRIVAL)).used == (1, 0, 0)
    await backend.connection.pipeline([("DEL", name), ("SADD", name, "x")])
    assert (await book(ledger, ARRIVAL)).used == (1, 0, 0)
    assert (await book(ledger, replace(ARRIVAL, version=2, num_held=2))).used == (2, 0, 0)
    assert [(each.what, each.times) for each in backend.connection.garbage.seen()] == [("account", 5)]


async def test_without_redis_it_says_so() -> None:
    ledger = RedisLedger(RedisConnection("redis://127.0.0.1:1/0"), "ns")
    with pytest.raises(StoreUnavailable):
        await book(ledger, ARRIVAL)
    await ledger.close()
