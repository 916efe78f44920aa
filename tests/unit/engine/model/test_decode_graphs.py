"""Decode steps as CUDA graphs: which are, what they are given, and what comes of replays."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Executor

import pytest

from tests.support import graphed

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux")


def test_a_step_has_the_smallest_graph_that_holds_it(interpreter: Executor) -> None:
    planned = interpreter.submit(graphed.plans).result()
    assert planned["sizes"] == {
        1: (1,),
        3: (1, 2, 4),
        5: (1, 2, 4, 8),
        8: (1, 2, 4, 8),
        9: (1, 2, 4, 8, 16),
        64: (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64),
        256: (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    }
    assert {name: size for name, size in planned["of"].items() if size} == {"one": 1, "three": 4}
    token_ids, positions, rows, places, *tiles = planned["numbers"]
    assert (token_ids, positions) == ([7, 8, 0, 0], [20, 3, 0, 0])
    assert (rows, places) == ([5, 2, 0, 0], [20, 3, -1, -1])
    assert tiles == [[5, 0, 1, 20], [2, 1, 1, 3], [0, 2, 1, -1], [0, 3, 1, -1]]


@pytest.mark.parametrize(
    ("is_fused", "by_flashinfer"),
    [(False, False), *(pytest.param(*case, marks=pytest.mark.full) for case in ((True, False), (False, True)))],
)
@pytest.mark.slow
def test_replays_compute_what_torch_computes(is_fused: bool, by_flashinfer: bool, interpreter: Executor) -> None:
    """Also with more tokens than the step before, with fewer, over other blocks, and with one that the host does not
    know."""
    difference, num_replays, done = interpreter.submit(
        graphed.replays_differ_by, is_fused=is_fused, by_flashinfer=by_flashinfer
    ).result()
    assert difference <= 1e-5
    assert num_replays == [2, 1, 2]
    assert done == [1] * len(graphed.STEPS), "one fence, behind the last layer"


def test_all_graphs_are_tried_on_one_stream(interpreter: Executor) -> None:
    """A GPU has few, and libraries keep memory for each that they have seen."""
    assert interpreter.submit(graphed.num_streams_of_captures).result() == 1


def test_steps_that_are_no_graphs_have_plans_of_their_own(interpreter: Executor) -> None:
    assert interpreter.submit(graphed.launched_steps_differ_by).result() <= 1e-5


def test_a_model_that_cannot_be_captured_launches_its_steps(interpreter: Executor) -> None:
    dynamic, looking = interpreter.submit(graphed.refusals).result()
    assert "RoPE of type dynamic" in dynamic
    assert "one cannot be captured: RuntimeError: operation not permitted when stream is capturing" in looking
