"""A tenant's windows and answers in flight, with time as an argument."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.admission.account import SEATS, SPANS, WINDOWS_MS, Account, LedgerAnswer, LedgerEntry
from router.admission.account import book as book_all

MINUTE, DAY = WINDOWS_MS[0], WINDOWS_MS[2]
SPAN = MINUTE // SPANS
NOW = 1_800_000_000_000
FREE = LedgerEntry(tenant_id="t", limits=(None, None, None))


def book(account: Account, entry: LedgerEntry, now_ms: int) -> LedgerAnswer:
    (answer,) = book_all([account], [entry], now_ms)
    return answer


def requests(limit: int, need: int = 1, amount: int = 1) -> LedgerEntry:
    return replace(FREE, limits=(limit, None, None), needs=(need, 0, 0), amounts=(amount, 0, 0))


def test_the_limit_is_reached_and_what_was_recorded_first_leaves_first() -> None:
    account = Account()
    for second in range(3):
        assert book(account, requests(3), NOW + second * 1000).refused_by is None
    refused = book(account, requests(3), NOW + 3000)
    assert (refused.refused_by, refused.used) == (0, (3, 0, 0))
    assert book(account, requests(3), NOW + 3000 + refused.retry_ms - 1).refused_by == 0
    assert book(account, requests(3), NOW + 3000 + refused.retry_ms).used == (3, 0, 0)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, MINUTE // 3), st.integers(1, 5)), min_size=1, max_size=60),
)
def test_no_window_ever_holds_more_than_the_limit_and_little_room_is_lost(
    limit: int, asked: list[tuple[int, int]]
) -> None:
    account, now = Account(), NOW
    recorded: list[tuple[int, int]] = []
    for pause, amount in asked:
        now += pause
        answer = book(account, requests(limit, amount, amount), now)
        recent = sum(num for at, num in recorded if at > now - MINUTE - SPAN)
        if answer.refused_by is None:
            recorded.append((now, amount))
        else:
            assert recent + amount > limit, "refused though there was room for a span more than the window"
            if amount <= limit:
                later = Account(tuple(dict(window) for window in account.windows))
                assert book(later, requests(limit, amount, amount), now + answer.retry_ms - 1).refused_by == 0
                assert book(later, requests(limit, amount, amount), now + answer.retry_ms).refused_by is None
        assert sum(num for at, num in recorded if at > now - MINUTE) <= limit


def test_an_entry_is_recorded_in_all_windows_or_in_none() -> None:
    account = Account()
    entry = replace(FREE, limits=(5, 100, 120), needs=(1, 100, 100), amounts=(1, 100, 100))
    assert book(account, entry, NOW).used == (1, 100, 100)
    assert book(account, entry, NOW).refused_by == 1
    assert book(account, entry, NOW + 2 * MINUTE).refused_by == 2
    assert book(account, replace(FREE, limits=(5, 100, 120)), NOW + 2 * MINUTE).used == (0, 0, 100)


def test_what_is_owed_is_recorded_beyond_the_limit_and_what_has_no_limit_is_not_counted() -> None:
    account = Account()
    owed = replace(FREE, limits=(None, 10, None), amounts=(3, 25, 25))
    assert book(account, owed, NOW).used == (0, 25, 0)
    answer = book(account, replace(owed, needs=(1, 1, 1), amounts=(1, 0, 0)), NOW)
    assert (answer.refused_by, answer.reset_ms) == (1, (0, MINUTE + SPAN, 0))
    assert book(account, replace(owed, needs=(1, 1, 1)), NOW + MINUTE + SPAN).refused_by is None


def test_a_clock_that_was_set_back_locks_nobody_out() -> None:
    account = Account()
    assert book(account, requests(1), NOW + DAY).refused_by is None
    assert book(account, requests(1), NOW).refused_by is None


def seats(writer: str, version: int, held: int, asked: int = 0, most: int = 3) -> LedgerEntry:
    return replace(FREE, max_in_flight=most, writer=writer, version=version, num_held=held, num_asked=asked)


def test_answers_in_flight_of_all_routers_count_until_they_are_given_up_or_lapse() -> None:
    account = Account()
    assert book(account, seats("a", 1, 2, 2), NOW).refused_by is None
    assert book(account, seats("b", 1, 1, 1), NOW).refused_by is None
    assert book(account, seats("b", 2, 2, 1), NOW).refused_by == SEATS
    assert book(account, seats("a", 2, 3, 1), NOW).refused_by == SEATS
    assert book(account, seats("a", 3, 1), NOW).refused_by is None
    assert book(account, seats("b", 3, 2, 1), NOW).refused_by is None
    assert book(account, seats("a", 4, 2, 1), NOW + 9_999).refused_by == SEATS, "of b, which holds two"
    assert book(account, seats("a", 5, 3, 2), NOW + 10_000).refused_by is None, "b has not been heard of for a lease"


def test_an_entry_that_is_late_changes_nothing_of_what_a_newer_one_has_said() -> None:
    account = Account()
    book(account, seats("a", 2, 0), NOW)
    assert book(account, seats("a", 1, 3, 1), NOW).refused_by is None
    assert book(account, seats("b", 1, 3, 3), NOW).refused_by is None, "a holds none"
    late = Account()
    book(late, seats("a", 2, 4, 1), NOW)
    assert book(late, seats("a", 1, 3, 1), NOW).refused_by is None, "the one too many was refused, this one was not"


def test_an_answer_that_is_refused_is_not_held() -> None:
    account = Account()
    entry = replace(seats("a", 1, 1, 1), limits=(1, None, None), needs=(1, 0, 0), amounts=(1, 0, 0))
    assert book(account, entry, NOW).refused_by is None
    assert book(account, replace(entry, version=2, num_held=2), NOW).refused_by == 0
    assert book(account, seats("b", 1, 2, 2), NOW).refused_by is None
    assert book(account, seats("b", 2, 2), NOW).used == (1, 0, 0), "the refused request is not recorded either"


def test_a_request_is_recorded_in_both_accounts_or_in_none() -> None:
    tenant, model = Account(), Account()
    wide = replace(requests(9), max_in_flight=9, writer="a", version=1, num_held=1, num_asked=1)
    narrow = replace(requests(1), model="m", writer="a", version=1, num_held=1, num_asked=1)
    assert [answer.refused_by for answer in book_all([tenant, model], [wide, narrow], NOW)] == [None, None]
    again = [replace(entry, version=2, num_held=2) for entry in (wide, narrow)]
    for order in (1, -1):
        first, second = book_all([tenant, model][::order], again[::order], NOW)[::order]
        assert (first.refused_by, first.used, first.num_in_flight) == (None, (1, 0, 0), 1)
        assert (second.refused_by, second.used) == (0, (1, 0, 0))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, MINUTE // 4)), max_size=40))
def test_neither_of_two_accounts_exceeds_its_limit_and_both_agree(asked: list[tuple[bool, int, int]]) -> None:
    """Two models of one tenant: the sum of what is recorded with the models is recorded over all models."""
    tenant, models, now = Account(), {False: Account(), True: Account()}, NOW
    for which, amount, pause in asked:
        now += pause
        entries = [requests(6, amount, amount), requests(4, amount, amount)]
        book_all([tenant, models[which]], entries, now)
        for each in models.values():
            book(each, FREE, now)  # what has left the window is dropped
        used = [sum(each.windows[0].values()) for each in (tenant, models[False], models[True])]
        assert used[0] == used[1] + used[2] <= 6
        assert max(used[1:]) <= 4
