"""The arena's clusters in virtual time: small ones by hand, random ones by what must always hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.config import RouterConfig
from lab.simulate.costs import GPUS, MODELS, CostModel, roofline
from lab.simulate.flight import Served
from lab.simulate.policy import RoutingDecision, WorkerView
from lab.simulate.production import Production
from lab.simulate.report import quantiles, result_of
from lab.simulate.worker import SimulatedWorker, WorkerShape
from lab.simulate.world import World
from lab.traces.trace import Trace, TraceRequest
from router.placement import Objective, Prices
from tests.support.builders import step_costs

torch.set_num_threads(1)

BLOCK = 16
STEPS = step_costs(s_overhead=1.0, s_per_token=0.1)
COSTS = CostModel(steps=STEPS, transfer_latency_s=0.25, transfer_s_per_token=0.125)
"""A step takes 1 s and 0.1 s a token."""


def shape(num_blocks: int = 64, batch: int = 64, seqs: int = 8, **layers: Any) -> WorkerShape:
    return WorkerShape(
        num_blocks=num_blocks,
        block_tokens=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=batch,
        output_reservation=32,
        **layers,
    )


class Fixed:
    """Its decisions in order, the last one again and again."""

    name = "fixed"

    def __init__(self, *decisions: RoutingDecision | None) -> None:
        self._decisions = decisions
        self._count = 0
        self.seen: list[tuple[list[WorkerView], list[WorkerView]]] = []
        self.told: list[tuple[str, TraceRequest, float]] = []

    def place(
        self, request: TraceRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], now_s: float
    ) -> RoutingDecision | None:
        is_again = any(told == "withdrawn" and other is request for told, other, _ in self.told)
        assert now_s > request.arrival_s if is_again else now_s == request.arrival_s
        self.seen.append((list(prefill), list(decode)))
        decision = self._decisions[min(self._count, len(self._decisions) - 1)]
        self._count += 1
        return decision

    def computed(self, request: TraceRequest, now_s: float) -> None:
        self.told.append(("computed", request, now_s))

    def finished(self, request: TraceRequest, now_s: float) -> None:
        self.told.append(("finished", request, now_s))

    def withdrawn(self, request: TraceRequest, now_s: float) -> None:
        self.told.append(("withdrawn", request, now_s))

    def moved(self, request: TraceRequest, decodes: int, now_s: float) -> None:
        self.told.append(("moved", request, now_s))


def request(arrival_s: float, num_tokens: int, num_output: int, first_block: int = 0) -> TraceRequest:
    blocks = range(first_block, first_block + num_tokens // BLOCK)
    return TraceRequest(arrival_s, num_tokens, num_output, tuple(blocks))


def trace(*requests: TraceRequest) -> Trace:
    return Trace("test", BLOCK, requests)


def run(
    requests: Trace, placer: Fixed, of: WorkerShape | None = None, prefill: int = 0, decode: int = 1
) -> tuple[World, list[Served]]:
    world = World(requests, placer, of or shape(), COSTS, prefill=prefill, decode=decode)
    return world, world.run()


HERE = RoutingDecision(computes=0, decodes=0)


def test_a_prompt_alone_takes_one_step_and_each_token_another() -> None:
    _, (served,) = run(trace(request(2.0, 20, 4)), Fixed(HERE))
    assert served.ttft_s == pytest.approx(1 + 20 * 0.1)
    assert served.finished_s == pytest.approx(2 + 3 + 3 * 1.1)
    assert served.intervals == [pytest.approx((1.1, 1)), pytest.approx((1.1, 2))]
    assert served.itl_s == pytest.approx(1.1)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    _, (served,) = run(trace(request(0.0, 40, 1)), Fixed(HERE), shape(batch=16))
    assert served.ttft_s == pytest.approx(2 * (1 + 1.6) + (1 + 0.8))
    assert served.finished_s == served.first_token_s
    assert served.itl_s == 0.0


def test_what_a_prompt_left_is_found_by_the_next_one() -> None:
    world, (first, second) = run(trace(request(0.0, 48, 1), request(100.0, 50, 1)), Fixed(HERE))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert second.ttft_s == pytest.approx(1 + 2 * 0.1)
    assert world.workers[0].computed_tokens == 50
    result = result_of("fixed", world, [first, second], Objective(2.0, 1.0))
    assert result.hit_rate == pytest.approx(48 / 98)
    assert result.good_share == 0.5, "5.8 s and 1.2 s to the first token"
    assert result.goodput_per_s == pytest.approx(1 / 100)


def test_an_arrival_waits_for_the_step_that_runs_and_for_no_more() -> None:
    """The first request decodes alone, many steps at once; 20 s after it began, the second comes."""
    _, (first, second) = run(trace(request(0.0, 10, 100), request(20.0, 10, 1, 7)), Fixed(HERE), shape(batch=256))
    assert first.ttft_s == 2.0
    num_before = 17  # steps of 1.1 s that begin before 20 s: at 2.0, 3.1 ... 19.6
    began_s = 2.0 + num_before * 1.1
    assert second.first_token_s == pytest.approx(began_s + 1 + 1.1)
    assert first.finished_s == pytest.approx(2.0 + 98 * 1.1 + 2.1)


def test_a_disaggregated_request_gets_its_first_token_from_the_prefill_worker() -> None:
    world, (served,) = run(
        trace(request(0.0, 40, 3)), Fixed(RoutingDecision(computes=0, decodes=1)), shape(batch=16), prefill=1, decode=1
    )
    computed_s = 2 * (1 + 1.6) + (1 + 0.8)
    assert served.ttft_s == pytest.approx(computed_s)
    # The transfer takes 0.25 + 40 * 0.125 = 5.25 s, all but the latency hidden behind 7 s of computing.
    assert served.finished_s == pytest.approx(computed_s + 0.25 + 2 * 1.1)
    assert [worker.computed_tokens for worker in world.workers] == [40, 0]


def test_what_computing_does_not_hide_of_a_transfer_delays_the_second_token() -> None:
    _, (_, second) = run(
        trace(request(0.0, 80, 1), request(50.0, 80, 2)),
        Fixed(RoutingDecision(computes=0, decodes=1)),
        shape(batch=64),
        prefill=1,
        decode=1,
    )
    assert second.num_cached_tokens == 64, "the last token's block is computed"
    computing_s = 1 + 16 * 0.1
    assert second.ttft_s == pytest.approx(computing_s)
    exposed_s = 0.25 + 80 * 0.125 - computing_s
    assert second.finished_s == pytest.approx(50 + computing_s + exposed_s + 1.1)


def test_a_prefix_is_pulled_from_where_it_is() -> None:
    placer = Fixed(
        RoutingDecision(computes=0, decodes=0), RoutingDecision(computes=1, decodes=1, source=0, source_tokens=48)
    )
    world, (_, second) = run(trace(request(0.0, 48, 1), request(100.0, 58, 1)), placer, decode=2)
    assert second.num_cached_tokens == 48
    assert second.ttft_s == pytest.approx(0.25 + 48 * 0.125 + 1 + 10 * 0.1)
    assert [worker.computed_tokens for worker in world.workers] == [48, 10]
    assert [view.num_cached_tokens for view in placer.seen[1][1]] == [48, 0]


def test_a_source_that_has_less_than_was_believed_gives_what_it_has() -> None:
    placer = Fixed(
        RoutingDecision(computes=0, decodes=0), RoutingDecision(computes=1, decodes=1, source=0, source_tokens=64)
    )
    _, (_, second) = run(trace(request(0.0, 32, 1), request(100.0, 70, 1)), placer, decode=2)
    assert second.num_cached_tokens == 32
    assert second.ttft_s == pytest.approx(0.25 + 32 * 0.125 + 1 + 38 * 0.1)


def test_two_workers_that_pull_from_each_other_end() -> None:
    """Each one's cache is full of what the other wants; room comes as it is reserved, not before."""
    placer = Fixed(
        RoutingDecision(computes=0, decodes=0),
        RoutingDecision(computes=1, decodes=1),
        RoutingDecision(computes=1, decodes=1, source=0, source_tokens=80),
        RoutingDecision(computes=0, decodes=0, source=1, source_tokens=80),
    )
    requests = trace(request(0.0, 80, 1), request(0.5, 80, 1, 50), request(100.0, 96, 1), request(100.0, 96, 1, 50))
    _, served = run(requests, placer, shape(num_blocks=8), decode=2)
    assert all(one.finished_s < 200 for one in served)


