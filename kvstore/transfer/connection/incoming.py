"""Receiving end of a connection: from a rank of another worker to a rank of this one.

A connection is a control stream (gRPC) and a transport with the thread that owns it. When the stream ends, the
transport fails or the peer falls silent, every transfer on it fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.errors import InvalidRequest, TransferCorrupted, TransferError, TransferRefused, text_of
from baton.messages import (
    Abort,
    Commit,
    FromReceiver,
    FromSender,
    Hello,
    Offer,
    Ping,
    Rendezvous,
    SessionFailed,
    TransportReady,
    Welcome,
)
from baton.tasks import cancel_and_wait
from kvstore.transfer.connection.control_stream import ControlStream
from kvstore.transfer.connection.reservations import Reservations, SourceConnection
from kvstore.transfer.pipeline.receive_loop import ReceiveLoop
from kvstore.transfer.pipeline.thread import TransportThread
from kvstore.transfer.transport.base import ReceivingTransport
from kvstore.transfer.transport.select import LocalRank, open_receiver, slot_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """A sender that has opened a control stream."""

    hello: Hello
    host: str
    """IP address of the stream's client; the transport connects to no other."""


class IncomingConnection:
    """Receiving end of a connection. For one event loop.

    Attributes:
        number: unique in this process; the connection's epoch, which every header on the transport carries.
        failure: why this side ended it; None while it is good, or if the peer left.
        transport_kind: the kind that this side chose.
        is_open: whether this side has opened the transport.
        thread: the transport's thread. It ends soon after the connection: at the latest at the transport's timeout to
            open or to operate.
    """

    def __init__(
        self, number: int, caller: Caller, transport_kind: str, local: LocalRank, reservations: Reservations
    ) -> None:
        hello = caller.hello
        self.number = number
        self.failure: TransferError | None = None
        self.transport_kind = transport_kind
        self.is_open = False
        self._config = config = reservations.config
        self._peer_id = hello.worker_id
        self._local = local
        self._peer_host = caller.host
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._stream: ControlStream[FromReceiver] = ControlStream(hello.worker_id, config, self._loop.time())
        size = slot_bytes(transport_kind, config, local.device)
        self._source = SourceConnection(number, hello, self._stream, size)
        self._reservations = reservations
        self._reservations.attach(self._source)
        self._receive_loop = ReceiveLoop(number, self._source.writers, size, slot_wait_s=config.op_timeout_s)
        self._stream.send(Welcome(reservations.worker.incarnation, transport_kind, number))
        self.thread: TransportThread[ReceivingTransport] = TransportThread(
            f"kv-recv-{hello.worker_id}",
            partial(self._open_transport, transport_kind),
            self._receive_loop,
            local.device,
        )
        self.thread.watch(self._on_transport)

    @property
    def num_fenced(self) -> int:
        """Number of dropped chunks of transfers that have ended."""
        return self._receive_loop.num_fenced

    async def serve(self, requests: AsyncIterator[FromSender], context: Any) -> None:
        """Serve the control stream until the sender ends it; then the connection has ended in any case.

        A failure on this side is sent as a message, and the sender hangs up. If the server ended the stream while the
        client writes, gRPC would hide the status and the messages before it.

        Raises:
            InvalidRequest: the sender sent something other than a message.
        """
        reading, writing, _ = tasks = [
            asyncio.create_task(self._failing_as_a_whole(work))
            for work in (partial(self._read, requests), partial(self._write, context), self._beat)
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                await asyncio.wait((reading, writing), timeout=self._config.op_timeout_s)
        finally:
            self._end(TransferError(f"worker {self._peer_id} is gone"))
            self._reservations.detach(self._source)
            await cancel_and_wait(tasks)
        if not reading.cancelled():
            reading.result()

    def break_off(self, error: TransferError) -> None:
        """End the connection from this side, and send the reason to the peer. Idempotent."""
        if not self._ended:
            self.failure = error
            self._stream.send(SessionFailed(text_of(error)))
            self._end(error)

    def _end(self, error: TransferError) -> None:
        """Fail the connection's transfers and release its transport. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._reservations.lost(self._source, error)
        self._stream.close()
        self.thread.stop()

    # -- the control stream ------------------------------------------------------------------------------------------

    async def _failing_as_a_whole(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except TransferRefused as error:
            self.break_off(error)
        except InvalidRequest as error:
            self.break_off(TransferRefused(str(error)))
            raise
        except Exception as bug:
            logger.exception("the KV connection with worker %s failed", self._peer_id)
            self.break_off(TransferError(f"the session failed: {bug!r}"))

    async def _read(self, requests: AsyncIterator[FromSender]) -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # this server stops, and the stream with it
            async for message in requests:
                self._stream.heard(self._loop.time())
                if not self._ended:  # an offer accepted after the end would wait until its lease expires
                    self._on_message(message)

    async def _write(self, context: Any) -> None:
        with contextlib.suppress(grpc.aio.InternalError):  # the peer is gone; `_read` ends with the stream
            async for message in self._stream.outgoing():
                await context.write(wire.session_response(message))

    async def _beat(self) -> None:
        """Send pings, and end the connection when the peer is silent."""
        period_s = self._stream.ping_s
        while not self._ended:
            await asyncio.sleep(period_s)
            if silence := self._stream.beat(self._loop.time(), period_s):
                self.break_off(TransferError(silence))

    def _on_message(self, message: FromSender) -> None:
        match message:
            case Rendezvous():
                self._stream.rendezvous.deliver(message.key, message.value)
            case Offer():
                self._reservations.offer(self._source, message)
            case Commit():
                self._reservations.commit(self._source, message)
            case Abort():
                self._reservations.abort(self._source, message)
            case Ping():
                self._reservations.renew(self._source)
            case Hello():
                self.break_off(TransferRefused("duplicate Hello"))

    # -- the transport -----------------------------------------------------------------------------------------------

    def _open_transport(self, kind: str) -> ReceivingTransport:
        end = self._local.end(kind, self._stream.rendezvous, self._config, self._peer_host)
        return open_receiver(kind, end)

    def _on_transport(self, error: TransferError | None) -> None:
        if error is None:
            self.is_open = True
            self._stream.send(TransportReady())
            return
        if isinstance(error, TransferCorrupted):
            logger.warning("closing the corrupted transport from worker %s: %s", self._peer_id, error)
        self.break_off(error)
