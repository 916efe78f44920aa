"""Calls from the router to its workers: one stream a worker carries them all, and their failures name the worker.

`worker.calls` is the other end, and shows what travels. A stream is opened by the first call that needs one.
When it breaks, because the worker died, hangs or closed it, all its calls fail at once; the next call opens another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import grpc
from opentelemetry.context import Context

from baton import messages, wire
from baton.cluster import Worker
from baton.errors import BatonError, NotAMember, Unsupported, WorkerFailed
from baton.messages import (
    CallEnded,
    DecodeRequest,
    Decoding,
    Failed,
    Fetched,
    FetchRequest,
    FirstToken,
    NewTokens,
    PrefillRequest,
    PrefixSource,
    SequenceSpec,
    Ticket,
    Transferred,
)
from baton.rpc import channel, from_rpc_error
from baton.rpc.errors import from_failed
from baton.rpc.member_auth import member_metadata
from baton.rpc.outbox import MAX_FRAME_COMMANDS, Outbox
from baton.scores import TokenScores
from baton.telemetry import tracing
from baton.tls import Certificates, Tls
from baton.trust import KeyFile
from baton.v1 import worker_pb2, worker_pb2_grpc

E = TypeVar("E")
LOG_TIMEOUT_S = 5.0
MAX_JOINED = 32
"""Messages with tokens that are read as one: detokenizing them must not hold up the event loop."""


class WorkerCallError(Exception):
    """A call to a worker failed with `error`. Stays inside the router."""

    def __init__(self, worker: Worker, error: BatonError) -> None:
        super().__init__(str(error))
        self.worker = worker
        self.error = error


class WorkerStream(Generic[E]):
    """The answers of one call. Leaving the context cancels the call, which frees everything on the worker.

    Answers that are not read yet wait here and hold up no other call.
    """

    def __init__(self, worker: Worker, leave: Callable[[], None]) -> None:
        self.worker = worker
        self._leave = leave
        self._events: list[E] = []
        self._failure: BatonError | None = None
        self._reader: asyncio.Future[None] | None = None

    async def read(self) -> E:
        """The next answer, for one reader at a time. Tokens come with those that wait behind them: a router that has
        fallen behind its workers writes fewer and larger chunks, and so catches up.

        Raises:
            WorkerCallError: the worker refused, failed or ended the call, and all that it sent before has been read.
        """
        while not self._events:
            if self._failure is not None:
                raise WorkerCallError(self.worker, self._failure)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return _taken(self._events)

    @property
    def num_unread(self) -> int:
        """Tokens that have been computed and that nobody has read."""
        return sum(num_computed(event) for event in self._events if isinstance(event, NewTokens))

    def leave(self) -> None:
        """Cancel the call, which frees everything on the worker; idempotent."""
        self._leave()

    def deliver(self, event: E) -> None:
        """Add an answer."""
        self._events.append(event)
        self._wake()

    def fail(self, failure: BatonError) -> None:
        """End the call: no further answer comes."""
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def __aenter__(self) -> WorkerStream[E]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()


def num_computed(new: NewTokens) -> int:
    """Return how many tokens a worker has computed since its last message."""
    return len(new.token_ids) + new.num_searched


def _taken(events: list[E]) -> E:
    """Take the next answer, or the tokens of several."""
    parts = list(itertools.takewhile(lambda event: isinstance(event, NewTokens), events[:MAX_JOINED]))
    if len(parts) <= 1:
        return events.pop(0)
    del events[: len(parts)]
    return cast(E, _joined(cast(list[NewTokens], parts)))


def _joined(parts: Sequence[NewTokens]) -> NewTokens:
    """One message with the tokens of several that follow one another."""
    first, last = parts[0], parts[-1]
    return NewTokens(
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        finish_reason=last.finish_reason,
        report=first.report,
        scores=TokenScores.joined(part.scores for part in parts),
        beams=last.beams,
        num_searched=sum(part.num_searched for part in parts),
    )


class _Link:
    """One stream to one address, and the calls on it."""

    def __init__(self, open_channel: grpc.aio.Channel, proof: tuple[tuple[str, bytes], ...]) -> None:
        self.is_broken = False
        self._call_ids = itertools.count(1)
        self._calls: dict[int, WorkerStream[Any]] = {}
        self._outbox = Outbox[worker_pb2.Command]()
        stub: Any = worker_pb2_grpc.WorkerCallsStub(open_channel)
        self._stream = stub.Serve(metadata=proof)
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    def start(
        self, worker: Worker, request: PrefillRequest | DecodeRequest | FetchRequest, trace: Context
    ) -> WorkerStream[Any]:
        """Raise WorkerCallError where the worker does not know all that would be said: then nothing is."""
        call_id = next(self._call_ids)
        command = wire.start_command(messages.StartCall(call_id, request, dict(tracing.to_metadata(trace))))
        lacking = wire.fields_unknown_to(worker.info.known_fields)
        if lacking and (unknown := lacking & wire.fields_in(command)):
            sentence = f"{worker.info.label} is of an older release and does not know {wire.named(unknown)}"
            raise WorkerCallError(worker, Unsupported(sentence))
        self._outbox.put(command)
        call = self._calls[call_id] = WorkerStream(worker, lambda: self._leave(call_id))
        return call

    async def close(self) -> None:
        self._stream.cancel()
        await asyncio.wait((self._reading, self._writing))

    def _leave(self, call_id: int) -> None:
        if self._calls.pop(call_id, None) is not None:  # else the worker has ended it
            self._outbox.put(wire.cancel_command(messages.CancelCall(call_id)))

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # broken: the reader learns why
            while True:
                await self._stream.write(wire.serve_request(await self._outbox.take(MAX_FRAME_COMMANDS)))

    async def _read(self) -> None:
        broken: grpc.aio.AioRpcError | None = None
        try:
            while (frame := await self._stream.read()) is not grpc.aio.EOF:
                for call_id, event in wire.events(frame):
                    self._deliver(call_id, event)
        except grpc.aio.AioRpcError as error:
            broken = error
        finally:
            self.is_broken = True
            self._stream.cancel()
            self._writing.cancel()
            for call in self._calls.values():
                peer = call.worker.info.label
                call.fail(_why(broken, peer) if broken else WorkerFailed(f"{peer} closed the stream"))
            self._calls.clear()

    def _deliver(self, call_id: int, event: messages.Event | None) -> None:
        call = self._calls.get(call_id)
        if call is None:
            return  # left already, and the worker will soon know
        match event:
            case Failed():
                del self._calls[call_id]
                call.fail(from_failed(event, call.worker.info.label))
            case CallEnded():
                del self._calls[call_id]
                call.fail(WorkerFailed(f"{call.worker.info.label} ended the call early"))
            case None:
                call.fail(WorkerFailed(f"{call.worker.info.label} speaks a newer version of Baton's protocol"))
            case _:
                call.deliver(event)


def _why(broken: grpc.aio.AioRpcError, peer: str) -> BatonError:
    """Return why a stream ended. That a worker refuses this router is no refusal of the client."""
    error = from_rpc_error(broken, peer)
    return WorkerFailed(f"{peer} does not serve this router: {error}") if isinstance(error, NotAMember) else error


class WorkerClient:
    """Opens calls to workers, over one stream an address.

    Args:
        keys: by which the router proves to workers who it is; None: the cluster has no secret.
        tls: what is shown to workers, and believed of them; None: plain text.
    """

    def __init__(self, keys: KeyFile | None = None, tls: Tls | None = None) -> None:
        self._keys = keys
        self._tls = tls
        self._channels: dict[str, tuple[str, grpc.aio.Channel, Certificates | None]] = {}
        self._links: dict[str, _Link] = {}

    def decode(
        self,
        worker: Worker,
        spec: SequenceSpec,
        *,
        await_kv: bool,
        source: PrefixSource | None = None,
        trace: Context,
    ) -> WorkerStream[Decoding]:
        return self._link(worker).start(worker, DecodeRequest(spec, await_kv, source), trace)

    def prefill(
        self, worker: Worker, spec: SequenceSpec, ticket: Ticket, *, source: PrefixSource | None, trace: Context
    ) -> WorkerStream[FirstToken | Transferred]:
        return self._link(worker).start(worker, PrefillRequest(spec, ticket, source), trace)

    def fetch(
        self, worker: Worker, spec: SequenceSpec, source: PrefixSource, *, trace: Context
    ) -> WorkerStream[Fetched]:
        return self._link(worker).start(worker, FetchRequest(spec, source), trace)

    async def read_log(self, worker: Worker, max_lines: int) -> tuple[str, ...]:
        """Return the latest lines that a worker has logged.

        Raises:
            BatonError: it does not answer within `LOG_TIMEOUT_S`, or is of a release without this call.
        """
        proof = member_metadata(self._keys, "/baton.v1.WorkerLog/ReadLog", worker.info.incarnation)
        stub: Any = worker_pb2_grpc.WorkerLogStub(self._channel(worker))
        asked = worker_pb2.ReadLogRequest(max_lines=max_lines)
        try:
            return tuple((await stub.ReadLog(asked, metadata=proof, timeout=LOG_TIMEOUT_S)).lines)
        except grpc.aio.AioRpcError as error:
            raise _why(error, worker.info.label) from error

    async def forget_past_incarnations(self, workers: Collection[Worker]) -> None:
        """Close the channels of workers that are listed at another address now; their calls have failed anyway."""
        addresses = {worker.info.id: worker.info.address for worker in workers}
        for address, (worker_id, _, _) in list(self._channels.items()):
            if addresses.get(worker_id, address) != address:
                await self._close(address)

    async def close(self) -> None:
        for address in list(self._channels):
            await self._close(address)

    def _link(self, worker: Worker) -> _Link:
        address = worker.info.address
        link = self._links.get(address)
        if link is None or link.is_broken:
            proof = member_metadata(self._keys, "/baton.v1.WorkerCalls/Serve", worker.info.incarnation)
            link = self._links[address] = _Link(self._channel(worker), proof)
        return link

    def _channel(self, worker: Worker) -> grpc.aio.Channel:
        """The channel to a worker: a new one where there is none yet, or the certificates have changed since."""
        address, shown = worker.info.address, self._tls.now() if self._tls else None
        known = self._channels.get(address)
        if known is None or known[2] is not shown:
            known = self._channels[address] = worker.info.id, channel(address, self._tls), shown
        return known[1]

    async def _close(self, address: str) -> None:
        _, open_channel, _ = self._channels.pop(address)
        if (link := self._links.pop(address, None)) is not None:
            await link.close()
        await open_channel.close()
