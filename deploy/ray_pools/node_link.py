"""Connection from a worker's actor to the node process (`deploy.ray_pools.node`), which runs the worker.

    link = await NodeLink.open(socket_path, WorkerName("baton", "worker-0"))
    report = await link.start(StartOrder(...), "it is a decode worker")  # or `adopt`, if the worker runs already
    ended = await link.ended()

The worker becomes an orphan when the connection ends, unless another connection has adopted it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import WorkerFailed
from baton.rpc import channel
from baton.tasks import cancel_and_wait
from baton.tls import Tls
from deploy.ray_pools.node import MAX_ORDER, end_in_words
from deploy.ray_pools.supervisor import StartOrder, WorkerName

ASK_S = 2.0
"""Interval between health checks of a worker."""
ANSWER_S = 5.0
"""Timeout of a health check."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """End of a worker's process."""

    status: int
    """Exit status, as in `subprocess`."""
    last_line: str
    """Last line of its output; empty: there was none."""
    log: str
    """Path of the file with its output; empty: it is in no file."""

    @property
    def in_words(self) -> str:
        """The end and the last line of output, as a predicate of the worker."""
        return f"{end_in_words(self.status) or 'ended with status 0'}{self.last_words}"

    @property
    def last_words(self) -> str:
        """The last line of output and the path of the log, as the end of a sentence."""
        log = f"; its log: {self.log}" if self.log else ""
        return f": {self.last_line}{log}" if self.last_line else ""


class NodeLink:
    """Connection that owns one worker's process after `start` or `adopt`. Create it with `open`."""

    def __init__(self, worker_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._worker_id = worker_id
        self._writer = writer
        self._said = ""
        loop = asyncio.get_running_loop()
        self._report: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._ended: asyncio.Future[WorkerEnd] = loop.create_future()
        self._reading = asyncio.create_task(self._read(reader), name=f"node of {worker_id}")

    @classmethod
    async def open(cls, path: str, worker: WorkerName) -> NodeLink:
        """Connect to the node process whose socket has this path.

        Raises:
            WorkerFailed: no process listens there, for instance because its container is about to end.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_ORDER)
        except OSError as error:
            raise WorkerFailed(f"the node process does not answer: {error}") from error
        link = cls(worker.id, reader, writer)
        link._send(worker=worker.id, cluster=worker.cluster, release=worker.release, stream="worker")
        return link

    async def start(self, order: StartOrder, reason: str) -> dict[str, Any]:
        """Start the worker, become its owner, and return its report when it is ready or has failed.

        Args:
            reason: reason for the start; the node process adds it to its log line.

        Raises:
            WorkerFailed: it cannot be started, or has ended before it was ready.
        """
        self._send(order="start", **dataclasses.asdict(order))
        self.say("starting", reason)
        return await self._reported()

    async def adopt(self, gpus: Sequence[str]) -> dict[str, Any]:
        """Become the owner of the running worker, and return its report.

        Args:
            gpus: GPUs that Ray has assigned to the actor.

        Raises:
            WorkerFailed: it does not run on this node, or is leaving.
        """
        self._send(order="adopt", gpus=gpus)
        return await self._reported()

    async def ended(self) -> WorkerEnd:
        """Wait for the end of the worker's process. Raises WorkerFailed if the node process ends."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker's process."""
        self._send(order="signal", number=int(number))

    def say(self, state: str, reason: str = "") -> None:
        """Report the worker's state if it has changed."""
        if state != self._said:
            self._said = state
            self._send(order="state", state=state, reason=reason)

    async def close(self) -> None:
        """Close the connection. A worker that still runs becomes an orphan."""
        self._writer.close()
        await cancel_and_wait([self._reading])

    async def watch(self, address: str, tls: Tls | None) -> None:
        """Check the health of the worker at this address every `ASK_S`, and report its state, until it has ended.

        Args:
            address: host:port of the worker's gRPC server.
            tls: credentials of the cluster; None: it has no TLS.
        """
        async with channel(address, tls) as link:
            while not self._ended.done():
                reason = await why_away(link)
                self.say("away" if reason else "ready", reason)
                await asyncio.wait([self._ended], timeout=ASK_S)

    async def _reported(self) -> dict[str, Any]:
        first: list[asyncio.Future[Any]] = [self._report, self._ended]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if self._report.done():
            return self._report.result()
        ended = self._ended.result()
        raise WorkerFailed(
            f"{self._worker_id} ended before it was ready{ended.last_words or '; its log has the reason'}"
        )

    def _send(self, **values: object) -> None:
        with contextlib.suppress(OSError):  # the connection has ended, and `_read` reports that
            self._writer.write(json.dumps(values).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                answer = json.loads(line)
                if "report" in answer:
                    self._report.set_result(answer["report"])
                elif "ended" in answer:
                    self._ended.set_result(WorkerEnd(answer["ended"], answer["last_line"], answer["log"]))
                    return
                else:
                    self._fail(answer["error"])
                    return
        self._fail("the node process has ended, and its workers with it")

    def _fail(self, why: str) -> None:
        for future in (self._report, self._ended):
            if not future.done():
                future.set_exception(WorkerFailed(why))
                future.exception()  # nothing may await it; otherwise asyncio would log it


async def why_away(link: grpc.aio.Channel) -> str:
    """Return the reason why the worker on this channel accepts no traffic; empty: it accepts traffic."""
    try:
        stub: Any = health_pb2_grpc.HealthStub(link)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return f"it does not answer ({error.code().name})"
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "it takes no new work"
