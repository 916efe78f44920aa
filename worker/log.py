"""Serves the worker's latest output to routers, so that an operator can read it without a shell on the machine.

The output includes tracebacks and prints of libraries if a node process (`deploy.ray_pools.node`) runs this worker. The
node process keeps the latest lines by worker id, and so also the last lines of a process that this one replaces.
Without a node process, for example in a terminal, the output cannot be read back. Only the lines of this process's log
are served then.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.errors import WorkerFailed
from baton.telemetry import logs
from baton.v1 import worker_pb2, worker_pb2_grpc

ANSWER_S = 5.0
"""Seconds to wait for the node's response."""


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """Node process that runs this worker."""

    socket: Path
    """Path of its socket."""
    cluster: str = ""
    """Ray namespace of the worker's cluster. Workers of other clusters with the same id may run on the node."""


class WorkerLog(worker_pb2_grpc.WorkerLogServicer):
    """Handler that returns the latest lines.

    Args:
        node: node process that runs this worker; None: no node process does.
    """

    def __init__(self, worker_id: str, node: NodeProcess | None = None) -> None:
        self._worker_id = worker_id
        self._node = node

    async def ReadLog(  # noqa: N802 - the generated name
        self, request: worker_pb2.ReadLogRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ReadLogResponse:
        if self._node is None:
            lines = logs.latest_lines()
        else:
            lines = await asyncio.to_thread(written, self._node, self._worker_id)
        return worker_pb2.ReadLogResponse(lines=lines[-request.max_lines :] if request.max_lines else lines)


def written(node: NodeProcess, worker_id: str) -> list[str]:
    """Return the latest lines of a worker's output as text, oldest first.

    Raises:
        WorkerFailed: the output cannot be read.
    """
    try:
        raw = _kept(node, worker_id)
    except OSError as error:
        raise WorkerFailed(f"the output of {worker_id} cannot be read from {node.socket}: {error}") from error
    return shown(raw)


def shown(raw: bytes) -> list[str]:
    """Return the latest lines of some output as text, at most as many as are served."""
    # Not `splitlines`, which also splits at characters that may occur within a line.
    lines = (text for line in raw.decode(errors="replace").split("\n") for text in logs.as_text(line).split("\n"))
    said = [line.rstrip("\r")[: logs.MAX_KEPT_CHARACTERS] for line in lines if line]
    return said[-logs.MAX_KEPT_LINES :]


def _kept(node: NodeProcess, worker_id: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(ANSWER_S)
        link.connect(str(node.socket))
        link.sendall(json.dumps({"worker": worker_id, "cluster": node.cluster, "stream": "latest"}).encode() + b"\n")
        with link.makefile("rb") as answer:
            return answer.read()
