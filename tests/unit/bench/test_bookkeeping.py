"""What the benchmark of a step's books counts as what, and that it measures whole steps of as many sequences."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from unittest.mock import patch

import pytest

from baton import garbage
from engine.core.runner import StepInput, StepOutput
from tests.bench import bookkeeping
from tests.bench.bookkeeping import Blank, Meter, Spent, Steps
from tests.bench.engine_sides import GREEDY
from tests.bench.stats import Spread

PROMPTS = [range(i, i + 20) for i in range(3)]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one each time somebody looks at it."""
    monkeypatch.setattr(bookkeeping, "clock", itertools.count().__next__)


def test_each_part_of_a_step_is_counted_once() -> None:
    runner = Blank(num_blocks=64, max_num_seqs=3)
    steps = Steps.of(runner, 3)
    compute, sample = steps.computing.around(runner._compute), steps.sampling.around(runner._sampler.sample_and_score)
    with (
        patch.object(runner, "_compute", compute),
        # An answer that is looked at by its number is drawn by the sampler.
        patch.object(runner._sampler, "sample_and_score", sample),
    ):
        found = steps.decode(PROMPTS, replace(GREEDY, logprobs=0), 2)
    # The two meters look twice each within the runner's time of five.
    assert found == [Spent(schedule=1, packing=3, sampling=1, commit=1, computing=1)] * 2
    assert found[0].books == 6
    assert found[0].share == pytest.approx(600 / 7)


def test_all_sequences_are_in_each_step() -> None:
    sizes: list[int] = []

    class Counting(Blank):
        def execute(self, step: StepInput, *others: object) -> StepOutput:
            sizes.append(len(step.parts))
            return super().execute(step)

    steps = Steps.of(Counting(num_blocks=64, max_num_seqs=3), 3)
    assert len(steps.decode(PROMPTS, GREEDY, 4)) == 4
    assert sizes == [3] * (1 + bookkeeping.WARM_UP_STEPS + 4)
    steps.engine.check()
    assert steps.engine.is_idle


def test_a_meter_that_is_read_begins_anew() -> None:
    meter = Meter()
    call = meter.around(lambda value: value + 1)
    assert call(1) == 2
    assert call(value=2) == 3
    assert (meter.take(), meter.take()) == (2, 0)


def test_growth_is_compared_with_the_first_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def spent(self: Steps, prompts: list[range], *others: object) -> list[Spent]:
        return [Spent(schedule=10 * len(prompts), packing=5e3, sampling=3e3, commit=2e3, computing=7e9)]

    monkeypatch.setattr(Steps, "decode", spent)
    table = bookkeeping.growth((16, bookkeeping.SIZES[-1]), 2, 1)
    first, last = table.rows
    assert (first[0], last[0]) == ("16", "512")
    assert isinstance(first[4], Spread)
    assert isinstance(last[4], Spread)
    assert isinstance(last[5], Spread)
    assert (first[4].median, last[4].median) == (0.01016, 0.01512)
    assert last[5].median == pytest.approx(15_120 / 512 / (10_160 / 16))
    assert last[6] == "< 1.5 ms, <= 1"


def test_the_collector_is_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with bookkeeping.collected_as_in_a_worker():
        assert gc.get_threshold() == garbage.THRESHOLDS
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
