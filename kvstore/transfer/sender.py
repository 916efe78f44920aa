"""Sending side of the KV transfer.

The life of a transfer at the sender:

1. `transfer` takes a ticket and offers as soon as there is a connection, while the prompt still waits. So the prompt's
   queue time hides the opening of the connection and the round trip to the receiver. Pings renew the lease from the
   offer on.
2. `extend` passes the blocks. The caller pins them until the context of `transfer` exits.
3. `advance`, on the engine's thread, reports which tokens are computed, in all layers or in some; a prefix that is
   already computed needs no report. The connection's transport thread gathers, checksums and sends chunk by chunk.
4. `finish` passes the first token, if one was drawn: Commit follows the last chunk, CommitAck ends the transfer.

Leaving the context early aborts the transfer: its blocks are no longer read afterwards, and the Abort is sent in the
background. Each source rank has a separate connection to each destination rank with which it exchanges bytes; that
connection carries its part.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

from baton.errors import BatonError, Overloaded, TransferCancelled, TransferError, TransferRefused
from baton.messages import Hello, Ticket, Transferred
from baton.tasks import seen_through
from kvstore.transfer.connection.control_stream import Peer
from kvstore.transfer.connection.outgoing import TransferPart
from kvstore.transfer.connection.pool import ConnectionPool, OpeningsAhead
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.pipeline.send_loop import ChunkQueue
from kvstore.transfer.protocol.chunk_header import PROTOCOL_VERSION
from kvstore.transfer.protocol.plan import (
    WireOptions,
    begins_of,
    destination_ranks,
    least_chunk_bytes,
    mismatch,
    plan,
    require_fitting_slots,
)
from kvstore.transfer.stats import TransferStats
from kvstore.transfer.transport.select import chunk_bytes, slot_bytes, usable_transports
from kvstore.transfer.transport.shm import host_id

ROOM_POLL_S = 0.05
"""Poll interval of `wait_for_room`: transport threads send between two ends of transfers."""

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from baton.config import TransferConfig
    from engine.core.outputs import KvProgress
    from engine.core.runner import BlockTables, Fence
    from kvstore.transfer.local_worker import LocalWorker


class KvSender:
    """Sender of KV from one worker's cache. For one event loop."""

    def __init__(self, worker: LocalWorker, config: TransferConfig) -> None:
        self.layout = worker.layout()
        require_fitting_slots(self.layout, config.slot_bytes, config.wire_dtype)
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            wire_compat=worker.wire_compat,
            transports=usable_transports(worker.devices, config.transports),
            layout=self.layout,
            rank=0,
            peer_rank=0,
            host_id=host_id(),
            plaintext_transports=config.plaintext_transports,
        )
        self._worker = worker
        self._config = config
        self._connections = ConnectionPool(worker, hello, config)
        self._ahead = OpeningsAhead(self._connections)
        self._max_tokens = worker.max_tokens
        self._live: set[TransferPart] = set()
        self._ended = asyncio.Event()
        self._num_waiting = 0
        self._stats = TransferStats()

    # -- what operators see ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> TransferStats:
        """Count of sent transfers."""
        pool = self._connections
        return dataclasses.replace(self._stats, fenced=pool.num_fenced, resent=pool.num_resent)

    @property
    def num_connections(self) -> int:
        """Number of connections that are good."""
        return self._connections.num_open

    @property
    def open_kinds(self) -> list[str]:
        """Transport of each open connection."""
        return self._connections.open_kinds

    @property
    def num_failed_openings(self) -> int:
        """Number of transports that could not be opened, since the start."""
        return self._connections.num_failed_openings

    @property
    def slots_in_use(self) -> int:
        """Number of staging slots that transports hold."""
        return self._connections.staging.slots_in_use

    @property
    def unsent_bytes(self) -> int:
        """Payload of all chunks that are computed but not gathered yet."""
        return sum(part.queue.unsent_bytes for part in self._live if part.queue)

    async def wait_for_room(self, max_waiting: float) -> None:
        """Wait until less than `max_unsent_mib` of KV is computed and unsent, because blocks that wait fill the cache.

        Raises:
            Overloaded: `max_waiting` callers wait already.
        """
        limit = self._config.max_unsent_mib * 2**20
        if self.unsent_bytes <= limit:
            return
        if self._num_waiting >= max_waiting:
            raise Overloaded("too much computed KV waits to be sent; try again later")
        self._num_waiting += 1
        try:
            while self.unsent_bytes > limit:
                self._ended.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ROOM_POLL_S):
                        await self._ended.wait()
        finally:
            self._num_waiting -= 1

    # -- connections -------------------------------------------------------------------------------------------------

    @property
    def opens_slowly(self) -> bool:
        """True if a connection may take seconds to reach its best kind, so that opening it ahead pays off."""
        return self._connections.opens_slowly

    async def open_ahead(self, peers: Sequence[Peer]) -> bool:
        """Open the first connection, or better one, that is missing and due; wait until it is open or has failed.

        No connection is closed in its favor, and no transfer fails because of it.

        Args:
            peers: the receivers to which transfers may go.

        Returns:
            Whether one was due.
        """
        return await self._ahead.open_next(peers)

    # -- transfers ---------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def transfer(self, ticket: Ticket, num_tokens: int | None = None) -> AsyncGenerator[OutgoingTransfer]:
        """Context manager: one KV transfer. After it exits, the KV blocks are no longer read.

        Args:
            num_tokens: leading tokens to send; by default all tokens of the ticket.

        Raises:
            TransferRefused: the two sides are incompatible.
        """
        num_tokens = ticket.num_tokens if num_tokens is None else num_tokens
        parts = self._parts(ticket, num_tokens)
        starting = [
            asyncio.create_task(self._start(rank, part, Peer(*_address(ticket), peer_rank)))
            for (rank, peer_rank), part in parts.items()
        ]
        self._live.update(parts.values())
        transfer = OutgoingTransfer(self, ticket, parts)
        try:
            yield transfer
        finally:
            for start in starting:
                start.cancel()
            try:
                await transfer.close()
            finally:
                self._live.difference_update(parts.values())
                self._ended.set()
                self._connections.make_room()

    async def close(self) -> None:
        """End all connections and their threads."""
        await self._connections.close()

    def copier(self, rank: int, part: TransferPart, block_ids: BlockTables) -> BlockCopier:
        """Return the copier that gathers the chunks of a part out of a rank's cache."""
        return BlockCopier(self._worker.caches[rank], part.plan, self.layout, rank, block_ids)

    @property
    def is_checked(self) -> bool:
        """True if chunks carry checksums."""
        return self._config.checksum == "full"

    def count(self, transferred: Transferred) -> None:
        """Count a committed transfer."""
        self._stats.committed += 1
        self._stats.num_bytes += transferred.num_bytes
        self._stats.num_chunks += transferred.num_chunks
        self._stats.transfer_s += transferred.transfer_s
        self._stats.exposed_s += transferred.exposed_s

    def require_compatible(self, ticket: Ticket) -> None:
        """Raise TransferRefused, with the difference, if a ticket's worker cannot receive KV from this one."""
        difference = mismatch(self.layout, ticket.layout, self._config.wire_dtype)
        if ticket.wire_compat != self._worker.wire_compat:
            raise TransferRefused(
                f"worker {ticket.decode_worker_id} has KV of kind {ticket.wire_compat}, "
                f"this worker {self._worker.wire_compat}{difference and f': {difference}'}"
            )
        if difference:
            raise TransferRefused(difference)

    def count_failure(self, error: BatonError) -> None:
        """Count a failed transfer."""
        self._stats.count_failure(error)

    def _parts(self, ticket: Ticket, num_tokens: int) -> dict[tuple[int, int], TransferPart]:
        """Plan the parts of a transfer, by sending and receiving rank."""
        here, there = self.layout, ticket.layout
        if num_tokens > (most := self._max_tokens):
            raise TransferRefused(f"{num_tokens} tokens are to be sent; this worker's cache holds at most {most}")
        self.require_compatible(ticket)
        parts = {}
        try:
            begins = begins_of(ticket, num_tokens)
            for rank in range(here.tp_size):
                for peer_rank in destination_ranks(here, there, rank):
                    options = self._options(rank, Peer(*_address(ticket), peer_rank))
                    planned = plan(here, rank, there, peer_rank, num_tokens, begins, options)
                    parts[rank, peer_rank] = TransferPart(ticket, planned)
        except ValueError as error:
            raise TransferRefused(str(error)) from error
        return parts

    def _options(self, rank: int, peer: Peer) -> WireOptions:
        wanted = self._config.wire_dtype
        at_least = least_chunk_bytes(self.layout, wanted)
        kind, device = self._connections.transport_kind(rank, peer), self._worker.caches[rank].device
        size = chunk_bytes(kind, slot_bytes(kind, self._config, device), at_least, device)
        return WireOptions(size, self._config.span_tokens, wanted)

    async def _start(self, rank: int, part: TransferPart, peer: Peer) -> None:
        """Offer a part as soon as its connection is open."""
        try:
            async with self._connections.open(rank, peer) as connection:
                part.offer_on(connection)
        except BatonError as error:
            part.fail(error)
        except BaseException as error:
            part.fail(TransferError(f"the transfer could not start: {error!r}"))
            raise


