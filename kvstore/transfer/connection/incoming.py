"""The receiving end of one pair: the stream of a sending worker's rank, its link, and the lane that owns it.

Ends as a whole: when the stream breaks, the link fails or the peer falls silent, every transfer on it fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from baton import wire
from baton.errors import TransferCorrupted, TransferError, TransferRefused
from baton.messages import (
    Abort,
    Commit,
    FromReceiver,
    FromSender,
    Hello,
    LinkReady,
    Offer,
    Ping,
    Rendezvous,
    SessionFailed,
    Welcome,
)
from kvstore.transfer.pipeline.driven import post
from kvstore.transfer.pipeline.receive_loop import ChunkWriter, ReceiveLoop
from kvstore.transfer.pipeline.thread import TransportThread, use_own_stream
from kvstore.transfer.protocol.reasons import to_reason
from kvstore.transfer.transport.base import ReceivingTransport
from kvstore.transfer.transport.gloo import RendezvousStore
from kvstore.transfer.transport.select import open_receiver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import torch

    from baton.config import TransferConfig
    from kvstore.transfer.transport.staging import StagingPool

logger = logging.getLogger(__name__)


class Desk(Protocol):
    """Who decides about the transfers of a session: `KvReceiver`."""

    def on_offer(self, session: IncomingConnection, offer: Offer) -> None: ...

    def on_commit(self, session: IncomingConnection, commit: Commit) -> None: ...

    def on_abort(self, session: IncomingConnection, abort: Abort) -> None: ...

    def on_ping(self, session: IncomingConnection) -> None: ...

    def on_lost(self, session: IncomingConnection, error: TransferError) -> None: ...


class IncomingConnection:
    """For one event loop.

    Attributes:
        id: unique in this process; the pair's epoch, which every header on the link carries.
        hello: what the peer said of itself.
        inbounds: transfers that may send on the link now, by generation. Written on the loop, read by the lane.
        failure: why this side ended it; None while it is good, or when the peer left.
        lane: ends soon after the session: at the link's timeout, to open or to operate, at the latest.
    """

    def __init__(
        self,
        session_id: int,
        hello: Hello,
        transport_kind: str,
        incarnation: str,
        desk: Desk,
        config: TransferConfig,
        host: str,
        device: torch.device,
        staging: StagingPool,
    ) -> None:
        self.id = session_id
        self.hello = hello
        self.inbounds: dict[int, ChunkWriter] = {}
        self.failure: TransferError | None = None
        self._desk = desk
        self._config = config
        self._host = host
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._out: asyncio.Queue[FromReceiver | None] = asyncio.Queue()
        self._ended = False
        self._store = RendezvousStore(
            lambda key, value: post(self._loop, self.tell, Rendezvous(key, value)), config.open_timeout_s
        )
        self._inflow = ReceiveLoop(session_id, self.inbounds.get, config.slot_bytes, slot_wait_s=config.op_timeout_s)
        self.tell(Welcome(incarnation, transport_kind, session_id))
        self.lane = TransportThread(
            f"kv-recv-{hello.worker_id}", partial(self._open_link, transport_kind, staging), self._inflow
        )
        self.lane.opened.add_done_callback(self._link_opened)
        self.lane.ended.add_done_callback(self._link_ended)

    @property
    def num_fenced(self) -> int:
        return self._inflow.num_fenced

    async def serve(self, requests: AsyncIterator[FromSender], context: Any) -> None:
        """Until the sender ends the stream. Whatever happened, the session is over when this returns.

        A failure on this side is said, and the sender hangs up: gRPC hides the status, and what was said before it,
        from a client that is writing while the server ends the stream.
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
            self.end(TransferError(f"worker {self.hello.worker_id} is gone"))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def tell(self, message: FromReceiver) -> None:
        self._out.put_nowait(message)

    def break_off(self, error: TransferError) -> None:
        """Ends the session from here."""
        if not self._ended:
            self.failure = error
            self.tell(SessionFailed(to_reason(error)))
            self.end(error)

    def end(self, error: TransferError) -> None:
        """Fails the session's transfers and lets go of its link. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self.inbounds.clear()
        self._desk.on_lost(self, error)
        self._out.put_nowait(None)
        self._store.close()
        self.lane.stop()

    async def _failing_as_a_whole(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except TransferRefused as error:
            self.break_off(error)
        except Exception as bug:
            logger.exception("the KV session with worker %s failed", self.hello.worker_id)
            self.break_off(TransferError(f"the session failed: {bug!r}"))

    async def _read(self, requests: AsyncIterator[FromSender]) -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # this server stops, and the stream with it
            async for message in requests:
                self._heard_s = self._loop.time()
                if not self._ended:  # an offer taken after the end would wait for its lease
                    self._on(message)

    async def _write(self, context: Any) -> None:
        with contextlib.suppress(grpc.aio.InternalError):  # the peer is gone, and the stream's end says so
            while (message := await self._out.get()) is not None:
                await context.write(wire.session_response(message))

    async def _beat(self) -> None:
        """Says that this side lives, and notices when the other one is silent."""
        while not self._ended:
            await asyncio.sleep(min(self._config.ping_s, self._config.op_timeout_s / 4))
            self.tell(Ping())
            if self._loop.time() - self._heard_s > self._config.op_timeout_s:
                silent = f"worker {self.hello.worker_id} has been silent for {self._config.op_timeout_s:g} s"
                self.break_off(TransferError(silent))

    def _on(self, message: FromSender) -> None:
        match message:
            case Rendezvous():
                self._store.deliver(message.key, message.value)
            case Offer():
                self._desk.on_offer(self, message)
            case Commit():
                self._desk.on_commit(self, message)
            case Abort():
                self._desk.on_abort(self, message)
            case Ping():
                self._desk.on_ping(self)
            case Hello():
                self.break_off(TransferRefused("a session has one Hello"))

    def _open_link(self, kind: str, staging: StagingPool) -> ReceivingTransport:
        config = self._config
        use_own_stream(self._device)
        timeouts = (config.open_timeout_s, config.op_timeout_s)
        return open_receiver(kind, self._store, self._host, staging, config.window, *timeouts)

    def _link_opened(self, opened: asyncio.Future[None]) -> None:
        if not opened.cancelled() and opened.exception() is None:
            self.tell(LinkReady())

    def _link_ended(self, ended: asyncio.Future[TransferError | None]) -> None:
        error = ended.result() or TransferError("the link was closed")
        if isinstance(error, TransferCorrupted):
            logger.warning("the link from worker %s cannot be trusted: %s", self.hello.worker_id, error)
        self.break_off(error)
