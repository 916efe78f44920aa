"""The hand-over's two state machines against everything that can go wrong once or twice, exhaustively; a minute or two.

What the worlds are, and what must hold in them: `transfer_model`. That broken machines are found is shown in
`tests/unit/test_transfer_explorer.py`.
"""

from __future__ import annotations

import pytest

from tests.integration.transfer_model import Scenario, explore

SCENARIOS = [
    (Scenario("one transfer", ((2,),), 2, num_faults=2, num_cancels=2), 40_000),
    (Scenario("side by side", ((1,), (1,)), 2, num_faults=2), 400_000),
    (Scenario("one after the other in one block", ((1,), (1,)), 1, num_faults=2, num_cancels=1), 200_000),
    (Scenario("the second in a block of the first", ((2,), (1,)), 2, num_faults=1, num_cancels=1), 30_000),
    (Scenario("one without chunks", ((0,), (1,)), 1, num_faults=1, num_cancels=1), 70_000),
    (Scenario("two sessions, one block", ((1, None), (None, 1)), 1, num_faults=2), 80_000),
    (Scenario("two sources", ((1, 1),), 2, num_faults=1), 20_000),
    (Scenario("two sources, then one", ((1, 1), (1, None)), 2, num_faults=1), 80_000),
]


@pytest.mark.parametrize(("scenario", "at_least"), SCENARIOS, ids=lambda value: str(value))
def test_whatever_happens_no_block_is_lost_or_misread_and_every_run_ends(scenario: Scenario, at_least: int) -> None:
    explored = explore(scenario)
    print(f"\n{scenario}: {explored}")
    assert explored.num_worlds > at_least
