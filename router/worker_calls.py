"""Calls from the router to its workers: one channel a worker, streams whose failures are typed and name the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
from opentelemetry.context import Context

from baton import wire
from baton.cluster import Worker
from baton.errors import BatonError, WorkerFailed
from baton.messages import FirstToken, HandedOver, NewTokens, SequenceSpec, Ticket
from baton.rpc import channel, from_rpc_error
from baton.telemetry import tracing
from baton.v1 import worker_pb2_grpc

Event = TypeVar("Event")


class WorkerCallError(Exception):
    """A call to a worker failed with `error`. Stays inside the router."""

    def __init__(self, worker: Worker, error: BatonError) -> None:
        super().__init__(str(error))
        self.worker = worker
        self.error = error


class WorkerStream(Generic[Event]):
    """The responses of one call. Leaving the context cancels the call, which frees everything on the worker."""

    def __init__(self, worker: Worker, call: Any, convert: Callable[[Any], Event]) -> None:
        self.worker = worker
        self._call = call
        self._convert = convert

    async def read(self) -> Event:
        """The next response.

        Raises:
            WorkerCallError: the worker refused, failed or ended the stream.
        """
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise WorkerCallError(self.worker, from_rpc_error(error, self.worker.info.id)) from error
        except asyncio.CancelledError:
            if self._call.cancelled() and not _is_current_task_cancelling():
                raise WorkerCallError(self.worker, WorkerFailed(f"{self.worker.info.id} cancelled the call")) from None
            raise
        if message is grpc.aio.EOF:
            raise WorkerCallError(self.worker, WorkerFailed(f"{self.worker.info.id} ended the stream early"))
        return self._convert(message)

    async def __aenter__(self) -> WorkerStream[Event]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call.cancel()


class WorkerCalls:
    """Opens streams to workers; keeps one channel for each worker id."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}

    async def decode(
        self, worker: Worker, spec: SequenceSpec, *, await_kv: bool, trace: Context
    ) -> WorkerStream[Ticket | NewTokens]:
        stub = worker_pb2_grpc.DecodeWorkerStub(await self._channel(worker))
        call = stub.Decode(wire.decode_request(spec, await_kv), metadata=tracing.to_metadata(trace))
        return WorkerStream(worker, call, wire.decode_event)

    async def prefill(
        self, worker: Worker, spec: SequenceSpec, ticket: Ticket, *, trace: Context
    ) -> WorkerStream[FirstToken | HandedOver]:
        stub = worker_pb2_grpc.PrefillWorkerStub(await self._channel(worker))
        call = stub.Prefill(wire.prefill_request(spec, ticket), metadata=tracing.to_metadata(trace))
        return WorkerStream(worker, call, wire.prefill_event)

    async def close(self) -> None:
        for _, open_channel in self._channels.values():
            await open_channel.close()

    async def _channel(self, worker: Worker) -> grpc.aio.Channel:
        known = self._channels.get(worker.info.id)
        if known is not None and known[0] == worker.info.address:
            return known[1]
        # A new incarnation listens elsewhere; calls still open on the old channel fail with its process anyway.
        self._channels[worker.info.id] = (worker.info.address, channel(worker.info.address))
        if known is not None:
            await known[1].close()
        return self._channels[worker.info.id][1]


def _is_current_task_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