def test_views_tell_what_is_queued_and_used() -> None:
    placer = Fixed(HERE)
    run(
        trace(request(0.0, 40, 8), request(0.5, 24, 1, 9), request(1.0, 16, 1, 20)),
        placer,
        shape(num_blocks=8),
        decode=2,
    )
    (first, idle), (second, _), (third, _) = (decode for _, decode in placer.seen)
    assert (first.queued_tokens, first.num_requests, first.used_blocks) == (0, 0, 0)
    assert (second.queued_tokens, second.reserved_tokens, second.num_requests) == (40, 40, 1)
    assert (second.used_blocks, second.num_blocks) == (3, 8), "40 tokens and 8 more"
    assert (third.queued_tokens, third.num_requests, third.num_waiting) == (64, 2, 1)
    assert (idle.queued_tokens, idle.kv_use) == (0, 0.0)
    assert idle.tokens_per_s == pytest.approx(10.0)


requests_lists = st.lists(
    st.tuples(st.floats(0, 60), st.integers(1, 90), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12
).map(
    lambda found: trace(
        # Apart by what steps do not take: who comes at the very end of a step comes before it or after it.
        *(
            request(at_s + 0.0137 * i, prompt, output, 100 * block)
            for i, (at_s, prompt, output, block) in enumerate(sorted(found))
        )
    )
)


layers = st.fixed_dictionaries(
    {
        "window": st.sampled_from([0, 0, 1, 20, 64]),
        "has_states": st.booleans(),
        "snapshot_tokens": st.sampled_from([16, 64]),
        "longest": st.just(130),
    }
)


class Anything:
    """Decides by lot, as hypothesis drew it."""

    name = "anything"

    def __init__(self, draws: st.DataObject) -> None:
        self._draws = draws

    def place(
        self, request: TraceRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], now_s: float
    ) -> RoutingDecision:
        decodes = self._draws.draw(st.sampled_from(decode)).index
        computes = self._draws.draw(st.sampled_from([*prefill, decode[decodes - len(prefill)]])).index
        others = [view for view in (*prefill, *decode) if view.index != computes and view.num_cached_tokens]
        source = self._draws.draw(st.none() | st.sampled_from(others)) if others else None
        objectives = st.sampled_from([0.5, 3.0, 60.0, math.inf])
        return RoutingDecision(
            computes=computes,
            decodes=decodes,
            source=source.index if source else None,
            source_tokens=source.num_cached_tokens if source else 0,
            ttft_s=self._draws.draw(objectives),
            itl_s=self._draws.draw(objectives),
            num_expected_tokens=self._draws.draw(st.integers(0, 50)),
        )

    def computed(self, request: TraceRequest, now_s: float) -> None:
        pass

    def finished(self, request: TraceRequest, now_s: float) -> None:
        pass

    def withdrawn(self, request: TraceRequest, now_s: float) -> None:
        pass

    def moved(self, request: TraceRequest, decodes: int, now_s: float) -> None:
        pass


