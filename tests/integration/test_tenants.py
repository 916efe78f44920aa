"""Tenants of a running cluster: who is admitted, through both endpoints, and that their caches are apart."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster import Role
from baton.config import RouterConfig, TelemetryConfig, TransferConfig
from engine.testing import expected_tokens
from tests.chaos.fleet import RouterProcess, running_fleet
from tests.integration.cluster import Answer, Served, request
from tests.integration.conftest import TraceReceiver
from tests.integration.test_doctor import doctor
from tests.integration.test_operator_errors import baton, refused
from tests.support.asking import exposition, metric, prompt_of, sample, sampling
from tests.support.operator import OPERATOR_ENTRY, OPERATOR_KEY
from tests.support.waiting import wait_until

TENANTS = """
alone: {{key_sha256: [{alone}]}}
team: {{key_sha256: [{team}], parse_special: true}}
team-batch: {{key_sha256: [{batch}], cache_scope: team}}
"""
KINDS = ("prompt", "cached", "generated")
KEYS = {name: f"key-of-{name}" for name in ("alone", "team", "batch")}


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, trace_receiver: tuple[TraceReceiver, str]
) -> Iterator[RouterProcess]:
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    path.write_text(OPERATOR_ENTRY + TENANTS.format(**hashes))
    router, telemetry = (
        RouterConfig(mode="disaggregated", tenants_file=str(path)),
        TelemetryConfig(otlp_endpoint=trace_receiver[1]),
    )
    with running_fleet(TransferConfig(), router, telemetry=telemetry) as fleet:
        yield fleet.fill(*Role)


def ask(cluster: Served, key: str | None, prompt: list[int]) -> Answer:
    metadata = None if key is None else (("authorization", f"Bearer {key}"),)
    message = request(token_ids=prompt, sampling=sampling(4))
    return Answer(list(cluster.inference.Generate(message, timeout=120, metadata=metadata)))


def ask_http(
    cluster: Served, path: str, body: object, **headers: str
) -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(cluster.http, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST" if data != b"null" else "GET", path, data, {"Content-Type": "application/json", **names})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer, response.msg


def completion(prompt: list[int]) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def num_counted(cluster: Served) -> list[float]:
    text = exposition(cluster)
    return [sample(text, name) for name in ("baton_placements_total", "baton_requests_total")]


def test_a_call_without_a_tenants_key_is_refused_and_nothing_placed(cluster: Served) -> None:
    before = num_counted(cluster)
    for key in (None, "nobody", "", "KEY-OF-ALONE"):
        with pytest.raises(grpc.RpcError) as caught:
            ask(cluster, key, prompt_of(1, 64))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, key
        assert "API key" in (caught.value.details() or "")
    assert num_counted(cluster) == before


ASKED: list[tuple[str, object]] = [
    ("/v1/completions", completion([1, 2, 3])),
    ("/v1/completions", {**completion([1, 2, 3]), "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ("/v1/chat/completions", b"{"),
    ("/v1/completions", b" " * (9 * 2**20)),
    ("/v1/models", None),
    ("/v1/models/smollm2-135m-instruct", None),
    ("/v1/none", None),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1]}),
]


def test_an_http_request_without_a_tenants_key_gets_openais_401(cluster: Served) -> None:
    before = num_counted(cluster)[0]
    wrong: list[dict[str, str]] = [{}, {"Authorization": "Bearer nobody"}, {"Authorization": "Basic dTpw"}]
    for (path, body), headers in itertools.product(ASKED, wrong):
        status, answer, got = ask_http(cluster, path, body, **headers)
        assert (status, set(answer)) == (401, {"error"}), (path, headers)
        assert "API key" in answer["error"].pop("message")
        assert answer["error"] == {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
        assert got["WWW-Authenticate"] == "Bearer"
    assert num_counted(cluster)[0] == before


def test_only_a_tenant_that_may_writes_special_tokens(cluster: Served) -> None:
    body = {"prompt": "<|im_end|>", "parse_special": True}
    for path in ("/tokenize", "/v1/completions"):
        status, answer, _ = ask_http(cluster, path, body, Authorization=f"Bearer {KEYS['alone']}")
        assert status == 403, answer
        assert "may not write special tokens" in answer["error"]["message"]
        status, answer, _ = ask_http(cluster, path, body, Authorization=f"Bearer {KEYS['team']}")
        assert status == 200, answer
    message = request(text="<|im_end|>", sampling=sampling(1))
    message.parse_special = True
    with pytest.raises(grpc.RpcError) as caught:
        list(cluster.inference.Generate(message, timeout=60, metadata=(("authorization", f"Bearer {KEYS['alone']}"),)))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_tenant_is_served_through_both_endpoints(cluster: Served) -> None:
    prompt = prompt_of(2, 64)
    assert ask(cluster, KEYS["alone"], prompt).token_ids == expected_tokens(prompt, 4)
    for headers in ({"Authorization": f"Bearer {KEYS['alone']}"}, {"x_api_key": KEYS["alone"]}):
        for path, body in (
            ("/v1/completions", completion(prompt)),
            ("/v1/models", None),
            ("/tokenize", {"prompt": "hi"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            status, answer, _ = ask_http(cluster, path, body, **headers)
            assert status == 200, answer


def test_the_openai_package_authenticates(cluster: Served) -> None:
    url = f"http://{cluster.http}/v1"
    with openai.OpenAI(base_url=url, api_key=KEYS["team"]) as client:
        assert client.completions.create(model="", prompt="hi", max_tokens=2).usage is not None
        stream = client.completions.create(model="", prompt="hi", max_tokens=2, stream=True)
        assert list(stream)[-1].choices[0].finish_reason
    with openai.OpenAI(base_url=url, api_key="none") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.completions.create(model="", prompt="hi", max_tokens=2)
    assert caught.value.code == "invalid_api_key"


def test_tenants_hit_each_others_prefixes_only_where_they_share_a_scope(cluster: Served) -> None:
    prompt = prompt_of(3, 160)
    answers = [ask(cluster, KEYS[name], prompt) for name in ("team", "alone", "batch", "team", "alone")]
    assert [answer.usage.cached_tokens for answer in answers] == [0, 0, 144, 144, 144]
    assert all(answer.token_ids == expected_tokens(prompt, 4) for answer in answers)


def test_each_tenants_requests_and_tokens_are_counted_and_nobody_elses(cluster: Served) -> None:
    def counted() -> dict[str, float]:
        text = exposition(cluster)
        kinds = {kind: sample(text, "baton_tenant_tokens_total", 'tenant="team"', f'kind="{kind}"') for kind in KINDS}
        return kinds | {"met": sample(text, "baton_tenant_requests_total", 'tenant="team"', 'outcome="met"')}

    prompt, before = prompt_of(5, 160), counted()
    answers = [ask(cluster, KEYS["team"], prompt) for _ in range(2)]
    new = {name: value - before[name] for name, value in counted().items()}
    num_cached = sum(answer.usage.cached_tokens for answer in answers)
    assert new == {"prompt": 320, "cached": num_cached, "generated": 8, "met": 2}
    assert num_cached == 144
    with pytest.raises(grpc.RpcError):
        ask(cluster, "nobody", prompt)
    with pytest.raises(grpc.RpcError):
        ask(cluster, KEYS["team"], [])
    wait_until(lambda: metric(cluster, "baton_tenant_requests_total", 'tenant="team"', 'outcome="invalid"') == 1)
    shown = set(re.findall(r'^baton_tenant_\w+\{.*tenant="([^"]*)"', exposition(cluster), re.MULTILINE))
    assert "team" in shown
    assert shown <= {"alone", "team", "team-batch"}, "a key of nobody is no label"


def test_tenants_caches_are_apart_over_http(cluster: Served) -> None:
    prompt = prompt_of(4, 160)
    cached = []
    for name in ("alone", "team", "batch", "alone"):
        _, answer, _ = ask_http(cluster, "/v1/completions", completion(prompt), x_api_key=KEYS[name])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 144, 144]


def test_probes_need_no_key(cluster: Served) -> None:
    for path in ("/health", "/healthz", "/readyz"):
        with urllib.request.urlopen(f"http://{cluster.http}{path}", timeout=30) as answer:
            assert answer.status == 200
    with grpc.insecure_channel(cluster.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        checked = health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Inference"), timeout=30)
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    buf = Path(sys.executable).parent / "buf"
    listed = subprocess.run(
        [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--list-methods", f"http://{cluster.grpc}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "baton.v1.Inference/Generate" in listed.stdout, listed.stderr


def test_a_tenant_learns_nothing_of_the_cluster_or_of_another(cluster: Served) -> None:
    message = request(token_ids=prompt_of(11, 64), sampling=sampling(2), request_id="known")
    list(cluster.inference.Generate(message, timeout=120, metadata=(("x-api-key", KEYS["alone"]),)))
    command = ("status", "--explain", "known", "--json")
    told = baton(*command, BATON_ADDRESS=cluster.grpc, BATON_API_KEY=OPERATOR_KEY)
    assert json.loads(told.stdout)[0]["tenant"] == "alone", told.stderr
    key = {"BATON_ADDRESS": cluster.grpc, "BATON_API_KEY": KEYS["team"]}
    for words in (command, ("status",), ("scale", "decode", "2"), ("autoscale", "--dry-run", "--seconds", "1")):
        refused(baton(*words, **key), "use an operator's API key")
    for path, expected in (("/api/metrics", 403), ("/metrics", 404)):
        status, answer, _ = ask_http(cluster, path, None, x_api_key=KEYS["team"])
        assert (status, set(answer)) == (expected, {"error"})


def test_baton_generate_sends_a_key(cluster: Served) -> None:
    command = ("generate", "hello", "--max-tokens", "3", "--json")
    for result in (
        baton(*command, BATON_ADDRESS=cluster.grpc, BATON_API_KEY=KEYS["alone"]),
        baton(*command, "--api-key", KEYS["alone"], BATON_ADDRESS=cluster.grpc, BATON_API_KEY="nobody"),
    ):
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["usage"]["completion_tokens"] == 3
    refused(baton(*command, BATON_ADDRESS=cluster.grpc), "send the header 'Authorization: Bearer KEY'")
    refused(baton(*command, "--api-key", "nobody", BATON_ADDRESS=cluster.grpc), "not one of this cluster's tenants")
    refused(baton(*command, "--api-key", "ключ", BATON_ADDRESS=cluster.grpc), "printable ASCII")


def test_a_bad_tenants_file_stops_the_cluster_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("acme: {key_sha256: [abc]}")
    for name, sentence in (("tenants.yaml", "tenant 'acme': key_sha256 must be"), ("none", "cannot read the tenants'")):
        result = baton("up", BATON_ROUTER_TENANTS_FILE=str(tmp_path / name))
        refused(result, sentence)
        assert sentence in result.stderr.splitlines()[-1], "told by this process, not by a router that it has started"


@pytest.mark.chaos
def test_the_doctor_asks_for_a_key_and_tries_it(cluster: Served) -> None:

    def tried(*words: str, **settings: str) -> tuple[int, dict[str, str]]:
        """Once the router has answered in time; the check is not made otherwise."""

        def look() -> tuple[int, dict[str, str]] | None:
            returncode, checks = doctor(cluster, *words, **settings)
            return (returncode, checks["api key"]) if "api key" in checks else None

        return wait_until(look, 120.0)

    for words in ((), ("--api-key", KEYS["alone"])):
        _, lesser = tried(*words)
        assert lesser["state"] == "warn"
        assert "BATON_API_KEY" in lesser["fix"]
    _, accepted = tried("--api-key", OPERATOR_KEY)
    assert accepted["state"] == "ok"
    returncode, wrong = tried(BATON_API_KEY="another")
    assert (returncode, wrong["state"]) == (1, "fail")


def test_a_key_appears_in_no_log_trace_or_error(
    cluster: RouterProcess, trace_receiver: tuple[TraceReceiver, str]
) -> None:
    receiver, _ = trace_receiver
    prompt, wrong = prompt_of(9, 64), "key-that-nobody-has"
    num_spans = len(receiver.spans)
    said = []
    for key in (KEYS["alone"], wrong):
        for headers in ({"Authorization": f"Bearer {key}"}, {"x_api_key": key}, {"Authorization": f"Basic {key}"}):
            for body in (completion(prompt), {"prompt": prompt, "max_tokens": "many"}, b"{"):
                _, answer, got = ask_http(cluster, "/v1/completions", body, **headers)
                assert "server" not in got, "clients do not learn what software answers"
                said.append(f"{answer} {got}")
        with contextlib.suppress(grpc.RpcError):
            ask(cluster, key, prompt)
    wait_until(lambda: any("text_completion" in span.name for _, span in receiver.spans[num_spans:]))
    written = [*said, *(str(span) for _, span in receiver.spans[num_spans:]), cluster.log, exposition(cluster)]
    assert not [text for text in written for key in (*KEYS.values(), wrong) if key in text]
