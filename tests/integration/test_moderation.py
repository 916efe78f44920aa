"""The operator's moderation in a running cluster: what it vetoes leaves through no endpoint, and its workers are
free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from engine.testing import expected_tokens
from tests.chaos.fleet import running_fleet
from tests.integration.cluster import Served
from tests.support.asking import metric, prompt_of, sampling

EVERY = 8
PROMPT = prompt_of(5, 40)
ANSWER = expected_tokens(PROMPT, 60)


@pytest.fixture(scope="module", params=["disaggregated", pytest.param("aggregated", marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Served]:
    router = RouterConfig(
        mode=request.param,
        moderation="tests.support.judges:judge",
        moderation_tokens=EVERY,
        moderation_timeout_s=0.5,
    )
    with running_fleet(TransferConfig(), router) as fleet:
        yield fleet.fill(*Role)


def events(cluster: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed completion."""
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    answer = httpx2.post(f"http://{cluster.http}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_vetoed_answer_ends_where_it_was_last_allowed(cluster: Served) -> None:
    whole = cluster.generate(token_ids=PROMPT, sampling=sampling(60), request_id="whole")
    assert whole.token_ids == ANSWER
    found = cluster.generate(token_ids=PROMPT, sampling=sampling(60), request_id="veto-20-grpc")
    assert (found.token_ids, found.finish_reason) == (ANSWER[:16], "content_filter")
    assert whole.text.startswith(found.text)
    assert found.usage.completion_tokens == 16
    streamed = events(cluster, request_id="veto-20-http", stream_options={"include_usage": True})
    assert "".join(choice["text"] for event in streamed for choice in event["choices"]) == found.text
    ends = [choice["finish_reason"] for event in streamed for choice in event["choices"] if choice["finish_reason"]]
    assert ends == ["content_filter"]
    assert streamed[-1]["usage"]["completion_tokens"] == 16
    at_once = cluster.generate(token_ids=PROMPT, sampling=sampling(60), request_id="veto-0-once")
    assert (at_once.token_ids, at_once.text, at_once.finish_reason) == ([], "", "content_filter")
    cluster.wait_until_idle()
    assert metric(cluster, "baton_moderation_verdicts_total", 'verdict="vetoed"') >= 3


def test_a_stream_that_is_resumed_gets_no_further(cluster: Served) -> None:
    found = cluster.generate(token_ids=PROMPT, sampling=sampling(60), request_id="veto-20-resumed", resume_from={0: 10})
    assert (found.token_ids, found.finish_reason) == (ANSWER[10:16], "content_filter")
    with pytest.raises(grpc.RpcError) as caught:
        cluster.generate(token_ids=PROMPT, sampling=sampling(60), request_id="veto-20-liar", resume_from={0: 30})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("what", ["raise", "hang"])
def test_a_judge_that_fails_ends_the_answer(cluster: Served, what: str) -> None:
    found = cluster.generate(token_ids=PROMPT, sampling=sampling(60), request_id=f"{what}-1")
    assert (found.token_ids, found.finish_reason) == ([], "content_filter")


def test_one_vetoed_answer_of_several_leaves_the_others_alone(cluster: Served) -> None:
    found = cluster.generate(token_ids=PROMPT, sampling=sampling(60, n=3), request_id="second-20-of-3")
    assert [found.choice(index).token_ids for index in range(3)] == [ANSWER, ANSWER[:16], ANSWER]
    reasons = [next(m.finish_reason for m in found.choice(index).messages if m.finish_reason) for index in range(3)]
    assert reasons == ["length", "content_filter", "length"]
    cluster.wait_until_idle()
