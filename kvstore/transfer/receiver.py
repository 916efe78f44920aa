"""The decode side of the hand-over.

The life of a transfer, as the receiver sees it:

1. `expect` takes blocks that the worker has reserved, and answers with a ticket. The ledger holds the blocks from here.
2. A prefill worker opens a session: Hello and Welcome, and the link's rendezvous.
3. Offer: both plans must be the same. The session's lane posts receives into staging, and Grant goes out.
4. Each chunk is verified and, if the ledger says that the reservation still stands, written into the blocks.
5. Commit and every chunk in: the blocks are readable, `wait_committed` returns, CommitAck goes out.
6. `release` takes the blocks back out of the ledger, once: to the pool after a failure or a cancel, to the running
   sequence after a commit.

A failure at any point (Nack or Abort, lease, lost session) ends the reservation at once. Only this process writes its
blocks, so nothing of the other side needs to be waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.errors import TransferCorrupted, TransferError, TransferRefused
from baton.messages import (
    Abort,
    AbortAck,
    Commit,
    CommitAck,
    FromDecode,
    FromPrefill,
    Grant,
    Hello,
    Nack,
    Offer,
    Rendezvous,
    Ticket,
    Welcome,
)
from baton.v1 import kv_pb2_grpc
from kvstore.transfer.header import PROTOCOL_VERSION
from kvstore.transfer.inbound import Inbound
from kvstore.transfer.lane import Lane
from kvstore.transfer.ledger import Committed, Failed, Free, Instruction, Ledger
from kvstore.transfer.link import Link, Slot
from kvstore.transfer.plan import Chunk, plan, plan_digest, require_fitting_slots
from kvstore.transfer.reasons import from_reason, to_reason
from kvstore.transfer.staging import Rows
from kvstore.transfer.stats import TransferStats
from kvstore.transfer.torch_link import RECEIVER, SessionStore, open_link, usable_links

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from baton.config import TransferConfig
    from baton.engine.kv_cache import KVCache


logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Reserved:
    """What the event loop knows of one reservation."""

    ticket: Ticket
    chunks: tuple[Chunk, ...]
    digest: bytes
    rows: Rows
    settled: asyncio.Event
    freed: asyncio.Future[tuple[int, ...]]
    session: _Session | None = None
    lease: asyncio.TimerHandle | None = None
    offered_at: float = 0.0
    first_token: int = 0
    error: TransferError | None = None
    release_began: bool = False


class KvReceiver(kv_pb2_grpc.KvControlServicer):
    """Takes sequences' KV into one decode worker's cache. For one event loop, on a `baton.rpc` server.

    Attributes:
        kv_address: where prefill workers reach the server that this is added to; the worker sets it before `expect`.

    Args:
        host: the address on which prefill workers can reach this one's links.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        cache: KVCache,
        wire_compat: str,
        config: TransferConfig,
        host: str,
        kv_address: str = "",
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.kv_address = kv_address
        self.cache = cache
        self.config = config
        self.host = host
        self.ledger = Ledger()
        self.ledger_lock = threading.Lock()
        self.lanes: set[Lane] = set()
        self._wire_compat = wire_compat
        require_fitting_slots(cache.spec, config.slot_bytes)
        self._links = usable_links(cache.device, config.links)
        self._decided: deque[Instruction] = deque()
        self._reserved: dict[int, _Reserved] = {}
        self._sessions: set[_Session] = set()
        self._epochs: dict[str, int] = {}
        self._stats = TransferStats()

    @property
    def stats(self) -> TransferStats:
        return dataclasses.replace(
            self._stats,
            num_pairs=len(self._sessions),
            num_fenced=self.ledger.num_fenced,
            num_expired=self.ledger.num_expired,
        )

    # -- the decode worker's side ----------------------------------------------------------------------------------

    def expect(
        self,
        transfer_id: str,
        num_tokens: int,
        skip_tokens: int,
        block_ids: Sequence[int],
        state_slot: int | None = None,
    ) -> Ticket:
        """Registers blocks for a transfer; the ledger holds them until `release`.

        Args:
            block_ids: all blocks of the sequence, in order: first those of `skip_tokens`, which stay as they are, then
                those to be written, then any for the answer.
            state_slot: of the sequence, where the model has states.

        Raises:
            ValueError: too few blocks, `skip_tokens` not block-aligned, or blocks that do not fit a slot.
        """
        spec = self.cache.spec
        num_blocks = -(-num_tokens // spec.block_size)
        if len(block_ids) < num_blocks:
            raise ValueError(f"{num_tokens} tokens need {num_blocks} blocks, got {len(block_ids)}")
        chunks = plan(spec, num_tokens, skip_tokens, self.config.slot_bytes)
        rows = Rows(self.cache, block_ids[skip_tokens // spec.block_size : num_blocks], state_slot)
        digest = plan_digest(spec, num_tokens, skip_tokens, chunks, self.config.window, self.config.checksum)
        loop = asyncio.get_running_loop()
        expires_at = loop.time() + self.config.lease_s
        with self.ledger_lock:
            generation = self.ledger.reserve(transfer_id, tuple(block_ids), expires_at)
        ticket = Ticket(
            transfer_id=transfer_id,
            generation=generation,
            decode_worker_id=self.worker_id,
            incarnation=self.incarnation,
            kv_address=self.kv_address,
            num_tokens=num_tokens,
            skip_tokens=skip_tokens,
            lease_ms=int(self.config.lease_s * 1000),
            wire_compat=self._wire_compat,
        )
        reserved = _Reserved(ticket, chunks, digest, rows, asyncio.Event(), loop.create_future())
        reserved.lease = loop.call_at(expires_at, self._expire, expires_at)
        self._reserved[generation] = reserved
        return ticket

    async def wait_committed(self, ticket: Ticket) -> int:
        """The first token, once the sequence's KV is complete and readable.

        Raises:
            TransferCorrupted: a chunk failed its header or checksum test.
            TransferTimeout: the lease or an operation's time ended.
            TransferError: the transfer failed otherwise, was released, or its session was lost.
        """
        reserved = self._reserved.get(ticket.generation)
        if reserved is None:
            raise TransferError(f"transfer {ticket.transfer_id} has been released")
        await reserved.settled.wait()
        if reserved.error is not None:
            raise reserved.error
        return reserved.first_token

    async def release(self, ticket: Ticket) -> tuple[int, ...]:
        """Ends the reservation, in whatever state, and hands its blocks back, once.

        Returns:
            The reservation's blocks. They are the caller's alone from now on: to free, or to go on with where the
            transfer is committed. Empty for every call but the first.

        Waits for one scatter at most, and sees that through even when it is cancelled, so that no block is lost.
        """
        reserved = self._reserved.get(ticket.generation)
        if reserved is None or reserved.release_began:
            return ()
        reserved.release_began = True
        self._decide(lambda ledger: ledger.release(ticket.generation))
        cancelled = False
        while not reserved.freed.done():
            try:
                await asyncio.wait({reserved.freed})
            except asyncio.CancelledError:
                cancelled = True
        if cancelled and (task := asyncio.current_task()):
            task.cancel()  # again, at its next wait: this call had to return the blocks
        return reserved.freed.result()

    async def close(self) -> None:
        """Ends all sessions and their threads, and fails what is not committed. Blocks stay with `release`."""
        for session in list(self._sessions):
            session.end(TransferError("this decode worker shuts down"))
        for reserved in list(self._reserved.values()):
            self.fail(reserved.ticket, TransferError("this decode worker shuts down"))
            if reserved.lease:
                reserved.lease.cancel()
        for lane in list(self.lanes):
            await lane.join(self.config.op_timeout_s + 1)

    def check(self) -> None:
        """Raises AssertionError where the books do not hold."""
        self._carry_out()
        with self.ledger_lock:
            self.ledger.check()
            assert self._decided or len(self.ledger) == len(self._reserved)

    # -- the prefill workers' side -----------------------------------------------------------------------------------

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        """KvControl.Session: as a coroutine that writes, because a cancelled generator is left suspended."""
        requests = _known(request_iterator)
        hello = await anext(requests, None)
        try:
            session = self._welcome(hello)
        except TransferRefused as error:
            await context.abort(grpc.StatusCode[error.status], str(error))
        self._sessions.add(session)
        reading = asyncio.create_task(session.read(requests))
        writing = asyncio.create_task(session.write(context))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.end(TransferError(f"prefill worker {session.peer} is gone"))
            self._sessions.discard(session)
            reading.cancel()
            writing.cancel()
            await asyncio.wait({reading, writing})
            for task in (reading, writing):
                if not task.cancelled() and (bug := task.exception()) is not None:
                    logger.error("the session with prefill worker %s failed", session.peer, exc_info=bug)
                    session.failure = session.failure or TransferError(f"the session failed: {bug}")
        if (failure := session.failure) is not None:
            await context.abort(grpc.StatusCode[failure.status], str(failure))

    def on_offer(self, session: _Session, offer: Offer) -> FromDecode | Inbound:
        """The receiving job of an offer that stands; else its Nack."""
        reserved = self._reserved.get(offer.generation)
        known = reserved is not None and reserved.ticket.transfer_id == offer.transfer_id and reserved.session is None
        if known and reserved and (reserved.digest, len(reserved.chunks)) != (offer.plan_digest, offer.num_chunks):
            error = TransferRefused(
                "the two sides plan this transfer differently; here it is "
                f"{len(reserved.chunks)} chunks for {self.cache.spec.describe()}, window {self.config.window}, "
                f"slots of {self.config.slot_bytes} bytes, checksum {self.config.checksum}"
            )
            self.fail(reserved.ticket, error)
            return Nack(offer.transfer_id, offer.generation, to_reason(error))
        with self.ledger_lock:
            stands = self.ledger.offer(offer.transfer_id, offer.generation, offer.num_chunks)
        if not stands or reserved is None:
            refused = TransferRefused(f"transfer {offer.transfer_id}, generation {offer.generation}, is not expected")
            return Nack(offer.transfer_id, offer.generation, to_reason(refused))
        loop = asyncio.get_running_loop()
        reserved.session = session
        reserved.offered_at = loop.time()
        return Inbound(
            offer.transfer_id,
            offer.generation,
            reserved.chunks,
            reserved.rows,
            self.config.checksum == "full",
            self.ledger,
            self.ledger_lock,
            partial(self._emit, loop),
        )

    def on_commit(self, commit: Commit) -> None:
        self._decide(lambda ledger: ledger.commit(commit.transfer_id, commit.generation, commit.first_token))

    def fail(self, transfer: Ticket | Abort, error: TransferError) -> None:
        self._decide(lambda ledger: ledger.fail(transfer.transfer_id, transfer.generation, error))

    def fail_all(self, session: _Session, error: TransferError) -> None:
        """Of a session that has ended."""
        for reserved in [r for r in self._reserved.values() if r.session is session]:
            self.fail(reserved.ticket, error)

    def _decide(self, event: Callable[[Ledger], list[Instruction]]) -> None:
        with self.ledger_lock:
            self._decided.extend(event(self.ledger))
        self._carry_out()

    def _emit(self, loop: asyncio.AbstractEventLoop, instructions: list[Instruction]) -> None:
        """From a lane, under the ledger's lock."""
        self._decided.extend(instructions)
        _post(loop, self._carry_out)

    def _carry_out(self) -> None:
        """What the ledger decided, in that order, whichever thread brought it about."""
        while self._decided:
            instruction = self._decided.popleft()
            reserved = self._reserved[instruction.generation]
            if reserved.lease is not None:
                reserved.lease.cancel()
            ids = (reserved.ticket.transfer_id, reserved.ticket.generation)
            match instruction:
                case Committed():
                    reserved.first_token = instruction.first_token
                    reserved.settled.set()
                    self._count(reserved)
                    if reserved.session is not None:
                        reserved.session.tell(CommitAck(*ids))
                case Failed():
                    reserved.error = instruction.error
                    reserved.settled.set()
                    self._stats.num_failed += 1
                    self._stats.num_corrupted += isinstance(instruction.error, TransferCorrupted)
                    if reserved.session is not None:
                        reserved.session.tell(Nack(*ids, to_reason(instruction.error)))
                case Free():
                    del self._reserved[instruction.generation]
                    reserved.freed.set_result(instruction.block_ids)

    def _welcome(self, hello: FromPrefill | None) -> _Session:
        if not isinstance(hello, Hello):
            raise TransferRefused("a session begins with Hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise TransferRefused(
                f"prefill worker {hello.worker_id} speaks version {hello.protocol_version} of the hand-over, "
                f"decode worker {self.worker_id} version {PROTOCOL_VERSION}"
            )
        if hello.wire_compat != self._wire_compat:
            raise TransferRefused(
                f"prefill worker {hello.worker_id} has KV of kind {hello.wire_compat}, "
                f"decode worker {self.worker_id} of kind {self._wire_compat}"
            )
        link = next((kind for kind in hello.links if kind in self._links), None)
        if link is None:
            raise TransferRefused(
                f"prefill worker {hello.worker_id} offers the links {', '.join(hello.links) or 'none'}, "
                f"decode worker {self.worker_id} has {', '.join(self._links) or 'none'}"
            )
        epoch = self._epochs[hello.worker_id] = self._epochs.get(hello.worker_id, 0) + 1
        session = _Session(self, hello.worker_id, link, epoch)
        session.tell(Welcome(self.incarnation, link, epoch))
        return session

    def _expire(self, now: float) -> None:
        self._decide(lambda ledger: ledger.expire(now))

    def _count(self, reserved: _Reserved) -> None:
        self._stats.num_transfers += 1
        self._stats.num_bytes += sum(chunk.num_bytes for chunk in reserved.chunks)
        self._stats.num_chunks += len(reserved.chunks)
        self._stats.transfer_s += asyncio.get_running_loop().time() - reserved.offered_at


class _Session:
    """One prefill process's stream, its link and the lane that owns it.

    Attributes:
        failure: why the stream must be ended from here; None while it is good, or when the peer left.
    """

    def __init__(self, receiver: KvReceiver, peer: str, link_kind: str, epoch: int) -> None:
        self.peer = peer
        self.failure: TransferError | None = None
        self._receiver = receiver
        self._epoch = epoch
        self._loop = asyncio.get_running_loop()
        self._out: asyncio.Queue[FromDecode | None] = asyncio.Queue()
        self._ended = False
        self._store = SessionStore(lambda k, v: _post(self._loop, self.tell, Rendezvous(k, v)))
        self._link: Link | None = None
        self._slots: list[Slot] = []
        self._jobs: dict[int, asyncio.Future[None]] = {}
        self._lane = Lane(f"kv-recv-{peer}")
        receiver.lanes.add(self._lane)
        self._lane.ended.add_done_callback(lambda _: receiver.lanes.discard(self._lane))
        self._lane.submit(partial(self._open_link, link_kind)).add_done_callback(self._job_done)

    def tell(self, message: FromDecode) -> None:
        self._out.put_nowait(message)

    async def write(self, context: Any) -> None:
        while (message := await self._out.get()) is not None:
            await context.write(wire.session_response(message))

    async def read(self, requests: AsyncIterator[FromPrefill]) -> None:
        async for message in requests:
            self._on(message)

    def end(self, error: TransferError) -> None:
        """Fails the session's transfers and lets go of its link. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._receiver.fail_all(self, error)
        self._out.put_nowait(None)
        self._store.close()
        if self._link is not None:
            self._link.abort()
        self._lane.close(self._close_link)

    def _on(self, message: FromPrefill) -> None:
        if self._ended:
            return  # read after the end: an offer taken now would wait for its lease
        match message:
            case Rendezvous():
                self._store.deliver(message.key, message.value)
            case Offer():
                self._offered(message)
            case Commit():
                self._receiver.on_commit(message)
            case Abort():
                self._receiver.fail(message, from_reason(message.reason))
                self._ack_abort(message)
            case Hello():
                self._break(TransferRefused("a session has one Hello"))

    def _offered(self, offer: Offer) -> None:
        answer = self._receiver.on_offer(self, offer)
        if not isinstance(answer, Inbound):
            self.tell(answer)
            return
        grant = Grant(offer.transfer_id, offer.generation)
        job = self._lane.submit(partial(self._receive, answer, grant))
        self._jobs[offer.generation] = job
        job.add_done_callback(lambda _: self._jobs.pop(offer.generation, None))
        job.add_done_callback(self._job_done)

    def _receive(self, inbound: Inbound, grant: Grant) -> None:
        assert self._link is not None
        inbound.run(self._link, self._slots, self._epoch, lambda: _post(self._loop, self.tell, grant))

    def _ack_abort(self, abort: Abort) -> None:
        """Once nothing of the transfer is posted on the link."""
        ack = AbortAck(abort.transfer_id, abort.generation)
        if job := self._jobs.get(abort.generation):
            job.add_done_callback(lambda _: self.tell(ack))
        else:
            self.tell(ack)

    def _job_done(self, job: asyncio.Future[None]) -> None:
        if not job.cancelled() and (error := job.exception()):
            self._break(
                error if isinstance(error, TransferError) else TransferError(f"the link's lane failed: {error}")
            )

    def _break(self, error: TransferError) -> None:
        if not self._ended:
            self.failure = error
            self.end(error)

    def _open_link(self, kind: str) -> None:
        config = self._receiver.config
        device = self._receiver.cache.device
        host = self._receiver.host
        self._link = open_link(kind, self._store, RECEIVER, host, device, config.open_timeout_s, config.op_timeout_s)
        pinned = device.type == "cuda" and self._link.device.type == "cpu"
        self._slots = [Slot(config.slot_bytes, self._link.device, pinned) for _ in range(config.window)]

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()


async def _known(request_iterator: Any) -> AsyncIterator[FromPrefill]:
    """Requests of the kinds that we know."""
    async for request in request_iterator:
        if (message := wire.session_request_from_pb(request)) is not None:
            yield message


def _post(loop: asyncio.AbstractEventLoop, callback: Any, *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is gone
        loop.call_soon_threadsafe(callback, *args)