class OutgoingTransfer:
    """One KV transfer, in all its parts; created by `KvSender.transfer`."""

    def __init__(self, sender: KvSender, ticket: Ticket, parts: dict[tuple[int, int], TransferPart]) -> None:
        self.ticket = ticket
        self._sender = sender
        self._parts = parts
        self._queues: list[ChunkQueue] = []

    def extend(self, block_ids: BlockTables) -> None:
        """Make the blocks readable, as far as `advance` reports them computed.

        An engine that allocates a sequence's blocks bit by bit may call it again, in any thread, before it advances
        into the new blocks.

        Args:
            block_ids: all blocks of the sequence so far, and the row of its states once all tokens are computed. Blocks
                that the receiver has or does not need are not sent.
        """
        if self._queues:
            for queue in self._queues:
                queue.extend(block_ids)
            return
        for (rank, _), part in self._parts.items():
            copier = self._sender.copier(rank, part, block_ids)
            queue = ChunkQueue(self.ticket, copier, self._sender.is_checked)
            self._queues.append(queue)
            part.attach(queue)

    def on_progress(self, progress: KvProgress) -> None:
        """Handle an engine's progress report, in any thread, after the first `extend`."""
        if progress.block_ids is not None:
            self.extend(progress.block_ids)
        self.advance(progress.num_tokens, progress.num_layers, progress.fence)

    def advance(self, num_tokens: int, num_layers: int, fence: Fence | None = None) -> None:
        """Report that the first `num_tokens` tokens are computed in the model's first `num_layers` layers.

        Any thread may call it, after the first `extend`.

        Args:
            fence: must be reached before these blocks are read.
        """
        for queue in self._queues:
            queue.advance(num_tokens, num_layers, fence)

    async def finish(self, first_token: int | None) -> Transferred:
        """Report that everything is computed, and wait until the receiver has it.

        Args:
            first_token: the token from which the receiver continues; None for a prefix, and if the receiver draws it
                itself.

        Raises:
            TransferError: the transfer failed; the receiver may be alive.
            WorkerFailed: the receiver is gone.
        """
        finished_s = time.monotonic()
        for part in self._parts.values():
            part.finish(first_token)
        try:
            await asyncio.gather(*(asyncio.shield(part.settled) for part in self._parts.values()))
        except BatonError as error:
            self._sender.count_failure(error)
            raise
        now = time.monotonic()
        began_s = min([finished_s, *(queue.began_s for queue in self._queues if queue.began_s)])
        plans = [part.plan for part in self._parts.values()]
        transferred = Transferred(
            num_bytes=sum(plan.num_bytes for plan in plans),
            num_chunks=sum(len(plan.chunks) for plan in plans),
            transfer_s=now - began_s,
            exposed_s=now - finished_s,
        )
        self._sender.count(transferred)
        return transferred

    async def close(self) -> None:
        """Abort unsettled parts, and wait until the blocks are no longer read, even if cancelled in the meantime."""
        for part in self._parts.values():
            part.give_up(TransferCancelled("the sender aborted the transfer"))
        waiting = asyncio.gather(*(part.unpinned for part in self._parts.values()))
        await seen_through(waiting)


def _address(ticket: Ticket) -> tuple[str, str, str]:
    return ticket.decode_worker_id, ticket.incarnation, ticket.kv_address
