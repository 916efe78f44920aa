"""What lies about where `baton up` is started: neither a user's files nor other programs' memory end what it runs.

The cluster that several files share is started in such a place (`arithmetic_cluster`), and all their tests run there.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import httpx2
import psutil
import pytest

from baton.cluster import Role
from baton.config import Config
from tests.integration.cluster import Cluster
from tests.integration.conftest import OWN_MODULES, own_file
from tests.support.waiting import wait_until

pytestmark = pytest.mark.first


def test_a_folder_of_modules_and_a_full_machine_harm_no_cluster(arithmetic_cluster: Cluster) -> None:
    started = psutil.Process(arithmetic_cluster.process.pid)
    folder = Path(started.cwd())
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict(map(own_file, OWN_MODULES))
    assert started.environ()["RAY_memory_usage_threshold"] == "0"
    assert folder != Path.cwd()
    answer = arithmetic_cluster.generate(token_ids=[1, 2, 3], sampling={"max_tokens": 4})
    assert len(answer.token_ids) == 4
    assert "my own" not in arithmetic_cluster.log
    workers = arithmetic_cluster.wait_for(lambda status: len(status["workers"]) == 4)["workers"]
    for worker in workers:
        told = Config.from_json(psutil.Process(worker["pid"]).environ()["BATON_CONFIG_JSON"])
        assert told.engine.memory_share == 0.25, "four workers on one machine"


PIDFD_GETFD = 438


def descriptor_of(pid: int, number: int) -> int:
    """A copy of another process's descriptor. A socket cannot be opened by its path below /proc."""
    process = os.pidfd_open(pid)
    try:
        copy = int(ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, number, 0))
    finally:
        os.close(process)
    assert copy >= 0, os.strerror(ctypes.get_errno())
    return copy


def test_a_worker_s_log_has_what_its_process_writes_whichever_way(arithmetic_cluster: Cluster) -> None:
    """As a library does that knows nothing of our logs."""
    name = arithmetic_cluster.ids(Role.DECODE)[0]
    worker = arithmetic_cluster.worker(name)

    def lines() -> list[str]:
        answer = httpx2.get(f"http://{arithmetic_cluster.http}/api/workers/{name}/log", timeout=30)
        return list(answer.raise_for_status().json()["lines"])

    for stream in (1, 2):
        with os.fdopen(descriptor_of(worker["pid"], stream), "w") as output:
            output.write(f"a library writes to {stream}\n")
    wait_until(lambda: lines()[-2:] == ["a library writes to 1", "a library writes to 2"], 30, seen=lines)
    assert any(f"{name} joins at" in line for line in lines())
    assert any("blocks of 16 tokens (0.03125 KiB per token)" in line for line in lines())
    assert not any(line.startswith(":actor_name:") for line in lines())
