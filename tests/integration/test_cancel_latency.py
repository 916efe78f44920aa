"""How soon a client that leaves is forgotten: `tests.bench.recovery` holds it to a step and 50 ms."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from tests.chaos.fleet import Fleet
from tests.chaos.phases import STEP_S, Leaving, Phase, cancel_bench, cancel_fleet

pytestmark = pytest.mark.clock

MEDIAN_S, LIMIT_S = STEP_S + 0.05, STEP_S + 0.5
"""The first holds where nothing runs beside the test: elsewhere the steps say more than the seconds."""


@pytest.mark.chaos
def test_both_sides_are_free_a_step_and_50_ms_after_the_client_left() -> None:
    with cancel_fleet() as fleet:
        found = asyncio.run(_measure(fleet, num_times=12))
    medians = {phase: statistics.median(leaving.seconds for leaving in leavings) for phase, leavings in found.items()}
    assert all(seconds < MEDIAN_S for seconds in medians.values()), medians


def test_both_sides_are_free_a_step_after_they_heard_that_the_client_has_left() -> None:
    with cancel_fleet() as fleet:
        found = asyncio.run(_measure(fleet, num_times=4))
    assert all(leaving.num_steps <= 1 for leavings in found.values() for leaving in leavings), found
    assert all(leaving.seconds < LIMIT_S for leavings in found.values() for leaving in leavings), found


async def _measure(fleet: Fleet, num_times: int) -> dict[Phase, list[Leaving]]:
    async with cancel_bench(fleet) as bench:
        return {phase: [await bench.left_in(phase) for _ in range(num_times)] for phase in Phase}