@settings(max_examples=60)
@given(requests_lists, layers, st.integers(0, 2), st.integers(1, 2), st.integers(10, 40), st.data())
def test_every_request_is_served_whole_and_nothing_is_left(
    requests: Trace, kind: dict[str, int], prefill: int, decode: int, num_blocks: int, data: st.DataObject
) -> None:
    of = shape(num_blocks, batch=32, seqs=4, **kind)
    world = World(requests, Anything(data), of, COSTS, prefill=prefill, decode=decode)
    for served in world.run():
        assert served.request.arrival_s < served.first_token_s <= served.finished_s < float("inf")
        assert 1 + sum(count for _, count in served.intervals) == served.request.num_output_tokens
        waited_s = served.finished_s - served.first_token_s
        assert sum(interval * count for interval, count in served.intervals) == pytest.approx(waited_s)
        assert served.num_cached_tokens < served.request.num_prompt_tokens
    for worker in world.workers:
        assert worker.engine.is_idle
        assert (worker.queued_tokens, worker.reserved_tokens, worker.num_requests) == (0, 0, 0)


PREEMPTED_AFTER_A_LEAP = trace(
    request(0.0, 79, 35, 100),
    request(23.0137, 69, 28, 200),
    request(23.0274, 84, 29, 0),
    request(24.0411, 1, 17, 300),
)
"""Regression: blocks that a leap had filled were not cached, and their tokens were computed again."""


