"""Sending end of a connection: from a rank of this worker to a rank of one incarnation of another.

A connection is a control stream (gRPC), a transport with the thread that owns it, and the state machine of its offers.
It opens when it is created and is never repaired: when any part of it fails, it fails as a whole with every transfer on
it, and a new transfer opens a new connection under a new epoch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.addresses import host_of
from baton.errors import BatonError, TransferError, TransferRefused, WorkerFailed, transfer_error_of
from baton.messages import (
    AbortAck,
    CommitAck,
    FromReceiver,
    FromSender,
    Grant,
    Hello,
    Nack,
    Offer,
    Ping,
    Rendezvous,
    SessionFailed,
    Ticket,
    TransportReady,
    Welcome,
)
from baton.tasks import cancel_and_wait
from kvstore.transfer.connection.control_stream import ControlStream, Peer, open_channel, open_session
from kvstore.transfer.pipeline.driven import DrivenMachine
from kvstore.transfer.pipeline.send_loop import ChunkQueue, SendLoop
from kvstore.transfer.pipeline.thread import TransportThread
from kvstore.transfer.protocol.machine import Send, TransferCommitted, TransferFailed
from kvstore.transfer.protocol.send_state import Granted, SendInstruction, SendState, Unpin
from kvstore.transfer.transport.base import SendingTransport
from kvstore.transfer.transport.select import LocalRank, open_sender, slot_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.config import TransferConfig
    from baton.tls import Tls
    from kvstore.transfer.protocol.plan import TransferPlan

logger = logging.getLogger(__name__)
REASON_WAIT_S = 0.1
"""Seconds that the control stream has to report the reason after a transport breaks."""


class TransferPart:
    """The part of a transfer that one connection carries.

    Attributes:
        settled: done when the receiver has everything; fails with the reason when it never will.
        unpinned: done when this process no longer reads the blocks, and will not do so again.
    """

    def __init__(self, ticket: Ticket, plan: TransferPlan) -> None:
        loop = asyncio.get_running_loop()
        self.ticket = ticket
        self.plan = plan
        self.settled: asyncio.Future[None] = loop.create_future()
        self.unpinned: asyncio.Future[None] = loop.create_future()
        self.settled.add_done_callback(_retrieve)
        self.granted = False
        self.finished = False
        self.first_token: int | None = None
        self.queue: ChunkQueue | None = None
        """Chunks, once the blocks are attached."""
        self._connection: OutgoingConnection | None = None

    def offer_on(self, connection: OutgoingConnection) -> None:
        """Offer the transfer on an open connection. A transfer that was aborted in the meantime is not affected."""
        if self.settled.done():
            return
        if connection.failure is not None:
            self.fail(connection.failure)
            return
        connection.offer(self)
        # Set only now: if the ticket is in use already, `offer` raises, and the other transfer is not this one's.
        self._connection = connection

    def attach(self, queue: ChunkQueue) -> None:
        """Make the blocks readable, as far as the queue reports them computed."""
        self.queue = queue
        if self._connection is not None:
            self._connection.attached(self)

    def finish(self, first_token: int | None) -> None:
        """Record that everything is computed: the Commit follows the last chunk."""
        self.finished = True
        self.first_token = first_token
        if self.queue is not None:
            self.queue.finish()
        if self._connection is not None:
            self._connection.finish(self)

    def give_up(self, error: BatonError) -> None:
        """End the transfer early. A transfer that has ended is not affected."""
        if self._connection is not None:
            self._connection.abort(self, error)
        else:
            self.fail(error)

    def fail(self, error: BatonError) -> None:
        """End a transfer that was never offered."""
        if not self.settled.done():
            self.settled.set_exception(error)
        if not self.unpinned.done():
            self.unpinned.set_result(None)


class OutgoingConnection:
    """Sending end of a connection. For one event loop.

    Attributes:
        opened: done once transfers can be offered; fails with TransferError if the two sides could not build the
            transport or are incompatible, with WorkerFailed if the peer is gone.
        failure: the error that ended the connection; None while it is good.
        transport_kind: the kind that the two sides chose; "" before they have.
        used_s: time at which a transfer last ended on it, on the monotonic clock.
        closed: the connection's task; done once stream, transport and thread are gone.
    """

    def __init__(
        self, peer: Peer, hello: Hello, config: TransferConfig, local: LocalRank, tls: Tls | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.peer = peer
        self.failure: BatonError | None = None
        self.transport_kind = ""
        self.used_s = time.monotonic()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.opened.add_done_callback(_retrieve)
        self._hello = hello
        self._config = config
        self._local = local
        self._num_sides_open = 0
        self._transport_is_gone = False
        self._stream: ControlStream[FromSender] = ControlStream(peer.worker_id, config, time.monotonic())
        self._transfers: dict[int, TransferPart] = {}
        self._state = SendState(config.resend_s, config.op_timeout_s)
        self._machine: DrivenMachine[SendState, SendInstruction] = DrivenMachine(self._state, self._on_instruction)
        self._send_loop: SendLoop | None = None
        """None until the peer's Welcome has named the epoch."""
        self._thread: TransportThread[SendingTransport] | None = None
        self._channel = open_channel(peer.address, tls)
        self._call = open_session(self._channel, peer, self._requests(), local.keys)
        self.closed = loop.create_task(self._run())

    # -- transfers ---------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if it takes no new transfers."""
        return self.failure is not None or self._transport_is_gone

    @property
    def is_idle(self) -> bool:
        """True if no transfer is on it."""
        return not self._transfers

    @property
    def num_fenced(self) -> int:
        """Number of dropped answers about unknown or past transfers."""
        return self._state.num_fenced

    @property
    def num_resent(self) -> int:
        """Number of messages sent again because no answer came."""
        return self._state.num_resent

    def offer(self, transfer: TransferPart) -> None:
        """Put a transfer on this connection.

        Raises:
            TransferError: another transfer uses the same ticket.
        """
        ticket, plan = transfer.ticket, transfer.plan
        size = slot_bytes(self.transport_kind, self._config, self._local.device)
        if plan.options.chunk_bytes > size:  # planned for another connection, which has ended since
            raise TransferError(f"chunks of {plan.options.chunk_bytes} bytes do not fit the slots of {size} bytes here")
        offer = Offer(
            transfer_id=ticket.transfer_id,
            generation=ticket.generation,
            plan_digest=plan.digest(self._config.checksum),
            num_chunks=len(plan.chunks),
            wire_dtype=plan.options.wire_dtype,
            num_tokens=plan.num_tokens,
            chunk_bytes=plan.options.chunk_bytes,
        )
        if ticket.generation in self._transfers:
            raise TransferError(f"the ticket of transfer {ticket.transfer_id} is in use already")
        self._transfers[ticket.generation] = transfer
        self._machine.apply(lambda state: state.offer(offer, time.monotonic()))
        if transfer.finished:
            self.finish(transfer)

    def attached(self, transfer: TransferPart) -> None:
        """Send the chunks of a granted transfer, now that its blocks may be read."""
        is_live = self._transfers.get(transfer.ticket.generation) is transfer and not transfer.settled.done()
        if is_live and transfer.granted and transfer.queue is not None and self._send_loop is not None:
            self._send_loop.add(transfer.queue)

    def finish(self, transfer: TransferPart) -> None:
        """Record that everything is computed: the Commit follows the last chunk."""
        now = time.monotonic()
        self._machine.apply(lambda state: state.finish(transfer.ticket.generation, transfer.first_token, now))

    def abort(self, transfer: TransferPart, error: BatonError) -> None:
        """Abort a transfer."""
        self._machine.apply(lambda state: state.abort(transfer.ticket.generation, error, time.monotonic()))

    def lose(self, error: BatonError) -> None:
        """End the connection and all its transfers. Idempotent."""
        if self.failure is not None:
            return
        self.failure = error
        if not self.opened.done():
            self.opened.set_exception(error)
        if self._thread is not None:
            self._thread.stop()
        self._machine.apply(lambda state: state.lost(error))
        self._stream.close()
        self._call.cancel()

    def _on_instruction(self, instruction: SendInstruction) -> None:
        if isinstance(instruction, Send):
            self._stream.send(instruction.message)
            return
        transfer = self._transfers.get(instruction.generation)
        if transfer is None:
            return
        match instruction:
            case Granted():
                transfer.granted = True
                self.attached(transfer)
            case TransferCommitted():
                transfer.settled.set_result(None)
            case TransferFailed():
                if transfer.queue is not None and self._send_loop is not None:
                    self._send_loop.drop(transfer.queue)
                transfer.settled.set_exception(instruction.error)
            case Unpin():
                del self._transfers[instruction.generation]
                self.used_s = time.monotonic()
                transfer.unpinned.set_result(None)

    # -- the control stream ------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._stream.send(self._hello)
        beat = asyncio.create_task(self._beat())
        beat.add_done_callback(lambda _: self.lose(TransferError("the pings of the KV connection ended")))
        try:
            async with asyncio.timeout(self._config.open_timeout_s):
                welcome = await self._read()
            self._join(welcome)
            while (message := await self._read()) is not None:
                self._on_message(message)
            self.lose(WorkerFailed(f"worker {self.peer.worker_id} closed the KV connection"))
        except TimeoutError:
            self.lose(WorkerFailed(f"worker {self.peer.worker_id} did not answer at its KV address"))
        except TransferError as error:
            self.lose(error)
        except grpc.aio.AioRpcError as error:
            self.lose(WorkerFailed(f"worker {self.peer.worker_id} is gone: {error.details() or error.code().name}"))
        except asyncio.CancelledError:  # by the call's own cancel, in `lose`
            if self.failure is None:
                raise
        finally:
            self.lose(WorkerFailed("the KV connection was cancelled"))
            await cancel_and_wait([beat])
            if not beat.cancelled() and (bug := beat.exception()) is not None:
                logger.error("the KV connection with worker %s failed", self.peer.worker_id, exc_info=bug)
            await self._channel.close()
            if self._thread is not None:
                await self._thread.join(self._config.op_timeout_s + 1)

    async def _beat(self) -> None:
        """Send pings, resend unanswered messages, and end the connection when the peer is silent."""
        period_s = min(self._stream.ping_s, self._config.resend_s)
        while self.failure is None:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            silence = self._stream.beat(now, period_s)
            self._machine.apply(lambda state, now=now: state.tick(now))  # type: ignore[misc]
            if silence:
                self.lose(WorkerFailed(silence))

    async def _requests(self) -> AsyncIterator[Any]:
        async for message in self._stream.outgoing():
            yield wire.session_request(message)

    async def _read(self) -> FromReceiver | None:
        """Return the next message of a known kind; None at the end."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            self._stream.heard(time.monotonic())
            if (known := wire.session_response_from_pb(message)) is not None:
                return known
        return None

    def _on_message(self, message: FromReceiver) -> None:
        now = time.monotonic()
        match message:
            case Rendezvous():
                self._stream.rendezvous.deliver(message.key, message.value)
            case Grant():
                self._machine.apply(lambda state: state.on_grant(message.transfer_id, message.generation, now))
            case CommitAck():
                self._machine.apply(lambda state: state.on_commit_ack(message.transfer_id, message.generation))
            case Nack():
                self._machine.apply(
                    lambda state: state.on_nack(message.transfer_id, message.generation, message.reason)
                )
            case AbortAck():
                self._machine.apply(lambda state: state.on_abort_ack(message.transfer_id, message.generation))
            case TransportReady():
                self._side_opened()
            case Ping():
                pass
            case SessionFailed():
                self.lose(transfer_error_of(message.reason))
            case Welcome():
                self.lose(TransferError(f"worker {self.peer.worker_id} sent a second Welcome"))

    # -- the transport -----------------------------------------------------------------------------------------------

    def _join(self, welcome: FromReceiver | None) -> None:
        """Start the transport that the receiver chose."""
        peer = self.peer
        if isinstance(welcome, SessionFailed):
            raise transfer_error_of(welcome.reason)
        if not isinstance(welcome, Welcome):
            raise TransferError(f"worker {peer.worker_id} did not start with Welcome")
        if welcome.incarnation != peer.incarnation:
            raise TransferRefused(
                f"the ticket is from incarnation {peer.incarnation} of worker {peer.worker_id}, "
                f"and {welcome.incarnation} answers at its address"
            )
        if welcome.transport not in self._hello.transports:
            chosen, offered = f"a {welcome.transport!r} transport", ", ".join(self._hello.transports)
            raise TransferRefused(f"worker {peer.worker_id} chose {chosen}, this worker offered {offered}")
        self.transport_kind = welcome.transport
        self._send_loop = SendLoop(welcome.pair_epoch, self._machine, heartbeat_s=self._config.op_timeout_s / 4)
        self._thread = TransportThread(
            f"kv-send-{peer.worker_id}",
            partial(self._open_transport, welcome.transport),
            self._send_loop,
            self._local.device,
        )
        self._thread.watch(self._on_transport)

    def _open_transport(self, kind: str) -> SendingTransport:
        end = self._local.end(kind, self._stream.rendezvous, self._config, host_of(self.peer.address))
        transport = open_sender(kind, end)
        if not self._local.testing.faults:
            return transport
        from kvstore.transfer.testing import faulty  # only tests need it

        return faulty(transport, self._local.testing, self._local.gpu)

    def _on_transport(self, error: TransferError | None) -> None:
        if error is None:
            self._side_opened()
            return
        # A transport only knows that it broke; the control stream often reports the reason a moment later.
        self._transport_is_gone = True
        asyncio.get_running_loop().call_later(REASON_WAIT_S, self.lose, error)

    def _side_opened(self) -> None:
        """Open the connection once both sides have the transport."""
        self._num_sides_open += 1
        if self._num_sides_open == 2 and not self.opened.done():
            self.opened.set_result(None)


def _retrieve(future: asyncio.Future[None]) -> None:
    """Retrieve a failure that no task awaits, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
