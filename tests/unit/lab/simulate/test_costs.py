"""Costs that were measured on a cluster: how they are found, written, read, and what they do in the arena."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.api import Timing, Usage
from baton.costs import StepCosts, StepFit, StepSize
from baton.errors import ConfigError
from lab.bench.connection import ServingWorker
from lab.bench.fit import OFTEN, cost_model, decoding_s, median_costs, prompt_step_s, request_overhead_s
from lab.bench.replay import ReplayedRequest
from lab.simulate.command import measured_scenario
from lab.simulate.costs import GPUS, MODELS, Bench, CostModel, read_bench, roofline
from lab.simulate.flight import Served
from lab.simulate.policy import RoutingDecision
from lab.simulate.run import run_policy
from lab.simulate.worker import WorkerShape
from lab.simulate.world import World
from lab.traces.trace import Trace, TraceRequest
from router.placement import Objective
from tests.support.builders import step_costs

BLOCK = 16
STEPS = step_costs(s_overhead=1.0, s_per_token=0.1)
"""A step takes 1 s and 0.1 s a token."""
SLOW_STEPS = replace(STEPS, s_per_token=0.2)
COSTS = CostModel(steps=STEPS, transfer_latency_s=0.25, transfer_s_per_token=0.0)
BENCH = Bench(
    costs=replace(COSTS, prefill_steps=SLOW_STEPS, request_overhead_s=0.5, decoding_s=((1, 0.0), (4, -0.25))),
    num_blocks=64,
    block_tokens=BLOCK,
    chunk_tokens=128,
    max_model_len=200,
)


def request(arrival_s: float, num_prompt: int, num_output: int, *blocks: int) -> TraceRequest:
    return TraceRequest(arrival_s, num_prompt, num_output, blocks)


def trace(*requests: TraceRequest) -> Trace:
    return Trace("talk", BLOCK, requests)


# In the arena


class Split:
    name = "disaggregated"

    def place(
        self, request: TraceRequest, prefill: Sequence[Any], decode: Sequence[Any], now_s: float
    ) -> RoutingDecision:
        return RoutingDecision(computes=prefill[0].index if prefill else decode[0].index, decodes=decode[0].index)

    def computed(self, request: TraceRequest, now_s: float) -> None:
        pass

    def finished(self, request: TraceRequest, now_s: float) -> None:
        pass

    def withdrawn(self, request: TraceRequest, now_s: float) -> None:
        pass

    def moved(self, request: TraceRequest, decodes: int, now_s: float) -> None:
        pass


def served(costs: CostModel, *requests: TraceRequest, prefill: int = 0) -> list[Served]:
    return World(
        trace(*requests), Split(), WorkerShape(num_blocks=64, block_tokens=BLOCK), costs, prefill=prefill
    ).run()


def test_a_requests_overhead_delays_its_first_token_and_takes_no_workers_time() -> None:
    costs = replace(COSTS, request_overhead_s=0.5)
    plain, late = served(COSTS, request(2.0, 20, 3)), served(costs, request(2.0, 20, 3))
    assert plain[0].ttft_s == pytest.approx(1 + 20 * 0.1)
    assert late[0].ttft_s == pytest.approx(0.5 + 1 + 20 * 0.1)
    assert late[0].intervals == plain[0].intervals
    first, second = served(costs, request(0.0, 20, 1), request(0.1, 20, 1))
    assert second.first_token_s - first.first_token_s == pytest.approx(3.0), "not 3.5: the worker waits for nobody"


def test_prefill_workers_have_steps_of_their_own() -> None:
    (one,) = served(replace(COSTS, prefill_steps=SLOW_STEPS), request(0.0, 20, 2), prefill=1)
    assert one.ttft_s == pytest.approx(1 + 20 * 0.2)
    assert one.finished_s - one.first_token_s == pytest.approx(0.25 + 1 + 0.1)
    assert served(COSTS, request(0.0, 20, 2), prefill=1)[0].ttft_s == pytest.approx(1 + 20 * 0.1)


def test_steps_with_a_prompt_take_longer_where_sequences_are_decoded_too() -> None:
    costs = replace(COSTS, prompt_step_s=0.75)
    (one,) = served(costs, request(0.0, 20, 3))
    assert one.ttft_s == pytest.approx(0.75 + 1 + 20 * 0.1)
    assert one.finished_s - one.first_token_s == pytest.approx(2 * 1.1), "and no other step"
    (split,) = served(costs, request(0.0, 20, 2), prefill=1)
    assert split.ttft_s == pytest.approx(1 + 20 * 0.1), "a prefill worker's own steps have it all"


def test_a_worker_that_has_seen_hardly_a_prompt_can_be_simulated() -> None:
    costs = replace(COSTS, steps=replace(STEPS, s_per_token=0.0))
    (one,) = served(costs, request(0.0, 20, 3))
    assert one.ttft_s == pytest.approx(1.0)


# From a replay


def observed(
    one: TraceRequest, sent_s: float, *token_times: tuple[float, int], cached: int = 0, **timing: Any
) -> ReplayedRequest:
    usage = Usage(one.num_prompt_tokens, one.num_output_tokens, cached)
    defaults: dict[str, Any] = {"decode_worker": "d0", "prefill_worker": "p0", "mode": "disaggregated"}
    return ReplayedRequest(
        request=one,
        sent_s=sent_s,
        outcome="served",
        error=None,
        token_times=list(token_times),
        usage=usage,
        timing=Timing(**defaults | timing),
    )


def worker(name: str, steps: StepCosts) -> ServingWorker:
    return ServingWorker(
        id=name,
        role="prefill" if name.startswith("p") else "decode",
        costs=steps,
        num_blocks=64,
        block_tokens=BLOCK,
        chunk_tokens=128,
    )


def test_steps_are_those_of_the_pools() -> None:
    workers = [worker("p0", SLOW_STEPS), worker("d0", STEPS), worker("d1", replace(STEPS, s_overhead=3.0))]
    model = cost_model([], workers)
    assert model is not None
    assert model.prefill_steps == SLOW_STEPS
    assert model.steps == replace(STEPS, s_overhead=2.0)
    alone = cost_model([], workers[1:2])
    assert alone is not None
    assert alone.prefill_steps is None
    assert cost_model([], []) is None, "not for this client"
    assert median_costs([]) is None


def test_overhead_is_what_is_neither_queue_nor_prefill() -> None:
    done = [
        observed(request(0.0, 20, 1), sent, (sent + 1.0 + extra, 1), queue_s=0.75, prefill_s=0.25)
        for sent, extra in ((0.0, 0.01), (5.0, 0.02), (9.0, 0.9))
    ]
    assert request_overhead_s(done) == pytest.approx(0.02), "from when it was sent: lateness is the client's own"
    assert request_overhead_s([]) == 0.0


def test_what_steps_with_a_prompt_take_beyond_the_workers_own_fit() -> None:
    """A step takes 1 s and 0.1 s a token; those with a prompt took 0.5 s more, the very first one 0.9 s."""
    here: dict[str, Any] = {"prefill_worker": "", "mode": "aggregated"}
    decoding = observed(request(0.0, 20, 100), 0.0, (3.9, 1), (99.0, 99), prefill_s=3.9, **here)
    beside = observed(request(0.0, 30, 1), 10.0, (12.6, 1), cached=20, prefill_s=2.6, **here)
    elsewhere = observed(request(0.0, 20, 1), 9.0, (12.6, 1), prefill_s=3.5, **here | {"decode_worker": "d1"})
    assert prompt_step_s([decoding], COSTS, 128) == pytest.approx(0.9)
    assert prompt_step_s([decoding, beside, elsewhere], COSTS, 128) == pytest.approx(0.5), "one decodes beside one"
    at_once = [observed(request(0.0, 20, 1), 50.0, (60.0, 1), prefill_s=5.0, **here) for _ in range(9)]
    assert prompt_step_s([decoding, beside, elsewhere, *at_once], COSTS, 128) == pytest.approx(0.5), "they share steps"
    long = [observed(request(0.0, 90, 1), t, (t + 20.0, 1), prefill_s=20.0, **here) for t in (100.0, 200.0, 300.0)]
    assert prompt_step_s([decoding, beside, elsewhere, *long], COSTS, 128) == pytest.approx(0.5), "of several steps"
    split = observed(request(0.0, 20, 1), 0.0, (9.0, 1), prefill_s=9.0)
    assert prompt_step_s([split], COSTS, 128) == 0.0
    quick = observed(request(0.0, 20, 1), 0.0, (2.0, 1), prefill_s=2.0, **here)
    assert prompt_step_s([quick], COSTS, 128) == 0.0, "no cost is negative"


def test_what_decoding_takes_beyond_the_workers_own_fit() -> None:
    """A step takes 1 s and 0.1 s a token; a sequence alone decodes a token a second, three of them one in 0.9 s."""

    def every(step_s: float, began_s: float, num_tokens: int, **timing: Any) -> ReplayedRequest:
        times = [(began_s + step_s * n, 1) for n in range(num_tokens)]
        return observed(request(0.0, 20, num_tokens), 0.0, *times, **timing)

    alone = [every(1.0, 0.0, OFTEN + 2)]
    assert decoding_s(alone, STEPS) == ((1, near(1.0 - 1.1)),)
    assert decoding_s([every(1.0, 0.0, OFTEN + 1)], STEPS) == (), "too few, without the first, to say anything"
    three = [every(0.9, 100.0 + late_s, OFTEN + 2) for late_s in (0.0, 0.01, 0.02)]
    assert decoding_s([*alone, *three], STEPS) == ((1, near(1.0 - 1.1)), (3, near(0.9 - 1.3)))
    apart = [every(0.9, 100.0, OFTEN + 2, decode_worker=f"d{number}") for number in range(3)]
    assert decoding_s(apart, STEPS) == ((1, near(0.9 - 1.1)),)

    here: dict[str, Any] = {"prefill_worker": "", "mode": "aggregated"}
    prompt = observed(request(0.0, 30, 1), 0.0, (5.5, 1), prefill_s=3.0, **here)
    assert decoding_s([*alone, prompt], STEPS) == (), "four of the intervals had a prompt's steps in them"
    assert decoding_s([every(1.0, 0.0, OFTEN + 6), prompt], STEPS) == ((1, near(1.0 - 1.1)),)
    at_once = observed(request(0.0, 20, 99), 0.0, (0.0, 1), *((float(n), 2) for n in range(1, 50)))
    assert decoding_s([at_once], STEPS) == (), "who gets two tokens at once has not seen the step between them"


def near(expected: float) -> Any:
    return pytest.approx(expected, abs=1e-6)


def test_decoding_takes_in_the_arena_what_it_took() -> None:
    costs = replace(COSTS, decoding_s=((2, -0.2), (6, 0.6)))
    for number, beyond_s in ((1, -0.2), (2, -0.2), (3, 0.0), (4, 0.2), (6, 0.6), (9, 0.6)):
        size = StepSize(num_new=number, num_decoding=number, num_kv_tokens=100)
        assert costs.step_s(size) == pytest.approx(COSTS.step_s(size) + beyond_s)
    assert costs.step_s(StepSize(num_new=20, num_pairs=200)) == COSTS.step_s(StepSize(num_new=20, num_pairs=200))
    assert costs.of_prefill().step_s(StepSize(num_new=3, num_decoding=3, num_kv_tokens=9)) == pytest.approx(1.3)
    absurd = replace(COSTS, decoding_s=((1, -99.0),))
    assert absurd.step_s(StepSize(num_new=1, num_decoding=1, num_kv_tokens=9)) == pytest.approx(1.1 / 4), (
        "no step takes no time"
    )


def test_transfers_cost_what_came_after_first_tokens() -> None:
    done = [
        observed(request(0.0, tokens, 2), 0.0, (1.0, 1), (2.0, 1), transfer_s=0.01 + 1e-4 * tokens)
        for tokens in (20, 40, 80, 160, 320) * 4
    ]
    model = cost_model(done, [worker("d0", STEPS)])
    assert model is not None
    assert model.transfer_latency_s == pytest.approx(0.01, rel=0.05)
    assert model.transfer_s_per_token == pytest.approx(1e-4, rel=0.05)


def test_a_slow_prefill_worker_learns_its_overhead() -> None:
    """It never decodes, so no prior for decoding may bound what its steps take."""
    true = step_costs(s_overhead=0.05, s_per_token=2e-3, s_per_pair=3e-7)
    fit = StepFit()
    for num_new in (17, 400, 90, 33, 250, 60, 512, 20) * 10:
        size = StepSize(num_new=num_new, num_pairs=num_new * num_new // 2)
        fit.observe(size, true.step_s(size.num_new, size.num_pairs, 0, 0))
    for num_tokens in (20, 100, 400):
        assert fit.costs.prefill_s(num_tokens, 0, 512) == pytest.approx(true.prefill_s(num_tokens, 0, 512), rel=0.05)


# On file


def test_what_a_bench_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"trace": "talk", **BENCH.as_dict()}))
    assert read_bench(path) == BENCH
    without = replace(BENCH, costs=replace(BENCH.costs, prefill_steps=None))
    path.write_text(json.dumps(without.as_dict()))
    assert read_bench(path) == without


def changed(**costs: Any) -> str:
    document = BENCH.as_dict()
    document["costs"] |= costs
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "no costs as `baton bench --json` writes them"),
        ("[]", "no costs as"),
        ('{"costs": null, "worker": null}', "only to its operators"),
        (changed(magic=1.0), "magic is 1.0"),
        (changed(request_overhead_s=-1.0), "request_overhead_s is -1.0"),
        (changed(decoding_s=[[4, 0.1], [2, 0.1]]), "decoding_s is [[4, 0.1], [2, 0.1]]"),
        (changed(decoding_s=[[4, math.nan]]), "decoding_s is [[4, nan]]"),
        (changed(decoding_s=[4]), "no costs as"),
        (changed(steps={**BENCH.as_dict()["costs"]["steps"], "s_weights": "much"}), "s_weights is 'much'"),
    ],
)
def test_another_file_is_refused_in_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_bench(path)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the costs nowhere\.json"):
        read_bench(Path("nowhere.json"))


def test_the_requests_are_those_that_a_replay_sends() -> None:
    """Cut to the model's 200 tokens; the answers' lengths are known to the router."""
    scenario = measured_scenario(
        trace(request(0.0, 300, 20, *range(18)), request(1.0, 20, 250), request(2.0, 40, 8, 0, 1)),
        BENCH, 1, 1, Objective(5.0, 1.0),
    )  # fmt: skip
    assert [r.num_prompt_tokens for r in scenario.trace.requests] == [180, 40]
    assert (scenario.shape.num_blocks, scenario.shape.max_num_batched_tokens) == (64, 128)
    assert scenario.costs == BENCH.costs
    assert scenario.knows_lengths
    assert run_policy("baton", scenario).num_requests == 2
    with pytest.raises(ConfigError, match="blocks of 32 tokens, but the measured workers have blocks of 16"):
        measured_scenario(replace(scenario.trace, block_tokens=32), BENCH, 1, 1, Objective(5.0, 1.0))


def test_a_roofline_is_what_the_data_sheets_say() -> None:
    costs = roofline(MODELS["llama-3-8b"], GPUS["h200"], num_gpus=2)
    assert costs.steps.s_per_token == pytest.approx(2 * 8.03e9 / 989e12), "two of them at half of their speed"
    assert costs.steps.s_weights == pytest.approx(2 * 8.03e9 / (2 * 0.7 * 4.8e12))
    assert costs.transfer_s_per_token == pytest.approx(131_072 / 100e9), "keys and values of 32 layers and 8 heads"
