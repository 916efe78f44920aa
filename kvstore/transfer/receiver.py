"""Receiving side of the KV transfer.

The life of a transfer at the receiver:

1. `expect` reserves blocks that the worker owns, and returns a ticket. The reservation holds the blocks from here on.
2. A sender opens a connection: Hello and Welcome, and the transport's rendezvous.
3. Offer: both sides must have the same plan. The receiver sends Grant; from now on the sender's pings renew the lease.
4. Each received chunk is verified and, if the reservation still exists, written into the blocks.
5. Every source has sent Commit and every chunk has been received: the blocks are readable, `wait_committed` returns,
   CommitAck is sent.
6. `release` returns the blocks, once: to the pool after a failure or a cancellation, to the running sequence after a
   commit.

A failure at any point (Nack or Abort, lease, lost connection) ends the reservation at once. Only this process writes
its blocks, so it need not wait for the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.blocks import num_blocks_for
from baton.errors import TransferError, TransferRefused, text_of
from baton.messages import FromSender, Hello, SessionFailed, Ticket
from baton.tasks import cancel_and_wait
from engine.core.runner import EMPTY_PLACE
from kvstore.transfer.connection.control_stream import caller_of
from kvstore.transfer.connection.incoming import Caller, IncomingConnection
from kvstore.transfer.connection.reservations import Arrival, Expected, Reservations
from kvstore.transfer.protocol.chunk_header import PROTOCOL_VERSION
from kvstore.transfer.protocol.plan import AUTO, block_size_of, mismatch, require_fitting_slots, window_begins
from kvstore.transfer.stats import TransferStats
from kvstore.transfer.transport.select import (
    LocalRank,
    StagingPools,
    choose_transport,
    must_not_be_plain,
    nearness,
    usable_transports,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.config import TransferConfig
    from baton.trust import KeyFile
    from engine.core.runner import BlockTables
    from kvstore.transfer.local_worker import LocalWorker
    from kvstore.transfer.pipeline.thread import TransportThread
    from kvstore.transfer.transport.base import Nearness, ReceivingTransport

ID_BYTES = 16
"""Random bytes in the id of a transfer."""
HANG_UP_S = 1.0
"""Time that senders have, when a receiver closes, to read the reason and to end their streams."""


class KvReceiver:
    """Receiver of KV into one worker's cache. For one event loop.

    Attributes:
        kv_address: the address of the server whose `KvControl.Session` is `session`; the worker sets it before
            `expect`.
        tls: certificates that this worker presents to other members; None: all connections are plain text.
    """

    def __init__(self, worker: LocalWorker, config: TransferConfig) -> None:
        self.kv_address = ""
        self.tls = worker.tls
        self.layout = worker.layout()
        require_fitting_slots(self.layout, config.slot_bytes)
        self._worker = worker
        self._config = config
        self._usable = usable_transports(worker.devices, config.transports)
        self._staging = StagingPools(config)
        self._reservations = Reservations(worker, config)
        self._connections: dict[int, IncomingConnection] = {}
        self._num_connections_ever = 0
        self._handlers: set[asyncio.Task[None]] = set()
        """Tasks that serve control streams."""
        self._threads: set[TransportThread[ReceivingTransport]] = set()
        self._fenced = 0
        """Messages and chunks that closed connections have dropped."""

    @property
    def keys(self) -> KeyFile | None:
        """Keys that prove this worker's identity to peers; None: the cluster has no secret."""
        return self._worker.keys

    # -- what operators see ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> TransferStats:
        """Count of received transfers."""
        stats = self._reservations.stats
        fenced = stats.fenced + self._fenced + sum(c.num_fenced for c in self._connections.values())
        return dataclasses.replace(stats, fenced=fenced)

    @property
    def num_connections(self) -> int:
        """Number of connections that are good."""
        return sum(connection.failure is None for connection in self._connections.values())

    @property
    def open_kinds(self) -> list[str]:
        """Transport of each open connection."""
        return [c.transport_kind for c in self._connections.values() if c.failure is None and c.is_open]

    @property
    def slots_in_use(self) -> int:
        """Number of staging slots that transports hold."""
        return self._staging.slots_in_use

    # -- reservations ------------------------------------------------------------------------------------------------

    def expect(
        self,
        name: str,
        num_tokens: int,
        skip_tokens: int,
        block_ids: BlockTables,
        expected: Expected = Expected.WHOLE,
        *,
        begins: tuple[int, ...] = (),
    ) -> Ticket:
        """Reserve blocks for a transfer, and return the ticket with which a sender fills them.

        Args:
            name: the purpose of the transfer. The transfer's id is this and random characters, so that no member can
                offer, abort or fail a transfer without its ticket.
            num_tokens: tokens of KV: the whole sequence, all of it but the last token, or a prefix.
            skip_tokens: leading tokens that the blocks of groups without a window already hold.
            block_ids: the sequence's block tables. The states arrive in the first row of the states' table.
            expected: the messages that complete the transfer.
            begins: first token whose KV is requested, by group, a multiple of the group's block size; empty:
                `skip_tokens` for all groups.

        Raises:
            ValueError: there are too few blocks, an empty place would be written, or a begin is not block-aligned.
        """
        wanted = begins or (skip_tokens,) * len(self.layout.groups)
        firsts, reserved = window_begins(self.layout, num_tokens), list[int]()
        for index, (table, begin, first) in enumerate(zip(block_ids, wanted, firsts, strict=False)):
            size = block_size_of(self.layout, index)
            num_blocks = num_blocks_for(num_tokens, size)
            if begin % size or not 0 <= begin <= num_tokens:
                raise ValueError(f"KV must begin at a multiple of {size} up to {num_tokens}, got {begin}")
            if len(table) < num_blocks:
                raise ValueError(f"{num_tokens} tokens need {num_blocks} blocks, got {len(table)}")
            num_empty = max((n for n, block in enumerate(table[:num_blocks], 1) if block == EMPTY_PLACE), default=0)
            if num_empty * size > max(begin, first):
                raise ValueError(f"KV cannot be received into an empty place of {table}")
            reserved.append(max(begin, num_empty * size))
        if self.layout.states and block_ids[-1][:1] in ((), (EMPTY_PLACE,)):
            raise ValueError(f"states cannot be received without a row for them, got {block_ids[-1]}")
        ticket = Ticket(
            transfer_id=f"{name}#{secrets.token_urlsafe(ID_BYTES)}",
            generation=0,
            decode_worker_id=self._worker.worker_id,
            incarnation=self._worker.incarnation,
            kv_address=self.kv_address,
            num_tokens=num_tokens,
            skip_tokens=skip_tokens,
            wire_compat=self._worker.wire_compat,
            layout=self.layout,
            force_first_token=expected is Expected.WITH_FIRST_TOKEN,
            begins=() if set(reserved) <= {skip_tokens} else tuple(reserved),
        )
        return self._reservations.add(ticket, block_ids, expected)

    async def wait_committed(self, ticket: Ticket) -> Arrival:
        """Wait until a transfer is complete and readable.

        Raises:
            TransferCorrupted: a chunk failed its header or checksum test.
            TransferExpired: the lease ended.
            TransferTimeout: an operation took too long.
            TransferCancelled: the sender aborted the transfer, or it was released.
            TransferError: the transfer failed otherwise, or its connection was lost.
        """
        return await self._reservations.wait_committed(ticket)

    async def release(self, ticket: Ticket) -> BlockTables:
        """End the reservation, in any phase, and return its blocks, once.

        Waits for at most one scatter, even if cancelled in the meantime. The caller then owns the blocks, although the
        call raises CancelledError.

        Returns:
            The reservation's blocks, which belong to the caller alone from now on: to free, or to continue with after a
            commit. Empty for every call but the first.
        """
        return await self._reservations.release(ticket)

    async def close(self) -> None:
        """End all connections, their tasks and threads, and fail transfers that are not committed.

        `release` still returns the blocks.
        """
        down = TransferError("this worker shuts down")
        for connection in list(self._connections.values()):
            connection.break_off(down)
        self._reservations.close(down)
        if self._handlers:
            _, waiting = await asyncio.wait(self._handlers, timeout=HANG_UP_S)
            await cancel_and_wait(waiting)
        for thread in list(self._threads):
            await thread.join(self._config.op_timeout_s + 1)

    def check(self) -> None:
        """Raise AssertionError if the reservations contradict each other."""
        self._reservations.check()

    # -- what senders call -------------------------------------------------------------------------------------------

    async def session(self, request_iterator: Any, context: Any) -> None:
        """Handle one call of KvControl.Session, which is one connection.

        This is a coroutine that writes, because gRPC leaves a cancelled generator suspended.
        """
        handler: Any = asyncio.current_task()
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        requests = _known(request_iterator)
        try:
            connection = self._welcome(await anext(requests, None), caller_of(context))
        except TransferRefused as error:
            await self._turn_away(request_iterator, context, error)
            return
        self._connections[connection.number] = connection
        self._threads.add(connection.thread)
        connection.thread.ended.add_done_callback(lambda _: self._threads.discard(connection.thread))
        try:
            await connection.serve(requests, context)
        finally:
            del self._connections[connection.number]
            self._fenced += connection.num_fenced

    async def _turn_away(self, requests: Any, context: Any, error: TransferRefused) -> None:
        """Send the reason, and let the sender hang up, as `IncomingConnection.serve` does."""
        with contextlib.suppress(TimeoutError, grpc.aio.InternalError):  # the sender may be gone, or never hang up
            async with asyncio.timeout(self._config.op_timeout_s):
                await context.write(wire.session_response(SessionFailed(text_of(error))))
                async for _ in requests:
                    pass

    def _welcome(self, hello: FromSender | None, host: str) -> IncomingConnection:
        """Open a connection; raises TransferRefused if the two workers are incompatible."""
        here = self._worker
        if not isinstance(hello, Hello):
            raise TransferRefused("the first message of a session must be Hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise TransferRefused(
                f"worker {hello.worker_id} speaks version {hello.protocol_version} of the KV transfer, "
                f"worker {here.worker_id} version {PROTOCOL_VERSION}"
            )
        if hello.wire_compat != here.wire_compat:
            raise TransferRefused(
                f"worker {hello.worker_id} has KV of kind {hello.wire_compat}, "
                f"worker {here.worker_id} of kind {here.wire_compat}"
            )
        if difference := mismatch(hello.layout, self.layout, AUTO):
            raise TransferRefused(difference)
        if not hello.rank < hello.layout.tp_size:
            raise TransferRefused(f"worker {hello.worker_id} has no rank {hello.rank}")
        if not hello.peer_rank < len(here.caches):
            raise TransferRefused(f"worker {here.worker_id} has no rank {hello.peer_rank}")
        is_sealed = self.tls is not None
        local = LocalRank(
            host=here.host,
            device=here.caches[hello.peer_rank].device,
            staging=self._staging,
            testing=here.testing,
            is_sealed=is_sealed,
        )
        near = nearness(
            hello, local.device, is_sealed=is_sealed, plaintext_transports=self._config.plaintext_transports
        )
        kind = choose_transport(hello.transports, self._usable, near)
        if kind is None:
            raise TransferRefused(self._why_no_transport(hello, near))
        self._num_connections_ever += 1
        caller = Caller(hello, host)
        return IncomingConnection(self._num_connections_ever, caller, kind, local, self._reservations)

    def _why_no_transport(self, hello: Hello, near: Nearness) -> str:
        """Return why none of the sender's kinds of transport can be used between it and this worker."""
        here = self._worker.worker_id
        offers = f"worker {hello.worker_id} offers the transports {', '.join(hello.transports) or 'none'}"
        if plain := must_not_be_plain(hello.transports, self._usable, near):
            silent = [
                worker
                for worker, names in (
                    (hello.worker_id, hello.plaintext_transports),
                    (here, self._config.plaintext_transports),
                )
                if not set(plain) <= set(names)
            ]
            return (
                f"{offers}, and is on another host, to which KV goes encrypted, since the cluster has certificates "
                f"(cluster.tls_certificate): {', '.join(plain)} cannot encrypt, and transfer.plaintext_transports of "
                f"worker {' and '.join(silent)} does not name it"
            )
        is_elsewhere = any(offered in self._usable for offered in hello.transports)
        where = "on the same GPU" if near.is_same_gpu else "on another host"
        if near.is_same_host and not near.is_same_gpu:
            where = "on a GPU that the receiver's GPU cannot read"
        return (
            f"{offers}{f', and is {where}; ' if is_elsewhere else ', '}worker {here} can use {', '.join(self._usable)}"
        )


async def _known(request_iterator: Any) -> AsyncIterator[FromSender]:
    """Yield the requests of known kinds; raises TransferRefused for a request that is too long."""
    async for request in request_iterator:
        if (message := wire.session_request_from_pb(request)) is not None:
            yield message
