"""Calls from the router to its workers, multiplexed over one gRPC stream per worker. Failures name the worker.

`worker.calls` is the other end and documents the messages. The first call opens the stream. When it breaks, because the
worker died, hangs or closed it, all its calls fail at once, and the next call opens another one.
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
from baton.errors import BatonError, NotAMember, Overloaded, Unsupported, WorkerFailed
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
    SeenImage,
    SequenceSpec,
    Ticket,
    Transferred,
)
from baton.registered_adapters import CHECK_S, CheckedAdapter, check_facts
from baton.rpc import channel, from_rpc_error
from baton.rpc.errors import from_failed
from baton.rpc.member_auth import member_metadata
from baton.scores import TokenScores
from baton.tasks import Outbox
from baton.telemetry import tracing
from baton.tls import Certificates, Tls
from baton.trust import KeyFile
from baton.v1 import worker_pb2, worker_pb2_grpc

E = TypeVar("E")
LOG_TIMEOUT_S = 5.0
LOOK_TIMEOUT_S = 60.0
"""Time that the images of one request may take until workers have decoded them, in seconds."""
MAX_JOINED = 32
"""Maximum number of token messages that are joined into one. Detokenizing it must not block the event loop for long."""


class WorkerCallError(Exception):
    """A call to a worker failed with `error`. It never leaves the router."""

    def __init__(self, worker: Worker, error: BatonError) -> None:
        super().__init__(str(error))
        self.worker = worker
        self.error = error


class WorkerStream(Generic[E]):
    """Responses of one call to a worker. Leaving the context cancels the call, which frees everything on the worker.

    Unread responses are buffered here, so a slow reader does not block the other calls that share the gRPC stream.
    """

    def __init__(self, worker: Worker, leave: Callable[[], None]) -> None:
        self.worker = worker
        self._leave = leave
        self._events: list[E] = []
        self._failure: BatonError | None = None
        self._reader: asyncio.Future[None] | None = None
        self.on_arrival: Callable[[], object] | None = None
        """Callback when there is something to take."""

    def take(self) -> E | None:
        """Return the next response; None: there is none yet.

        Buffered token messages are joined. So a router that has fallen behind its workers writes fewer and larger
        chunks, and catches up.

        Raises:
            WorkerCallError: the worker refused, failed or ended the call, and all earlier responses have been taken.
        """
        if self._events:
            return _taken(self._events)
        # A failure is raised only when the buffer is empty: tokens that came before it still count.
        if self._failure is not None:
            raise WorkerCallError(self.worker, self._failure)
        return None

    async def read(self) -> E:
        """Wait for the next response and take it, for one reader at a time. Raises the errors of `take`."""
        while (event := self.take()) is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return event

    @property
    def has_message(self) -> bool:
        """True if `take` returns a response, or raises."""
        return bool(self._events) or self._failure is not None

    @property
    def num_unread(self) -> int:
        """Number of computed tokens that are buffered unread."""
        return sum(num_computed(event) for event in self._events if isinstance(event, NewTokens))

    def leave(self) -> None:
        """Cancel the call, which frees everything on the worker; idempotent."""
        self._leave()

    def deliver(self, event: E) -> None:
        """Add a response."""
        self._events.append(event)
        self._wake()

    def fail(self, failure: BatonError) -> None:
        """End the call: no further response arrives."""
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        # Several responses may arrive before the reader runs, and a reader may have been cancelled: its future is done.
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self.on_arrival is not None:
            self.on_arrival()

    async def __aenter__(self) -> WorkerStream[E]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()


def num_computed(new: NewTokens) -> int:
    """Return the number of tokens that a worker has computed since its last message."""
    return len(new.token_ids) + new.num_searched


def _taken(events: list[E]) -> E:
    """Remove and return the next response, or the joined tokens of several."""
    parts = list(itertools.takewhile(lambda event: isinstance(event, NewTokens), events[:MAX_JOINED]))
    if len(parts) <= 1:
        return events.pop(0)
    del events[: len(parts)]
    return cast("E", _joined(cast("list[NewTokens]", parts)))


def _joined(parts: Sequence[NewTokens]) -> NewTokens:
    """Join consecutive token messages into one."""
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
        """Start a call. It fails at once, and nothing is sent, if it has fields that the worker does not know."""
        call_id = next(self._call_ids)
        command = wire.start_command(messages.StartCall(call_id, request, dict(tracing.to_metadata(trace))))
        call: WorkerStream[Any] = WorkerStream(worker, lambda: self._leave(call_id))
        lacking = wire.fields_unknown_to(worker.info.known_fields)
        if lacking and (unknown := lacking & wire.fields_in(command)):
            sentence = f"{worker.info.label} is of an older release and does not know {wire.named(unknown)}"
            call.fail(Unsupported(sentence))
            return call
        self._outbox.put(command, fills_frame=bool(getattr(request, "images", ())))
        self._calls[call_id] = call
        return call

    async def close(self) -> None:
        self._stream.cancel()
        await asyncio.wait((self._reading, self._writing))

    def _leave(self, call_id: int) -> None:
        if self._calls.pop(call_id, None) is not None:  # else the worker has ended the call already
            self._outbox.put(wire.cancel_command(messages.CancelCall(call_id)))

    async def _write(self) -> None:
        # A write to a broken stream raises. `_read` gets the reason from gRPC and fails the calls with it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._stream.write(wire.serve_request(await self._outbox.take(wire.MAX_FRAME_COMMANDS)))

    async def _read(self) -> None:
        broken: grpc.aio.AioRpcError | None = None
        try:
            while (frame := await self._stream.read()) is not grpc.aio.EOF:
                for call_id, event in wire.events(frame):
                    self._deliver(call_id, event)
        except grpc.aio.AioRpcError as error:
            broken = error
        finally:
            # No await from here on, so no call can start on this stream in between: it would never get a response.
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
            return  # cancelled here; the worker has sent this before it received the cancellation
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
    """Return the error of a broken stream. A worker's refusal of this router becomes WorkerFailed.

    The client must not see it as a refusal of its own request.
    """
    error = from_rpc_error(broken, peer)
    return WorkerFailed(f"{peer} does not serve this router: {error}") if isinstance(error, NotAMember) else error


class WorkerClient:
    """Opens calls to workers, over one stream per address.

    Args:
        keys: authenticate the router to workers; None: the cluster has no secret.
        tls: the certificates to show to workers and to verify theirs with; None: plain text.
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
        images: tuple[bytes, ...] = (),
        trace: Context,
    ) -> WorkerStream[Decoding]:
        return self._link(worker).start(worker, DecodeRequest(spec, await_kv, source, images), trace)

    def prefill(
        self,
        worker: Worker,
        spec: SequenceSpec,
        ticket: Ticket,
        *,
        source: PrefixSource | None,
        images: tuple[bytes, ...] = (),
        trace: Context,
    ) -> WorkerStream[FirstToken | Transferred]:
        return self._link(worker).start(worker, PrefillRequest(spec, ticket, source, images), trace)

    def fetch(
        self, worker: Worker, spec: SequenceSpec, source: PrefixSource, *, trace: Context
    ) -> WorkerStream[Fetched]:
        return self._link(worker).start(worker, FetchRequest(spec, source), trace)

    async def look(
        self, worker: Worker, images: Sequence[bytes], cache_seed: bytes, timeout_s: float = LOOK_TIMEOUT_S
    ) -> tuple[SeenImage, ...]:
        """Return what a worker sees of images, whose pixels it then keeps for a while.

        Raises:
            WorkerCallError: the worker refuses an image, fails, or does not answer within `timeout_s`. In the last case
                the error is Overloaded: other images may have kept it busy, so this shows no failure of the worker.
        """
        proof = member_metadata(self._keys, "/baton.v1.WorkerCalls/Look", worker.info.incarnation)
        stub: Any = worker_pb2_grpc.WorkerCallsStub(self._channel(worker))
        try:
            answer = await stub.Look(wire.look_request(images, cache_seed), metadata=proof, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            why = _why(error, worker.info.label)
            if isinstance(why, WorkerFailed) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                why = Overloaded("the images were not decoded in time; send fewer or smaller ones, or try again later")
            raise WorkerCallError(worker, why) from error
        return wire.seen_images(answer)

    async def read_log(self, worker: Worker, max_lines: int) -> tuple[str, ...]:
        """Return the latest lines of a worker's log.

        Raises:
            BatonError: the worker does not answer within `LOG_TIMEOUT_S`, or its release lacks this call.
        """
        proof = member_metadata(self._keys, "/baton.v1.WorkerLog/ReadLog", worker.info.incarnation)
        stub: Any = worker_pb2_grpc.WorkerLogStub(self._channel(worker))
        asked = worker_pb2.ReadLogRequest(max_lines=max_lines)
        try:
            return tuple((await stub.ReadLog(asked, metadata=proof, timeout=LOG_TIMEOUT_S)).lines)
        except grpc.aio.AioRpcError as error:
            raise _why(error, worker.info.label) from error

    async def check_adapter(self, worker: Worker, path: str) -> CheckedAdapter:
        """Return what a worker finds in the folder of an adapter.

        Raises:
            InvalidRequest, Unsupported: the worker cannot apply it; the text says why.
            Overloaded: it is checking another one.
            WorkerFailed: it does not answer in time, or answers nonsense.
        """
        proof = member_metadata(self._keys, "/baton.v1.WorkerCalls/CheckAdapter", worker.info.incarnation)
        stub: Any = worker_pb2_grpc.WorkerCallsStub(self._channel(worker))
        asked = worker_pb2.CheckAdapterRequest(path=path)
        try:
            found = await stub.CheckAdapter(asked, metadata=proof, timeout=CHECK_S + LOG_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _why(error, worker.info.label) from error
        facts = CheckedAdapter(digest=found.digest, rank=found.rank, num_bytes=found.num_bytes)
        try:
            check_facts(facts)
        except ValueError as error:
            raise WorkerFailed(f"{worker.info.label} has checked the adapter, but {error}") from error
        return facts

    async def forget_past_incarnations(self, workers: Collection[Worker]) -> None:
        """Close the channels of workers that now have another address. Their calls have failed already."""
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
        """Return the channel to a worker; open one if there is none, or if the certificates have changed."""
        address, shown = worker.info.address, self._tls.now() if self._tls else None
        known = self._channels.get(address)
        if known is None or known[2] is not shown:
            known = self._channels[address] = worker.info.id, channel(address, self._tls), shown
        return known[1]

    async def _close(self, address: str) -> None:
        # Both entries go before the first await: a call that starts meanwhile opens a new channel.
        _, open_channel, _ = self._channels.pop(address)
        if (link := self._links.pop(address, None)) is not None:
            await link.close()
        await open_channel.close()
