"""The sending end of one pair: a rank of this worker, and a rank of one incarnation of another.

A pair is a control session (gRPC), a link with the lane that owns it, and the book of what was offered. It opens when
it is made and is never mended: when any part of it fails, it fails as a whole with every transfer on it, and a new
transfer makes a new pair under a new epoch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.errors import BatonError, TransferError, TransferRefused, WorkerFailed
from baton.messages import (
    AbortAck,
    CommitAck,
    FromReceiver,
    FromSender,
    Grant,
    Hello,
    LinkReady,
    Nack,
    Offer,
    Ping,
    Rendezvous,
    SessionFailed,
    Ticket,
    Welcome,
)
from baton.v1 import kv_pb2_grpc
from kvstore.transfer.connection.channel import open_channel
from kvstore.transfer.pipeline.driven import DrivenMachine, post
from kvstore.transfer.pipeline.send_loop import ChunkQueue, SendLoop
from kvstore.transfer.pipeline.thread import TransportThread, use_own_stream
from kvstore.transfer.protocol.reasons import from_reason
from kvstore.transfer.protocol.send_state import Committed, Failed, Granted, Instruction, SendState, Tell, Unpin
from kvstore.transfer.transport.base import SendingTransport
from kvstore.transfer.transport.faults import FaultInjector, Faults
from kvstore.transfer.transport.faulty import FaultyTransport
from kvstore.transfer.transport.gloo import RendezvousStore
from kvstore.transfer.transport.select import StagingPools, open_sender

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import torch

    from baton.config import TransferConfig
    from kvstore.transfer.protocol.plan import Plan
    from kvstore.transfer.transport.staging import StagingPool

logger = logging.getLogger(__name__)
SESSION_SAYS_WHY_S = 0.1


class TransferPart:
    """One transfer's part on one pair.

    Attributes:
        settled: done when the receiver has everything; fails with the reason when it never will.
        unpinned: done when nothing here reads the blocks any more, and nothing will.
    """

    def __init__(self, ticket: Ticket, plan: Plan) -> None:
        loop = asyncio.get_running_loop()
        self.ticket = ticket
        self.plan = plan
        self.settled: asyncio.Future[None] = loop.create_future()
        self.unpinned: asyncio.Future[None] = loop.create_future()
        self.settled.add_done_callback(_seen)
        self.granted = False
        self.finished = False
        self.first_token: int | None = None
        self.outbound: ChunkQueue | None = None
        """Once its blocks are attached."""
        self._pair: OutgoingConnection | None = None

    def offer_on(self, pair: OutgoingConnection) -> None:
        """`pair` is open. No effect on a transfer that was given up meanwhile."""
        if self.settled.done():
            return
        if pair.failure is not None:
            self.fail(pair.failure)
            return
        pair.offer(self)
        self._pair = pair  # not before: of a ticket that is in use already, the other transfer's is not this one's

    def attach(self, outbound: ChunkQueue) -> None:
        self.outbound = outbound
        if self._pair is not None:
            self._pair.attached(self)

    def finish(self, first_token: int | None) -> None:
        """Everything is computed: the commit follows the last chunk."""
        self.finished = True
        self.first_token = first_token
        if self.outbound is not None:
            self.outbound.finish()
        if self._pair is not None:
            self._pair.finish(self)

    def give_up(self, error: BatonError) -> None:
        """No effect on a transfer that has ended."""
        if self._pair is not None:
            self._pair.abort(self, error)
        else:
            self.fail(error)

    def fail(self, error: BatonError) -> None:
        """It was never offered."""
        if not self.settled.done():
            self.settled.set_exception(error)
        if not self.unpinned.done():
            self.unpinned.set_result(None)


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A receiving rank."""

    worker_id: str
    incarnation: str
    address: str
    rank: int


