"""How soon a client that leaves is forgotten: `tests.bench.recovery` shows the tail."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from tests.chaos.fleet import Fleet
from tests.chaos.phases import STEP_S, Phase, cancel_bench, cancel_fleet

pytestmark = pytest.mark.clock

NUM_TIMES = 12
LIMIT_S = STEP_S + 0.05
TAIL_LIMIT_S = STEP_S + 0.5
"""Other tests run beside this one."""


def test_both_sides_are_free_a_step_and_50_ms_after_the_client_left() -> None:
    with cancel_fleet() as fleet:
        took_s = asyncio.run(_measure(fleet))
    for phase, seconds in took_s.items():
        print(f"{phase}: {statistics.median(seconds) * 1e3:.1f} ms, at most {max(seconds) * 1e3:.1f} ms")
    assert all(statistics.median(seconds) < LIMIT_S for seconds in took_s.values()), took_s
    assert all(max(seconds) < TAIL_LIMIT_S for seconds in took_s.values()), took_s


async def _measure(fleet: Fleet) -> dict[Phase, list[float]]:
    async with cancel_bench(fleet) as bench:
        return {phase: [await bench.seconds_until_free(phase) for _ in range(NUM_TIMES)] for phase in Phase}
