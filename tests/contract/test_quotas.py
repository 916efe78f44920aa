"""The ledger of the tenants' limits: one suite for memory and for every Redis."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from baton.errors import StoreUnavailable
from kvstore.index import RedisConnection
from kvstore.index.keys import Keys
from router.admission import Ledger, MemoryLedger, RedisLedger
from router.admission.account import SEATS, Account, LedgerEntry

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


async def test_requests_of_two_routers_count_together(ledger: Ledger, backend: Backend) -> None:
    assert (await ledger.book(ARRIVAL)).refused_by is None
    assert (await ledger.book(replace(ARRIVAL, writer="b"))).used == (2, 0, 0)
    refused = await ledger.book(replace(ARRIVAL, writer="c", max_in_flight=9))
    assert (refused.refused_by, refused.used) == (0, (2, 0, 0))
    assert (await ledger.book(replace(ARRIVAL, tenant_id="zeta"))).refused_by is None
    backend.clock.now += refused.retry_ms / 1000
    assert (await ledger.book(replace(ARRIVAL, writer="c", max_in_flight=9))).used == (1, 0, 0)


async def test_answers_in_flight_end_with_their_lease(ledger: Ledger, backend: Backend) -> None:
    entry = replace(ARRIVAL, limits=(None, None, None))
    assert (await ledger.book(replace(entry, num_held=2, num_asked=2))).refused_by is None
    assert (await ledger.book(replace(entry, writer="b"))).refused_by == SEATS
    backend.clock.now += 8
    await ledger.book(replace(entry, version=2, num_held=2, num_asked=0))
    backend.clock.now += 8
    assert (await ledger.book(replace(entry, writer="b", version=2))).refused_by == SEATS
    backend.clock.now += 2
    assert (await ledger.book(replace(entry, writer="b", version=3))).refused_by is None


async def test_what_answers_of_another_router_may_still_be_leaves_no_room(ledger: Ledger, backend: Backend) -> None:
    entry = replace(ARRIVAL, max_in_flight=None, limits=(None, 100, None), needs=(0, 10, 0), amounts=(0, 10, 0))
    first = await ledger.book(replace(entry, num_reserved=90, num_to_reserve=90))
    assert (first.refused_by, first.used, first.num_reserved) == (None, (0, 10, 0), 90)
    other = replace(entry, writer="b", num_reserved=5, num_to_reserve=5)
    refused = await ledger.book(other)
    assert (refused.refused_by, refused.retry_ms, refused.num_reserved) == (1, 0, 90)
    await ledger.book(replace(ENTRY, max_in_flight=None, limits=entry.limits, version=2, amounts=(0, 30, 0)))
    assert (await ledger.book(replace(other, version=2))).refused_by is None
    backend.clock.now += 10  # a router that is not heard of
    assert (await ledger.book(replace(entry, writer="c", num_held=0, num_asked=0))).num_reserved == 0


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
        expected = account.book(entry, int(backend.clock.now * 1000))
        assert await ledger.book(entry) == expected
        refusals.add(expected.refused_by)
    assert refusals == {None, 0, 1, 2, SEATS}


async def test_an_account_lives_until_nothing_of_it_counts(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    assert backend.connection
    ledger, name = RedisLedger(backend.connection, namespace), Keys(namespace).account("acme")
    await ledger.book(replace(ENTRY, max_in_flight=None))
    assert await backend.connection.call("EXISTS", name) == 0
    await ledger.book(replace(ARRIVAL, max_in_flight=None))
    assert 59_000 < await backend.connection.call("PTTL", name) <= 61_000
    await ledger.book(replace(ENTRY, amounts=(0, 5, 5)))
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
        assert (await ledger.book(ARRIVAL)).used == (1, 0, 0)
    await backend.connection.pipeline([("DEL", name), ("SADD", name, "x")])
    assert (await ledger.book(ARRIVAL)).used == (1, 0, 0)
    assert (await ledger.book(replace(ARRIVAL, version=2, num_held=2))).used == (2, 0, 0)
    assert [(each.what, each.times) for each in backend.connection.garbage.seen()] == [("account", 5)]


async def test_without_redis_it_says_so() -> None:
    ledger = RedisLedger(RedisConnection("redis://127.0.0.1:1/0"), "ns")
    with pytest.raises(StoreUnavailable):
        await ledger.book(ARRIVAL)
    await ledger.close()
