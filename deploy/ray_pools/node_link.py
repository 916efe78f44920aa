"""A worker's actor, as the first process of its container sees it (`deploy.ray_pools.node`): where the worker's output
goes, and what the worker does. Elsewhere, as on a laptop, there is no such process, and nothing is said.
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
"""Interval between the questions whether a worker takes traffic."""
ANSWER_S = 5.0
"""Longest wait for the answer."""


class NodeLink:
    """Says what one worker does.

    Args:
        path: of the node's socket; empty: there is none.

    Raises:
        WorkerFailed: nobody listens there; its container is about to end.
    """

    def __init__(self, path: str, worker_id: str) -> None:
        self._path = path
        self._worker_id = worker_id
        self._states = self._connected("state")
        self._said = ""

    @classmethod
    def of(cls, environ: Mapping[str, str], worker_id: str) -> NodeLink:
        """The link to the node whose environment this is."""
        return cls(environ.get(SOCKET, ""), worker_id)

    @property
    def path(self) -> str:
        """Where the node's socket is; empty: there is none."""
        return self._path

    def output(self) -> socket.socket | None:
        """A socket for all that the worker's process writes, which the caller closes; None: it writes where we do."""
        return self._connected("output")

    def say(self, state: str, reason: str = "") -> None:
        """Says what the worker does now, unless that was said last."""
        if self._states is None or state == self._said:
            return
        self._said = state
        with contextlib.suppress(OSError):  # the container is about to end
            self._states.sendall(json.dumps({"state": state, "reason": reason}).encode() + b"\n")

    def close(self) -> None:
        """Says no more: for the node, the worker is gone."""
        if self._states is not None:
            self._states.close()

    async def watch(self, address: str, tls: Tls | None) -> None:
        """Asks the worker at that address whether it takes traffic, and says so, until cancelled."""
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
    """The reason why a worker takes no traffic; empty: it does."""
    try:
        stub: Any = health_pb2_grpc.HealthStub(link)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return f"it does not answer ({error.code().name})"
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "it takes no new work"


def end_in_words(status: int) -> str:
    """How a process ended, from its exit status as `subprocess` reports it; empty: as it should."""
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
