"""Pools that change in virtual time: one change by hand, any changes by what must always hold, the autoscaler's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster import Role, WorkerState
from baton.config import AutoscaleConfig, RouterConfig
from baton.messages import SequenceSpec
from deploy.scaling.values import Measured, Needs, PolicyState, ScalingDecision, Sizes
from lab.simulate import scaler as scaler_module
from lab.simulate.costs import PROFILES
from lab.simulate.flight import Served, spec_of
from lab.simulate.policy import RoutingDecision, TwoLegs, WorkerView
from lab.simulate.production import Production
from lab.simulate.report import Result, result_of
from lab.simulate.run import Scenario, run_policy
from lab.simulate.scaler import Scaling
from lab.simulate.textbook import Greedy
from lab.simulate.worker import WorkerShape
from lab.simulate.world import World
from lab.traces.generator import Conversations, generate
from lab.traces.trace import Trace, TraceRequest
from router.placement import Objective, Prices
from tests.unit.lab.simulate.test_world import (
    COSTS,
    Anything,
    Fixed,
    request,
    requests_lists,
    shape,
    trace,
    view,
)

torch.set_num_threads(1)

QUICK = AutoscaleConfig(window_s=5.0, cool_down_s=5.0)
EASY = Objective(1e6, 1e6)
Sized = Callable[[Sizes, float], Sizes]


def ordering(monkeypatch: pytest.MonkeyPatch, sized: Sized) -> None:
    """Instead of the policy: what the pools should be, by what they are and when."""

    def decide(
        measured: Measured, state: PolicyState, config: AutoscaleConfig, objective: Objective, now_s: float, mode: str
    ) -> ScalingDecision:
        return ScalingDecision(
            before=measured.sizes,
            sizes=sized(measured.sizes, now_s),
            reasons=("by lot",),
            needs=Needs(0, 0),
            state=state,
        )

    monkeypatch.setattr(scaler_module, "decide", decide)


def to(sizes: Sizes, at_s: float) -> Sized:
    return lambda before, now_s: sizes if now_s >= at_s else before


def run(requests: Trace, placer: Fixed, prefill: int, decode: int) -> tuple[World, list[Served]]:
    world = World(
        requests, placer, shape(), COSTS, prefill=prefill, decode=decode, scaling=Scaling(config=QUICK, objective=EASY)
    )
    return world, world.run()


def num_tokens(served: Served) -> int:
    return 1 + sum(count for _, count in served.intervals)


def test_an_answer_under_way_goes_on_elsewhere_and_waits_for_its_kv_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 decodes two answers and worker 0 one. That has its first token at 3 s, and then one every 1.1 s; at 10 s
    worker 0 becomes a prefill worker, as soon as its step is over, at 10.7 s, with 7 more tokens out."""
    ordering(monkeypatch, to(Sizes(1, 1), 10.0))
    placer = Fixed(RoutingDecision(computes=0, decodes=0), RoutingDecision(computes=1, decodes=1))
    requests = trace(request(0.0, 20, 40), request(0.0, 16, 60, 9), request(0.5, 16, 60, 19))
    world, (moved, *others) = run(requests, placer, 0, 2)
    assert world.num_moved == 1
    assert [num_tokens(served) for served in (moved, *others)] == [40, 60, 60]
    steps_s = [interval for interval, count in moved.intervals for _ in range(count)]
    assert steps_s[:7] == [pytest.approx(1.1)] * 7
    transfer_s = 0.25 + 0.125 * (20 + 7)  # the last token's KV is not computed yet
    assert steps_s[7] == pytest.approx(transfer_s + 1.3, abs=1.3 + 1.2), "reserved and joined between two steps"
    assert steps_s[7] > transfer_s + 1.0
    assert steps_s[8] == pytest.approx(1.3), "three decode there"
    assert [told for told, *_ in placer.told if told == "moved"] == ["moved"]
    assert [member.role for member in world.members.all] == [Role.PREFILL, Role.DECODE]


def test_workers_of_different_pools_stop_and_start_instead_of_changing_their_roles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prefill pool's workers have fewer blocks, and compute in half the time."""
    ordering(monkeypatch, to(Sizes(1, 1), 10.0))
    quick = replace(COSTS, steps=replace(COSTS.steps, s_per_token=COSTS.steps.s_per_token / 2))
    placer = Fixed(RoutingDecision(computes=1, decodes=1))
    scaling = Scaling(config=QUICK, objective=EASY, may_flip=False)
    requests = trace(request(0.0, 20, 40), request(60.0, 20, 4, 9))
    world = World(
        requests, placer, shape(), COSTS, decode=2, of_prefill=(replace(shape(), num_blocks=7), quick), scaling=scaling
    )
    world.run()
    found = [(each.role, each.state, each.worker.costs.steps.s_per_token) for each in world.members.all]
    slow, fast = COSTS.of_prefill().steps.s_per_token, quick.of_prefill().steps.s_per_token
    assert slow == 2 * fast
    assert found[2:] == [(Role.PREFILL, WorkerState.READY, fast)]
    assert sorted(state for _, state, _ in found[:2]) == [WorkerState.DEAD, WorkerState.READY]
    assert {role for role, *_ in found[:2]} == {Role.DECODE}
    assert [each.worker.load(world.now, each.state).blocks.total for each in world.members.all][2] == 7


