"""A real Prometheus scrapes a real cluster under load: every expression that is shipped has something to show.

The cluster has all that a panel may be about: tenants and SLO classes, one of which nobody can keep; more load than it
can serve in time; transfers that fail, as `testing.faults` makes them; a worker that leaves; a Redis that stands still,
while workers forget what the index says they have; a lease that nobody can read; an autoscaler that tells what it would
do.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import random
import re
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import redis

from baton.errors import BatonError
from baton.v1 import inference_pb2
from deploy.operator.client import Client
from tests.integration.cluster import Cluster, free_port, request, running_cluster
from tests.observability.exporters import NAMESPACE, PODS, running_exporters
from tests.observability.prometheus import Prometheus, binaries, running_prometheus
from tests.observability.shipped import JOB, RULES, dashboards, recorded, shown, substituted
from tests.support.asking import exposition, metric, prompt_of, sampling
from tests.support.load import Clients, Requests
from tests.support.processes import running
from tests.support.waiting import wait_until
from tools.dashboards.catalogue import definitions
from tools.dashboards.model import ZERO

pytestmark = [pytest.mark.first, pytest.mark.full, pytest.mark.timeout(1000)]

TENANTS = """
flood: {{key_sha256: ['{flood}'], slo_class: chat}}
small: {{key_sha256: ['{small}'], slo_class: chat, weight: 8}}
hurried: {{key_sha256: ['{hurried}'], slo_class: hurried, requests_per_minute: 2}}
operations: {{key_sha256: ['{operations}'], operator: true}}
"""
NAMES = ("flood", "small", "hurried", "operations")
SLO_CLASSES = {
    "default": {},
    "chat": {"ttft_ms": 1500, "itl_ms": 500, "e2e_ms": 30_000},
    "hurried": {"e2e_ms": 1},  # which nobody can keep
}
CLIENTS = {"flood": 14, "small": 3, "hurried": 1}
SETTINGS = {
    "testing_arithmetic": "true", "testing_token_ms": "2", "engine_num_blocks": "512",
    "router_slo_classes": json.dumps(SLO_CLASSES),
    "autoscale_enabled": "true", "autoscale_dry_run": "true", "autoscale_window_s": "1",
    "router_moderation": "tests.support.judges:judge", "router_moderation_tokens": "8",
    "router_mode": "disaggregated", "index_renew_s": "0.5", "index_poll_s": "0.5",
    "testing_faults": "corrupt_chunk=12",
}  # fmt: skip
SYSTEM_PROMPT = prompt_of(1, 32)
NUM_FLOOD = 8
"""Requests that come at once."""
NUM_CONVERSATIONS = 8
"""Of one client, which comes back to them: more than the caches hold."""
NUM_ROUNDS = 4
"""Rounds of trouble, each of which brings about everything, however slow the machine is; then all has been shown."""
DATA_WITHIN_S = 700.0
"""A deadline for rounds that do not end."""

NOTHING_TO_SHOW = {
    "overview / Alerts / firing": "the alerts wait for minutes before they fire",
}
"""Expressions that are 0 here by their `or $zero` alone, and why."""


ABSENT = {
    "pools / Certificates / {{certificate}}": "baton_certificate_validity_seconds",
    "pools / State rows by state / {{role}} {{state}}": "baton_state_rows",
    "pools / LoRA adapters / {{worker}} ({{role}}, {{release}})": "baton_adapters_resident",
    "pools / Busiest expert / {{worker}} ({{role}}, {{release}})": "baton_expert_tokens_total",
}
"""Expressions about what this cluster has not: certificates, states, adapters and divided experts; and the metrics."""


def key_of(name: str) -> str:
    return f"key-of-{name}"


class Load(Clients):
    """Clients that ask until the block is left. What is refused or fails is what the dashboards are to show."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._names = [name for name, number in CLIENTS.items() for _ in range(number)]
        super().__init__(self._ask, len(self._names))

    def _ask(self, number: int) -> Requests:
        drawn = random.Random(number)
        while True:
            conversation = prompt_of(1000 * (number + 1) + drawn.randrange(NUM_CONVERSATIONS), 160)
            question = prompt_of(drawn.getrandbits(32), 100)
            repeating = {"allowed_token_ids": [7]} if drawn.random() < 0.5 else {}  # drafts of it prove right
            message = request(
                token_ids=SYSTEM_PROMPT + conversation + question,
                sampling=sampling(drawn.randint(40, 120), **repeating),
            )
            yield partial(self._read, message, self._names[number], drawn)
            self.is_over.wait(0.1)

    def _read(self, message: inference_pb2.GenerateRequest, name: str, drawn: random.Random) -> None:
        metadata = (("authorization", f"Bearer {key_of(name)}"),)
        chunks = self._cluster.inference.Generate(message, timeout=60, metadata=metadata)
        with contextlib.suppress(grpc.RpcError):
            for _ in chunks:
                if drawn.random() < 0.001 or self.is_over.is_set():
                    chunks.cancel()


