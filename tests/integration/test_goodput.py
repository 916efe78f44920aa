"""A delay that is put into one stage of requests' lives is what is blamed for what comes too late. Real processes.

Each stage gets workers of its own, of which one is slow at that stage alone, or dies, or has no room.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.cluster import Role
from baton.config import RouterConfig, TelemetryConfig, TransferConfig
from baton.v1 import inference_pb2
from router.timeline.folds import Stage
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.conftest import TraceReceiver
from tests.support.asking import prompt_of
from tests.support.load import Stream
from tests.support.waiting import wait_until

pytestmark = pytest.mark.clock

STAGES = ("queue_s", "admission_s", "prefill_s", "transfer_s", "decode_s", "recovery_s")
PHASES = {f"request.{stage}" for stage in Stage}


class Injected:
    """A fleet whose workers are replaced for each stage."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._base = fleet.config
        self._seeds = iter(range(50_000, 60_000))
        self._numbers = iter(range(10_000))

    def add(self, role: Role, *, num_blocks: int | None = None, **testing: Any) -> str:
        """A worker with settings of its own, ready."""
        engine = self._base.engine if num_blocks is None else replace(self._base.engine, num_blocks=num_blocks)
        self.fleet.config = replace(self._base, engine=engine, testing=replace(self._base.testing, **testing))
        worker_id = self.fleet.add(role)
        self.fleet.wait_for(worker_id)
        return worker_id

    def remove_workers(self) -> None:
        """They send their spans before they go."""
        for worker_id in list(self.fleet.workers):
            self.fleet.remove(worker_id, signal.SIGTERM)
        wait_until(lambda: not self.fleet.client.status()["workers"])  # the leases of the killed have to run out

    def ask(self, num_prompt: int, num_tokens: int, **slo: float) -> Stream:
        """A prompt that no cache holds a block of."""
        return self.ask_for(prompt_of(next(self._seeds), num_prompt), num_tokens, **slo)

    def ask_for(self, prompt: list[int], num_tokens: int, **slo: float) -> Stream:
        request_id = f"goodput-{next(self._numbers)}-{time.time_ns()}"
        fields = {"request_id": request_id, "slo": inference_pb2.ServiceLevelObjective(**slo)}
        return Stream(inference=self.fleet.inference, prompt=prompt, max_tokens=num_tokens, fields=fields).start()

    def at_once(self, num: int, num_prompt: int, num_tokens: int, **slo: float) -> list[Stream]:
        return [self.ask(num_prompt, num_tokens, **slo) for _ in range(num)]

    def one_by_one(self, num: int, num_prompt: int, num_tokens: int, **slo: float) -> list[Stream]:
        done = []
        for _ in range(num):
            done.append(self.ask(num_prompt, num_tokens, **slo))
            done[-1].served()
        return done

    def metric(self, name: str) -> dict[str, float]:
        """By labels, as they stand there."""
        return {
            sample.partition("{")[2]: value
            for sample, value in self.fleet.routers[0].metrics()
            if sample.partition("{")[0] == name
        }

    def misses(self) -> Counter[tuple[str, str]]:
        """By outcome and the stage to blame."""
        found: Counter[tuple[str, str]] = Counter()
        for labels, value in self.metric("baton_slo_misses_total").items():
            named = dict(item.split("=") for item in labels.rstrip("}").replace('"', "").split(","))
            found[named["outcome"], named["stage"]] += int(value)
        return found


