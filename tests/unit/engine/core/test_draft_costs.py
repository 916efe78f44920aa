"""What drafts cost, learned from steps."""

from __future__ import annotations

import random

import pytest

from engine.core.draft_costs import DraftCurve
from engine.core.step_fit import StepFit, StepSize
from tests.support.builders import step_costs


def test_the_curve_of_costs_goes_through_what_was_seen() -> None:
    curve = DraftCurve(((2.0, 0.01), (8.0, 0.016)), 0.003)
    found = [curve.extra_s(number) for number in (1, 2, 5, 8, 10)]
    assert found == pytest.approx([0.005, 0.01, 0.013, 0.016, 0.022])


TRUE = step_costs(s_overhead=0.002, s_weights=0.008, s_per_sequence=0.001, s_per_kv_token=1e-6)


def plain_s(num_decoding: int, num_kv_tokens: int) -> float:
    """No line: from eight sequences on a step is full."""
    return TRUE.step_s(0, 0, num_decoding, num_kv_tokens) + 0.008 * max(0, num_decoding - 8)


def learned(fit: StepFit, num_steps: int, extra_s: dict[tuple[int, int], float], seed: int = 1) -> StepFit:
    """Learns from steps of 1 to 16 sequences, with the numbers of sequences and drafts that cost something."""
    draw = random.Random(seed)
    for _ in range(num_steps):
        num_decoding, num_kv_tokens = draw.choice((1, 2, 4, 8, 16)), draw.randrange(100, 4000)
        drafts = draw.choice([0, *(number for sequences, number in extra_s if sequences == num_decoding)])
        took_s = plain_s(num_decoding, num_kv_tokens) + extra_s.get((num_decoding, drafts), 0.0)
        size = StepSize(num_new=num_decoding, num_decoding=num_decoding, num_kv_tokens=num_kv_tokens, num_drafts=drafts)
        fit.observe(size, took_s * draw.uniform(0.95, 1.05))
    return fit


def curve_of(fit: StepFit, num_decoding: int) -> DraftCurve:
    curve = fit.draft_costs.curve(num_decoding)
    assert curve is not None
    return curve


def test_a_worker_learns_what_drafts_cost_beside_as_many_sequences() -> None:
    extra_s = {(1, 1): 0.002, (1, 3): 0.009, (1, 6): 0.010, (1, 12): 0.02, (16, 3): 0.03, (16, 12): 0.05}
    fit = learned(StepFit(), 1500, extra_s)
    for (num_decoding, number), expected_s in extra_s.items():
        assert curve_of(fit, num_decoding).extra_s(number) == pytest.approx(expected_s, rel=0.25, abs=5e-4)
    for num_decoding in (1, 4, 8, 16):
        predicted_s = fit.costs.step_s(0, 0, num_decoding, 2000) * curve_of(fit, num_decoding).plain
        assert predicted_s == pytest.approx(plain_s(num_decoding, 2000), rel=0.1)
    assert fit.costs.step_s(0, 0, 16, 2000) < 0.5 * plain_s(16, 2000), "the one line for all is not as good"


def test_nothing_is_known_of_numbers_of_sequences_that_were_not_seen() -> None:
    fit = StepFit()
    size = StepSize(num_new=2, num_decoding=2, num_kv_tokens=100)
    for number in range(30):
        fit.observe(size, 0.01)
        assert (fit.draft_costs.curve(2) is None) == (number < 5 + 2), number
    assert fit.draft_costs.curve(3) is not None
    assert fit.draft_costs.curve(1) is None
    assert fit.draft_costs.curve(4) is None
    for _ in range(3000):
        fit.observe(StepSize(num_new=1, num_decoding=1, num_kv_tokens=100), 0.01)
    assert fit.draft_costs.curve(2) is None, "it has been too long"


def test_a_delay_is_no_cost_and_what_looked_dear_is_tried_again() -> None:
    fit = learned(StepFit(), 100, {})
    fit.observe(StepSize(num_new=1, num_decoding=1, num_kv_tokens=100, num_drafts=2), 60.0)
    dear = curve_of(fit, 1).extra_s(2)
    assert dear < 0.05
    fit.observe(StepSize(num_new=1, num_decoding=1, num_kv_tokens=100), 60.0)
    assert curve_of(fit, 1).plain < 1.2
    learned(fit, 3000, {}, seed=2)
    assert curve_of(fit, 1).extra_s(2) < dear / 10
    assert curve_of(fit, 1).points == (), "nothing is kept for ever"


def test_a_step_with_a_prompt_says_nothing_of_drafts() -> None:
    fit = learned(StepFit(), 100, {})
    before, costs = curve_of(fit, 1), fit.costs
    fit.observe(StepSize(num_new=65, num_pairs=4096, num_decoding=1, num_kv_tokens=100, num_drafts=4), 5.0)
    assert (curve_of(fit, 1).points, fit.costs) == (before.points, costs)