class Trouble:
    """What happens to the cluster, again and again, while the block is entered."""

    def __init__(self, cluster: Cluster, tenants: Path) -> None:
        self._cluster = cluster
        self._tenants = tenants
        self._stop = threading.Event()
        self.num_rounds = 0
        (self._redis,) = running(cluster.processes(), "valkey-server")

    def __enter__(self) -> Trouble:
        self._write_garbage()
        self._threads = ThreadPoolExecutor(NUM_FLOOD + 1)
        self._happening = self._threads.submit(self._happen)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        try:
            self._happening.result()
        finally:
            self._threads.shutdown()

    def _happen(self) -> None:
        for number in itertools.count():
            for each in (
                partial(self._drain, f"long-{number}"),
                self._write_malformed,
                self._write_fields,
                self._flood,
                self._no_redis,
                self._new_tenants,
            ):
                if self._stop.is_set():
                    return
                each()
            self.num_rounds = number + 1

    def _drain(self, request_id: str) -> None:
        """A worker leaves in the midst of a long answer, which is read until it goes on elsewhere."""
        num_before = metric(self._cluster, "baton_migrations_total")
        answer = streamed(self._cluster, "small", 50, 3000, 60_000, request_id)
        with contextlib.closing(Client(self._cluster.grpc, key_of("operations"))) as operations:
            with contextlib.suppress(grpc.RpcError, BatonError):  # it is refused, or has gone on elsewhere already
                for _ in itertools.islice(answer, 50):
                    pass
                for told in operations.explain(request_id):  # none, where others have pushed it out of what is kept
                    operations.drain(told.decode_worker)
                for number, _ in enumerate(answer):
                    has_gone_on = number % 20 == 0 and metric(self._cluster, "baton_migrations_total") > num_before
                    if has_gone_on or self._stop.is_set():
                        break
            answer.cancel()

    def _write_garbage(self) -> None:
        """Somebody else's lease, of another type."""
        with redis.Redis.from_url(self._cluster.client.status()["redis"]["address"]) as store:
            (workers,) = store.keys("kv:{*}:workers")
            store.config_set("maxmemory", "1gb")
            store.sadd(workers, "stranger")
            store.set(workers.removesuffix(b"workers") + b"lease:stranger", "x")

    def _write_malformed(self) -> None:
        """Bytes that are no message, to the router and to a worker."""
        status = self._cluster.client.status()
        for address in (status["routers"][0]["grpc"], status["workers"][0]["address"]):
            with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
                check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
                check(b"\xff", timeout=10)

    def _write_fields(self) -> None:
        """A field that is refused, and one that changes no answer."""
        for field in ({"of_tomorrow": 1}, {"cache_prompt": False}):
            body = json.dumps({"prompt": "a", "max_tokens": 1, **field}).encode()
            headers = {"Authorization": f"Bearer {key_of('small')}", "Content-Type": "application/json"}
            asked = urllib.request.Request(f"http://{self._cluster.http}/v1/completions", body, headers)
            with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=60) as answer:
                answer.read()

    def _new_tenants(self) -> None:
        """The tenants' file changes."""
        with self._tenants.open("a") as file:
            file.write("# once more\n")

    def _no_redis(self) -> None:
        """Workers forget, and the index is not told, until a router has counted on what is gone. That takes as long as
        the caches take to be filled anew: 20 s where little runs beside it.
        """
        num_before = metric(self._cluster, "baton_index_stale_hints_total")
        self._redis.suspend()
        try:
            while metric(self._cluster, "baton_index_stale_hints_total") <= num_before and not self._stop.wait(1):
                pass
        finally:
            self._redis.resume()
        self._stop.wait(2)

    def _flood(self) -> None:
        """One tenant fills the queues; for another one, some of it has to make way."""
        flood = [self._threads.submit(ask, self._cluster, "flood", 500, 1, 60_000) for _ in range(NUM_FLOOD)]
        self._stop.wait(0.5)
        ask(self._cluster, "small", 100, 1, 1_000)
        for each in flood:
            each.result()


def streamed(
    cluster: Cluster, name: str, num_prompt_tokens: int, num_tokens: int, ttft_ms: float, request_id: str = ""
) -> Any:
    """The call of a request with a first-token objective of its own."""
    prompt = prompt_of(random.getrandbits(32), num_prompt_tokens)
    message = request(token_ids=prompt, sampling=sampling(num_tokens), slo={"ttft_ms": ttft_ms}, request_id=request_id)
    return cluster.inference.Generate(message, timeout=600, metadata=(("authorization", f"Bearer {key_of(name)}"),))


def ask(cluster: Cluster, name: str, num_prompt_tokens: int, num_tokens: int, ttft_ms: float) -> None:
    """To the answer's end. Refused or not: the metrics tell."""
    with contextlib.suppress(grpc.RpcError):
        list(streamed(cluster, name, num_prompt_tokens, num_tokens, ttft_ms))