class OutgoingConnection:
    """For one event loop.

    Attributes:
        opened: done once transfers can be offered; fails with TransferError where the two sides could not make the link
            or do not fit, with WorkerFailed where the peer is gone.
        failure: why the pair is over; None while it is good.
        transport_kind: what the two sides chose; "" before they have.
        closed: its task; done once stream, link and thread are gone.
    """

    def __init__(
        self,
        peer: Peer,
        hello: Hello,
        config: TransferConfig,
        host: str,
        device: torch.device,
        staging: StagingPools,
        faults: Faults,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.peer = peer
        self.failure: BatonError | None = None
        self.transport_kind = ""
        self.used_s = time.monotonic()
        """When it was last needed."""
        self.opened: asyncio.Future[None] = loop.create_future()
        self.opened.add_done_callback(_seen)
        self._hello = hello
        self._config = config
        self._host = host
        self._device = device
        self._staging = staging
        self._faults = faults
        self._epoch = 0
        self._num_sides_open = 0
        self._link_is_gone = False
        self._heard_s = time.monotonic()
        self._out: asyncio.Queue[FromSender | None] = asyncio.Queue()
        self._transfers: dict[int, TransferPart] = {}
        self._offers = SendState(config.resend_s, config.op_timeout_s)
        self._book: DrivenMachine[SendState, Instruction] = DrivenMachine(self._offers, self._carry_out)
        self._outflow = SendLoop(lambda: self._epoch, self._book, FaultInjector(faults), config.op_timeout_s / 4)
        self._lane: TransportThread[SendingTransport] | None = None
        self._store = RendezvousStore(
            lambda key, value: post(loop, self._out.put_nowait, Rendezvous(key, value)), config.open_timeout_s
        )
        self._channel = open_channel(peer.address)
        stub: Any = kv_pb2_grpc.KvControlStub(self._channel)
        self._call = stub.Session(self._requests())
        self.closed = loop.create_task(self._run())

    # -- transfers ---------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Nothing new is to be put on it."""
        return self.failure is not None or self._link_is_gone

    @property
    def is_idle(self) -> bool:
        return not self._transfers

    @property
    def num_fenced(self) -> int:
        return self._offers.num_fenced

    @property
    def num_resent(self) -> int:
        return self._offers.num_resent

    def offer(self, transfer: TransferPart) -> None:
        """Puts a transfer on this pair."""
        ticket, plan = transfer.ticket, transfer.plan
        digest = plan.digest(self._config.checksum)
        dtype = plan.options.wire_dtype
        offer = Offer(
            transfer_id=ticket.transfer_id,
            generation=ticket.generation,
            plan_digest=digest,
            num_chunks=len(plan.chunks),
            wire_dtype=dtype,
            num_tokens=plan.num_tokens,
            chunk_bytes=plan.options.chunk_bytes,
        )
        if ticket.generation in self._transfers:
            raise TransferError(f"the ticket of transfer {ticket.transfer_id} is in use already")
        self._transfers[ticket.generation] = transfer
        self._book.apply(lambda offers: offers.offer(offer, time.monotonic()))
        if transfer.finished:
            self.finish(transfer)

    def attached(self, transfer: TransferPart) -> None:
        """Its blocks may be read now."""
        is_live = self._transfers.get(transfer.ticket.generation) is transfer and not transfer.settled.done()
        if is_live and transfer.granted and transfer.outbound is not None:
            self._outflow.add(transfer.outbound)

    def finish(self, transfer: TransferPart) -> None:
        """Everything is computed: the commit follows the last chunk."""
        now = time.monotonic()
        self._book.apply(lambda offers: offers.finish(transfer.ticket.generation, transfer.first_token, now))

    def abort(self, transfer: TransferPart, error: BatonError) -> None:
        self._book.apply(lambda offers: offers.abort(transfer.ticket.generation, error, time.monotonic()))

    def lose(self, error: BatonError) -> None:
        """Ends the pair and all its transfers. Idempotent."""
        if self.failure is not None:
            return
        self.failure = error
        if not self.opened.done():
            self.opened.set_exception(error)
        self._store.close()
        if self._lane is not None:
            self._lane.stop()
        self._book.apply(lambda offers: offers.lost(error))
        self._out.put_nowait(None)
        self._call.cancel()

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Tell):
            self._out.put_nowait(instruction.message)
            return
        transfer = self._transfers.get(instruction.generation)
        if transfer is None:
            return
        match instruction:
            case Granted():
                transfer.granted = True
                self.attached(transfer)
            case Committed():
                transfer.settled.set_result(None)
            case Failed():
                if transfer.outbound is not None:
                    self._outflow.drop(transfer.outbound)
                transfer.settled.set_exception(instruction.error)
            case Unpin():
                del self._transfers[instruction.generation]
                self.used_s = time.monotonic()
                transfer.unpinned.set_result(None)

    # -- the session -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._out.put_nowait(self._hello)
        beat = asyncio.create_task(self._beat())
        beat.add_done_callback(lambda _: self.lose(TransferError("the session's heart stopped")))
        try:
            async with asyncio.timeout(self._config.open_timeout_s):
                welcome = await self._read()
            self._join(welcome)
            while (message := await self._read()) is not None:
                self._on(message)
            self.lose(WorkerFailed(f"worker {self.peer.worker_id} closed the KV session"))
        except TimeoutError:
            self.lose(WorkerFailed(f"worker {self.peer.worker_id} did not answer at its KV address"))
        except TransferError as error:
            self.lose(error)
        except grpc.aio.AioRpcError as error:
            text = error.details() or error.code().name
            self.lose(WorkerFailed(f"worker {self.peer.worker_id} is gone: {text}"))
        except asyncio.CancelledError:  # by the call's own cancel, in `lose`
            if self.failure is None:
                raise
        finally:
            self.lose(WorkerFailed("the KV session was cancelled"))
            beat.cancel()
            await asyncio.wait({beat})
            if not beat.cancelled() and (bug := beat.exception()) is not None:
                logger.error("the KV session with worker %s failed", self.peer.worker_id, exc_info=bug)
            await self._channel.close()
            if self._lane is not None:
                await self._lane.join(self._config.op_timeout_s + 1)

    async def _beat(self) -> None:
        """Says that this side lives, says again what was not answered, and notices when the other side is silent."""
        config = self._config
        period_s = min(config.ping_s, config.resend_s, config.op_timeout_s / 4)
        pinged_s = 0.0
        while self.failure is None:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            if now - pinged_s >= min(config.ping_s, config.op_timeout_s / 4) - period_s / 2:
                self._out.put_nowait(Ping())
                pinged_s = now
            self._book.apply(lambda offers, now=now: offers.tick(now))  # type: ignore[misc]
            if now - self._heard_s > config.op_timeout_s:
                self.lose(WorkerFailed(f"worker {self.peer.worker_id} has been silent for {config.op_timeout_s:g} s"))

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self._out.get()) is not None:
            yield wire.session_request(message)

    async def _read(self) -> FromReceiver | None:
        """The next message of a kind that we know; None at the end."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            self._heard_s = time.monotonic()
            if (known := wire.session_response_from_pb(message)) is not None:
                return known
        return None

    def _join(self, welcome: FromReceiver | None) -> None:
        peer = self.peer
        if isinstance(welcome, SessionFailed):
            raise from_reason(welcome.reason)
        if not isinstance(welcome, Welcome):
            raise TransferError(f"worker {peer.worker_id} did not begin with Welcome")
        if welcome.incarnation != peer.incarnation:
            raise TransferRefused(
                f"the ticket is from incarnation {peer.incarnation} of worker {peer.worker_id}, "
                f"and {welcome.incarnation} answers at its address"
            )
        if welcome.link not in self._hello.links:
            raise TransferRefused(
                f"worker {peer.worker_id} chose a {welcome.link!r} link, this worker offered "
                f"{', '.join(self._hello.links)}"
            )
        self._epoch = welcome.pair_epoch
        self.transport_kind = welcome.link
        name = f"kv-send-{peer.worker_id}"
        self._lane = TransportThread(
            name, partial(self._open_link, welcome.link, self._staging.pool(welcome.link, self._device)), self._outflow
        )
        self._lane.opened.add_done_callback(self._link_opened)
        self._lane.ended.add_done_callback(self._link_ended)

    def _open_link(self, kind: str, staging: StagingPool) -> SendingTransport:
        config = self._config
        use_own_stream(self._device)
        timeouts = (config.open_timeout_s, config.op_timeout_s)
        link = open_sender(kind, self._store, self._host, staging, config.window, *timeouts)
        return FaultyTransport(link, self._faults) if self._faults.on_link else link

    def _link_opened(self, opened: asyncio.Future[None]) -> None:
        if not opened.cancelled() and opened.exception() is None:
            self._side_opened()

    def _side_opened(self) -> None:
        """The link is good once both sides have it."""
        self._num_sides_open += 1
        if self._num_sides_open == 2 and not self.opened.done():
            self.opened.set_result(None)

    def _link_ended(self, ended: asyncio.Future[TransferError | None]) -> None:
        """A link only knows that it broke; the session, a moment later, often knows why."""
        self._link_is_gone = True
        error = ended.result() or TransferError("the link was closed")
        ended.get_loop().call_later(SESSION_SAYS_WHY_S, self.lose, error)

    def _on(self, message: FromReceiver) -> None:
        now = time.monotonic()
        match message:
            case Rendezvous():
                self._store.deliver(message.key, message.value)
            case Grant():
                self._book.apply(lambda offers: offers.on_grant(message.transfer_id, message.generation, now))
            case CommitAck():
                self._book.apply(lambda offers: offers.on_commit_ack(message.transfer_id, message.generation))
            case Nack():
                self._book.apply(lambda offers: offers.on_nack(message.transfer_id, message.generation, message.reason))
            case AbortAck():
                self._book.apply(lambda offers: offers.on_abort_ack(message.transfer_id, message.generation))
            case LinkReady():
                self._side_opened()
            case Ping():
                pass
            case SessionFailed():
                self.lose(from_reason(message.reason))
            case Welcome():
                self.lose(TransferError(f"worker {self.peer.worker_id} sent a second Welcome"))


def _seen(future: asyncio.Future[None]) -> None:
    """A failure that nobody waits for is not an unretrieved exception."""
    if not future.cancelled():
        future.exception()
