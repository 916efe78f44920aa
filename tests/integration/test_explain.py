"""How a request's placement is explained, counted and traced, on a cluster as `baton up` starts it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from engine.testing import expected_tokens
from tests.integration.cluster import Cluster, Served
from tests.integration.conftest import TraceReceiver
from tests.integration.test_operator_errors import baton
from tests.support.asking import exposition, metric, prompt_of, sample, sampling
from tests.support.waiting import wait_until

pytestmark = pytest.mark.first


def explain(cluster: Served, request_id: str) -> list[dict[str, Any]]:
    words = ("--address", cluster.grpc, "--api-key", cluster.api_key, "--json")
    result = CliRunner().invoke(app, ["status", "--explain", request_id, *words])
    assert result.exit_code == 0, result.output
    return [placement for call in json.loads(result.stdout) for placement in call["placements"]]


def test_the_command_line_explains_where_a_request_went(arithmetic_cluster: Cluster) -> None:
    name = f"why-{time.time_ns()}"
    prompt = prompt_of(600, 300)
    answer = arithmetic_cluster.generate(request_id=name, token_ids=prompt, sampling=sampling(8))
    timing = answer.timing
    (told,) = explain(arithmetic_cluster, name)
    assert (told["request_id"], told["choice_index"], told["mode"], told["outcome"]) == (
        name,
        0,
        "disaggregated",
        "admitted",
    )
    assert (told["prefill_worker"], told["decode_worker"]) == (timing.prefill_worker, timing.decode_worker)
    assert (told["tenant"], told["slo_class"], told["priority"]) == ("default", "default", 0)
    assert (told["ttft_objective_s"], told["itl_objective_s"]) == (60.0, 1.0)
    assert (told["num_prompt_tokens"], told["num_expected_tokens"]) == (300, 8)
    assert 0 < told["predicted_ttft_s"] < 5
    assert 0 < told["measured_ttft_s"] <= timing.ttft_s
    roles = {worker["id"]: worker["role"] for worker in arithmetic_cluster.client.status()["workers"]}
    assert sorted(roles.values()) == ["decode", "decode", "prefill", "prefill"]
    assert {option["worker_id"]: option["role"] for option in told["options"]} == roles
    costs = [option["cost_s"] for option in told["options"]]
    assert costs == sorted(costs), "the quickest first"
    shown = baton("status", "--explain", name, "--address", arithmetic_cluster.grpc)
    assert shown.returncode == 0, shown.stderr
    assert (
        f"{name}/0: disaggregated on {timing.prefill_worker} (prefill) -> {timing.decode_worker} (decode); admitted"
        in shown.stdout
    )
    predicted, measured = told["predicted_ttft_s"], told["measured_ttft_s"]
    assert f"first token: predicted {predicted:.3f} s, measured {measured:.3f} s" in shown.stdout
    rows = {line.split()[0] for line in shown.stdout.splitlines()}
    assert rows >= {"worker", *roles}
    listed = baton("requests", "--address", arithmetic_cluster.grpc)
    assert listed.returncode == 0, listed.stderr
    assert name in listed.stdout


def test_every_choice_is_explained(arithmetic_cluster: Cluster) -> None:
    name = f"choices-{time.time_ns()}"
    arithmetic_cluster.generate(request_id=name, token_ids=prompt_of(601, 40), sampling=sampling(3, n=3))
    assert sorted(told["choice_index"] for told in explain(arithmetic_cluster, name)) == [0, 1, 2]


def test_an_unknown_request_is_told_in_a_sentence(arithmetic_cluster: Cluster) -> None:
    for more in ((), ("--json",)):
        result = baton("status", "--explain", "never-asked", "--address", arithmetic_cluster.grpc, *more)
        assert result.returncode == 1
        assert result.stdout == ""
        assert "error: the router does not know a request 'never-asked'; it keeps the latest" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_span_tells_what_was_predicted(
    arithmetic_cluster: Cluster, trace_receiver: tuple[TraceReceiver, str]
) -> None:
    name = f"predicted-{time.time_ns()}"
    arithmetic_cluster.generate(request_id=name, token_ids=prompt_of(602, 200), sampling=sampling(4))
    (told,) = explain(arithmetic_cluster, name)
    receiver = trace_receiver[0]

    def spans() -> list[dict[str, Any]]:
        found = [{a.key: a.value for a in span.attributes} for _, span in receiver.spans]
        return [each for each in found if each.get("gen_ai.response.id", None) and name in str(each)]

    (attributes,) = wait_until(spans)
    predicted = {
        key.removeprefix("baton.predicted."): value.double_value
        for key, value in attributes.items()
        if key.startswith("baton.predicted.")
    }
    assert set(predicted) == {"wait_s", "room_s", "pull_s", "compute_s", "exposed_s", "step_s", "ttft_s"}
    assert predicted["ttft_s"] == pytest.approx(told["predicted_ttft_s"])
    (chosen,) = [option for option in told["options"] if option["worker_id"] == told["prefill_worker"]]
    assert predicted["compute_s"] == pytest.approx(chosen["compute_s"])
    assert attributes["baton.slo"].string_value == "met"


def test_the_metrics_classify_requests_by_their_objectives(arithmetic_cluster: Cluster) -> None:
    labels = 'slo_class="default"', 'outcome="met"', 'model="smollm2-135m-instruct"'
    names = "baton_requests_slo_total", "baton_tokens_slo_met_total", "baton_placement_prediction_error_count"
    text = exposition(arithmetic_cluster)
    before = [sample(text, name) for name in names]
    met = sample(text, names[0], *labels)
    arithmetic_cluster.generate(token_ids=prompt_of(603, 64), sampling=sampling(5, n=2))
    text = exposition(arithmetic_cluster)
    assert [sample(text, name) for name in names] == [before[0] + 1, before[1] + 10, before[2] + 4]
    assert sample(text, names[0], *labels) == met + 1
    with pytest.raises(grpc.RpcError):
        arithmetic_cluster.generate(token_ids=prompt_of(603, 64), sampling={"max_tokens": 0})
    assert metric(arithmetic_cluster, names[0]) == before[0] + 1, "an invalid request is in no class"


def test_the_room_for_an_answer_shrinks_to_what_answers_have_had_whatever_ended_them(
    arithmetic_cluster: Cluster, model_dir: Path
) -> None:
    """By a stop token here; the slow cluster's tests have several tenants."""
    prompt = prompt_of(604, 30)
    stop = expected_tokens(prompt, 5)[-1]
    settings = {"temperature": 0, "max_tokens": 700, "stop_token_ids": [stop]}
    for number in range(20):
        name = f"short-{number}-{time.time_ns()}"
        arithmetic_cluster.generate(request_id=name, token_ids=prompt, sampling=settings)
    (told,) = explain(arithmetic_cluster, name)
    assert 64 <= told["num_expected_tokens"] < 256
