"""Who is admitted when a worker is busy, who has to go, and how a request's placement is explained. Real processes.

The slow cluster's workers take a millisecond a token (asleep), so that queues last seconds and their lengths are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import multiprocessing
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import grpc
import pytest
import torch
import uvloop

from baton.cluster import Role
from baton.config import Config, RouterConfig, SloClassConfig, TransferConfig
from engine.core.runner import OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.engines import engine_over
from engine.testing import ArithmeticRunner, expected_tokens
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.test_explain import explain
from tests.support.asking import prompt_of
from tests.support.load import Stream
from tests.support.operator import OPERATOR_ENTRY
from tests.support.waiting import wait_until
from worker.process import running

pytestmark = pytest.mark.clock

S_PER_TOKEN = 1e-3
CHUNK = 64
TENANTS = """
large: {{key_sha256: [{large}]}}
small: {{key_sha256: [{small}]}}
urgent: {{key_sha256: [{urgent}], max_priority: 5}}
brisk: {{key_sha256: [{brisk}], slo_class: interactive}}
"""
KEYS = {name: f"key-of-{name}" for name in ("large", "small", "urgent", "brisk")}
_PROCESSES = multiprocessing.get_context("forkserver")


class SlowRunner(ArithmeticRunner):
    """Each step takes as long as its tokens: what a worker of a larger model would."""

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        time.sleep(S_PER_TOKEN * step.num_scheduled_tokens)
        return super().execute(step, on_layer_done)


def run_slow_worker(role: Role, worker_id: str, config_json: str) -> None:
    """The worker's process."""
    uvloop.run(_serve(Role(role), worker_id, Config.from_json(config_json)))


async def _serve(role: Role, worker_id: str, config: Config) -> None:
    torch.set_num_threads(1)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner = SlowRunner(config.engine.num_blocks, max_num_seqs=config.engine.batch(on_gpu=False).max_num_seqs)
    async with running(config, role, worker_id, "127.0.0.1", engine_over(runner, config.engine)) as (_, ended):
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()


class SlowCluster:
    """Workers of which one computes all prompts, and their router."""

    def __init__(self, fleet: Fleet, roles: list[Role]) -> None:
        self._fleet = fleet
        self._seeds = iter(range(10_000, 20_000))
        config = fleet.config
        config = replace(config, engine=replace(config.engine, max_num_batched_tokens=CHUNK))
        for role in roles:
            process = _PROCESSES.Process(
                target=run_slow_worker, args=(role, f"slow-{role}", config.to_json()), daemon=True
            )
            process.start()
            fleet.workers[f"slow-{role}"] = process
        fleet.wait_for(*fleet.workers)
        self.router = fleet.routers[0]
        self.grpc = fleet.routers[0].grpc
        self.http = fleet.routers[0].http

    def fresh(self, num_tokens: int) -> list[int]:
        """A prompt that no cache holds a block of."""
        return prompt_of(next(self._seeds), num_tokens)

    def ask(self, num_tokens: int, tenant: str = "large", max_tokens: int = 4, **fields: Any) -> Asked:
        return self.ask_for(self.fresh(num_tokens), tenant, max_tokens, **fields)

    def ask_for(self, prompt: list[int], tenant: str, max_tokens: int, **fields: Any) -> Asked:
        return Asked(
            inference=self._fleet.inference,
            prompt=prompt,
            max_tokens=max_tokens,
            fields=fields,
            metadata=(("authorization", f"Bearer {KEYS[tenant]}"),),
            timeout_s=120.0,
        ).start()

    def metric(self, name: str, *labels: str) -> float:
        samples = self._fleet.routers[0].metrics()
        return sum(
            value
            for sample, value in samples
            if sample.partition("{")[0] == name and all(label in sample for label in labels)
        )

    def post(self, body: dict[str, Any], tenant: str = "large") -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
        connection = http.client.HTTPConnection(self.http, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[tenant]}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        return response.status, answer, response.msg

    def rest(self) -> None:
        """Until nothing is left anywhere, and the router, whose leases are half a second old at most, believes so."""

        def workers() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = self._fleet.client.status()["workers"]
            return found

        time.sleep(0.7)
        wait_until(
            lambda: not any(w["running"] or w["waiting"] or w["blocks"]["in_use"] for w in workers()),
            60.0,
            every_s=0.05,
            seen=workers,
        )


