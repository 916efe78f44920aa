"""Secrets planted in every setting that holds one are found nowhere: in no argument, record of Ray, log, answer or
environment of a process that does not need them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis

from baton.errors import BatonError
from deploy.embedded_redis import EmbeddedRedis
from deploy.operator.client import Client
from tests.integration.cluster import Cluster, free_port, running_cluster
from tests.integration.test_operator_errors import baton
from tests.support.asking import prompt_of
from tests.support.processes import command_line, running
from tests.unit.baton.test_secrets import SECRETS

PLANTED = {
    "index.redis_url": "planted-redis-1f7c",
    "router.cache_secret": "planted-scopes-2e8b",
    "operator's key": "planted-operator-3d9a",
    "tenant's key": "planted-tenant-4ca1",
    "hub token": "planted-hub-5bb2",
}
CHUNK = 2**20
pytestmark = pytest.mark.chaos


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A cluster with secrets, and its operator."""

    cluster: Cluster
    operator: Client
    metrics_port: int


@pytest.fixture(scope="module")
def planted(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    operator, tenant = (hashlib.sha256(PLANTED[f"{who}'s key"].encode()).hexdigest() for who in ("operator", "tenant"))
    tenants.write_text(f"ops: {{key_sha256: [{operator}], operator: true}}\nacme: {{key_sha256: [{tenant}]}}\n")
    metrics_port, store = free_port(), EmbeddedRedis(port=free_port())
    with contextlib.ExitStack() as stack:
        stack.enter_context(store)
        with redis.Redis.from_url(store.url) as connection:
            connection.config_set("requirepass", PLANTED["index.redis_url"])
        with pytest.MonkeyPatch.context() as environ:
            environ.setenv("HF_TOKEN", PLANTED["hub token"])
            cluster = stack.enter_context(
                running_cluster(
                    "--prefill", "1", "--decode", "1",
                    testing_arithmetic="true", engine_num_blocks="512", telemetry_port=str(metrics_port),
                    index_redis_url=store.url.replace("//", f"//:{PLANTED['index.redis_url']}@"),
                    router_cache_secret=PLANTED["router.cache_secret"], router_tenants_file=str(tenants),
                    api_key=PLANTED["operator's key"],
                )
            )  # fmt: skip
        client = stack.enter_context(contextlib.closing(Client(cluster.grpc, PLANTED["operator's key"])))
        yield Planted(cluster=cluster, operator=client, metrics_port=metrics_port)


def found_in(text: str | bytes) -> set[str]:
    """The secrets that a text holds, by name."""
    found = text if isinstance(text, bytes) else text.encode()
    return {name for name, value in PLANTED.items() if value.encode() in found}


def environment(process: psutil.Process) -> bytes:
    return Path(f"/proc/{process.pid}/environ").read_bytes()


def records(process: psutil.Process) -> Iterator[bytes]:
    """The memory of a process, but for its program, in pieces that overlap; what it was started with is in none."""
    with Path(f"/proc/{process.pid}/mem").open("rb") as memory:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            span, kind, *_ = line.split()
            if "w" not in kind or "[stack]" in line:
                continue
            begin, end = (int(each, 16) for each in span.split("-"))
            kept = b""
            for at in range(begin, end, CHUNK):
                memory.seek(at)
                with contextlib.suppress(OSError):  # a guard page
                    kept = kept[-100:] + memory.read(min(CHUNK, end - at))
                    yield kept


def test_every_secret_setting_is_planted() -> None:
    assert set(PLANTED) >= SECRETS


def test_no_argument_and_no_environment_has_a_secret_that_is_not_its_own(planted: Planted) -> None:
    first, *others = planted.cluster.processes()
    for process in (first, *others):
        assert found_in(" ".join(command_line(process))) == set(), command_line(process)
    (router,), (controller,) = running(others, "router"), running(others, "deploy.controller")
    assert found_in(environment(router)) == {"router.cache_secret"}, "the control: it is to be found there"
    for process in others:
        if process != router:
            assert found_in(environment(process)) == set(), command_line(process)
    assert running(others, "gcs_server")
    assert sum("worker" in command_line(process) for process in others) == 2
    assert controller.is_running()


def test_no_other_user_gets_at_what_ray_writes(planted: Planted) -> None:
    """Ray opens its folders and logs to all users; so one above them is closed."""
    (raylet,) = running(planted.cluster.processes(), "raylet/raylet")
    places = re.findall(r"/\S*?/session_[\w-]+(?=/)", " ".join(command_line(raylet)))
    assert places
    for place in set(places):
        above = Path(place).parents[1]
        assert stat.S_IMODE(above.stat().st_mode) == 0o700, above
        assert (above.stat().st_uid, Path(place).name) == (os.getuid(), Path(place).resolve().name)
    (logs,) = (Path(places[0]) / "logs",)
    assert any(logs.glob("worker-*.err"))


def test_ray_records_no_secret(planted: Planted) -> None:
    (gcs,) = running(planted.cluster.processes(), "gcs_server")
    try:
        pieces = list(records(gcs))
    except PermissionError:
        pytest.skip("needs a kernel that lets a parent read its children's memory")
    assert any(b'"arithmetic": true' in piece for piece in pieces), "the control: workers' settings are there"
    assert set().union(*map(found_in, pieces)) == set()
    (raylet, *_) = running(planted.cluster.processes(), "raylet/raylet")
    session = re.search(r"/[^\s=]+/session_[^/\s]+", " ".join(command_line(raylet)))
    assert session
    files = [path for path in Path(session[0]).rglob("*") if path.is_file()]
    assert files
    assert {path: found for path in files if (found := found_in(path.read_bytes()))} == {}


def test_nothing_that_is_said_has_a_secret(planted: Planted) -> None:
    cluster = planted.cluster
    asked = {"prompt": prompt_of(1, 64), "max_tokens": 4}
    said = [json.dumps(planted.operator.status()), cluster.log]
    for key, body in ((PLANTED["tenant's key"], asked), (PLANTED["tenant's key"], {"prompt": []}), ("wrong", asked)):
        request = urllib.request.Request(
            f"http://{cluster.http}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                said.append(answer.read().decode() + str(answer.headers))
        except urllib.error.HTTPError as error:
            said.append(error.read().decode() + str(error.headers))
    with urllib.request.urlopen(f"http://127.0.0.1:{planted.metrics_port}/metrics", timeout=30) as answer:
        said.append(answer.read().decode())
    assert "acme" in said[-1], "the control: this is where tenants are named"
    key = PLANTED["operator's key"]
    for command in (("status", "--json"), ("doctor", "--part", "cluster", "--json"), ("status", "--explain", "x")):
        result = baton(*command, BATON_ADDRESS=cluster.grpc, BATON_API_KEY=key)
        said.append(result.stdout + result.stderr)
    assert [found_in(text) for text in said] == [set()] * len(said)
    with (
        contextlib.closing(Client(cluster.grpc, PLANTED["tenant's key"])) as tenant,
        pytest.raises(BatonError) as caught,
    ):
        tenant.explain("anything")
    assert "operator" in str(caught.value)
