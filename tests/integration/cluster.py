"""A real cluster for tests: `baton up` in a process of its own, and clients of it. `tests.chaos.fleet` is lighter."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from baton.errors import BatonError
from baton.tls import Tls
from baton.v1 import inference_pb2, inference_pb2_grpc
from deploy.operator.client import Client, opened
from deploy.operator.tables import natural_key
from deploy.processes import APART, tied
from tests.support.logs import forget, show_on_failure
from tests.support.operator import OPERATOR_KEY
from tests.support.processes import command_line
from tests.support.waiting import wait_until

READY = re.compile(r"BATON READY grpc=(\S+) http=(\S+)")
FIXED_PORTS = range(10_000, 30_000)
"""Below those that Linux and macOS give to outgoing connections."""
MOST_WORKERS = 8
"""Most processes that pytest-xdist starts here."""
START_TIMEOUT_S = 400.0
"""Others may start beside one, on processors that have other work."""
STOP_TIMEOUT_S = 120.0


class Served:
    """A router, and clients of it.

    Attributes:
        grpc, http: host:port.
        tls: what its clients show and believe; None: plain text.
        client, inference: once connected.
        api_key: an operator's; empty: there are no tenants.
    """

    api_key = ""
    grpc: str
    http: str
    tls: Tls | None = None
    _log_file: tempfile._TemporaryFileWrapper[str]

    def connect(self) -> None:
        self.client = Client(self.grpc, self.api_key, self.tls)
        self._channel = opened(self.grpc, self.tls)
        self.inference = inference_pb2_grpc.InferenceStub(self._channel)
        show_on_failure(self.grpc, lambda: self.log)

    def disconnect(self) -> None:
        forget(self.grpc)
        self.client.close()
        self._channel.close()

    @property
    def log(self) -> str:
        """What was printed, for failure messages."""
        return Path(self._log_file.name).read_text()

    def generate(self, **fields: Any) -> Answer:
        """One request, read to its end. `token_ids` and `sampling` take plain lists and dicts."""
        return Answer(list(self.inference.Generate(request(**fields), timeout=240)))

    def ids(self, role: str) -> list[str]:
        """The workers that have the role now, by their numbers."""
        found = [worker["id"] for worker in self.client.status()["workers"] if worker["role"] == role]
        return sorted(found, key=natural_key)

    def worker(self, worker_id: str) -> dict[str, Any]:
        return next(w for w in self.client.status()["workers"] if w["id"] == worker_id)

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 150.0) -> dict[str, Any]:
        """The first status that fulfils the condition. A router that does not answer in time is asked again."""
        found: list[dict[str, Any]] = []

        def holds() -> bool:
            found[:] = [self.client.status()]
            return condition(found[0])

        wait_until(holds, timeout_s, every_s=0.1, seen=lambda: f"{found}\n{self.log}", not_yet=(BatonError,))
        return found[0]

    def wait_until_idle(self) -> dict[str, Any]:
        """Every worker has nothing to do, holds nothing, and says so itself."""
        return self.wait_for(lambda status: all(is_idle(worker) for worker in status["workers"]))


class Cluster(Served):
    """A running `baton up`."""

    def __init__(self, *args: str, **settings: str) -> None:
        """Starts one and waits until it is ready.

        Args:
            args: of `baton up`.
            settings: BATON_* environment variables without the prefix, in lower case.
        """
        self.api_key = OPERATOR_KEY if "router_tenants_file" in settings else ""
        self._log_file = tempfile.NamedTemporaryFile("w+", prefix="baton-up-", suffix=".log")  # noqa: SIM115
        ports = {"grpc_port": str(free_port()), "http_port": str(free_port())}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BATON_") or k == "BATON_CACHE"}
        environment |= {f"BATON_{name.upper()}": value for name, value in (ports | settings).items()}
        self.process = subprocess.Popen(
            # A test run that is killed leaves no cluster behind.
            tied([sys.executable, "-P", "-m", "deploy.cli", "up", *args], signal.SIGTERM),
            env=environment,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            process_group=APART,
        )
        try:
            self.grpc, self.http = self._wait_until_ready()
        except BaseException:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)
            self._log_file.close()
            raise
        self.connect()

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends the cluster as an operator would, and returns its exit status."""
        self.disconnect()
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for process in self.processes():
                process.kill()
            raise AssertionError(f"baton up did not end within {STOP_TIMEOUT_S} s:\n{self.log}") from None
        finally:
            self._log_file.close()

    def _wait_until_ready(self) -> tuple[str, str]:
        def ready() -> re.Match[str] | None:
            assert self.process.poll() is None, f"baton up ended with {self.process.returncode}:\n{self.log}"
            return READY.search(self.log)

        match = wait_until(ready, START_TIMEOUT_S, every_s=0.1, seen=lambda: self.log)
        return match[1], match[2]


class Answer:
    """The messages of one Generate call, put together."""

    def __init__(self, messages: list[inference_pb2.GenerateResponse]) -> None:
        self.messages = messages
        self.text = "".join(message.text for message in messages)
        self.token_ids = [token_id for message in messages for token_id in message.token_ids]
        self.finish_reason = messages[-1].finish_reason
        self.usage = messages[-1].usage
        self.timing = messages[-1].timing

    def choice(self, index: int) -> Answer:
        return Answer([message for message in self.messages if message.choice_index == index])


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    if "token_ids" in fields:
        fields["token_ids"] = inference_pb2.TokenIds(ids=fields["token_ids"])
    if isinstance(fields.get("chat"), list):
        fields["chat"] = inference_pb2.ChatInput(
            messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in fields["chat"]]
        )
    if "sampling" in fields:
        fields["sampling"] = inference_pb2.SamplingParams(**fields["sampling"])
    return inference_pb2.GenerateRequest(**fields)


def is_idle(worker: dict[str, Any]) -> bool:
    blocks = worker["blocks"]
    assert worker["self_check"] == "ok", worker
    assert blocks["free"] + blocks["cached"] + blocks["in_use"] == blocks["total"], worker
    return bool(worker["running"] == worker["waiting"] == blocks["in_use"] == 0)


def _own_ports() -> Iterator[int]:
    """Fixed ports that no other of pytest's processes takes, in an order of this one's, again and again."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(FIXED_PORTS)[number % MOST_WORKERS :: MOST_WORKERS]
    random.Random(os.getpid()).shuffle(ports)
    return itertools.cycle(ports)


_PORTS = _own_ports()


def free_port() -> int:
    """Not an ephemeral one, which somebody's outgoing connection might have by the time it is wanted; nor one that has
    been given out a while ago, and may be bound later.
    """
    while True:
        port = next(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def running_cluster(*args: str, **settings: str) -> Iterator[Cluster]:
    """A cluster for the length of a block. Leaving it checks that no process is left."""
    cluster = Cluster(*args, **settings)
    try:
        yield cluster
        started = cluster.processes()
    except BaseException:
        with contextlib.suppress(Exception):
            print(cluster.log)  # pytest shows it with the failure
        cluster.stop()
        raise
    assert cluster.stop() == 0
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive, f"left behind: {[command_line(process) for process in alive]}"
