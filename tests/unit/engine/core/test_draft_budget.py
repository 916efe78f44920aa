"""What a draft model may lose."""

from __future__ import annotations

import pytest

from engine.core.draft_budget import FIRST_LOSS_SHARE, FIRST_STEPS, LOSS_SHARE, MOST_STEPS, DraftBudget


def after(num_steps: int, step_s: float = 0.01) -> DraftBudget:
    budget = DraftBudget()
    for _ in range(num_steps):
        budget.add(step_s)
    return budget


def test_each_step_adds_a_share_of_its_time_and_the_first_ones_more() -> None:
    assert DraftBudget().left_s == 0.0
    assert after(FIRST_STEPS).left_s == pytest.approx(FIRST_STEPS * 0.01 * FIRST_LOSS_SHARE)
    later = after(FIRST_STEPS + 500).left_s - after(FIRST_STEPS).left_s
    assert later == pytest.approx(500 * 0.01 * LOSS_SHARE)


def test_what_is_spent_in_vain_has_to_come_in_again() -> None:
    budget = after(FIRST_STEPS + 1)
    budget.book(budget.left_s + 0.02, 0.0)
    assert budget.left_s == pytest.approx(-0.02)
    for _ in range(199):
        budget.add(0.01)
    assert budget.left_s < 0
    budget.add(0.01)
    budget.add(0.01)
    assert budget.left_s > 0


def test_who_gains_may_spend_but_not_all_that_was_ever_gained() -> None:
    budget = after(1)
    budget.book(0.01, 0.03)
    assert budget.left_s == pytest.approx(0.02 + FIRST_LOSS_SHARE * 0.01)
    budget.book(0.0, 100.0)
    budget.add(0.01)
    assert budget.left_s == pytest.approx(MOST_STEPS * 0.01)