class Asked(Stream):
    """A request of a tenant."""

    def served(self) -> Self:
        """To its end, with the right tokens, at the first attempt."""
        super().served()
        assert self.retries == 0
        return self

    def refused(self) -> float:
        """What it was told: in how many seconds to come back."""
        self.wait()
        assert isinstance(self.error, grpc.RpcError), self.error or "it was served"
        assert self.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, self.error
        assert self.tokens == []
        trailers: Any = self.error.trailing_metadata() or ()
        return float(dict(trailers)["retry-after"])

    @property
    def details(self) -> str:
        return (isinstance(self.error, grpc.RpcError) and self.error.details()) or ""


@pytest.fixture(scope="module", params=["aggregated", "disaggregated"])
def slow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowCluster]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    tenants.write_text(OPERATOR_ENTRY + TENANTS.format(**hashes))
    router = RouterConfig(
        mode=request.param,
        tenants_file=str(tenants),
        slo_classes={"default": SloClassConfig(), "interactive": SloClassConfig(ttft_ms=2000.0)},
    )
    roles = [Role.DECODE] if request.param == "aggregated" else [Role.PREFILL, Role.DECODE]
    _PROCESSES.set_forkserver_preload(["tests.chaos.fleet", __name__])
    with running_fleet(TransferConfig(), router) as fleet:
        cluster = SlowCluster(fleet, roles)
        for num_tokens in (100, 400, 50, 200, 300, 150):  # from which workers learn what their steps take
            cluster.ask(num_tokens, max_tokens=8).served()
        yield cluster


@contextlib.contextmanager
def queue(slow: SlowCluster, num: int, num_tokens: int, tenant: str = "large", **fields: Any) -> Iterator[list[Asked]]:
    """The block is entered with `num` prompts queued, of which the first is being computed."""
    slow.rest()
    queued = []
    for _ in range(num):
        queued.append(slow.ask(num_tokens, tenant, **fields))
        time.sleep(0.05)
    try:
        yield queued
    finally:
        for asked in queued:
            asked.cancel()
            asked.wait()


