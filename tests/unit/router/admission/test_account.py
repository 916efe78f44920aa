"""A tenant's windows and answers in flight, with time as an argument."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.admission.account import SEATS, SPANS, WINDOWS_MS, Account, LedgerEntry

MINUTE, DAY = WINDOWS_MS[0], WINDOWS_MS[2]
SPAN = MINUTE // SPANS
NOW = 1_800_000_000_000
FREE = LedgerEntry(tenant_id="t", limits=(None, None, None))


def requests(limit: int, need: int = 1, amount: int = 1) -> LedgerEntry:
    return replace(FREE, limits=(limit, None, None), needs=(need, 0, 0), amounts=(amount, 0, 0))


def test_the_limit_is_reached_and_what_was_recorded_first_leaves_first() -> None:
    account = Account()
    for second in range(3):
        assert account.book(requests(3), NOW + second * 1000).refused_by is None
    refused = account.book(requests(3), NOW + 3000)
    assert (refused.refused_by, refused.used) == (0, (3, 0, 0))
    assert account.book(requests(3), NOW + 3000 + refused.retry_ms - 1).refused_by == 0
    assert account.book(requests(3), NOW + 3000 + refused.retry_ms).used == (3, 0, 0)


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
        answer = account.book(requests(limit, amount, amount), now)
        recent = sum(num for at, num in recorded if at > now - MINUTE - SPAN)
        if answer.refused_by is None:
            recorded.append((now, amount))
        else:
            assert recent + amount > limit, "refused though there was room for a span more than the window"
            if amount <= limit:
                later = Account(tuple(dict(window) for window in account.windows))
                assert later.book(requests(limit, amount, amount), now + answer.retry_ms - 1).refused_by == 0
                assert later.book(requests(limit, amount, amount), now + answer.retry_ms).refused_by is None
        assert sum(num for at, num in recorded if at > now - MINUTE) <= limit


def test_an_entry_is_recorded_in_all_windows_or_in_none() -> None:
    account = Account()
    entry = replace(FREE, limits=(5, 100, 120), needs=(1, 100, 100), amounts=(1, 100, 100))
    assert account.book(entry, NOW).used == (1, 100, 100)
    assert account.book(entry, NOW).refused_by == 1
    assert account.book(entry, NOW + 2 * MINUTE).refused_by == 2
    assert account.book(replace(FREE, limits=(5, 100, 120)), NOW + 2 * MINUTE).used == (0, 0, 100)


def test_what_is_owed_is_recorded_beyond_the_limit_and_what_has_no_limit_is_not_counted() -> None:
    account = Account()
    owed = replace(FREE, limits=(None, 10, None), amounts=(3, 25, 25))
    assert account.book(owed, NOW).used == (0, 25, 0)
    answer = account.book(replace(owed, needs=(1, 1, 1), amounts=(1, 0, 0)), NOW)
    assert (answer.refused_by, answer.reset_ms) == (1, (0, MINUTE + SPAN, 0))
    assert account.book(replace(owed, needs=(1, 1, 1)), NOW + MINUTE + SPAN).refused_by is None


def test_a_clock_that_was_set_back_locks_nobody_out() -> None:
    account = Account()
    assert account.book(requests(1), NOW + DAY).refused_by is None
    assert account.book(requests(1), NOW).refused_by is None


def seats(writer: str, version: int, held: int, asked: int = 0, most: int = 3) -> LedgerEntry:
    return replace(FREE, max_in_flight=most, writer=writer, version=version, num_held=held, num_asked=asked)


def test_answers_in_flight_of_all_routers_count_until_they_are_given_up_or_lapse() -> None:
    account = Account()
    assert account.book(seats("a", 1, 2, 2), NOW).refused_by is None
    assert account.book(seats("b", 1, 1, 1), NOW).refused_by is None
    assert account.book(seats("b", 2, 2, 1), NOW).refused_by == SEATS
    assert account.book(seats("a", 2, 3, 1), NOW).refused_by == SEATS
    assert account.book(seats("a", 3, 1), NOW).refused_by is None
    assert account.book(seats("b", 3, 2, 1), NOW).refused_by is None
    assert account.book(seats("a", 4, 2, 1), NOW + 9_999).refused_by == SEATS, "of b, which holds two"
    assert account.book(seats("a", 5, 3, 2), NOW + 10_000).refused_by is None, "b has not been heard of for a lease"


def test_an_entry_that_is_late_changes_nothing_of_what_a_newer_one_has_said() -> None:
    account = Account()
    account.book(seats("a", 2, 0), NOW)
    assert account.book(seats("a", 1, 3, 1), NOW).refused_by is None
    assert account.book(seats("b", 1, 3, 3), NOW).refused_by is None, "a holds none"
    late = Account()
    late.book(seats("a", 2, 4, 1), NOW)
    assert late.book(seats("a", 1, 3, 1), NOW).refused_by is None, "the one too many was refused, this one was not"


def test_an_answer_that_is_refused_is_not_held() -> None:
    account = Account()
    entry = replace(seats("a", 1, 1, 1), limits=(1, None, None), needs=(1, 0, 0), amounts=(1, 0, 0))
    assert account.book(entry, NOW).refused_by is None
    assert account.book(replace(entry, version=2, num_held=2), NOW).refused_by == 0
    assert account.book(seats("b", 1, 2, 2), NOW).refused_by is None
    assert account.book(seats("b", 2, 2), NOW).used == (1, 0, 0), "the refused request is not recorded either"
