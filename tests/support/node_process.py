"""Node process with a shell script in place of Ray, connections of actors to it, and actors without Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from baton.errors import WorkerFailed
from deploy.ray_pools.actor import RESOURCE, WorkerActor
from deploy.ray_pools.node_link import NodeLink
from deploy.ray_pools.supervisor import StartOrder, WorkerName
from tests.support.waiting import until, wait_until

PATIENT_S = 60.0
REPORT = {"pid": 1, "address": "127.0.0.1:1", "incarnation": "a1"}
SERVES = f"""
import json, os, signal, sys, time
report = os.fdopen(int(sys.argv[sys.argv.index("--ready-fd") + 1]), "w")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(json.dumps({REPORT!r}), file=report, flush=True)
while True: time.sleep(1)
"""
"""Code of a worker that is ready at once, and ends at SIGTERM."""


class Running:
    """Node process with a shell script in place of Ray, which by default ends with status 3 after `let_ray_end`."""

    def __init__(self, folder: Path, log_format: str, script: str, *options: str, before: str = "") -> None:
        self.folder, self._may_end = folder / "node", folder / "may-end"
        script = script or f"echo Ray is up; while [ ! -e {self._may_end} ]; do sleep 0.05; done; exit 3"
        arguments = ["--folder", str(self.folder), "--log-format", log_format, *options, "--", "sh", "-c", script]
        code = f"{before}from deploy.ray_pools.node import main; main()"
        command = [sys.executable, "-P", "-c", code, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        wait_until(self._answers, PATIENT_S)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as tried:
            return tried.connect_ex(str(self.socket)) == 0

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    def shows(self, words: str, *names: str) -> bool:
        """Return whether the file `workers` contains these words, and exactly these probes' files exist."""
        there = {name for name in ("ready", "started") if (self.folder / name).exists()}
        return words in (self.folder / "workers").read_text() and there == set(names)

    async def wait_for(self, words: str, *names: str) -> None:
        """Wait until `shows` is true."""
        await until(lambda: self.shows(words, *names), PATIENT_S)

    def let_ray_end(self) -> None:
        self._may_end.touch()

    def end(self) -> str:
        """Let Ray end, and return the output of the node process."""
        self.let_ray_end()
        out, _ = self.process.communicate(timeout=PATIENT_S)
        assert self.process.returncode == 3, "Ray's own status"
        return out.decode()


@contextmanager
def node(
    folder: Path, log_format: str = "json", script: str = "", *options: str, before: str = ""
) -> Iterator[Running]:
    """Context manager: a node process that ends with the block.

    Args:
        script: shell script that runs in place of Ray; empty: the default one.
        before: Python code that the node process runs first.
    """
    running = Running(folder, log_format, script, *options, before=before)
    try:
        yield running
    finally:
        running.let_ray_end()  # else the shell would outlive the node
        running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()


def order(
    code: str = SERVES, *, gpus: Sequence[str] = (), share: float = 0.0, orphan_s: float = 60.0, end_s: float = 60.0
) -> StartOrder:
    """Return an actor's order to start a worker that runs this Python code."""
    return StartOrder(
        command=[sys.executable, "-c", code],
        environment={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
        gpus=gpus,
        gpu_share=share,
        orphan_timeout_s=orphan_s,
        end_timeout_s=end_s,
    )


@asynccontextmanager
async def actor(here: Running, worker_id: str, cluster: str = "", release: str = "") -> AsyncGenerator[NodeLink]:
    """Context manager: the connection of a worker's actor. It closes at the end of the block."""
    link = await NodeLink.open(str(here.socket), WorkerName(cluster, worker_id, release))
    try:
        yield link
    finally:
        await link.close()


async def write(here: Running, worker_id: str, *lines: str) -> None:
    """Start a worker that writes these lines, the last one without a line end, and then ends."""
    async with actor(here, worker_id) as link:
        code = f"import sys; sys.stdout.write({chr(10).join(lines)!r})"
        with pytest.raises(WorkerFailed, match="ended before it was ready"):
            await link.start(order(code), "it writes")
        await link.ended()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Alone(WorkerActor):
    """Actor without Ray and without a GPU."""

    def _assigned(self) -> Mapping[str, float]:
        return {RESOURCE: 1.0}

    def _cluster(self) -> str:
        return "baton"


async def let_go(*workers: WorkerActor) -> None:
    """The actors end, with the node processes that they have started."""
    for each in workers:
        if each._node is not None:
            await each._node.close()
        if each._own is not None:
            each._own.terminate()
            assert each._own.wait(PATIENT_S) == 0
