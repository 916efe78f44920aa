from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import AnswerHistory
from router.admission.gate import ENOUGH, REMEMBERED

FLOOR, DEFAULT = 64, 256


def history_of(*lengths: int, tenant_id: str = "a") -> AnswerHistory:
    history = AnswerHistory(FLOOR, DEFAULT)
    for length in lengths:
        history.observe(tenant_id, length)
    return history


def test_the_default_counts_until_enough_was_seen() -> None:
    assert history_of().expect("a", 1000) == DEFAULT
    assert history_of(*[500] * (ENOUGH - 1)).expect("a", 1000) == DEFAULT
    assert history_of(*[500] * ENOUGH).expect("a", 1000) == 500


def test_nine_answers_in_ten_are_no_longer() -> None:
    assert history_of(*range(100, 120)).expect("a", 1000) == 118
    assert history_of(*range(119, 99, -1)).expect("a", 1000) == 118, "in whatever order they came"
    assert history_of(*[100] * 15, 900).expect("a", 1000) == 100
    assert history_of(*[100] * 14, 900, 900).expect("a", 1000) == 900


def test_a_request_is_expected_to_take_no_more_than_it_may_and_no_less_than_the_floor() -> None:
    history = history_of(*[3] * ENOUGH)
    assert history.expect("a", 1000) == FLOOR
    assert history.expect("a", 10) == 10
    assert history_of(*[500] * ENOUGH).expect("a", 70) == 70
    assert history_of().expect("a", 100) == 100


def test_who_ignores_the_end_takes_all_that_it_may() -> None:
    assert history_of(*[100] * ENOUGH).expect("a", 5000, ignore_eos=True) == 5000


def test_a_tenant_is_known_by_its_own_answers_once_there_are_enough() -> None:
    history = history_of(*[100] * 200)
    for _ in range(ENOUGH - 1):
        history.observe("b", 700)
    assert history.expect("b", 1000) == 100, "everybody's, of which these are few"
    history.observe("b", 700)
    assert history.expect("b", 1000) == 700
    assert history.expect("a", 1000) == history.expect("c", 1000) == 100


def test_old_answers_are_forgotten() -> None:
    history = history_of(*[900] * 1000)
    assert history.expect("a", 1000) == 900
    for _ in range(REMEMBERED):
        history.observe("a", 200)
    assert history.expect("a", 1000) == 200


def test_what_is_expected_follows_in_steps_of_some_answers() -> None:
    history = history_of(*[100] * ENOUGH)
    assert history.expect("a", 1000) == 100
    for _ in range(ENOUGH - 1):
        history.observe("a", 900)
    assert history.expect("a", 1000) == 100
    history.observe("a", 900)
    assert history.expect("a", 1000) == 900


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 5000), min_size=ENOUGH, max_size=REMEMBERED), max_tokens=st.integers(1, 6000))
def test_at_least_nine_in_ten_would_have_had_room(lengths: list[int], max_tokens: int) -> None:
    expected = history_of(*lengths).expect("a", max_tokens)
    assert 1 <= expected <= max_tokens
    if expected < max_tokens:
        assert sum(length <= expected for length in lengths) >= 0.9 * len(lengths)
        assert expected in (FLOOR, *lengths), "and no more than that takes"
