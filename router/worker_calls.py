"""Calls from the router to its workers: one channel a worker, streams whose failures are typed and name the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
from opentelemetry.context import Context

from baton import wire
from baton.cluster import Worker
from baton.errors import BatonError, WorkerFailed
from baton.messages import FirstToken, HandedOver, NewTokens, PrefixSource, SequenceSpec, Ticket
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
    """Opens streams to workers, over one channel an address."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}

    def decode(
        self,
        worker: Worker,
        spec: SequenceSpec,
        *,
        await_kv: bool,
        source: PrefixSource | None = None,
        trace: Context,
    ) -> WorkerStream[Ticket | NewTokens]:
        stub = worker_pb2_grpc.DecodeWorkerStub(self._channel(worker))
        call = stub.Decode(wire.decode_request(spec, await_kv, source), metadata=tracing.to_metadata(trace))
        return WorkerStream(worker, call, wire.decode_event)

    def prefill(
        self, worker: Worker, spec: SequenceSpec, ticket: Ticket, *, source: PrefixSource | None, trace: Context
    ) -> WorkerStream[FirstToken | HandedOver]:
        stub = worker_pb2_grpc.PrefillWorkerStub(self._channel(worker))
        call = stub.Prefill(wire.prefill_request(spec, ticket, source), metadata=tracing.to_metadata(trace))
        return WorkerStream(worker, call, wire.prefill_event)

    async def forget_past_incarnations(self, workers: Collection[Worker]) -> None:
        """Closes the channels of workers that are listed at another address now; their streams have failed anyway."""
        addresses = {worker.info.id: worker.info.address for worker in workers}
        for address, (worker_id, old) in list(self._channels.items()):
            if addresses.get(worker_id, address) != address:
                del self._channels[address]
                await old.close()

    async def close(self) -> None:
        for _, open_channel in self._channels.values():
            await open_channel.close()

    def _channel(self, worker: Worker) -> grpc.aio.Channel:
        address = worker.info.address
        if address not in self._channels:
            self._channels[address] = worker.info.id, channel(address)
        return self._channels[address][1]


def _is_current_task_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