@pytest.fixture(scope="module")
def injected(model_dir: Path, trace_receiver: tuple[TraceReceiver, str]) -> Iterator[Injected]:
    telemetry = TelemetryConfig(otlp_endpoint=trace_receiver[1], log_format="json", vllm_aliases=True)
    router = RouterConfig(mode="disaggregated", worker_wait_s=20.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # milliseconds until the router's spans are sent
        with running_fleet(TransferConfig(), router, telemetry=telemetry) as fleet:
            fleet.wait_for()
            yield Injected(fleet)


@pytest.fixture(autouse=True)
def own_workers(injected: Injected) -> Iterator[None]:
    """No test has another one's."""
    yield
    injected.remove_workers()


def slow_queue(injected: Injected) -> list[Stream]:
    """Long prompts come first on the worker that computes them all."""
    injected.add(Role.PREFILL, token_ms=1.0)
    injected.add(Role.DECODE)
    before = injected.at_once(3, 600, 2)
    time.sleep(0.3)
    late = injected.at_once(24, 20, 2, e2e_ms=400)
    for asked in before:
        asked.served()
    return late


def slow_admission(injected: Injected) -> list[Stream]:
    """One answer has the decode worker's blocks to itself for as long as it takes."""
    injected.add(Role.PREFILL)
    injected.add(Role.DECODE, num_blocks=40, step_ms=20.0)
    before = injected.ask(500, 100)
    wait_until(lambda: any(worker["running"] for worker in injected.fleet.client.status()["workers"]))
    late = injected.at_once(20, 100, 4, e2e_ms=700)
    before.served()
    return late


def slow_prefill(injected: Injected) -> list[Stream]:
    injected.add(Role.PREFILL, token_ms=2.0)
    injected.add(Role.DECODE)
    return injected.one_by_one(6, 300, 3, ttft_ms=500)


def slow_transfer(injected: Injected) -> list[Stream]:
    injected.add(Role.PREFILL, faults="link_delay_ms=120")
    injected.add(Role.DECODE, faults="link_delay_ms=120")
    return injected.one_by_one(6, 100, 8, itl_ms=12)


def slow_decode(injected: Injected) -> list[Stream]:
    injected.add(Role.PREFILL)
    injected.add(Role.DECODE, step_ms=30.0)
    return injected.at_once(24, 40, 12, itl_ms=15)


def lost_decode(injected: Injected) -> list[Stream]:
    """The decode worker dies in the middle, and another one comes."""
    injected.add(Role.PREFILL)
    first = injected.add(Role.DECODE, step_ms=10.0)
    streams = injected.at_once(8, 40, 60, itl_ms=60)
    wait_until(lambda: all(len(asked.tokens) >= 10 for asked in streams), every_s=0.01)
    injected.fleet.remove(first, signal.SIGKILL)
    time.sleep(4.0)  # the delay to blame: longer than all steps take on a busy machine
    injected.add(Role.DECODE, step_ms=10.0)
    return streams


def lost_prefill(injected: Injected) -> list[Stream]:
    """The worker with the prompts dies before any of them is computed; another one is there."""
    injected.add(Role.DECODE)
    first = injected.add(Role.PREFILL, token_ms=200.0)
    streams = injected.at_once(8, 100, 3, e2e_ms=500)
    time.sleep(0.3)
    injected.add(Role.PREFILL)
    time.sleep(0.7)
    injected.fleet.remove(first, signal.SIGKILL)
    return streams


SCENES: dict[str, tuple[Callable[[Injected], list[Stream]], str, Stage]] = {
    "queue": (slow_queue, "e2e_missed", Stage.QUEUE),
    "decode_admission": (slow_admission, "e2e_missed", Stage.DECODE_ADMISSION),
    "prefill": (slow_prefill, "ttft_missed", Stage.PREFILL),
    "transfer": (slow_transfer, "itl_missed", Stage.TRANSFER),
    "decode": (slow_decode, "itl_missed", Stage.DECODE),
    "recovery after the first token": (lost_decode, "itl_missed", Stage.RECOVERY),
    "recovery before it": (lost_prefill, "e2e_missed", Stage.RECOVERY),
}


@pytest.mark.parametrize("name", SCENES)
def test_a_delay_is_blamed_on_the_stage_that_it_is_in(
    injected: Injected, trace_receiver: tuple[TraceReceiver, str], name: str
) -> None:
    scene, outcome, stage = SCENES[name]
    misses = injected.misses()
    served_s, staged_s = (sum(injected.metric(metric).values()) for metric in SUMS)
    late = scene(injected)
    for asked in late:
        asked.served()
    new = injected.misses() - misses
    assert new.total() >= 0.9 * len(late), f"of {len(late)}, only {new} were late"
    assert new[outcome, stage] >= 0.99 * new.total(), new

    for asked in late:
        timing = asked.timing
        stages_s = sum(getattr(timing, each) for each in STAGES)
        assert stages_s == pytest.approx(timing.total_s, rel=1e-6)
        assert timing.ttft_s <= timing.total_s <= asked.took_s, "the client saw nothing else"
    served_s, staged_s = (
        sum(injected.metric(metric).values()) - before
        for metric, before in zip(SUMS, (served_s, staged_s), strict=True)
    )
    assert staged_s == pytest.approx(served_s, rel=0.01)

    injected.remove_workers()
    blamed = [_whole_trace(trace_receiver[0], asked) for asked in late]
    assert blamed.count(stage.value) >= 0.9 * len(late)


def test_where_workers_do_both_a_lack_of_blocks_is_not_called_a_queue(model_dir: Path) -> None:
    with running_fleet(TransferConfig(), RouterConfig(mode="aggregated", worker_wait_s=20.0)) as fleet:
        fleet.wait_for()
        injected = Injected(fleet)
        injected.add(Role.DECODE, num_blocks=40, step_ms=20.0)
        before = injected.ask(500, 100)
        wait_until(lambda: any(worker["running"] for worker in fleet.client.status()["workers"]))
        late = injected.at_once(20, 100, 4, e2e_ms=700)
        for asked in [before, *late]:
            asked.served()
        misses = injected.misses()
        assert misses.total() >= 0.9 * len(late)
        assert misses["e2e_missed", Stage.DECODE_ADMISSION] >= 0.99 * misses.total(), misses
        injected.remove_workers()


SUMS = ("gen_ai_server_request_duration_seconds_sum", "baton_stage_duration_seconds_sum")


def _whole_trace(receiver: TraceReceiver, asked: Stream) -> str:
    """Checks a request's spans: phases follow one another from its begin to its end, and are as long as the client was
    told. Returns the stage that is blamed."""
    root = _root(receiver, asked.fields["request_id"])
    trace = [(who, span) for who, span in receiver.spans if span.trace_id == root.trace_id and span is not root]
    phases = [span for who, span in trace if who == "baton-router"]
    others = [(who, span) for who, span in trace if who != "baton-router"]
    assert {span.name for span in phases} <= PHASES
    phases.sort(key=lambda span: span.start_time_unix_nano)
    assert phases[0].start_time_unix_nano == root.start_time_unix_nano
    assert phases[-1].end_time_unix_nano == root.end_time_unix_nano
    for one, following in pairwise(phases):
        assert one.end_time_unix_nano == following.start_time_unix_nano
    took_s: defaultdict[str, float] = defaultdict(float)
    for span in phases:
        took_s[span.name.removeprefix("request.")] += _seconds(span)
    told_s = {each.removesuffix("_s"): getattr(asked.timing, each) for each in STAGES}
    told_s["decode_admission"] = told_s.pop("admission")
    for stage in Stage:
        assert took_s[stage.value] == pytest.approx(told_s[stage.value], abs=1e-6)
    assert sum(took_s.values()) == pytest.approx(_seconds(root), rel=1e-6)
    assert _seconds(root) == pytest.approx(asked.timing.total_s, rel=0.01)
    assert {service for service, _ in others} == {"baton-prefill", "baton-decode"}
    assert all(span.parent_span_id == root.span_id for span in [*phases, *(span for _, span in others)])

    attributes: dict[str, Any] = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in root.attributes}
    assert root.kind == Span.SPAN_KIND_SERVER
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.provider.name"] == "baton"
    assert attributes["gen_ai.request.stream"] is True
    assert attributes["server.address"] == "127.0.0.1"
    assert attributes["server.port"] > 0
    assert attributes["gen_ai.usage.output_tokens"] == len(asked.tokens)
    assert [each.string_value for each in attributes["gen_ai.response.finish_reasons"].values] == ["length"]
    assert attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(asked.timing.ttft_s)
    return str(attributes.get("baton.slo.blame", ""))