class Seen(NamedTuple):
    """The cluster under load, what happens to it, and the Prometheus that scrapes it."""

    cluster: Cluster
    prometheus: Prometheus
    trouble: Trouble


@pytest.fixture(scope="module")
def seen(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    binaries()
    folder = tmp_path_factory.mktemp("prometheus")
    tenants = folder / "tenants.yaml"
    tenants.write_text(TENANTS.format(**{name: hashlib.sha256(key_of(name).encode()).hexdigest() for name in NAMES}))
    files = {"router_tenants_file": str(tenants), "router_usage_log": str(folder / "usage.jsonl")}
    metrics_port = free_port()
    with running_cluster(
        "--prefill", "2", "--decode", "2", telemetry_port=str(metrics_port), **files, **SETTINGS
    ) as cluster:
        labels = {"namespace": NAMESPACE, "pod": PODS[0]}
        routers = {"targets": [f"127.0.0.1:{metrics_port}"], "labels": labels}
        with running_exporters() as exporters:
            config = {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(path) for path in RULES.glob("*.yaml")],
                "scrape_configs": [{"job_name": JOB, "static_configs": [routers]}, *exporters],
            }
            happens = Trouble(cluster, tenants)
            with running_prometheus(folder, config) as prometheus, Load(cluster), happens as trouble:
                yield Seen(cluster, prometheus, trouble)


def flaw(prometheus: Prometheus, expression: str) -> str:
    """What is wrong with its data now; empty: nothing."""
    vector = prometheus.query(expression)
    if not vector:
        return "no data"
    wrong = [sample for sample in vector if not math.isfinite(float(sample["value"][1]))]
    return f"not finite: {wrong}" if wrong else ""


def flawed(prometheus: Prometheus, expressions: dict[str, str]) -> list[tuple[str, str]]:
    """Those of some named expressions whose data are wrong now, and how."""
    return [(name, found) for name, text in expressions.items() if (found := flaw(prometheus, text))]


def test_every_panel_has_something_to_show(seen: Seen) -> None:
    """With nothing but what was measured: `or $zero` is left out."""
    _, prometheus, trouble = seen
    waiting = {str(each): substituted(each.expression.replace(f" or {ZERO}", "")) for each in shown()}
    for name in (*NOTHING_TO_SHOW, *ABSENT):
        del waiting[name]
    assert len(waiting) > 80
    flaws: list[tuple[str, str, str]] = []

    def has_been_shown() -> bool:
        flaws[:] = [(name, found, text) for name, text in waiting.items() if (found := flaw(prometheus, text))]
        for name in waiting.keys() - {name for name, _, _ in flaws}:
            del waiting[name]
        return not waiting or trouble.num_rounds >= NUM_ROUNDS

    wait_until(has_been_shown, DATA_WITHIN_S, every_s=1.0, seen=lambda: flaws)
    assert not waiting, f"not shown within {trouble.num_rounds} rounds: {flaws}"
    # As they are shipped, all at the same time. A scrape that a stalled router misses takes its gauges for a second.
    shipped = {str(each): substituted(each.expression) for each in shown() if str(each) not in ABSENT}
    wait_until(
        lambda: not flawed(prometheus, shipped), DATA_WITHIN_S, every_s=1.0, seen=lambda: flawed(prometheus, shipped)
    )


def test_variables_have_values(seen: Seen) -> None:
    prometheus = seen.prometheus
    values: dict[str, list[str]] = {}
    for dashboard in dashboards().values():
        for variable in dashboard["templating"]["list"][1:]:
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert match
            found = prometheus.get(f"label/{match[2]}/values", **{"match[]": substituted(match[1])})
            values[variable["name"]] = found
    assert values["namespace"] == [NAMESPACE]
    assert values["prefix"] == [PODS[0]], "of which its pattern takes the beginning"
    assert set(values["pod"]) == set(PODS), "without the stranger"
    assert values["job"] == [JOB]
    assert values["slo_class"] == ["chat", "custom", "hurried"]
    assert set(values["tenant"]) == set(CLIENTS)
    assert values["role"] == ["decode", "prefill"]
    assert all(values.values()), values


def test_rules_are_evaluated_and_what_is_recorded_is_finite(seen: Seen) -> None:
    prometheus = seen.prometheus
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    names = {rule["record"]: rule["record"] for rule in recorded()}
    wait_until(lambda: not flawed(prometheus, names), every_s=1.0, seen=lambda: flawed(prometheus, names))


def test_nothing_is_exposed_that_the_catalogue_lacks(seen: Seen) -> None:
    lines = exposition(seen.cluster).splitlines()
    exposed = {tuple(line.split(" ")[2:4]) for line in lines if line.startswith("# TYPE ")}
    known = {(each.name, each.kind) for each in definitions()}
    assert exposed <= known
    assert {name for name, _ in known - exposed} == set(ABSENT.values()), "recorded under this load"