def test_whoever_would_come_too_late_is_refused_at_once_and_told_when_to_come_back(slow: SlowCluster) -> None:
    """3 s of prompts are before it, and it has 1.5 s."""
    with queue(slow, 3, 1000) as before:
        rejected = slow.metric("baton_requests_slo_total", 'outcome="rejected"', 'slo_class="custom"')
        asked = slow.ask(200, slo={"ttft_ms": 1500})
        retry_after_s = asked.refused()
        assert asked.took_s < 2.0, "at once"
        assert 0.7 < retry_after_s < 6, "about 1.7 s too late; more where the machine is busy and steps take longer"
        assert "later than the objective of 1.5 s allows; try again later" in asked.details
        assert not any(one.is_over for one in before), "nobody has to go for one of the same tenant"
        body = {"prompt": slow.fresh(200), "max_tokens": 4, "slo": {"ttft_ms": 1500}}
        for stream in (False, True):
            status, answer, headers = slow.post({**body, "stream": stream})
            assert status == 429
            assert answer["error"]["type"] == "rate_limit_error"
            assert answer["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(headers["Retry-After"]) <= 6
        assert slow.metric("baton_requests_slo_total", 'outcome="rejected"', 'slo_class="custom"') == rejected + 3
        assert slow.ask(200, slo={"ttft_ms": 20_000}).served(), "one that can wait is admitted"
        assert not [one for one in before if one.error]


def test_the_time_that_was_named_is_when_there_is_room(slow: SlowCluster) -> None:
    """4 s of prompts are before it, and it has 2.5 s: there is room in 1.7 s, or later where the machine is busy."""
    with queue(slow, 4, 1000) as before:
        time.sleep(slow.ask(200, slo={"ttft_ms": 2500}).refused() + 0.7)
        slow.ask(200, slo={"ttft_ms": 2500}).served()
        assert not before[-1].is_over, "not only when all is done"


def test_a_tenants_class_is_what_its_requests_are_held_against(slow: SlowCluster) -> None:
    """The others' class allows 30 s, this one 2 s; the request says nothing. Priorities do not enter into it."""
    with queue(slow, 4, 1000, tenant="brisk", slo={"ttft_ms": 25_000}):
        asked = slow.ask(100, "brisk")
        asked.refused()
        assert "the objective of 2.0 s" in asked.details
        slow.ask(100, "brisk", slo={"ttft_ms": 25_000}).served()
    assert slow.metric("baton_requests_slo_total", 'slo_class="interactive"', 'outcome="rejected"') >= 1


def test_a_higher_priority_goes_before_who_waits_and_costs_nobody_its_place(slow: SlowCluster) -> None:
    with queue(slow, 3, 800) as before:
        urgent = slow.ask(200, "urgent", priority=5, slo={"ttft_ms": 1500}).served()
        assert not any(one.is_over for one in before[1:])
        assert all(one.served() for one in before)
        assert all(urgent.arrived_s[0] < one.arrived_s[0] for one in before[1:])


def test_who_is_held_up_for_too_long_by_what_came_later_is_told(slow: SlowCluster) -> None:
    """It was admitted, and would have been in time, if nobody more urgent had come."""
    with queue(slow, 1, 400, request_id="held-up", slo={"ttft_ms": 1000}) as (held_up,):
        urgent = [slow.ask(1000, "urgent", priority=5) for _ in range(5)]
        held_up.refused()
        assert not urgent[2].tokens, "three of these prompts take 3 s to compute, and longer on a busy machine"
        assert held_up.took_s >= 2.0, "the client has sent it before the router's clock began"
        assert "no first token within 2.0 s; try again later" in held_up.details
        (told,) = explain(slow.router, "held-up")
        assert told["outcome"] == "refused: no first token within 2.0 s"
        assert all(one.served() for one in urgent)


def test_a_small_tenant_is_served_while_a_large_one_floods(slow: SlowCluster) -> None:
    """The large one's newest requests make way, as many as it takes, and are told at once."""
    shed = slow.metric("baton_admission_shed_total", 'tenant="large"')
    with queue(slow, 8, 800) as flood:
        small = slow.ask(200, "small", slo={"ttft_ms": 4000})
        time.sleep(1.0)
        gone = [one for one in flood if one.error]
        assert gone, "told at once"
        assert flood[0] not in gone
        for one in gone:
            assert one.refused() > 0
            assert "preempted in the queue" in one.details
        assert gone == flood[-len(gone) :], "the newest"
        assert small.served().first_s < 4
        assert slow.metric("baton_admission_shed_total", 'tenant="large"') == shed + len(gone)
        assert 1 <= len(gone) < 8
        kept = [one for one in flood if one not in gone]
        assert all(one.served() for one in kept)


def test_a_tenant_within_its_share_is_not_shed(slow: SlowCluster) -> None:
    """Both have as much in the queue: the newcomer is the one that would be over."""
    with queue(slow, 2, 900, tenant="small") as first, queue_more(slow, 2, 900, tenant="large") as second:
        slow.ask(900, "large", slo={"ttft_ms": 2000}).refused()
        assert not any(one.error for one in (*first, *second))


@contextlib.contextmanager
def queue_more(slow: SlowCluster, num: int, num_tokens: int, tenant: str, **fields: Any) -> Iterator[list[Asked]]:
    """Behind those that are queued already."""
    queued = [slow.ask(num_tokens, tenant, **fields) for _ in range(num)]
    time.sleep(0.2)
    try:
        yield queued
    finally:
        for asked in queued:
            asked.cancel()
            asked.wait()


def test_a_prompt_that_cannot_meet_its_objective_is_served_when_nobody_waits(slow: SlowCluster) -> None:
    """A second of computing, and 0.4 s to the first token."""
    slow.rest()
    labels = 'outcome="ttft_missed"', 'slo_class="custom"'
    missed, tokens = slow.metric("baton_requests_slo_total", *labels), slow.metric("baton_tokens_slo_met_total")
    assert slow.ask(1000, slo={"ttft_ms": 400}).served().first_s > 0.9
    assert slow.metric("baton_requests_slo_total", *labels) == missed + 1
    assert slow.metric("baton_tokens_slo_met_total") == tokens, "its tokens are no goodput"


def test_a_prompt_that_cannot_meet_its_objective_waits_for_all_others_but_not_for_ever(slow: SlowCluster) -> None:
    with queue(slow, 3, 800):
        asked = slow.ask(1000, slo={"ttft_ms": 400})
        asked.refused()
        assert asked.took_s < 2.0
    with queue(slow, 1, 600) as before:
        hopeless = slow.ask(1200, slo={"ttft_ms": 600})
        time.sleep(0.1)
        other = slow.ask(300, slo={"ttft_ms": 3000})
        last_s = hopeless.served().arrived_s[0]
        assert max(before[0].served().arrived_s[0], other.served().arrived_s[0]) < last_s


def test_who_is_admitted_and_meets_its_objective_counts_once_with_its_tokens(slow: SlowCluster) -> None:
    slow.rest()
    met = 'outcome="met"', 'slo_class="custom"'
    before = slow.metric("baton_requests_slo_total", *met), slow.metric("baton_tokens_slo_met_total")
    all_before = slow.metric("baton_requests_slo_total")
    slow.ask(100, slo={"ttft_ms": 5000, "itl_ms": 1000}, max_tokens=7).served()
    after = slow.metric("baton_requests_slo_total", *met), slow.metric("baton_tokens_slo_met_total")
    assert after == (before[0] + 1, before[1] + 7)
    missed = slow.metric("baton_requests_slo_total", 'outcome="itl_missed"')
    slow.ask(100, slo={"ttft_ms": 5000, "itl_ms": 0.01}, max_tokens=7).served()
    assert slow.metric("baton_requests_slo_total", 'outcome="itl_missed"') == missed + 1
    assert slow.metric("baton_tokens_slo_met_total") == after[1]
    cancelled = slow.metric("baton_requests_slo_total", 'outcome="cancelled"')
    leaver = slow.ask(1000)
    time.sleep(0.3)
    leaver.cancel()
    leaver.wait()
    wait_until(lambda: slow.metric("baton_requests_slo_total", 'outcome="cancelled"') == cancelled + 1)
    assert slow.metric("baton_requests_slo_total") == all_before + 3, "each request once"


def test_predictions_are_near_the_truth_and_their_errors_are_counted(slow: SlowCluster) -> None:
    slow.rest()
    errors = {of: slow.metric("baton_placement_prediction_error_count", f'of="{of}"') for of in ("ttft", "compute")}
    asked = slow.ask(700, request_id="near-700").served()
    for of, before in errors.items():
        assert slow.metric("baton_placement_prediction_error_count", f'of="{of}"') == before + 1
    (told,) = explain(slow.router, "near-700")
    assert told["measured_ttft_s"] == pytest.approx(asked.first_s, abs=0.3)
    assert told["predicted_ttft_s"] == pytest.approx(0.7, rel=0.6)


def test_the_room_for_an_answer_is_what_answers_have_had(slow: SlowCluster) -> None:
    """They may have 300 tokens, and have ended by a stop token after three: room is taken for the floor of 64."""
    slow.rest()
    for number in range(20):
        prompt = slow.fresh(20)
        stop = expected_tokens(prompt, 3)[-1]
        settings = {"temperature": 0, "max_tokens": 300, "stop_token_ids": [stop]}
        slow.ask_for(prompt, "brisk", 3, sampling=settings, request_id=f"history-{number}").served()
    (first,), (last,) = explain(slow.router, "history-0"), explain(slow.router, "history-19")
    assert last["num_expected_tokens"] == 64 <= first["num_expected_tokens"]
    assert (last["tenant"], last["slo_class"], last["ttft_objective_s"]) == ("brisk", "interactive", 2.0)


def test_a_refusal_is_explained(slow: SlowCluster) -> None:
    with queue(slow, 3, 800):
        slow.ask(200, slo={"ttft_ms": 1000}, request_id="late-1").refused()
        (told,) = explain(slow.router, "late-1")
        assert told["outcome"].startswith("refused: the first token would come ")
        assert (told["measured_ttft_s"], told["priority"], told["tenant"]) == (None, 0, "large")
        assert told["slo_class"] == "custom"
        assert told["predicted_ttft_s"] > 1.0


def test_who_had_to_make_way_is_explained_so_and_tenants_may_use_the_same_id(slow: SlowCluster) -> None:
    with queue(slow, 1, 800), queue_more(slow, 1, 3000, "large", request_id="mine") as (shed,):
        small = slow.ask(300, "small", request_id="mine", slo={"ttft_ms": 2800})
        shed.refused()
        by_tenant = {told["tenant"]: told["outcome"] for told in explain(slow.router, "mine")}
        assert by_tenant == {
            "large": "refused: preempted in the queue by a tenant with less queued work",
            "small": "admitted",
        }
        small.served()
