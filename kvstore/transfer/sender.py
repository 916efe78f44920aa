"""The sending side of the hand-over.

The life of a transfer, as the sender sees it:

1. `transfer` takes a ticket and offers as soon as there is a pair, while the prompt still waits: opening it and the
   round trip to the receiver hide in the queue, and the session's pings renew the ticket's lease from the offer on.
2. `attach` gives the blocks. The caller pins them until the block of `transfer` is left.
3. `advance`, from the engine's thread: what is computed, in all layers or in some; not needed where all is. The pair's
   lane gathers, seals and sends chunk by chunk.
4. `finish`, with the first token where there is one: Commit follows the last chunk, CommitAck ends it.

Leaving the block early gives the transfer up: its blocks are not read any more once it is left, and the receiver is
told in the background. Each pair of ranks that exchange bytes carries its part over a pair of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

from baton.config import FaultsConfig
from baton.errors import BatonError, Overloaded, TransferCancelled, TransferError, TransferRefused
from baton.messages import HandedOver, Hello, Ticket
from kvstore.transfer.connection.outgoing import Peer, TransferPart
from kvstore.transfer.connection.pool import ConnectionPool
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.pipeline.driven import seen_through
from kvstore.transfer.pipeline.send_loop import ChunkQueue
from kvstore.transfer.protocol.chunk_header import PROTOCOL_VERSION
from kvstore.transfer.protocol.layout import destination_ranks, layout_of, mismatch
from kvstore.transfer.protocol.plan import WireOptions, least_chunk_bytes, plan, require_fitting_slots
from kvstore.transfer.stats import TransferStats
from kvstore.transfer.transport.faults import parse_faults
from kvstore.transfer.transport.select import chunk_bytes, usable_transports
from kvstore.transfer.transport.shm import host_id

ROOM_POLL_S = 0.05

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from baton.config import TransferConfig
    from baton.engine.core.runner import Fence
    from baton.engine.model.kv_cache import KVCache


class KvSender:
    """Sends KV out of one worker's cache. For one event loop.

    Args:
        caches: one a rank; block ids mean the same on all of them.
        num_kv_heads: of the whole model, one number a layer group, where ranks outnumber the heads.
        host: the address on which receivers can reach this one's links.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        caches: Sequence[KVCache],
        wire_compat: str,
        config: TransferConfig,
        host: str,
        faults: FaultsConfig | None = None,
        num_kv_heads: Sequence[int] = (),
    ) -> None:
        self.layout = layout_of(caches[0].spec, len(caches), num_kv_heads)
        require_fitting_slots(self.layout, config.slot_bytes, config.wire_dtype)
        devices = [cache.device for cache in caches]
        links = usable_transports(devices, config.links)
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=worker_id,
            incarnation=incarnation,
            wire_compat=wire_compat,
            links=links,
            layout=self.layout,
            rank=0,
            peer_rank=0,
            host_id=host_id(),
        )
        self._caches = tuple(caches)
        self._config = config
        self._wire_compat = wire_compat
        self._pairs = ConnectionPool(hello, devices, config, host, parse_faults((faults or FaultsConfig()).spec))
        self._live: set[TransferPart] = set()
        self._ended = asyncio.Event()
        self._num_waiting = 0
        self._stats = TransferStats()

    # -- what operators see ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> TransferStats:
        return dataclasses.replace(self._stats, fenced=self._pairs.num_fenced, resent=self._pairs.num_resent)

    @property
    def num_pairs(self) -> int:
        return self._pairs.num_open

    @property
    def slots_in_use(self) -> int:
        return self._pairs.staging.slots_in_use

    @property
    def unsent_bytes(self) -> int:
        """Computed, and not gathered yet."""
        return sum(part.outbound.unsent_bytes for part in self._live if part.outbound)

    async def wait_for_room(self, max_waiting: float) -> None:
        """Returns once less KV than `max_unsent_mib` is computed and not sent: blocks that wait fill the cache.

        Raises:
            Overloaded: `max_waiting` others wait already.
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
                with contextlib.suppress(TimeoutError):  # lanes drain what is unsent between two ends of transfers
                    async with asyncio.timeout(ROOM_POLL_S):
                        await self._ended.wait()
        finally:
            self._num_waiting -= 1

    # -- transfers ---------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def transfer(self, ticket: Ticket, num_tokens: int | None = None) -> AsyncGenerator[OutgoingTransfer]:
        """A hand-over, for as long as the block is entered. When it is left, nothing reads the blocks any more.

        Args:
            num_tokens: leading tokens to send, where it is not all that the ticket asks for.

        Raises:
            TransferRefused: the two sides do not fit.
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
                self._pairs.make_room()

    async def close(self) -> None:
        """Ends all pairs and their threads."""
        await self._pairs.close()

    def rows(self, rank: int, part: TransferPart, block_ids: Sequence[int], state_slot: int | None) -> BlockCopier:
        cache = self._caches[rank]
        return BlockCopier(cache, part.plan, self.layout, rank, block_ids, state_slot)

    @property
    def is_checked(self) -> bool:
        return self._config.checksum == "full"

    def count(self, handed_over: HandedOver) -> None:
        self._stats.committed += 1
        self._stats.num_bytes += handed_over.num_bytes
        self._stats.num_chunks += handed_over.num_chunks
        self._stats.transfer_s += handed_over.transfer_s
        self._stats.exposed_s += handed_over.exposed_s

    def count_failure(self, error: BatonError) -> None:
        self._stats.count_failure(error)

    def _parts(self, ticket: Ticket, num_tokens: int) -> dict[tuple[int, int], TransferPart]:
        """By sending and receiving rank."""
        here, there = self.layout, ticket.layout
        if num_tokens > (most := self._caches[0].num_blocks * here.block_size):
            raise TransferRefused(f"{num_tokens} tokens are to be sent; this worker's cache holds at most {most}")
        if ticket.wire_compat != self._wire_compat:
            raise TransferRefused(
                f"worker {ticket.decode_worker_id} has KV of kind {ticket.wire_compat}, this worker {self._wire_compat}"
            )
        if difference := mismatch(here, there, self._config.wire_dtype):
            raise TransferRefused(difference)
        parts = {}
        try:
            for rank in range(here.tp_size):
                for peer_rank in destination_ranks(here, there, rank):
                    options = self._options(rank, Peer(*_address(ticket), peer_rank))
                    planned = plan(here, rank, there, peer_rank, num_tokens, ticket.skip_tokens, options)
                    parts[rank, peer_rank] = TransferPart(ticket, planned)
        except ValueError as error:
            raise TransferRefused(str(error)) from error
        return parts

    def _options(self, rank: int, peer: Peer) -> WireOptions:
        slot_bytes, wanted = self._config.slot_bytes, self._config.wire_dtype
        at_least = least_chunk_bytes(self.layout, wanted)
        size = chunk_bytes(self._pairs.transport_kind(rank, peer), slot_bytes, at_least)
        return WireOptions(size, self._config.span_tokens, wanted)

    async def _start(self, rank: int, part: TransferPart, peer: Peer) -> None:
        """SendState a part as soon as its pair is open."""
        try:
            async with self._pairs.open(rank, peer) as pair:
                part.offer_on(pair)
        except BatonError as error:
            part.fail(error)
        except BaseException as error:
            part.fail(TransferError(f"the transfer could not begin: {error!r}"))
            raise


