"""Tenants' limits and usage records of a running cluster with two routers."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos.fleet import Fleet, RouterProcess, running_fleet
from tests.integration.cluster import is_idle, request
from tests.support.asking import metric, prompt_of, sampling
from tests.support.operator import OPERATOR_ENTRY
from tests.support.waiting import wait_until

DOCUMENT = Path(__file__).parents[2] / "docs" / "accounts.md"
REQUESTS, TOKENS, ALONE = 20, 1000, 10
TENANTS: dict[str, dict[str, int]] = {
    "free": {},
    "requests": {"requests_per_minute": REQUESTS},
    "tokens": {"tokens_per_minute": TOKENS},
    "alone": {"requests_per_minute": ALONE},
    "late": {"requests_per_minute": ALONE},
    "few": {"max_in_flight": 1},
    "short": {"max_answer_tokens": 5, "requests_per_minute": 1000, "tokens_per_day": 10**6},
    "several": {"requests_per_minute": 3, "max_in_flight": 2},
    "withdrawn": {},
    "computes": {"tokens_per_day": 10**7},
    "searches": {},
}


def key_of(tenant: str) -> str:
    return f"secret-key-of-{tenant}"


def entry(tenant: str) -> str:
    hashed = hashlib.sha256(key_of(tenant).encode()).hexdigest()
    return json.dumps(tenant) + ": " + json.dumps({"key_sha256": [hashed], **TENANTS.get(tenant, {})}) + "\n"


@dataclass
class Billed:
    """A cluster, its files, and what its clients have counted.

    Attributes:
        counted: tokens of answers by request id.
    """

    fleet: Fleet
    tenants: Path
    log: Path
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def routers(self) -> list[RouterProcess]:
        return self.fleet.routers

    def stream(self, tenant: str, router: int = 0, **fields: Any) -> Any:
        metadata = (("authorization", f"Bearer {key_of(tenant)}"),)
        return self.routers[router].inference.Generate(request(**fields), timeout=120, metadata=metadata)

    def ask(self, tenant: str, router: int = 0, num_tokens: int = 1, prompt: int = 20, **fields: Any) -> str:
        """The status with which a request ends: OK, or the code."""
        ids = prompt_of(time.time_ns(), prompt)
        try:
            answers = list(self.stream(tenant, router, token_ids=ids, sampling=sampling(num_tokens), **fields))
        except grpc.RpcError as error:
            return str(error.code().name)
        self.counted[answers[0].request_id] = sum(len(answer.token_ids) for answer in answers)
        return "OK"

    def many(self, tenant: str, count: int, **fields: Any) -> list[str]:
        """Requests to both routers by turns, some at a time."""
        with ThreadPoolExecutor(6) as threads:
            return list(threads.map(lambda number: self.ask(tenant, number % 2, **fields), range(count)))

    def client(self, tenant: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://{self.routers[0].http}/v1", api_key=key_of(tenant), max_retries=0)

    def records(self) -> dict[str, list[dict[str, Any]]]:
        found = defaultdict(list)
        for line in self.log.read_text().splitlines():
            found[json.loads(line)["request_id"]].append(json.loads(line))
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Billed]:
    folder = tmp_path_factory.mktemp("accounts")
    tenants, log = folder / "tenants.yaml", folder / "usage.jsonl"
    tenants.write_text(OPERATOR_ENTRY + "".join(map(entry, TENANTS)))
    config = RouterConfig(mode="disaggregated", tenants_file=str(tenants), usage_log=str(log))
    with running_fleet(TransferConfig(), config, num_routers=2, step_ms=10) as fleet:
        fleet.fill(*Role)
        yield Billed(fleet, tenants, log)


def test_the_steps_of_the_document_give_a_tenant_a_key_with_a_limit(cluster: Billed) -> None:
    (steps,) = re.findall(r"^```\n(KEY=.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert "sleep 2" in steps
    steps = steps.replace("sleep 2", "sleep 10").replace(".venv/bin/baton", f"{sys.executable} -m deploy.cli")
    again = "\nfor _ in 1 2 3; do BATON_API_KEY=$KEY " + steps.rpartition("BATON_API_KEY=$KEY ")[2].strip() + "; done"
    environment = {
        "PATH": "/usr/bin:/bin",
        "TENANTS_FILE": str(cluster.tenants),
        "PYTHONPATH": str(DOCUMENT.parents[1]),
    }
    done = subprocess.run(
        ["bash", "-c", steps + again],
        env=environment | {"BATON_ADDRESS": cluster.routers[0].grpc, "HOME": str(cluster.tenants.parent)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert "'newcomer' has used up its requests_per_minute of 3" in done.stderr, done
    assert done.stderr.count("used up") == 1, "of four"
    cluster.tenants.write_text(OPERATOR_ENTRY + "".join(map(entry, TENANTS)))


def test_requests_hold_over_two_routers(cluster: Billed) -> None:
    began = time.monotonic()
    statuses = cluster.many("requests", 2 * REQUESTS)
    num_windows = 1 + (time.monotonic() - began) // 60
    assert REQUESTS <= statuses.count("OK") <= REQUESTS * num_windows
    assert set(statuses) <= {"OK", "RESOURCE_EXHAUSTED"}
    refused = sum(metric(one, "baton_tenant_refusals_total", 'tenant="requests"') for one in cluster.routers)
    assert refused == statuses.count("RESOURCE_EXHAUSTED")
    limited = sum(metric(one, "baton_tenant_requests_total", 'outcome="limited"') for one in cluster.routers)
    assert limited >= refused
    assert metric(cluster.routers[0], "baton_requests_slo_total", 'outcome="rejected"') == 0


def test_tokens_hold_over_two_routers_but_for_answers_in_flight(cluster: Billed) -> None:
    began = time.monotonic()
    num_ok = cluster.many("tokens", 80, num_tokens=2, prompt=20).count("OK")
    num_windows = 1 + (time.monotonic() - began) // 60
    assert 0.95 * TOKENS <= num_ok * 22 <= (TOKENS + 6 * 2) * num_windows


def test_answers_in_flight_hold_over_two_routers_and_are_free_when_a_stream_has_ended(cluster: Billed) -> None:
    stream = cluster.stream("few", token_ids=prompt_of(1, 30), sampling=sampling(400), request_id="holds")
    num_tokens = len(next(stream).token_ids)
    assert [cluster.ask("few", router) for router in (0, 1)] == ["RESOURCE_EXHAUSTED"] * 2
    stream.cancel()
    wait_until(lambda: cluster.ask("few", 1) == "OK")
    assert num_tokens
    for number in range(6):
        wait_until(lambda number=number: cluster.ask("few", number % 2) == "OK", every_s=0.2)  # type: ignore[misc]


def test_openais_package_sees_its_limits(cluster: Billed) -> None:
    with cluster.client("short") as client:
        raw = client.completions.with_raw_response.create(model="", prompt="hello there", max_tokens=2)
        headers, usage = raw.headers, raw.parse().usage
        assert usage is not None
        assert headers["x-ratelimit-limit-requests"] == "1000"
        assert int(headers["x-ratelimit-remaining-requests"]) < 1000
        assert int(headers["x-ratelimit-remaining-tokens"]) <= 10**6 - usage.prompt_tokens
        assert re.fullmatch(r"(\d+h)?(\d+m)?[\d.]+s", headers["x-ratelimit-reset-tokens"])
        stream = client.completions.with_raw_response.create(model="", prompt="hello", max_tokens=2, stream=True)
        assert stream.headers["x-ratelimit-limit-tokens"] == "1000000"
        list(stream.parse())
    with cluster.client("alone") as client:
        for _ in range(ALONE):
            client.completions.create(model="", prompt="hello", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="", prompt="hello", max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) > 0
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"


def left(cluster: Billed) -> int:
    """Tokens that the tenant has left, before the one token of the answer to this question is charged."""
    with cluster.client("computes") as client:
        raw = client.completions.with_raw_response.create(model="", prompt=[5], max_tokens=1)
    return int(raw.headers["x-ratelimit-remaining-tokens"])


COMPUTED: dict[str, dict[str, Any]] = {
    "all of which the best is given": {"sampling": sampling(20, best_of=8, temperature=1.0, seed=3)},
    "choices": {"sampling": sampling(20, n=3)},
    "beams": {"sampling": sampling(20, use_beam_search=True, beam_width=4)},
    "a claim that no record supports": {"sampling": sampling(120), "request_id": "never-was", "resume_from": {0: 119}},
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_tenant_is_charged_what_was_computed_and_usage_says_so(cluster: Billed, name: str) -> None:
    expected = {"beams": 77, "choices": 60, "all of which the best is given": 160}.get(name, 120)
    before = left(cluster)
    chunks = list(cluster.stream("computes", token_ids=prompt_of(7, 20), **COMPUTED[name]))
    assert chunks[-1].usage.completion_tokens == expected
    assert before - left(cluster) == 20 + expected + 2, "and the two questions' tokens"


def test_a_search_that_is_left_is_charged_until_then(cluster: Billed) -> None:
    router = cluster.routers[0]
    asked = sampling(4000, use_beam_search=True, beam_width=4)
    stream = cluster.stream("searches", token_ids=prompt_of(8, 20), sampling=asked, request_id="is-left")
    router.wait_for(lambda status: not all(is_idle(worker) for worker in status["workers"]))
    # No token comes before all, but the worker says meanwhile how many it has computed.
    (decode,) = cluster.fleet.started_as(Role.DECODE)
    progress = cluster.fleet.progress[decode]
    begun_s = progress.step_began_s
    wait_until(lambda: progress.step_began_s > begun_s + 1)
    stream.cancel()

    def num_computed() -> float:
        return metric(router, "baton_tenant_tokens_total", 'tenant="searches"', 'kind="computed"')

    wait_until(lambda: num_computed() > 0)
    assert num_computed() < 4 * 4000


def test_an_answer_is_no_longer_than_the_tenant_may_have(cluster: Billed) -> None:
    with cluster.client("short") as client:
        chat: Any = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model="", messages=chat, extra_body={"ignore_eos": True})
        assert (answer.usage and answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")
        plain = client.completions.create(model="", prompt="hello", extra_body={"ignore_eos": True})
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 5
        for name in ("max_tokens", "max_completion_tokens"):
            with pytest.raises(openai.BadRequestError, match=f"{name} must be at most 5") as caught:
                client.chat.completions.create(model="", messages=chat, **{name: 6})  # type: ignore[call-overload]
            assert caught.value.param == name


def test_several_prompts_keep_within_what_the_tenant_may_have(cluster: Billed) -> None:
    with cluster.client("several") as client:
        with pytest.raises(openai.BadRequestError, match="prompt holds 4 prompts"):
            client.completions.create(model="", prompt=["a", "b", "c", "d"], max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="asks for 3 answers at a time"):
            client.completions.create(model="", prompt="a", max_tokens=1, n=3)
        answer = client.completions.create(
            model="", prompt=["a", "b", "c"], max_tokens=3, extra_body={"ignore_eos": True}
        )
    assert answer.usage is not None
    assert (len(answer.choices), answer.usage.completion_tokens) == (3, 9)
    records = [one for found in cluster.records().values() for one in found if one["tenant"] == "several"]
    wait_until(lambda: sum(one["tenant"] == "several" for found in cluster.records().values() for one in found) == 3)
    assert len(records) <= 3


def test_a_key_that_is_withdrawn_or_added_holds_without_a_restart(cluster: Billed) -> None:
    stream = cluster.stream("withdrawn", token_ids=prompt_of(2, 30), sampling=sampling(600), request_id="goes-on")
    num_tokens = len(next(stream).token_ids)
    entries = [entry(tenant) for tenant in (*TENANTS, "added") if tenant != "withdrawn"]
    cluster.tenants.write_text(OPERATOR_ENTRY + "".join(entries))

    def holds(router: int) -> bool:
        return (cluster.ask("withdrawn", router), cluster.ask("added", router)) == ("UNAUTHENTICATED", "OK")

    wait_until(lambda: holds(0) and holds(1), every_s=0.1)
    with cluster.client("withdrawn") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with cluster.client("added") as client:
        assert client.models.list().data
    cluster.counted["goes-on"] = num_tokens + sum(len(answer.token_ids) for answer in stream)
    assert cluster.counted["goes-on"] == 600, "what was in flight has gone on"
    cluster.tenants.write_text("acme: {key_sha256: [no-hash]}")
    wait_until(lambda: all("the tenants' file is invalid" in router.log for router in cluster.routers))
    assert cluster.ask("added") == "OK"
    assert metric(cluster.routers[0], "baton_tenants_file_reads_total", 'outcome="refused"') >= 1
    cluster.tenants.write_text(OPERATOR_ENTRY + "".join(map(entry, TENANTS)))
    wait_until(lambda: all(cluster.ask("withdrawn", router) == "OK" for router in (0, 1)), every_s=0.1)


def test_without_redis_each_router_goes_by_its_share(cluster: Billed) -> None:
    cluster.fleet.redis.kill()
    began = time.monotonic()
    statuses = [[cluster.ask("late", router) for _ in range(ALONE)] for router in (0, 1)]
    num_windows = 1 + (time.monotonic() - began) // 60
    served = [each.count("OK") for each in statuses]
    assert min(served) >= ALONE // 2
    assert sum(served) <= 2 * ALONE * num_windows
    cluster.fleet.redis.start()
    for back in ("are counted for all routers again", "are agreed on with other routers again"):
        wait_until(lambda back=back: all(back in router.log for router in cluster.routers), 60)  # type: ignore[misc]
    cluster.fleet.wait_for(*cluster.fleet.workers)


def read(stream: Any, num_tokens: int) -> int:
    """Tokens that came, at least as many as asked for."""
    count = 0
    while count < num_tokens:
        count += len(next(stream).token_ids)
    return count


def test_records_add_up_to_what_clients_counted_over_cancels_kills_and_resumes(cluster: Billed) -> None:
    prompts = {f"req-{name}-{number}": prompt_of(number, 40) for number in range(3) for name in ("kill", "cut", "back")}

    def begin(request_id: str, router: int, got: int = 0) -> Any:
        resume = {0: got} if got else {}
        fields = {"token_ids": prompts[request_id], "request_id": request_id, "resume_from": resume}
        return cluster.stream("free", router, sampling=sampling(150), **fields)

    streams = {request_id: begin(request_id, 1) for request_id in prompts}
    got = {request_id: read(stream, 20) for request_id, stream in streams.items()}
    for request_id in prompts:
        if not request_id.startswith("req-kill"):
            streams[request_id].cancel()
    for request_id in prompts:
        if request_id.startswith("req-back"):
            with pytest.raises(grpc.RpcError):  # refused: takes nothing away
                list(cluster.stream("free", 0, token_ids=[], request_id=request_id, resume_from={0: 1}))
            got[request_id] += sum(len(part.token_ids) for part in begin(request_id, 0, got[request_id]))
    cluster.routers[1].process.kill()
    for request_id in prompts:
        if request_id.startswith("req-kill"):
            try:
                got[request_id] += sum(len(part.token_ids) for part in streams[request_id])
            except grpc.RpcError:
                got[request_id] += sum(len(part.token_ids) for part in begin(request_id, 0, got[request_id]))
    wait_until(lambda: prompts.keys() <= cluster.records().keys(), 90, seen=cluster.records)
    records = cluster.records()
    assert {request_id: found for request_id, found in records.items() if len(found) > 1} == {}
    for request_id in prompts:
        (record,) = records[request_id]
        assert (record["tenant"], record["prompt_tokens"]) == ("free", 40)
        if request_id.startswith("req-cut"):
            assert record["status"] == "cancelled"
            assert got[request_id] <= record["completion_tokens"] < 150
        else:
            assert (record["status"], record["finish_reasons"]) == ("ok", ["length"])
            assert record["completion_tokens"] == got[request_id] == 150
    told: dict[str, int] = {request_id: found[0]["completion_tokens"] for request_id, found in records.items()}
    assert {request_id: told.get(request_id) for request_id in cluster.counted} == cluster.counted


def test_no_key_is_in_any_log_or_record(cluster: Billed) -> None:
    text = cluster.fleet.log + cluster.log.read_text() + json.dumps(cluster.routers[0].metrics())
    assert "secret-key-of" not in text
    assert "goes-on" in text
