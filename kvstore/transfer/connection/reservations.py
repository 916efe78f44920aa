"""Reservations of a receiving worker, shared by its requests and its connections.

Requests add reservations, await them and release them. Connections check offers against them and report commits, aborts
and losses. The state machine decides; this module carries out its instructions.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from typing import TYPE_CHECKING

from baton.errors import BatonError, ConfigError, TransferError, TransferRefused, text_of, transfer_error_of
from baton.messages import Abort, Commit, FromReceiver, Hello, Nack, Offer, Ticket
from baton.tasks import seen_through
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.pipeline.driven import DrivenMachine
from kvstore.transfer.pipeline.receive_loop import ChunkWriter
from kvstore.transfer.protocol.machine import Send, TransferCommitted, TransferFailed
from kvstore.transfer.protocol.plan import (
    WIRE_DTYPES,
    TransferPlan,
    WireOptions,
    begins_of,
    mismatch,
    plan,
    source_ranks,
)
from kvstore.transfer.protocol.receive_state import Free, ReceiveInstruction, ReceivePhase, ReceiveState
from kvstore.transfer.stats import TransferStats

if TYPE_CHECKING:
    from baton.config import TransferConfig
    from engine.core.runner import BlockTables
    from kvstore.transfer.connection.control_stream import ControlStream
    from kvstore.transfer.local_worker import LocalWorker


class Expected(enum.Enum):
    """What a sender must commit."""

    WHOLE = "whole"
    """The sender commits all tokens of the ticket; a first token may come with them."""
    WITH_FIRST_TOKEN = "with first token"
    """The sender commits all tokens of the ticket, and a first token, which the receiver cannot draw itself."""
    PREFIX = "prefix"
    """The sender commits the leading tokens that it has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """Result of a transfer."""

    num_tokens: int
    """Leading tokens whose KV is readable now."""
    first_token: int | None
    """Token from which the receiver must continue; None: it draws the token itself."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _ReservedTransfer:
    """The event loop's record of one reservation."""

    ticket: Ticket
    block_ids: BlockTables
    expected: Expected
    settled: asyncio.Event
    freed: asyncio.Future[BlockTables]
    num_tokens: int | None = None
    """Number of tokens that the first offer named."""
    plans: list[TransferPlan] = dataclasses.field(default_factory=list)
    first_token: int | None = None
    error: BatonError | None = None
    release_began: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SourceConnection:
    """A connection on which transfers arrive, as reservations use it."""

    number: int
    hello: Hello
    """The sender's description of itself."""
    stream: ControlStream[FromReceiver]
    slot_bytes: int
    """Largest payload of a chunk on its transport."""
    writers: dict[int, ChunkWriter] = dataclasses.field(default_factory=dict)
    """Transfers that may send on its transport now, by generation. The transport thread reads it."""


