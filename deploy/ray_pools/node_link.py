"""Connection from a worker's actor to the first process of its container (`deploy.ray_pools.node`).

It carries the worker's output and state. Outside containers, as on a laptop, there is no such process, and nothing is
reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import WorkerFailed
from baton.rpc import channel
from baton.tls import Tls
from deploy.ray_pools.node import SOCKET

ASK_S = 2.0
"""Interval between health checks of a worker."""
ANSWER_S = 5.0
"""Timeout of a health check."""


class NodeLink:
    """Reporter of one worker's state.

    Args:
        path: path of the node's socket; empty: there is none.

    Raises:
        WorkerFailed: no process listens there, because its container is about to end.
    """

    def __init__(self, path: str, worker_id: str) -> None:
        self._path = path
        self._worker_id = worker_id
        self._states = self._connected("state")
        self._said = ""

    @classmethod
    def of(cls, environ: Mapping[str, str], worker_id: str) -> NodeLink:
        """Return the connection to the node with this environment."""
        return cls(environ.get(SOCKET, ""), worker_id)

    @property
    def path(self) -> str:
        """Path of the node's socket; empty: there is none."""
        return self._path

    def output(self) -> socket.socket | None:
        """Return a socket for the worker's output, which the caller closes; None: it shares this process's output."""
        return self._connected("output")

    def say(self, state: str, reason: str = "") -> None:
        """Report the worker's state if it has changed."""
        if self._states is None or state == self._said:
            return
        self._said = state
        with contextlib.suppress(OSError):  # the container is about to end
            self._states.sendall(json.dumps({"state": state, "reason": reason}).encode() + b"\n")

    def close(self) -> None:
        """Stop reporting: for the node, the worker is gone."""
        if self._states is not None:
            self._states.close()

    async def watch(self, address: str, tls: Tls | None) -> None:
        """Check the health of the worker at that address and report it, until cancelled."""
        if self._states is None:
            return
        async with channel(address, tls) as link:
            while True:
                reason = await why_away(link)
                self.say("away" if reason else "ready", reason)
                await asyncio.sleep(ASK_S)

    def _connected(self, stream: str) -> socket.socket | None:
        if not self._path:
            return None
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(self._path)
            link.sendall(json.dumps({"worker": self._worker_id, "stream": stream}).encode() + b"\n")
        except OSError as error:
            link.close()
            raise WorkerFailed(f"the node's first process does not answer: {error}") from error
        return link


async def why_away(link: grpc.aio.Channel) -> str:
    """Return the reason why a worker accepts no traffic; empty: it does."""
    try:
        stub: Any = health_pb2_grpc.HealthStub(link)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return f"it does not answer ({error.code().name})"
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "it takes no new work"


def end_in_words(status: int) -> str:
    """Describe the end of a process by its exit status from `subprocess`; empty: a normal exit."""
    if status == 0:
        return ""
    if status > 0:
        return f"ended with status {status}"
    killed = "was killed by" if -status == signal.SIGKILL else "crashed with"
    hint = " (by the kernel, for want of memory?)" if -status == signal.SIGKILL else ""
    try:
        return f"{killed} {signal.Signals(-status).name}{hint}"
    except ValueError:
        return f"{killed} signal {-status}"
