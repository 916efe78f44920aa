"""What a draft costs, learned from steps."""

from __future__ import annotations

import random

import pytest

from baton.costs import StepSize
from engine.core.drafting import PRIOR, DraftPrice
from tests.support.builders import step_costs

COSTS = step_costs(s_overhead=0.002, s_weights=0.008)
"""What is expected of every step: 10 ms, for any number of sequences."""


def observe(price: DraftPrice, took_s: float, num_drafts: int = 0, num_decoding: int = 1, number: int = 1) -> None:
    size = StepSize(num_new=num_decoding, num_decoding=num_decoding, num_kv_tokens=100, num_drafts=num_drafts)
    for _ in range(number):
        price.observe(size, COSTS, took_s)


def learned(num_decoding: int = 1) -> DraftPrice:
    """Has seen steps of 10 ms without drafts."""
    price = DraftPrice()
    observe(price, 0.01, num_decoding=num_decoding, number=50)
    return price


@pytest.mark.parametrize("num_decoding", [1, 4, 16])
@pytest.mark.parametrize("draft_s", [0.0, 0.0001, 0.0008])
def test_the_price_is_the_added_time_in_tokens(draft_s: float, num_decoding: int) -> None:
    """Also where steps take longer than is expected of them."""
    draw, price = random.Random(1), DraftPrice()
    for _ in range(500):
        num_drafts = draw.choice((0, num_decoding, 4 * num_decoding))
        took_s = (0.015 + draft_s * num_drafts) * draw.uniform(0.98, 1.02)
        observe(price, took_s, num_drafts, num_decoding)
    for num_drafts in (num_decoding, 4 * num_decoding):
        expected = draft_s / 0.015 * num_decoding
        assert price.of(num_decoding, num_drafts) == pytest.approx(expected, rel=0.25, abs=0.03)
    assert price.token_s(num_decoding) == pytest.approx(0.015 / num_decoding, rel=0.03)


def test_a_few_drafts_may_be_cheap_and_many_expensive() -> None:
    price = learned(4)
    for _ in range(20):
        observe(price, 0.011, num_drafts=4, num_decoding=4)
        observe(price, 0.03, num_drafts=16, num_decoding=4)
    assert price.of(4, 7) == pytest.approx(0.1, abs=0.02)
    assert price.of(4, 16) == pytest.approx(0.5, abs=0.02)
    assert price.of(4, 8) == price.of(4, 300) == PRIOR, "neither was seen"


def test_no_time_is_known_before_five_steps_without_drafts_of_about_as_many_sequences() -> None:
    price = DraftPrice()
    for number in range(10):
        assert (price.token_s(2) is None) == (number < 5), number
        observe(price, 0.01, num_decoding=2)
    assert price.token_s(3) == price.token_s(2) == pytest.approx(0.005)
    assert price.token_s(1) is None
    assert price.token_s(4) is None


def test_steps_without_drafts_are_measured_again_after_many_with_drafts() -> None:
    price = learned()
    observe(price, 0.011, num_drafts=4, number=500)
    assert price.token_s(1) is not None
    observe(price, 0.011, num_drafts=4, number=300)
    assert price.token_s(1) is None
    observe(price, 0.01)
    assert price.token_s(1) is not None


def test_a_delay_is_no_price() -> None:
    price = learned()
    observe(price, 60.0, num_drafts=2)
    assert price.of(1, 2) < 0.6
    observe(price, 60.0)
    token_s = price.token_s(1)
    assert token_s is not None
    assert token_s < 0.011


def test_steps_that_take_far_longer_than_expected_are_no_delays_for_long() -> None:
    price = DraftPrice()
    observe(price, 0.05, number=100)
    assert price.token_s(1) == pytest.approx(0.05, rel=0.01)


def test_drafts_that_looked_expensive_are_tried_again() -> None:
    """Be it after steps without drafts, or after steps with fewer."""
    price = learned()
    for num_drafts in (0, 4):
        observe(price, 0.02, num_drafts=1, number=100)
        assert price.of(1, 1) == pytest.approx(1.0, abs=0.02)
        observe(price, 0.01, num_drafts, number=2000)
        assert price.of(1, 1) == pytest.approx(PRIOR, abs=0.02)


def test_a_step_with_a_prompt_says_nothing_of_drafts() -> None:
    price = learned()
    price.observe(StepSize(num_new=65, num_pairs=4096, num_decoding=1, num_kv_tokens=100, num_drafts=4), COSTS, 5.0)
    assert price.of(1, 4) == PRIOR


def test_drafts_that_are_faster_than_none_cost_nothing() -> None:
    price = learned()
    observe(price, 0.005, num_drafts=4, number=10)
    assert price.of(1, 4) == 0.0


def test_steps_of_many_drafts_are_reached_by_doubling() -> None:
    price = learned(8)
    found = []
    for _ in range(4):
        found.append(price.most(8))
        observe(price, 0.01, num_drafts=found[-1], num_decoding=8)
    observe(price, 0.01, num_decoding=8)
    assert [*found, price.most(8)] == [16, 32, 64, 128, 256]
    observe(price, 0.01, num_drafts=1, num_decoding=8)
    assert price.most(8) == 16