class Reservations:
    """Reservations of one worker. For one event loop."""

    def __init__(self, worker: LocalWorker, config: TransferConfig) -> None:
        self.worker = worker
        self.config = config
        self.layout = worker.layout()
        self._stats = TransferStats()
        self._state = ReceiveState()
        self._machine: DrivenMachine[ReceiveState, ReceiveInstruction] = DrivenMachine(
            self._state, self._on_instruction
        )
        self._reserved: dict[int, _ReservedTransfer] = {}
        self._sources: dict[int, SourceConnection] = {}
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def stats(self) -> TransferStats:
        """Count of received transfers, without the messages that connections dropped."""
        return dataclasses.replace(self._stats, fenced=self._state.num_fenced)

    # -- the requests' side ------------------------------------------------------------------------------------------

    def add(self, ticket: Ticket, block_ids: BlockTables, expected: Expected) -> Ticket:
        """Reserve blocks for a transfer, and return its ticket with the reservation's generation."""
        loop = asyncio.get_running_loop()
        expires_at = loop.time() + self.config.lease_s
        generation = self._machine.ask(lambda state: state.reserve(ticket.transfer_id, block_ids, expires_at))
        ticket = dataclasses.replace(ticket, generation=generation)
        self._reserved[generation] = _ReservedTransfer(
            ticket=ticket,
            block_ids=block_ids,
            expected=expected,
            settled=asyncio.Event(),
            freed=loop.create_future(),
        )
        if self._sweep is None:
            self._sweep = loop.call_later(self.config.lease_s / 4, self._expire)
        return ticket

    async def wait_committed(self, ticket: Ticket) -> Arrival:
        """Wait until the transfer is complete and readable; raises the error that ended it otherwise."""
        reserved = self._reserved.get(ticket.generation)
        if reserved is None:
            raise TransferError(f"transfer {ticket.transfer_id} has been released")
        await reserved.settled.wait()
        if reserved.error is not None:
            raise reserved.error
        assert reserved.num_tokens is not None
        return Arrival(reserved.num_tokens, reserved.first_token)

    async def release(self, ticket: Ticket) -> BlockTables:
        """End a reservation and return its blocks, once; an empty tuple for every call but the first.

        Waits for at most one scatter, even if cancelled in the meantime.
        """
        reserved = self._reserved.get(ticket.generation)
        if reserved is None or reserved.release_began:
            return ()
        reserved.release_began = True
        self._machine.apply(lambda state: state.release(ticket.generation))
        await seen_through(reserved.freed)
        return reserved.freed.result()

    def close(self, error: TransferError) -> None:
        """Fail every transfer that is not committed. `release` still returns the blocks."""
        for reserved in list(self._reserved.values()):
            self._fail(reserved.ticket, error)
        if self._sweep is not None:
            self._sweep.cancel()

    def check(self) -> None:
        """Raise AssertionError if the reservations contradict each other."""
        self._machine.apply(lambda state: [])
        self._machine.ask(lambda state: state.check())
        assert len(self._state) == len(self._reserved)
        written = {generation for generation, reserved in self._reserved.items() if not reserved.settled.is_set()}
        assert all(source.writers.keys() <= written for source in self._sources.values())

    # -- the connections' side ---------------------------------------------------------------------------------------

    def attach(self, source: SourceConnection) -> None:
        """Add a connection that has been welcomed."""
        self._sources[source.number] = source

    def detach(self, source: SourceConnection) -> None:
        """Remove a connection, after `lost`."""
        del self._sources[source.number]

    def offer(self, source: SourceConnection, offer: Offer) -> None:
        """Handle an Offer: grant it, or refuse it if the two sides would not plan the same transfer."""
        reserved = self._meant(offer)
        phase = self._machine.ask(lambda state: state.state(offer.generation))
        is_open = phase in (ReceivePhase.RESERVED, ReceivePhase.RECEIVING)
        num_sources = 0
        if reserved is not None and is_open:
            try:
                self._prepare(source, offer, reserved)
            except TransferRefused as error:
                self._fail(reserved.ticket, error)
                source.stream.send(Nack(offer.transfer_id, offer.generation, text_of(error)))
                return
            there, here = source.hello.layout, self.layout
            num_sources = sum(len(source_ranks(there, here, rank)) for rank in range(here.tp_size))
        ids = (source.number, offer.transfer_id, offer.generation)
        self._machine.apply(lambda state: state.offer(*ids, offer.num_chunks, num_sources))

    def commit(self, source: SourceConnection, commit: Commit) -> None:
        """Handle a Commit."""
        ids = (source.number, commit.transfer_id, commit.generation)
        reserved = self._meant(commit)
        if commit.first_token is None and reserved is not None and reserved.expected is Expected.WITH_FIRST_TOKEN:
            self._fail(reserved.ticket, TransferError("the sender committed without the first token"))
        self._machine.apply(lambda state: state.commit(*ids, commit.first_token))

    def abort(self, source: SourceConnection, abort: Abort) -> None:
        """Handle an Abort."""
        error = transfer_error_of(abort.reason)
        ids = (source.number, abort.transfer_id, abort.generation)
        self._machine.apply(lambda state: state.abort(*ids, error))

    def renew(self, source: SourceConnection) -> None:
        """Extend the leases of the transfers offered on a connection, because its sender has pinged."""
        expires_at = asyncio.get_running_loop().time() + self.config.lease_s
        self._machine.ask(lambda state: state.renew(source.number, expires_at))

    def lost(self, source: SourceConnection, error: TransferError) -> None:
        """Fail the transfers offered on a connection, because it has ended."""
        source.writers.clear()
        self._machine.apply(lambda state: state.lost(source.number, error))

    def _meant(self, message: Offer | Commit) -> _ReservedTransfer | None:
        """Return the reservation that a message is about; None if there is none or the sender does not know its id."""
        reserved = self._reserved.get(message.generation)
        is_known = reserved is not None and reserved.ticket.transfer_id == message.transfer_id
        return reserved if is_known else None

    def _prepare(self, source: SourceConnection, offer: Offer, reserved: _ReservedTransfer) -> None:
        """Let the transport thread write the chunks, before they are granted. Idempotent.

        Raises:
            TransferRefused: the two sides would not plan the same transfer.
        """
        if offer.generation in source.writers:
            return
        planned = self._plan(source, offer, reserved)
        rank = source.hello.peer_rank
        copier = BlockCopier(self.worker.caches[rank], planned, self.layout, rank, reserved.block_ids)
        source.writers[offer.generation] = ChunkWriter(
            reserved.ticket, source.number, copier, self._machine, self.config.checksum == "full"
        )
        reserved.num_tokens = offer.num_tokens
        reserved.plans.append(planned)

    def _plan(self, source: SourceConnection, offer: Offer, reserved: _ReservedTransfer) -> TransferPlan:
        """Plan an offered transfer; raises TransferRefused if the sender has planned another one."""
        ticket, config, hello = reserved.ticket, self.config, source.hello
        offered = ticket.num_tokens if reserved.num_tokens is None else reserved.num_tokens
        is_prefix = reserved.expected is Expected.PREFIX and reserved.num_tokens is None
        is_less = is_prefix and offer.num_tokens < offered
        if offer.num_tokens != offered and not is_less:
            raise TransferRefused(f"{offered} tokens are expected, {offer.num_tokens} were offered")
        if offer.wire_dtype not in WIRE_DTYPES:
            raise TransferRefused(f"{offer.wire_dtype!r} is not a supported wire data type for KV")
        if difference := mismatch(hello.layout, self.layout, offer.wire_dtype):
            raise TransferRefused(difference)
        if offer.chunk_bytes > source.slot_bytes:
            raise TransferRefused(
                f"chunks of {offer.chunk_bytes} bytes do not fit the slots of {source.slot_bytes} bytes here"
            )
        options = WireOptions(offer.chunk_bytes, config.span_tokens, offer.wire_dtype)
        ranks = (hello.layout, hello.rank, self.layout, hello.peer_rank)
        try:
            planned = plan(*ranks, offer.num_tokens, begins_of(ticket, offer.num_tokens), options)
        except (ValueError, ConfigError) as error:
            raise TransferRefused(str(error)) from error
        if (planned.digest(config.checksum), len(planned.chunks)) != (offer.plan_digest, offer.num_chunks):
            raise TransferRefused(
                f"the two sides plan this transfer differently; here it is {len(planned.chunks)} chunks of "
                f"{offer.chunk_bytes} bytes, spans of {config.span_tokens} tokens and checksum "
                f"{config.checksum}"
            )
        return planned

    # -- what the state machine decides ------------------------------------------------------------------------------

    def _fail(self, ticket: Ticket, error: TransferError) -> None:
        self._machine.apply(lambda state: state.fail(ticket.transfer_id, ticket.generation, error))

    def _expire(self) -> None:
        """Fail expired transfers, and repeat while there is a reservation."""
        loop = asyncio.get_running_loop()
        self._machine.apply(lambda state: state.expire(loop.time()))
        self._sweep = loop.call_later(self.config.lease_s / 4, self._expire) if self._reserved else None

    def _on_instruction(self, instruction: ReceiveInstruction) -> None:
        if isinstance(instruction, Send):
            if (source := self._sources.get(instruction.connection)) is not None:
                source.stream.send(instruction.message)
            return
        reserved = self._reserved[instruction.generation]
        match instruction:
            case TransferCommitted():
                reserved.first_token = instruction.first_token
                reserved.settled.set()
                self._stats.committed += 1
                self._stats.num_bytes += sum(planned.num_bytes for planned in reserved.plans)
                self._stats.num_chunks += sum(len(planned.chunks) for planned in reserved.plans)
                self._drop_writers(instruction.generation)
            case TransferFailed():
                reserved.error = instruction.error
                reserved.settled.set()
                self._stats.count_failure(instruction.error)
                self._drop_writers(instruction.generation)
            case Free():
                del self._reserved[instruction.generation]
                reserved.freed.set_result(reserved.block_ids)

    def _drop_writers(self, generation: int) -> None:
        """Make the transport threads drop further chunks of a transfer that has ended."""
        for source in self._sources.values():
            source.writers.pop(generation, None)