@settings(max_examples=40)
@given(requests_lists, layers)
@example(PREEMPTED_AFTER_A_LEAP, {})
def test_leaps_change_no_time(requests: Trace, kind: dict[str, int]) -> None:
    """As long as a step's cost does not grow with the context, which a leap takes as it was at its beginning."""

    def times() -> list[tuple[float, float]]:
        _, served = run(requests, Fixed(HERE), shape(num_blocks=24, batch=32, seqs=4, **kind))
        return [(one.first_token_s, one.finished_s) for one in served]

    leaping = times()
    with pytest.MonkeyPatch.context() as patch:
        begin = SimulatedWorker._begin

        def one_step(self: SimulatedWorker, *how: object) -> object:
            step = begin(self, *how)  # type: ignore[arg-type]
            step.num_steps = 1
            return step

        patch.setattr(SimulatedWorker, "_begin", one_step)
        stepping = times()
    for (first, finished), (other_first, other_finished) in zip(leaping, stepping, strict=True):
        assert first == pytest.approx(other_first)
        assert finished == pytest.approx(other_finished)


def test_a_roofline_is_two_operations_a_parameter_and_one_read_of_the_weights() -> None:
    costs = roofline(MODELS["llama-3-8b"], GPUS["h200"])
    steps = costs.steps
    assert costs.tokens_per_s == pytest.approx(989e12 * 0.5 / (2 * 8.03e9))
    assert steps.s_weights == pytest.approx(8.03e9 * 2 / (4.8e12 * 0.7))
    assert MODELS["llama-3-8b"].kv_bytes_per_token == 131_072
    assert steps.s_per_kv_token == pytest.approx(131_072 / (4.8e12 * 0.7)), "the KV of what decodes is read"
    assert steps.step_s(1, 0, 1, 0) == pytest.approx(0.5e-3 + steps.s_weights), "one token is a read of the weights"
    assert steps.step_s(8192, 0, 0, 0) == pytest.approx(0.5e-3 + 8192 * steps.s_per_token), "many are arithmetic"
    two = roofline(MODELS["llama-3-8b"], GPUS["h200"], 2)
    assert two.steps.s_per_token == pytest.approx(steps.s_per_token / 2)
    assert steps.prefill_s(4096, 0, 2048) == pytest.approx(
        sum(steps.step_s(2048, 2048 * (2 * start + 2048) // 2, 0, 0) for start in (0, 2048)), rel=1e-9
    )


def test_quantiles_are_of_everything_that_occurred() -> None:
    assert quantiles([(3.0, 1), (1.0, 98), (2.0, 1)]) == (1.0, 1.0, 2.0)
    assert quantiles([(5.0, 1)]) == (5.0, 5.0, 5.0)
    assert quantiles([]) == (0.0, 0.0, 0.0)


# Refusals and objectives


def test_the_placer_is_told_of_first_and_last_tokens() -> None:
    placer, requests = Fixed(RoutingDecision(computes=0, decodes=1)), trace(request(0.0, 40, 3))
    _, (served,) = run(requests, placer, prefill=1, decode=1)
    assert placer.told == [
        ("computed", requests.requests[0], served.first_token_s),
        ("finished", requests.requests[0], served.finished_s),
    ]


def test_who_is_refused_never_reaches_a_worker_and_counts_in_goodputs_denominator_alone() -> None:
    requests = trace(request(0.0, 48, 3), request(5.0, 90, 7), request(50.0, 58, 1), request(60.0, 80, 2))
    placer = Fixed(HERE, None, HERE, None)
    world, served = run(requests, placer)
    assert [one.is_refused for one in served] == [False, True, False, True]
    assert [one.request for one in served] == list(requests.requests), "in order of arrival"
    assert served[1].ttft_s == served[1].finished_s == math.inf
    assert world.workers[0].computed_tokens == 48 + 10, "the second prompt begins as the first one"
    assert [told for told, *_ in placer.told] == ["computed", "finished"] * 2
    result = result_of("fixed", world, served, Objective(6.0, 2.0))
    admitted = [served[0], served[2]]
    alone = result_of("fixed", world, admitted, Objective(6.0, 2.0))
    assert (result.num_requests, result.num_refused, alone.num_refused) == (4, 2, 0)
    assert (result.good_share, alone.good_share) == (0.5, 1.0)
    assert result.goodput_per_s == pytest.approx(2 / 60)
    others = ("hit_rate", "imbalance", "ttft_s", "itl_s", "busy_share", "num_preemptions")
    assert [getattr(result, name) for name in others] == [getattr(alone, name) for name in others]


def test_deadlines_reach_the_engine() -> None:
    """The prompts arrive while a step runs; the last one's first token is due first."""
    requests = trace(request(0.0, 60, 1), request(1.0, 60, 1, 20), request(2.0, 60, 1, 40))
    easy, urgent = replace(HERE, ttft_s=90.0), replace(HERE, ttft_s=20.0)
    _, served = run(requests, Fixed(easy, easy, urgent))
    assert [one.first_token_s for one in served] == pytest.approx([7.0, 21.0, 14.4])
    _, served = run(requests, Fixed(HERE))
    assert [one.first_token_s for one in served] == pytest.approx([7.0, 14.4, 21.0])


def test_itl_objectives_reach_the_engine() -> None:
    """A prompt of 60 tokens, in one step with the sequence that decodes, takes 7.1 s; the least chunk is of 7."""
    requests = trace(request(0.0, 40, 30), request(10.0, 60, 1, 20))

    def slowest(decision: RoutingDecision) -> float:
        _, (first, second) = run(requests, Fixed(decision))
        assert second.finished_s < math.inf
        return max(interval for interval, _ in first.intervals)

    assert slowest(HERE) == pytest.approx(1 + 0.1 + 6.0)
    assert slowest(replace(HERE, itl_s=1.3)) == pytest.approx(1 + 0.1 + 0.7)


def test_the_expected_answer_reaches_the_engine() -> None:
    """40 tokens, and room for 16 or 48 more, or as many as the worker's settings say: 32."""
    requests = trace(request(0.0, 40, 60), request(1.0, 16, 1, 20))
    for expected, num_blocks in ((16, 4), (48, 6), (0, 5)):
        placer = Fixed(replace(HERE, num_expected_tokens=expected))
        run(requests, placer)
        assert placer.seen[1][1][0].used_blocks == num_blocks


def test_workers_learn_in_the_arena_what_their_steps_cost() -> None:
    world, _ = run(trace(*(request(30.0 * n, 20 + 7 * n, 3, 20 * n) for n in range(8))), Fixed(HERE))
    learned = world.workers[0].engine.costs
    for num_new in (10, 30, 60):
        assert learned.step_s(num_new, 0, 0, 0) == pytest.approx(STEPS.step_s(num_new, 0, 0, 0), rel=0.1)


# The router's own placement and admission

HIDDEN = step_costs(s_per_token=0.1, s_weights=1.0)
"""Up to ten sequences decode in the time of one."""
FREE = Prices(0.0, 0.0, 0.0, 0.0)


def view(index: int, num_cached_tokens: int = 0) -> WorkerView:
    return WorkerView(
        index=index,
        num_cached_tokens=num_cached_tokens,
        queued_tokens=0,
        reserved_tokens=0,
        num_requests=0,
        num_waiting=0,
        used_blocks=0,
        num_blocks=10_000,
        tokens_per_s=10.0,
        costs=HIDDEN,
        block_tokens=BLOCK,
    )


def placed(
    production: Production, num: int, prefill: list[WorkerView], decode: list[WorkerView]
) -> list[RoutingDecision]:
    found = [production.place(request(0.0, 80, 5), prefill, decode, 0.0) for _ in range(num)]
    return [decision for decision in found if decision is not None]


def test_the_routers_own_placement_decides_with_its_settings() -> None:
    """64 of the prompt's 80 tokens are somewhere: 1.6 s there, and elsewhere 8 s or a pull."""
    pool = [view(3), view(4, num_cached_tokens=64), view(5)]
    decisions = placed(Production(RouterConfig(pull_above_tokens=64), Objective(), FREE), 9, [], pool)
    assert decisions[0] == RoutingDecision(computes=4, decodes=4, num_expected_tokens=256)
    elsewhere = [decision for decision in decisions if decision.computes != 4]
    assert {(decision.source, decision.source_tokens) for decision in elsewhere} == {(4, 64)}
    never = placed(Production(RouterConfig(pull_above_tokens=65), Objective(), FREE), 20, [], pool)
    assert {decision.source for decision in never} == {None}
    assert {decision.computes for decision in never} == {3, 4, 5}
    split = placed(Production(RouterConfig(mode="disaggregated"), Objective(4.0, 2.0), FREE), 1, [pool[0]], pool[1:])
    assert [(decision.computes, decision.ttft_s, decision.itl_s) for decision in split] == [(3, 4.0, 2.0)]


def test_the_routers_own_admission_refuses_who_would_be_late_until_there_is_room() -> None:
    """Prompts of 8 s each, and 20 s to the first token: a third one waits 16 s at its arrival, too long."""
    production = Production(RouterConfig(), Objective(20.0, math.inf), FREE)
    asked = [request(0.0, 80, 5) for _ in range(4)]
    first, second, third = (production.place(one, [], [view(0)], 0.0) for one in asked[:3])
    assert first is not None
    assert (second is None, third is None) == (False, True)
    production.computed(asked[0], 8.0)
    production.finished(asked[0], 9.0)
    assert production.place(asked[3], [], [view(0)], 9.0) is not None


def test_who_is_faster_than_one_would_think_does_not_get_everything() -> None:
    """Sparse prompts that have nothing in common. Once the first is computed, one worker is known to be quick."""
    quick = CostModel(
        steps=step_costs(s_overhead=1e-5, s_per_token=1e-6, s_weights=1e-5, s_per_sequence=1e-6),
        transfer_latency_s=1e-3,
        transfer_s_per_token=0.0,
    )
    requests = trace(*(request(1.0 * n, 320, 2, 100 * n) for n in range(40)))
    served = World(requests, Production(RouterConfig(), Objective(), FREE), shape(512), quick, decode=4).run()
    assert len({one.worker for one in served[:10]}) == 4


def test_predictions_that_err_refuse_more_or_fewer() -> None:
    def num_admitted(error: float) -> int:
        return len(placed(Production(RouterConfig(), Objective(30.0, math.inf), FREE, error), 40, [], [view(0)]))

    assert num_admitted(2.0) < num_admitted(1.0) < num_admitted(0.5)


def test_under_overload_the_routers_own_admission_serves_those_whom_it_lets_in_on_time() -> None:
    """Three prompts of a second and more for each that a worker can compute: whoever is admitted, is on time."""
    requests = trace(*(request(1.0 + 0.7 * n, 60, 3, 10 * n) for n in range(120)))
    objective = Objective(15.0, math.inf)
    costs = CostModel(steps=replace(HIDDEN, s_weights=0.1), transfer_latency_s=0.01, transfer_s_per_token=0.0)
    production = Production(RouterConfig(expected_output_floor=3, expected_output_default=3), objective, FREE)
    world = World(requests, production, shape(num_blocks=512, batch=64), costs, decode=2)
    served = world.run()
    result = result_of("baton", world, served, objective)
    assert 10 < result.num_refused < 110
    admitted = [one for one in served if not one.is_refused]
    num_late = sum(one.ttft_s > objective.ttft_s for one in admitted)
    assert num_late <= 0.1 * len(admitted)
    without = World(
        requests,
        Fixed(RoutingDecision(computes=0, decodes=0), RoutingDecision(computes=1, decodes=1)),
        shape(num_blocks=512, batch=64),
        costs,
        decode=2,
    )
    assert result.good_share > 1.5 * result_of("fixed", without, without.run(), objective).good_share