def test_prompts_that_wait_are_placed_again_and_their_deadlines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 computes a prompt from 0 s to 7 s, and another waits there; a third one is on worker 1."""
    ordering(monkeypatch, to(Sizes(1, 1), 5.0))
    here, there = (
        RoutingDecision(computes=0, decodes=0, ttft_s=100.0),
        RoutingDecision(computes=1, decodes=1, ttft_s=100.0),
    )
    placer = Fixed(here, there, here, there, there, there)
    requests = trace(
        request(0.0, 60, 2),
        request(0.0, 60, 40, 9),
        request(1.0, 60, 3, 19),
        request(1.5, 16, 30, 29),
        request(1.6, 16, 30, 39),
    )
    world = World(requests, placer, shape(), COSTS, decode=2, scaling=Scaling(config=QUICK, objective=EASY))
    deadlines = []

    def spied(asked: TraceRequest, decision: RoutingDecision, number: int, waited_s: float) -> SequenceSpec:
        spec = spec_of(asked, decision, number, waited_s)
        deadlines.append(world.now + spec.ttft_s - asked.arrival_s)
        return spec

    monkeypatch.setattr("lab.simulate.driver.spec_of", spied)
    served = world.run()
    assert ("withdrawn", requests.requests[2], 7.0) in placer.told
    assert len(deadlines) == 6
    assert deadlines == [pytest.approx(100.0)] * 6
    assert [one.worker for one in served] == [0, 1, 1, 1, 1]
    assert [num_tokens(one) for one in served] == [r.num_output_tokens for r in requests.requests]


def test_a_worker_that_starts_takes_its_time_and_one_that_stops_costs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ordering(monkeypatch, lambda before, now: Sizes(0, 2) if now < 60 else Sizes(0, 1))
    placer = Fixed(RoutingDecision(computes=0, decodes=0))
    requests = trace(*(request(4.0 * n, 16, 3, 10 * n) for n in range(40)))
    world, served = run(requests, placer, 0, 1)
    num_seen = [len(decode) for _, decode in placer.seen]
    arrived_s = [one.request.arrival_s for one in served]
    assert {n for n, at_s in zip(num_seen, arrived_s, strict=True) if at_s < 35} == {1}
    assert {n for n, at_s in zip(num_seen, arrived_s, strict=True) if 36 <= at_s < 60} == {2}
    assert {n for n, at_s in zip(num_seen, arrived_s, strict=True) if at_s > 60} == {1}
    result = result_of("fixed", world, served, EASY)
    lasted_s = max(one.finished_s for one in served)
    assert result.mean_workers == pytest.approx((lasted_s + 55) / lasted_s), "from the order at 5 s to the stop at 60 s"
    assert [(change.at_s, change.before, change.sizes) for change in result.changes] == [
        (5.0, "0:1", "0:2"),
        (60.0, "0:2", "0:1"),
    ]


@settings(max_examples=30)
@given(requests_lists, st.integers(0, 2), st.integers(1, 3), st.integers(10, 40), st.data())
def test_whatever_the_pools_become_every_request_is_served_whole(
    requests: Trace, prefill: int, decode: int, num_blocks: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sizes = st.builds(Sizes, st.integers(0, 2), st.integers(1, 3))
        ordering(patch, lambda before, now_s: data.draw(sizes) if now_s < 200 else before)
        scaling = Scaling(
            config=replace(QUICK, window_s=data.draw(st.sampled_from([1.5, 4.0]))), objective=EASY, start_s=2.0
        )
        world = World(
            requests,
            AnyOf(data),
            shape(num_blocks, batch=32, seqs=4),
            COSTS,
            prefill=prefill,
            decode=decode,
            scaling=scaling,
        )
        for served in world.run():
            assert served.request.arrival_s < served.first_token_s <= served.finished_s < math.inf
            assert num_tokens(served) == served.request.num_output_tokens
            waited_s = served.finished_s - served.first_token_s
            assert sum(interval * count for interval, count in served.intervals) == pytest.approx(waited_s)
    for worker in world.workers:
        assert worker.engine.is_idle
        assert (worker.queued_tokens, worker.reserved_tokens, worker.num_requests) == (0, 0, 0)
    assert all(member.num_awaited == 0 for member in world.members.all)
    assert not any(member.state is WorkerState.DRAINING for member in world.members.all)


class AnyOf(Anything):
    """As hypothesis drew it, of pools that change."""

    def place(
        self, request: TraceRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], now_s: float
    ) -> RoutingDecision:
        decodes = self._draws.draw(st.sampled_from(decode))
        computes = self._draws.draw(st.sampled_from([*prefill, decodes]))
        others = [view for view in (*prefill, *decode) if view is not computes and view.num_cached_tokens]
        source = self._draws.draw(st.none() | st.sampled_from(others)) if others else None
        return RoutingDecision(
            computes=computes.index,
            decodes=decodes.index,
            source=source.index if source else None,
            source_tokens=source.num_cached_tokens if source else 0,
        )


class Checked(Production):
    """Workers are used in the role that they have."""

    def place(
        self, request: TraceRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], now_s: float
    ) -> RoutingDecision | None:
        decision = super().place(request, prefill, decode, now_s)
        if decision is not None:
            assert decision.decodes in {view.index for view in decode}
        return decision


def test_the_routers_own_accounting_follows_and_nobody_admitted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ordering(monkeypatch, lambda before, now_s: Sizes(1, 2) if int(now_s / 40) % 2 else Sizes(0, 3))
    prices = Prices(0.25, 0.125, 0.25, 0.0)
    placer = Checked(RouterConfig(expected_output_floor=3), Objective(40.0, math.inf), prices)
    requests = trace(*(request(1.2 * n, 40, 12, 10 * n) for n in range(80)))
    world = World(
        requests, placer, shape(), COSTS, decode=3, scaling=Scaling(config=QUICK, objective=Objective(40.0, math.inf))
    )
    served = world.run()
    assert len(served) == 80
    assert world.num_moved > 0
    assert any(one.is_refused for one in served)
    assert all(one.worker < 0 if one.is_refused else one.finished_s < math.inf for one in served)
    assert not placer._placed
    assert not placer._admit
    for book in placer._loads.values():
        assert not book.is_busy


# The autoscaler

OBJECTIVE = Objective(5.0, 0.1)
TRACE = generate(Conversations(duration_s=150.0, sessions_per_s=1.6), seed=3)


def scaled(prefill: int, decode: int, scaling: Scaling | None) -> Result:
    scenario = Scenario(
        trace=TRACE,
        shape=WorkerShape(num_blocks=5000, block_tokens=TRACE.block_tokens),
        costs=PROFILES["llama-3-70b@8xa100"],
        prefill=prefill,
        decode=decode,
        objective=OBJECTIVE,
        router=RouterConfig(mode="disaggregated"),
        scaling=scaling,
    )
    return run_policy("baton", scenario)


@pytest.fixture(scope="module")
def statics() -> dict[int, float]:
    """Share of good requests by the number of prefill workers, of four."""
    return {prefill: scaled(prefill, 4 - prefill, None).good_share for prefill in (1, 2, 3)}


@pytest.mark.parametrize(
    "restarts_s",
    [
        (21.0, 26.0),
        pytest.param((), marks=pytest.mark.chaos),
        pytest.param((100.0,), marks=pytest.mark.chaos),
    ],
    ids=str,
)
@pytest.mark.slow
def test_from_a_bad_split_the_autoscaler_comes_near_the_best(
    statics: dict[int, float], restarts_s: tuple[float, ...]
) -> None:
    config = AutoscaleConfig(window_s=5.0, cool_down_s=10.0)
    result = scaled(1, 3, Scaling(config=config, objective=OBJECTIVE, mode="disaggregated", restarts_s=restarts_s))
    assert statics[1] < 0.8 * max(statics.values()), "else the split is not bad"
    assert result.good_share >= 0.9 * max(statics.values())
    assert 1 <= result.num_actions <= 6
    assert all(len(change.reasons) >= 4 for change in result.changes)


def test_few_workers_become_as_many_as_are_needed() -> None:
    config = AutoscaleConfig(window_s=5.0, cool_down_s=10.0, max_workers=6)
    few, grown = scaled(1, 1, None), scaled(1, 1, Scaling(config=config, objective=OBJECTIVE, mode="disaggregated"))
    assert grown.good_share > 1.3 * few.good_share
    assert 2.5 < grown.mean_workers <= 6
    again = scaled(1, 1, Scaling(config=config, objective=OBJECTIVE, mode="disaggregated"))
    assert again == grown, "the same arguments give the same figures and reasons"


def test_other_policies_serve_pools_that_change_too() -> None:
    world = World(
        trace(*(request(1.0 * n, 40, 12, 10 * n) for n in range(60))),
        TwoLegs(Greedy(Random(0), 4)),
        shape(),
        COSTS,
        prefill=1,
        decode=3,
        scaling=Scaling(config=QUICK, objective=Objective(10.0, 100.0)),
    )
    served = world.run()
    assert world.decisions
    assert all(one.finished_s < math.inf for one in served)


def test_the_routers_own_placement_knows_who_has_changed_its_role() -> None:
    placer = Production(RouterConfig(mode="disaggregated"), Objective(100.0, math.inf), Prices(0.0, 0.0, 0.0, 0.0))
    for prefill, decode in ((3, 4), (4, 3), (3, 4)):
        decision = placer.place(request(0.0, 80, 5), [view(prefill)], [view(decode)], 0.0)
        assert decision is not None
        assert (decision.computes, decision.decodes) == (prefill, decode)
