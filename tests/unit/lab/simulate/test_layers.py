"""Simulated models of which layers have windows, or states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.simulate.costs import CostModel
from lab.simulate.policy import RoutingDecision
from lab.simulate.worker import SimulatedWorker
from lab.simulate.world import World
from tests.support.builders import step_costs
from tests.unit.lab.simulate.test_world import BLOCK, COSTS, HERE, Fixed, request, run, shape, trace

PULLED = RoutingDecision(computes=1, decodes=1, source=0, source_tokens=48)
AWAY = RoutingDecision(computes=0, decodes=1)
LAYERS = replace(COSTS, transfer_s_per_token=0.125, transfer_s_per_window_token=0.25, transfer_s_per_state=3.0)


def test_the_pools_are_divided_as_an_engine_divides_them() -> None:
    assert shape(400).table_sizes == (400,)
    windows = shape(400, window=40, longest=80)
    assert windows.table_sizes == (400, 200)
    assert shape(400, has_states=True, snapshot_tokens=160).table_sizes == (400, 2 * 7 + 40)
    worker = SimulatedWorker(0, replace(windows, has_states=True), COSTS)
    assert worker.engine.runner.num_blocks == (400, 200, 2 * 7 + 7)


def test_a_transfer_has_all_tokens_of_some_layers_the_window_of_others_and_one_state() -> None:
    requests, kinds = trace(request(0.0, 80, 2)), {"window": 20, "has_states": True}

    def exposed_s(num_batched: int) -> float:
        world = World(requests, Fixed(AWAY), shape(batch=num_batched, **kinds), LAYERS, prefill=1, decode=1)
        (served,) = world.run()
        return served.finished_s - served.first_token_s - 1.1

    window = 80 - (80 - 20) // BLOCK * BLOCK
    assert window == 32
    whole_s = 0.25 + 80 * 0.125 + window * 0.25 + 3.0
    computed_s = 3 + 80 * 0.1  # after 64 tokens its state is kept, and then a step computes the other 16
    assert exposed_s(32) == pytest.approx(whole_s - computed_s)
    assert exposed_s(4) == pytest.approx(0.25 + 3.0), "only the end of a prompt has its state"


@pytest.mark.parametrize(
    ("kind", "num_cached"),
    [
        ({}, [48, 32, 16]),
        ({"has_states": True, "snapshot_tokens": 16}, [48, 32, 16]),
        ({"has_states": True, "snapshot_tokens": 32}, [48, 32, 0]),
        ({"has_states": True}, [48, 0, 0]),
    ],
)
def test_a_prompt_continues_from_a_snapshot(kind: dict[str, int], num_cached: list[int]) -> None:
    """A first prompt of 64 tokens keeps its states after 48 and 64 in any case."""
    later = [request(100.0 * n, 16 * (4 - n) + 4, 1) for n in (1, 2, 3)]
    _, served = run(trace(request(0.0, 64, 1), *later), Fixed(HERE), shape(batch=256, **kind))
    assert [one.num_cached_tokens for one in served[1:]] == num_cached


def test_a_prefix_is_pulled_with_its_state_or_not_at_all() -> None:
    """The second prompt leaves blocks at worker 1; the third one needs a state after 48 tokens."""
    placer = Fixed(HERE, PULLED, replace(PULLED, source_tokens=32))
    requests = trace(request(0.0, 64, 1), request(100.0, 58, 1), request(200.0, 40, 1))
    world = World(requests, placer, shape(has_states=True), LAYERS, decode=2)
    _, second, third = world.run()
    assert second.num_cached_tokens == 48
    assert second.ttft_s == pytest.approx(0.25 + 48 * 0.125 + 3.0 + 1 + 10 * 0.1)
    assert third.num_cached_tokens == 0, "nobody kept a state after 32 tokens"
    assert third.ttft_s == pytest.approx(0.25 + 2 * 1 + 40 * 0.1), "in two steps, and a state is kept between them"


def test_a_pull_has_the_blocks_of_the_window_that_the_receiver_lacks() -> None:
    """Worker 1 has 32 tokens: the third block is transferred in both groups."""
    placer = Fixed(HERE, RoutingDecision(computes=1, decodes=1), PULLED)
    requests = trace(request(0.0, 64, 1), request(100.0, 36, 1), request(200.0, 58, 1))
    world = World(requests, placer, shape(window=20), replace(LAYERS, transfer_s_per_state=0.0), decode=2)
    *_, third = world.run()
    assert third.num_cached_tokens == 48
    assert third.ttft_s == pytest.approx(0.25 + 16 * (0.125 + 0.25) + 1 + 10 * 0.1)


def test_a_leap_skips_no_snapshot() -> None:
    """The state after 99 tokens is nobody's, and those after 16, 48 and 80 have served their time."""
    world, _ = run(trace(request(0.0, 16, 84)), Fixed(HERE), shape(has_states=True, snapshot_tokens=32))
    assert world.workers[0].engine.load().state_rows.cached == 3


def test_layers_share_what_a_model_of_the_size_costs() -> None:
    steps = step_costs(s_overhead=1.0, s_per_token=0.1, s_per_pair=0.01, s_per_sequence=2.0, s_per_kv_token=0.001)
    whole = CostModel(steps=steps, transfer_latency_s=0.5, transfer_s_per_token=0.25)
    assert whole.with_layers(1.0, 0, 0.0) == whole
    parts = whole.with_layers(0.25, 100, 1000.0)
    assert parts.transfer_s(1000, 104) == pytest.approx(0.5 + 0.25 * (0.25 * 1000 + 0.75 * 104 + 1000))
    prompt, decoding = (parts.steps.step_s(*size) for size in ((10, 10 * 4000, 0, 0), (2, 0, 2, 2 * 4000)))
    assert prompt == pytest.approx(1.0 + 10 * 0.1 + 0.01 * 10 * (0.25 * 4000 + 0.75 * 100))
    pairs_s = 0.01 * 0.75 * 100
    assert decoding == pytest.approx(1 + 2 * (0.1 + pairs_s + 2 + 0.001 * (0.25 * 4000 + 0.75 * 100 + 2 * 1000)))
    assert whole.with_layers(0.0, 0, 1000.0).transfer_s(1000) == pytest.approx(0.5 + 0.25 * 1000), "a state alone"
