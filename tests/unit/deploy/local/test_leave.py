"""`baton leave` where no controller answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import deploy.local.leave
from baton.config import ClusterConfig, Config, IndexConfig, ModelConfig
from deploy.embedded_redis import EmbeddedRedis
from deploy.local.leave import leave, workers_on
from tests.support.waiting import wait_until

HOST = "127.99.1.2"
NOBODY = "127.99.1.3:9"
HEAD = "baton-head.serving.svc"
DRAIN_S = 2.0
WORKER = "import pathlib, sys, time; pathlib.Path('runs').touch(); time.sleep(600)"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.local.leave, "RAY_S", 0.2)
    monkeypatch.setattr(deploy.local.leave, "GONE_S", 1.0)


def test_a_worker_whose_whole_cluster_is_gone_ends(tmp_path: Path) -> None:
    """As in `helm uninstall`: neither Ray's head nor Redis nor a controller answers any more."""
    with worker_process(tmp_path):
        took_s = time_to_leave(f"redis://{NOBODY}/0", NOBODY)
    assert took_s < 20.0, "Ray's own client looks for its head for 40 s"


@pytest.mark.parametrize(("is_uninstalled", "timeout_s"), [(True, 60.0), (False, 5.0)])
def test_a_redis_of_ones_own_does_not_hold_a_worker_whose_release_is_gone(
    is_uninstalled: bool, timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's Service has a name until then. A name server that cannot say so does not count."""
    real = socket.getaddrinfo

    def resolved(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == HEAD:
            raise socket.gaierror(socket.EAI_NONAME if is_uninstalled else socket.EAI_AGAIN, "of the name server")
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with EmbeddedRedis() as redis, worker_process(tmp_path):
        took_s = time_to_leave(redis.url, f"{HEAD}:6379", timeout_s)
    assert took_s < 20.0 if is_uninstalled else took_s >= timeout_s - DRAIN_S


@pytest.mark.parametrize("there", ["redis", "head"])
def test_a_controller_that_restarts_is_waited_for_until_workers_need_the_time_to_drain(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else of the cluster is there."""
    monkeypatch.setattr(deploy.local.leave, "place_nothing_on", lambda *_: 0)  # Ray's client, for 40 s
    with contextlib.ExitStack() as stack:
        redis_url, head = f"redis://{NOBODY}/0", NOBODY
        if there == "redis":
            redis_url = stack.enter_context(EmbeddedRedis()).url
        else:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            head = f"127.0.0.1:{listener.getsockname()[1]}"
        stack.enter_context(worker_process(tmp_path))
        assert time_to_leave(redis_url, head, timeout_s=5.0) >= 5.0 - DRAIN_S


def time_to_leave(redis_url: str, ray_address: str, timeout_s: float = 60.0) -> float:
    """Seconds in which the worker has left."""
    config = Config(
        model=ModelConfig(revision="1"),
        index=IndexConfig(redis_url=redis_url),
        cluster=ClusterConfig(ray_address=ray_address, drain_timeout_s=DRAIN_S),
    )
    began_s = time.monotonic()
    assert asyncio.run(leave(config, {HOST}, timeout_s)) == []
    return time.monotonic() - began_s


@contextlib.contextmanager
def worker_process(folder: Path) -> Generator[None]:
    """A process that looks like a worker's, and is ended by SIGTERM."""
    (folder / "worker.py").write_text(WORKER)
    without_packages = str(Path(sys.executable).resolve())
    command = [
        without_packages,
        "-P",
        "-m",
        "worker",
        "decode",
        "decode-0",
        HOST,
        "--cluster",
        "baton",
    ]
    with subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}) as worker:
        try:
            wait_until(lambda: (folder / "runs").exists() or worker.poll() is not None)
            assert worker.poll() is None
            assert workers_on({HOST}).keys() == workers_on({HOST}, "baton").keys() == {"decode-0"}
            assert not workers_on({HOST}, "baton-2"), "those of another model stay"
            yield
            assert worker.wait() == -15
        finally:
            worker.kill()