def _root(receiver: TraceReceiver, request_id: str) -> Span:
    """The request's own span, which is the last of the router's to end."""
    found = wait_until(
        lambda: [s for _, s in list(receiver.spans) if any(a.value.string_value == request_id for a in s.attributes)],
        every_s=0.1,
        seen=lambda: f"no span of {request_id}",
    )
    assert len(found) == 1
    return found[0]


def _seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_log_lines_name_the_trace_of_their_request(
    injected: Injected, trace_receiver: tuple[TraceReceiver, str]
) -> None:
    """A worker dies, and the other one takes over."""
    for asked in lost_prefill(injected):
        asked.served()
    lines = [json.loads(line) for line in injected.fleet.routers[0].log.splitlines()]
    again = [line for line in lines if "is placed again" in line["message"]]
    assert again
    for line in again[:4]:
        assert line["service"] == "baton-router"
        root = _root(trace_receiver[0], line["message"].split("/")[1])
        assert (line["trace_id"], line["span_id"]) == (root.trace_id.hex(), root.span_id.hex())


def test_http_takes_an_objective_for_the_whole_answer_and_tells_where_the_time_went(injected: Injected) -> None:
    injected.add(Role.PREFILL)
    injected.add(Role.DECODE, step_ms=20.0)
    address = f"http://{injected.fleet.routers[0].http}"
    misses = injected.misses()
    body = {"prompt": prompt_of(7, 40), "max_tokens": 10, "ignore_eos": True, "slo": {"e2e_ms": 50}}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        timing = json.load(answer)["timing"]
    assert injected.misses() - misses == {("e2e_missed", "decode"): 1}
    assert timing["total_s"] == pytest.approx(sum(timing[each] for each in STAGES), rel=1e-6)
    assert timing["decode_s"] > 9 * 0.018


