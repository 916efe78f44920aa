"""What an operator sees when something cannot start: one sentence, exit status 1, nothing left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from deploy.cli.app import app
from tests.integration.cluster import free_port
from tests.support.members import secret_file


def baton(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATON_") or k == "BATON_CACHE"}
    ports = {"BATON_GRPC_PORT": str(free_port()), "BATON_HTTP_PORT": str(free_port())}
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *args],
        env=clean | ports | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def refused(result: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: "), result.stderr
    assert sentence in result.stderr


def refused_at_once(result: subprocess.CompletedProcess[str], sentence: str) -> None:
    """By `baton up`, before it starts anything: Ray alone takes seconds."""
    refused(result, sentence)
    said = [line for line in result.stderr.splitlines() if not line.startswith("==> Model ")]
    assert len(said) == 1, result.stderr


def test_a_port_in_use(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused_at_once(baton("up", BATON_HTTP_PORT=port), "set BATON_HTTP_PORT to another port")


def test_pool_sizes_that_cannot_serve() -> None:
    refused_at_once(baton("up", "--prefill", "0", BATON_ROUTER_MODE="disaggregated"), "use --prefill 1")


def test_settings_that_do_not_exist(tmp_path: Path) -> None:
    """One for each source; tests/unit/baton/test_config.py has many more."""
    refused(baton("up", BATON_ENGINE_BLOCKSIZE="16"), "BATON_ENGINE_BLOCKSIZE")
    odd = tmp_path / "[prod].yaml"
    odd.write_text("engine: {blocks: 3}")
    refused(baton("up", "--config", str(odd)), "unknown setting engine.blocks")


def test_a_model_that_does_not_run(tmp_path: Path) -> None:
    refused_at_once(baton("up", "--model", str(tmp_path)), str(tmp_path))


def test_what_this_machine_or_the_model_cannot_do(model_dir: Path) -> None:
    """One of many that tests/unit/deploy/doctor/test_preflight.py has."""
    sentence = "engine.tensor_parallel is 4, which does not divide the 9 heads of smollm2"
    refused_at_once(baton("up", CUDA_VISIBLE_DEVICES="", BATON_ENGINE_TENSOR_PARALLEL="4"), sentence)


def test_an_address_where_no_ray_answers() -> None:
    nobody = ("up", "--ray-address", "127.0.0.1:1")
    refused_at_once(baton(*nobody, BATON_CLUSTER_SECRET=secret_file()), "no Ray answers at 127.0.0.1:1")
    refused_at_once(baton(*nobody), "workers in an existing Ray cluster need the cluster's secret")


def test_a_router_for_others_without_a_secret() -> None:
    given = {"BATON_CLUSTER_HOST": "0.0.0.0", "BATON_INDEX_REDIS_URL": "redis://127.0.0.1:1"}
    sentence = "without cluster.secret (BATON_CLUSTER_SECRET) a process listens on loopback addresses only"
    result = baton("run", "router", BATON_ROUTER_CACHE_SECRET="s", **given)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert sentence in result.stderr.strip().splitlines()[-1]


def test_no_cluster() -> None:
    address = f"127.0.0.1:{free_port()}"
    refused(baton("status", "--address", address), f"no router answers at {address}")


def test_numbers_that_cannot_be_sent() -> None:
    result = baton("generate", "hi", "--seed", "9" * 30, "--address", f"127.0.0.1:{free_port()}")
    refused(result, "the request cannot be sent")


def test_the_doctor_without_a_cluster(model_dir: Path) -> None:
    def doctor(**ports: str) -> Result:
        unset = {name: None for name in os.environ if name.startswith("BATON_") and name != "BATON_CACHE"}
        free = {"BATON_GRPC_PORT": str(free_port()), "BATON_HTTP_PORT": str(free_port())}
        return CliRunner().invoke(app, ["doctor"], env={**unset, **free, **ports})

    result = doctor()
    assert result.exit_code == 0, result.stdout
    assert "cluster: none runs" in result.stdout
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        result = doctor(BATON_HTTP_PORT=port)
    assert result.exit_code == 1
    assert f"FAIL port {port}" in result.stdout
    assert "set BATON_HTTP_PORT to another port" in result.stdout
