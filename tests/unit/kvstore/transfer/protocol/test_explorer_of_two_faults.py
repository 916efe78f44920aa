"""The KV transfer's two state machines against everything that can go wrong once or twice, exhaustively.

What the worlds are, and what must hold in them: `explorer`. That broken machines are found is shown in
`test_explorer.py`. The largest worlds, some minutes of them, are explored by `make chaos`.
"""

from __future__ import annotations

import pytest

from tests.unit.kvstore.transfer.protocol.explorer import Scenario, explore

SCENARIOS = [
    (Scenario(name="one transfer", num_chunks=((2,),), num_blocks=2, num_faults=2, num_cancels=2), 40_000),
    pytest.param(
        Scenario(name="side by side", num_chunks=((1,), (1,)), num_blocks=2, num_faults=2),
        400_000,
        marks=pytest.mark.chaos,
    ),
    pytest.param(
        Scenario(
            name="one after the other in one block", num_chunks=((1,), (1,)), num_blocks=1, num_faults=2, num_cancels=1
        ),
        200_000,
        marks=pytest.mark.chaos,
    ),
    (
        Scenario(
            name="the second in a block of the first",
            num_chunks=((2,), (1,)),
            num_blocks=2,
            num_faults=1,
            num_cancels=1,
        ),
        30_000,
    ),
    pytest.param(
        Scenario(name="one without chunks", num_chunks=((0,), (1,)), num_blocks=1, num_faults=1, num_cancels=1),
        70_000,
        marks=pytest.mark.chaos,
    ),
    pytest.param(
        Scenario(name="two sessions, one block", num_chunks=((1, None), (None, 1)), num_blocks=1, num_faults=2),
        80_000,
        marks=pytest.mark.chaos,
    ),
    (
        Scenario(
            name="a block of a window, and a state",
            num_chunks=((2,),),
            num_blocks=3,
            num_held=1,
            states_from=(0,),
            num_faults=2,
            num_cancels=1,
        ),
        10_000,
    ),
    (Scenario(name="two sources", num_chunks=((1, 1),), num_blocks=2, num_faults=1), 20_000),
    pytest.param(
        Scenario(name="two sources, then one", num_chunks=((1, 1), (1, None)), num_blocks=2, num_faults=1),
        80_000,
        marks=pytest.mark.chaos,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "at_least"), SCENARIOS, ids=lambda value: str(value))
def test_whatever_happens_no_block_is_lost_or_misread_and_every_run_ends(scenario: Scenario, at_least: int) -> None:
    explored = explore(scenario)
    print(f"\n{scenario}: {explored}")
    assert explored.num_worlds > at_least
