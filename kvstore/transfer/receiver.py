"""The receiving side of the hand-over.

The life of a transfer, as the receiver sees it:

1. `expect` takes blocks that the worker has reserved, and answers with a ticket. The ledger holds the blocks from here.
2. A sender opens a session: Hello and Welcome, and the link's rendezvous.
3. Offer: both sides must have the same plan. Grant goes out; from now on the sender's pings renew the lease.
4. Each chunk that the link brings is verified and, if the ledger says that the reservation still stands, written into
   the blocks.
5. Commit and every chunk in, of every source: the blocks are readable, `wait_committed` returns, CommitAck goes out.
6. `release` takes the blocks back out of the ledger, once: to the pool after a failure or a cancel, to the running
   sequence after a commit.

A failure at any point (Nack or Abort, lease, lost session) ends the reservation at once. Only this process writes its
blocks, so nothing of the other side needs to be waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.errors import ConfigError, TransferError, TransferRefused
from baton.messages import Abort, Commit, FromSender, Hello, Nack, Offer, SessionFailed, Ticket
from kvstore.transfer.connection.incoming import IncomingConnection
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.pipeline.driven import DrivenMachine, seen_through
from kvstore.transfer.pipeline.receive_loop import ChunkWriter
from kvstore.transfer.protocol.chunk_header import PROTOCOL_VERSION
from kvstore.transfer.protocol.layout import AUTO, WIRE_DTYPES, layout_of, mismatch, source_ranks
from kvstore.transfer.protocol.plan import Plan, WireOptions, plan, require_fitting_slots
from kvstore.transfer.protocol.reasons import from_reason, to_reason
from kvstore.transfer.protocol.receive_state import (
    Committed,
    Failed,
    Free,
    Instruction,
    ReceivePhase,
    ReceiveState,
    Tell,
)
from kvstore.transfer.stats import TransferStats
from kvstore.transfer.transport.select import StagingPools, usable_transports
from kvstore.transfer.transport.shm import host_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from baton.config import TransferConfig
    from baton.engine.model.kv_cache import KVCache
    from kvstore.transfer.pipeline.thread import TransportThread
    from kvstore.transfer.transport.base import ReceivingTransport

HANG_UP_S = 1.0
"""For the senders of a receiver that closes: they hear why, and end their streams."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """What came in with a transfer."""

    num_tokens: int
    """Leading tokens whose KV is readable now."""
    first_token: int | None


@dataclasses.dataclass(slots=True, kw_only=True)
class _Reserved:
    """What the event loop knows of one reservation."""

    ticket: Ticket
    block_ids: tuple[int, ...]
    state_slot: int | None
    partial: bool
    settled: asyncio.Event
    freed: asyncio.Future[tuple[int, ...]]
    num_tokens: int | None = None
    """Offered, by whoever offered first."""
    plans: list[Plan] = dataclasses.field(default_factory=list)
    first_token: int | None = None
    error: TransferError | None = None
    release_began: bool = False


class KvReceiver:
    """Takes KV into one worker's cache. For one event loop.

    Attributes:
        kv_address: where senders reach the server whose `KvControl.Session` is `session`; the worker sets it before
            `expect`.

    Args:
        caches: one a rank; block ids mean the same on all of them.
        host: the address on which senders can reach this one's links.
        num_kv_heads: of the whole model, one number a layer group, where ranks outnumber the heads.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        caches: Sequence[KVCache],
        wire_compat: str,
        config: TransferConfig,
        host: str,
        kv_address: str = "",
        num_kv_heads: Sequence[int] = (),
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.kv_address = kv_address
        self.layout = layout_of(caches[0].spec, len(caches), num_kv_heads)
        require_fitting_slots(self.layout, config.slot_bytes)
        self._caches = tuple(caches)
        self._config = config
        self._host = host
        self._wire_compat = wire_compat
        self._links = usable_transports([cache.device for cache in caches], config.links)
        self._staging = StagingPools(config)
        self._ledger = ReceiveState()
        self._book: DrivenMachine[ReceiveState, Instruction] = DrivenMachine(self._ledger, self._carry_out)
        self._reserved: dict[int, _Reserved] = {}
        self._sessions: dict[int, IncomingConnection] = {}
        self._num_sessions = 0
        """Ever."""
        self._handlers: set[asyncio.Task[None]] = set()
        """Tasks in which sessions are."""
        self._lanes: set[TransportThread[ReceivingTransport]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._stats = TransferStats()

    # -- what operators see ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> TransferStats:
        fenced = self._ledger.num_fenced + self._stats.fenced + sum(s.num_fenced for s in self._sessions.values())
        return dataclasses.replace(self._stats, fenced=fenced)

    @property
    def num_pairs(self) -> int:
        return sum(session.failure is None for session in self._sessions.values())

    @property
    def slots_in_use(self) -> int:
        return self._staging.slots_in_use

    # -- the worker's side -------------------------------------------------------------------------------------------

    def expect(
        self,
        transfer_id: str,
        num_tokens: int,
        skip_tokens: int,
        block_ids: Sequence[int],
        state_slot: int | None = None,
        partial: bool = False,
    ) -> Ticket:
        """Registers blocks for a transfer; the ledger holds them until `release`.

        Args:
            block_ids: all blocks of the sequence, in order: first those of `skip_tokens`, which stay as they are, then
                those to be written, then any for the answer.
            state_slot: of the sequence, where the model has states.
            partial: fewer tokens than `num_tokens` are welcome too, and no first token is needed.

        Raises:
            ValueError: too few blocks, or `skip_tokens` is not block-aligned.
        """
        block_size = self.layout.block_size
        num_blocks = -(-num_tokens // block_size)
        if len(block_ids) < num_blocks:
            raise ValueError(f"{num_tokens} tokens need {num_blocks} blocks, got {len(block_ids)}")
        if skip_tokens % block_size or not 0 <= skip_tokens <= num_tokens:
            raise ValueError(f"skip_tokens must be a multiple of {block_size} up to {num_tokens}, got {skip_tokens}")
        loop = asyncio.get_running_loop()
        expires_at = loop.time() + self._config.lease_s
        ids = tuple(block_ids)
        generation = self._book.ask(lambda ledger: ledger.reserve(transfer_id, ids, expires_at))
        ticket = Ticket(
            transfer_id=transfer_id,
            generation=generation,
            decode_worker_id=self.worker_id,
            incarnation=self.incarnation,
            kv_address=self.kv_address,
            num_tokens=num_tokens,
            skip_tokens=skip_tokens,
            wire_compat=self._wire_compat,
            layout=self.layout,
        )
        self._reserved[generation] = _Reserved(
            ticket=ticket,
            block_ids=ids,
            state_slot=state_slot,
            partial=partial,
            settled=asyncio.Event(),
            freed=loop.create_future(),
        )
        if self._sweep is None:
            self._sweep = loop.call_later(self._config.lease_s / 4, self._expire)
        return ticket

    async def wait_committed(self, ticket: Ticket) -> Arrival:
        """What came in, once it is complete and readable.

        Raises:
            TransferCorrupted: a chunk failed its header or checksum test.
            TransferExpired: the lease ended.
            TransferTimeout: an operation's time ended.
            TransferCancelled: the sender gave it up, or it was released.
            TransferError: the transfer failed otherwise, or its session was lost.
        """
        reserved = self._reserved.get(ticket.generation)
        if reserved is None:
            raise TransferError(f"transfer {ticket.transfer_id} has been released")
        await reserved.settled.wait()
        if reserved.error is not None:
            raise reserved.error
        assert reserved.num_tokens is not None
        return Arrival(reserved.num_tokens, reserved.first_token)

    async def release(self, ticket: Ticket) -> tuple[int, ...]:
        """Ends the reservation, in whatever state, and hands its blocks back, once.

        Returns:
            The reservation's blocks. They are the caller's alone from now on: to free, or to go on with where the
            transfer is committed. Empty for every call but the first.

        Waits for one scatter at most, and sees that through even when it is cancelled: the blocks are the caller's then
        too, though the call raises.
        """
        reserved = self._reserved.get(ticket.generation)
        if reserved is None or reserved.release_began:
            return ()
        reserved.release_began = True
        self._book.apply(lambda ledger: ledger.release(ticket.generation))
        await seen_through(reserved.freed)
        return reserved.freed.result()

    async def close(self) -> None:
        """Ends all sessions, their tasks and threads, and fails what is not committed. Blocks stay with `release`."""
        down = TransferError("this worker shuts down")
        for session in list(self._sessions.values()):
            session.break_off(down)
        for reserved in list(self._reserved.values()):
            self._fail(reserved.ticket, down)
        if self._sweep is not None:
            self._sweep.cancel()
        if self._handlers:
            _, waiting = await asyncio.wait(self._handlers, timeout=HANG_UP_S)
            for handler in waiting:
                handler.cancel()
            if waiting:
                await asyncio.wait(waiting)
        for lane in list(self._lanes):
            await lane.join(self._config.op_timeout_s + 1)

    def check(self) -> None:
        """Raises AssertionError where the books do not hold."""
        self._book.apply(lambda ledger: [])
        self._book.ask(lambda ledger: ledger.check())
        assert len(self._ledger) == len(self._reserved)
        written = {generation for generation, reserved in self._reserved.items() if not reserved.settled.is_set()}
        assert all(session.inbounds.keys() <= written for session in self._sessions.values())

    # -- the senders' side -------------------------------------------------------------------------------------------

    async def session(self, request_iterator: Any, context: Any) -> None:
        """The handler of KvControl.Session.

        A coroutine that writes, because a cancelled generator is left suspended.
        """
        handler: Any = asyncio.current_task()
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        requests = _known(request_iterator)
        try:
            session = self._welcome(await anext(requests, None))
        except TransferRefused as error:
            await self._turn_away(request_iterator, context, error)
            return
        self._sessions[session.id] = session
        self._lanes.add(session.lane)
        session.lane.ended.add_done_callback(lambda _: self._lanes.discard(session.lane))
        try:
            await session.serve(requests, context)
        finally:
            del self._sessions[session.id]
            self._stats.fenced += session.num_fenced

    def on_offer(self, session: IncomingConnection, offer: Offer) -> None:
        reserved = self._reserved.get(offer.generation)
        state = self._book.ask(lambda ledger: ledger.state(offer.generation))
        is_open = state in (ReceivePhase.RESERVED, ReceivePhase.RECEIVING)
        num_sources = 0
        if reserved is not None and is_open and reserved.ticket.transfer_id == offer.transfer_id:
            try:
                self._prepare(session, offer, reserved)
            except TransferRefused as error:
                self._fail(reserved.ticket, error)
                session.tell(Nack(offer.transfer_id, offer.generation, to_reason(error)))
                return
            there, here = session.hello.layout, self.layout
            num_sources = sum(len(source_ranks(there, here, rank)) for rank in range(here.tp_size))
        self._book.apply(
            lambda ledger: ledger.offer(session.id, offer.transfer_id, offer.generation, offer.num_chunks, num_sources)
        )

    def on_commit(self, session: IncomingConnection, commit: Commit) -> None:
        ids = (session.id, commit.transfer_id, commit.generation)
        reserved = self._reserved.get(commit.generation)
        if commit.first_token is None and reserved is not None and not reserved.partial:
            self._fail(reserved.ticket, TransferError("the sender committed without the first token"))
        self._book.apply(lambda ledger: ledger.commit(*ids, commit.first_token))

    def on_abort(self, session: IncomingConnection, abort: Abort) -> None:
        error = from_reason(abort.reason)
        self._book.apply(lambda ledger: ledger.abort(session.id, abort.transfer_id, abort.generation, error))

    def on_ping(self, session: IncomingConnection) -> None:
        expires_at = asyncio.get_running_loop().time() + self._config.lease_s
        self._book.ask(lambda ledger: ledger.renew(session.id, expires_at))

    def on_lost(self, session: IncomingConnection, error: TransferError) -> None:
        self._book.apply(lambda ledger: ledger.lost(session.id, error))

    def _prepare(self, session: IncomingConnection, offer: Offer, reserved: _Reserved) -> None:
        """Lets the lane know where the chunks belong, before they are granted. Again is harmless.

        Raises:
            TransferRefused: the two sides would not plan the same transfer.
        """
        if offer.generation in session.inbounds:
            return
        ticket, hello = reserved.ticket, session.hello
        offered = ticket.num_tokens if reserved.num_tokens is None else reserved.num_tokens
        is_less = reserved.partial and reserved.num_tokens is None and offer.num_tokens < offered
        if offer.num_tokens != offered and not is_less:
            raise TransferRefused(f"{offered} tokens are expected, {offer.num_tokens} were offered")
        if offer.wire_dtype not in WIRE_DTYPES:
            raise TransferRefused(f"{offer.wire_dtype!r} is no data type that KV can have on the wire here")
        if difference := mismatch(hello.layout, self.layout, offer.wire_dtype):
            raise TransferRefused(difference)
        if offer.chunk_bytes > self._config.slot_bytes:
            raise TransferRefused(
                f"chunks of {offer.chunk_bytes} bytes do not fit the slots of {self._config.slot_bytes} bytes here"
            )
        options = WireOptions(offer.chunk_bytes, self._config.span_tokens, offer.wire_dtype)
        ranks = (hello.layout, hello.rank, self.layout, hello.peer_rank)
        try:
            planned = plan(*ranks, offer.num_tokens, ticket.skip_tokens, options)
        except (ValueError, ConfigError) as error:
            raise TransferRefused(str(error)) from error
        if (planned.digest(self._config.checksum), len(planned.chunks)) != (offer.plan_digest, offer.num_chunks):
            raise TransferRefused(
                f"the two sides plan this transfer differently; here it is {len(planned.chunks)} chunks of "
                f"{offer.chunk_bytes} bytes, spans of {self._config.span_tokens} tokens and checksum "
                f"{self._config.checksum}"
            )
        cache = self._caches[hello.peer_rank]
        layout, rank = self.layout, hello.peer_rank
        rows = BlockCopier(cache, planned, layout, rank, reserved.block_ids, reserved.state_slot)
        ids = (session.id, ticket.transfer_id, ticket.generation)
        session.inbounds[offer.generation] = ChunkWriter(
            *ids, planned, rows, self._book, self._config.checksum == "full"
        )
        reserved.num_tokens = offer.num_tokens
        reserved.plans.append(planned)

    # -- what the ledger decides ---------------------------------------------------------------------------------------

    def _fail(self, ticket: Ticket, error: TransferError) -> None:
        self._book.apply(lambda ledger: ledger.fail(ticket.transfer_id, ticket.generation, error))

    def _expire(self) -> None:
        """Sweeps while there is something that can expire."""
        loop = asyncio.get_running_loop()
        self._book.apply(lambda ledger: ledger.expire(loop.time()))
        self._sweep = loop.call_later(self._config.lease_s / 4, self._expire) if self._reserved else None

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Tell):
            if (session := self._sessions.get(instruction.session)) is not None:
                session.tell(instruction.message)
            return
        reserved = self._reserved[instruction.generation]
        match instruction:
            case Committed():
                reserved.first_token = instruction.first_token
                reserved.settled.set()
                self._stats.committed += 1
                self._stats.num_bytes += sum(planned.num_bytes for planned in reserved.plans)
                self._stats.num_chunks += sum(len(planned.chunks) for planned in reserved.plans)
                self._close_links_to(instruction.generation)
            case Failed():
                reserved.error = instruction.error
                reserved.settled.set()
                self._stats.count_failure(instruction.error)
                self._close_links_to(instruction.generation)
            case Free():
                del self._reserved[instruction.generation]
                reserved.freed.set_result(instruction.block_ids)

    def _close_links_to(self, generation: int) -> None:
        """What still comes for a transfer that has ended is dropped by the lanes."""
        for session in self._sessions.values():
            session.inbounds.pop(generation, None)

    async def _turn_away(self, requests: Any, context: Any, error: TransferRefused) -> None:
        """Says why, and lets the sender hang up, as `IncomingConnection.serve` does."""
        with contextlib.suppress(TimeoutError, grpc.aio.InternalError):  # it may be gone, or never hang up
            async with asyncio.timeout(self._config.op_timeout_s):
                await context.write(wire.session_response(SessionFailed(to_reason(error))))
                async for _ in requests:
                    pass

    def _welcome(self, hello: FromSender | None) -> IncomingConnection:
        if not isinstance(hello, Hello):
            raise TransferRefused("a session begins with Hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise TransferRefused(
                f"worker {hello.worker_id} speaks version {hello.protocol_version} of the hand-over, "
                f"worker {self.worker_id} version {PROTOCOL_VERSION}"
            )
        if hello.wire_compat != self._wire_compat:
            raise TransferRefused(
                f"worker {hello.worker_id} has KV of kind {hello.wire_compat}, "
                f"worker {self.worker_id} of kind {self._wire_compat}"
            )
        if difference := mismatch(hello.layout, self.layout, AUTO):
            raise TransferRefused(difference)
        if not hello.rank < hello.layout.tp_size:
            raise TransferRefused(f"worker {hello.worker_id} has no rank {hello.rank}")
        if not hello.peer_rank < len(self._caches):
            raise TransferRefused(f"worker {self.worker_id} has no rank {hello.peer_rank}")
        kinds = [kind for kind in hello.links if kind in self._links]
        link = next((kind for kind in kinds if kind != "shm" or hello.host_id == host_id()), None)
        if link is None:
            raise TransferRefused(
                f"worker {hello.worker_id} offers the links {', '.join(hello.links) or 'none'}"
                f"{', and is on another host; ' if kinds else ', '}"
                f"worker {self.worker_id} can use {', '.join(self._links)}"
            )
        cache = self._caches[hello.peer_rank]
        place = (self._config, self._host, cache.device, self._staging.pool(link, cache.device))
        self._num_sessions += 1
        return IncomingConnection(self._num_sessions, hello, link, self.incarnation, self, *place)


async def _known(request_iterator: Any) -> AsyncIterator[FromSender]:
    """Requests of the kinds that we know. Raises TransferRefused for one that is too long to be read."""
    async for request in request_iterator:
        if (message := wire.session_request_from_pb(request)) is not None:
            yield message
