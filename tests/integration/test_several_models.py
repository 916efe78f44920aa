"""`baton up` with two models: one address, and for each model its own workers and controller. Arithmetic engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.operator import worker_log
from deploy.operator.client import OPEN, Client
from tests.integration.cluster import Cluster, running_cluster
from tests.support.waiting import wait_until

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def second(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model that differs from the default one in its configuration only, and so has other blocks."""
    folder = tmp_path_factory.mktemp("models") / "second"
    folder.mkdir()
    for path in model_dir.iterdir():
        if path.name == "config.json":
            (folder / path.name).write_text(json.dumps(json.loads(path.read_text()) | {"of_the_second": True}))
        else:
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def cluster(second: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("settings")
    (folder / "first.yaml").write_text("")
    own = {"model": {"id": str(second), "release": "two"}, "cluster": {"prefill": 0}, "router": {"mode": "aggregated"}}
    (folder / "second.yaml").write_text(yaml.safe_dump(own))
    files = ("--config", str(folder / "first.yaml"), "--config", str(folder / "second.yaml"))
    with running_cluster(
        *files, "--routers", "2", testing_arithmetic="true", engine_num_blocks="512", router_mode="disaggregated"
    ) as running:
        yield running


def of_release(status: dict[str, Any], release: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in status["models"] if each["release"] == release)
    return found


def tokens(cluster: Cluster, model: str) -> list[int]:
    return cluster.generate(token_ids=PROMPT, model=model, sampling={"max_tokens": 8, "temperature": 0.0}).token_ids


def baton(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "deploy.cli", *arguments, "--address", cluster.grpc]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_router_serves_both_models_when_the_cluster_is_ready(cluster: Cluster) -> None:
    """And each model has the workers and the placement of its own file."""
    status = cluster.client.status()
    assert [sorted(model["id"] for model in status["models"])] == [["second", "smollm2-135m-instruct"]]
    contents = {model["content_id"] for model in status["models"]}
    assert len(contents) == 2

    def served() -> list[set[str]]:
        """A router reads what the other one serves from Redis, a moment later."""
        routers = cluster.client.status()["routers"]
        return [{each["content_id"] for each in router["models"]} for router in routers]

    wait_until(lambda: served() == [contents] * 2, 30.0, seen=served)
    workers = [(worker["release"], worker["id"], worker["role"]) for worker in status["workers"]]
    first = next(model["release"] for model in status["models"] if model["release"] != "two")
    assert sorted(workers) == sorted(
        [(first, "worker-0", "prefill"), (first, "worker-1", "decode"), ("two", "worker-0", "decode")]
    )
    assert tokens(cluster, "second") == tokens(cluster, "smollm2-135m-instruct") == tokens(cluster, "")
    with pytest.raises(Exception, match="third"):
        tokens(cluster, "third")


def test_commands_name_the_model(cluster: Cluster) -> None:
    shown = baton(cluster, "status")
    assert "second" in shown.stdout
    assert "release" in shown.stdout
    refused = baton(cluster, "scale", "decode", "2")
    assert refused.returncode == 1
    assert "two" in refused.stderr, "it names the models"
    done = baton(cluster, "scale", "decode", "2", "--model", "second", "--json")
    assert json.loads(done.stdout)["ready"] == 2, done.stderr
    # Another of the two routers may answer, which has not seen it yet.
    status = cluster.wait_for(lambda status: of_release(status, "two")["pools"]["decode"]["ready"] == 2)
    assert all(model["pools"]["decode"]["ready"] == 1 for model in status["models"] if model["release"] != "two")
    back = baton(cluster, "scale", "decode", "1", "--model", "two")
    assert back.returncode == 0, back.stderr
    woken = baton(cluster, "wake", "second", "--json")
    assert json.loads(woken.stdout)["state"] == "ready", woken.stderr


def test_the_log_of_a_worker_is_that_of_its_model(cluster: Cluster) -> None:
    with contextlib.closing(Client(cluster.grpc, model="two")) as client:
        endpoints = worker_log.endpoints(client, cluster.grpc, OPEN)
        two, other = (worker_log.read(endpoints, "worker-0", model) for model in ("two", "smollm2-135m-instruct"))
    assert any("as a decode worker" in line for line in two)
    assert any("as a prefill worker" in line for line in other)
    assert not any("as a prefill worker" in line for line in two)


def test_a_controller_that_dies_is_replaced_and_no_model_notices(cluster: Cluster) -> None:
    before = {model["release"]: model["controller"]["pid"] for model in cluster.client.status()["models"]}
    workers = {worker["pid"] for worker in cluster.client.status()["workers"]}
    os.kill(before["two"], signal.SIGKILL)
    assert tokens(cluster, "second") == tokens(cluster, "smollm2-135m-instruct")

    def is_back(status: dict[str, Any]) -> bool:
        controller = of_release(status, "two").get("controller")
        return controller is not None and controller["pid"] != before["two"]

    status = cluster.wait_for(is_back)
    assert {model["release"]: model["controller"]["pid"] for model in status["models"]} != before
    assert {worker["pid"] for worker in status["workers"]} >= workers, "they serve on"
    others = [model for model in status["models"] if model["release"] != "two"]
    assert [model["controller"]["pid"] for model in others] == [before[model["release"]] for model in others]


def test_the_same_model_twice_is_refused(second: Path) -> None:
    command = [sys.executable, "-P", "-m", "deploy.cli", "up", "--model", str(second), "--model", str(second)]
    environment = {**os.environ, "BATON_GRPC_PORT": "0", "BATON_HTTP_PORT": "0"}
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert refused.returncode == 1
    assert f"second ({second}) is listed twice" in refused.stderr