class OutgoingTransfer:
    """One hand-over, in all its parts. Made by `KvSender.transfer`."""

    def __init__(self, sender: KvSender, ticket: Ticket, parts: dict[tuple[int, int], TransferPart]) -> None:
        self.ticket = ticket
        self._sender = sender
        self._parts = parts
        self._outbounds: list[ChunkQueue] = []

    def attach(self, block_ids: Sequence[int], state_slot: int | None = None) -> None:
        """The blocks may be read from now on, as far as `advance` says.

        Args:
            block_ids: all blocks of the sequence, in order; those of `ticket.skip_tokens` stay here.
            state_slot: of the sequence, where the model has states.
        """
        for (rank, _), part in self._parts.items():
            rows = self._sender.rows(rank, part, block_ids, state_slot)
            outbound = ChunkQueue(self.ticket, part.plan, rows, self._sender.is_checked)
            self._outbounds.append(outbound)
            part.attach(outbound)

    def advance(self, num_tokens: int, num_layers: int, fence: Fence | None = None) -> None:
        """From any thread, after `attach`: the KV of the first `num_tokens` tokens is in the model's first `num_layers`
        layers.

        Args:
            fence: on a GPU, what must have happened before the blocks are read.
        """
        for outbound in self._outbounds:
            outbound.advance(num_tokens, num_layers, fence)

    async def finish(self, first_token: int | None) -> HandedOver:
        """Everything is computed. Returns once the receiver has it.

        Args:
            first_token: what a sequence goes on from there; None for a prefix.

        Raises:
            TransferError: the transfer failed; the receiver may be well.
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
        began_s = min([finished_s, *(outbound.began_s for outbound in self._outbounds if outbound.began_s)])
        plans = [part.plan for part in self._parts.values()]
        handed_over = HandedOver(
            num_bytes=sum(plan.num_bytes for plan in plans),
            num_chunks=sum(len(plan.chunks) for plan in plans),
            transfer_s=now - began_s,
            exposed_s=now - finished_s,
        )
        self._sender.count(handed_over)
        return handed_over

    async def close(self) -> None:
        """Gives up what is not settled, and returns once the blocks are not read any more, even when cancelled."""
        for part in self._parts.values():
            part.give_up(TransferCancelled("the sender gave the transfer up"))
        waiting = asyncio.gather(*(part.unpinned for part in self._parts.values()))
        await seen_through(waiting)


def _address(ticket: Ticket) -> tuple[str, str, str]:
    return ticket.decode_worker_id, ticket.incarnation, ticket.kv_address