def test_the_ceiling_of_the_prefix_cache_counts_answers_too(injected: Injected) -> None:
    """Nothing is cached: the workers of the first turn are gone when the second one comes."""
    names = ("baton_prefix_ceiling_tokens_total", "baton_prefix_hit_tokens_total")
    prompt, before = prompt_of(8, 40), [sum(injected.metric(name).values()) for name in names]
    answer: list[int] = []
    for goes_on, ceiling in ((False, 0), (False, 32), (True, 64)):
        injected.add(Role.PREFILL)
        injected.add(Role.DECODE)
        asked = injected.ask_for([*prompt, *answer, *prompt_of(9, 16)] if goes_on else prompt, 24)
        asked.served()
        answer = asked.tokens
        now = [sum(injected.metric(name).values()) for name in names]
        assert [after - value for after, value in zip(now, before, strict=True)] == [ceiling, 0]
        before = now
        injected.remove_workers()


def test_vllms_names_are_there_where_they_are_asked_for(injected: Injected) -> None:
    injected.add(Role.PREFILL)
    injected.add(Role.DECODE)
    injected.ask(40, 4).served()
    answered = sum(injected.metric("vllm:request_success_total").values())
    assert answered == sum(injected.metric("baton_finished_choices_total").values()) > 0
    ours = injected.metric("gen_ai_server_time_to_first_token_seconds_count")
    assert sum(injected.metric("vllm:time_to_first_token_seconds_count").values()) == sum(ours.values()) > 0
    assert len(injected.metric("vllm:kv_cache_usage_perc")) == 2, "of each worker"
