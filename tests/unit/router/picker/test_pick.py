"""Which routers a request may go to, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster import RouterInfo
from router.picker.pick import BUSIER, MAX_ENDPOINTS, SLACK, Subset, Wanted, choose, endpoint_of
from tests.support.gateways import router_at

MODEL, OTHER = "content-a", "content-b"
WANTED = Wanted(b"a session", frozenset({MODEL}))
ADDRESSES = [f"10.0.0.{number}:8000" for number in range(1, 21)]


def routers(num: int, load: int = 0) -> list[RouterInfo]:
    return [router_at(address, {MODEL: load}) for address in ADDRESSES[:num]]


addresses = st.sampled_from(ADDRESSES)
announcements = st.lists(
    st.builds(
        lambda address, loads, ready: router_at(address, loads, ready=ready),
        addresses,
        st.dictionaries(st.sampled_from([MODEL, OTHER]), st.integers(0, 500)),
        st.integers(0, 2),
    ),
    max_size=12,
)


@given(announcements, st.binary(max_size=8), st.sets(addresses))
def test_choices_are_in_the_subset_and_distinct(found: list[RouterInfo], session: bytes, allowed: set[str]) -> None:
    chosen = choose(found, Wanted(session, frozenset({MODEL})), Subset.of(allowed))
    assert set(chosen) <= allowed & {each.http for each in found}
    assert len(set(chosen)) == len(chosen) <= MAX_ENDPOINTS
    assert bool(chosen) == bool(allowed & {each.http for each in found})


@given(announcements, st.binary(max_size=8), st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_routers(
    found: list[RouterInfo], session: bytes, random: object
) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    wanted = Wanted(session, frozenset({MODEL}))
    assert choose(shuffled, wanted) == choose(found, wanted)


@given(st.binary(max_size=8), st.integers(2, 20), st.data())
def test_a_session_stays_when_another_router_leaves(session: bytes, num: int, data: st.DataObject) -> None:
    wanted = Wanted(session, frozenset({MODEL}))
    first = choose(routers(num), wanted)[0]
    left = [each for each in routers(num) if each.http == first or data.draw(st.booleans())]
    assert choose(left, wanted)[0] == first


@given(st.binary(max_size=8), st.integers(0, 1000), st.integers(0, 1000))
def test_a_session_leaves_its_router_only_for_one_that_is_much_less_busy(
    session: bytes, first: int, second: int
) -> None:
    wanted = Wanted(session, frozenset({MODEL}))
    order = choose(routers(2), wanted)
    loads = dict(zip(order, (first, second), strict=True))
    chosen = choose([router_at(each, {MODEL: loads[each]}) for each in order], wanted)
    assert chosen == (order[::-1] if first > BUSIER * second + SLACK else order)


def test_a_busy_router_is_passed_over_for_the_second_of_the_session_and_no_other() -> None:
    order = choose(routers(6), WANTED)
    found = [router_at(each, {MODEL: 100 if each == order[0] else 0}) for each in order]
    assert choose(found, WANTED) == (order[1], order[0], *order[2:])


def test_routers_that_fail_come_last_whatever_the_others_have_to_do() -> None:
    order = choose(routers(4), WANTED)
    assert choose(routers(4), WANTED, failing={order[0], order[2]}) == (order[1], order[3], order[0], order[2])
    found = [router_at(each, {MODEL: 100 if each == order[1] else 0}) for each in order[:2]]
    assert choose(found, WANTED, failing={order[0]}) == (order[1], order[0])
    assert choose(found[:1], WANTED, failing={order[0]}) == order[:1]


def test_sessions_spread_over_all_routers() -> None:
    num = Counter(choose(routers(8), Wanted(str(number).encode()))[0] for number in range(2000))
    assert len(num) == 8
    assert max(num.values()) < 1.4 * min(num.values())


def test_requests_that_wait_for_a_model_are_no_load() -> None:
    order = choose(routers(2), WANTED)
    found = [router_at(order[0], {MODEL: 100}, held=100), router_at(order[1], {MODEL: 10})]
    assert choose(found, WANTED) == order


def test_routers_that_know_workers_of_the_model_come_first_then_those_that_serve_it() -> None:
    ready, asleep, other = (
        router_at(ADDRESSES[0], {MODEL: 0}, ready=1),
        router_at(ADDRESSES[1], {MODEL: 0}, ready=0),
        router_at(ADDRESSES[2], {OTHER: 0}, ready=1),
    )
    assert choose([asleep, other, ready], WANTED) == (ready.http,)
    assert choose([asleep, other], WANTED) == (asleep.http,)
    assert choose([other], WANTED) == (other.http,)
    assert set(choose([asleep, other, ready], Wanted(b""))) == {ready.http, other.http}


def test_routers_of_an_older_release_serve_the_one_model() -> None:
    old = RouterInfo(id="old", pid=1, grpc="", http=ADDRESSES[0], mirror_lag_s=0.0, ready_workers=1)
    assert choose([old, router_at(ADDRESSES[1], {OTHER: 0})], WANTED) == (old.http,)


def test_routers_that_share_an_address_are_one_endpoint_with_their_average_load() -> None:
    order = choose(routers(2), WANTED)
    found = [router_at(order[0], {MODEL: load}) for load in (20, 2)] + [router_at(order[1], {MODEL: 6})]
    assert choose(found, WANTED) == order  # 11 is no more than 1.25 * 6 + 4
    assert choose([*found, router_at(order[0], {MODEL: 20})], WANTED) == order[::-1]


@pytest.mark.parametrize(
    ("entries", "allowed"),
    [
        (["10.0.0.1:8000"], ["10.0.0.1:8000"]),
        ([" 10.0.0.1:8000 ", "10.0.0.9:1"], ["10.0.0.1:8000"]),
        (["10.0.0.1"], ["10.0.0.1:8000"]),
        (["10.0.0.1:8001"], []),
        (["[2001:DB8::0:1]:8000"], ["[2001:db8::1]:8000"]),
        (["2001:db8::1"], ["[2001:db8::1]:8000"]),
        ([], []),
        (["", "router-0:8000", "10.0.0.1:", "10.0.0.1:0", ":8000", "10.0.0.1:08000x", "::::"], []),
    ],
)
def test_subsets_list_addresses_with_or_without_ports(entries: Sequence[str], allowed: list[str]) -> None:
    found = [router_at("10.0.0.1:8000"), router_at("[2001:db8::1]:8000")]
    assert [*choose(found, Wanted(b""), Subset.of(entries))] == allowed


@pytest.mark.parametrize(
    "address",
    ["router-0:8000", "localhost:80", "0.0.0.0:8000", "[::]:8000", "[fe80::1%eth0]:80", "10.0.0.1", "10.0.0.1:65536",
     "10.0.0.1:-1", "10.0.0.1:80\r\nx: y", "10.0.0.1:٨٠", "::1:80", "[10.0.0.1:80", "", "10.0.0.1:80,10.0.0.2:80"],
)  # fmt: skip
def test_only_ip_addresses_are_told_to_gateways(address: str) -> None:
    assert endpoint_of(address) is None
    assert choose([router_at(address)], Wanted(b"")) == ()
