"""Index in memory: one process, one event loop. For tests and for a cluster inside one process."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.errors import Fenced
from kvstore.index.events import ORIGIN, BlockEvent, Cursor, IndexAnswer, IndexOutcome, IndexState, Op, Position
from kvstore.index.protocol import READ_EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.cluster import ControllerInfo, ModelAnnouncement, RouterInfo, Worker
    from baton.registered_adapters import Adapters


@dataclass(slots=True)
class MemoryLease:
    """Lease of one worker."""

    epoch: int
    expires_at: float
    worker: Worker | None = None
    """None until the first renewal."""


@dataclass(slots=True)
class Blocks:
    """Blocks that one epoch of a worker owns."""

    expires_at: float
    seq: int = 0
    owned: set[bytes] = field(default_factory=set)
    parts: set[bytes] = field(default_factory=set)


class MemoryStore:
    """State that Redis would hold; index, leases and records share one. It lives as long as its process."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.boot = uuid.uuid4().hex
        self.epochs: dict[str, int] = {}
        self.leases: dict[str, MemoryLease] = {}
        self.blocks: dict[tuple[str, int], Blocks] = {}
        self.routers: dict[str, tuple[float, RouterInfo]] = {}
        self.models: dict[str, tuple[float, ModelAnnouncement]] = {}
        self.desired: dict[str, int] = {}
        self.controller: tuple[float, ControllerInfo] | None = None
        self.records: dict[tuple[str, str, bytes], tuple[float, dict[bytes, bytes]]] = {}
        """Records of requests in flight, by tenant, request id and digest: expiry and fields."""
        self.adapters: Adapters | None = None
        """Registered adapters by name; None: the store has none, or has lost them."""

    def lease(self, worker_id: str) -> MemoryLease | None:
        """Return a worker's lease if it is alive."""
        lease = self.leases.get(worker_id)
        return lease if lease and lease.expires_at > self.clock() else None

    def owned(self, worker_id: str, epoch: int) -> Blocks | None:
        """Return the blocks of an epoch unless they have expired."""
        blocks = self.blocks.get((worker_id, epoch))
        if blocks and blocks.expires_at <= self.clock():
            del self.blocks[worker_id, epoch]
            return None
        return blocks


class MemoryIndex:
    """`PrefixIndex` in a `MemoryStore`."""

    def __init__(self, store: MemoryStore, *, blocks_ttl_s: float = 60.0, stream_max_events: int = 100_000) -> None:
        self._store = store
        self._blocks_ttl_s = blocks_ttl_s
        self._stream_max_events = stream_max_events
        self._stream: list[BlockEvent] = []
        self._num_trimmed = 0
        self._grown = asyncio.Condition()

    async def apply(self, event: BlockEvent) -> IndexAnswer:
        lease = self._store.lease(event.worker_id)
        if lease and lease.epoch > event.epoch:
            raise Fenced(f"{event.worker_id}: epoch {lease.epoch} holds the lease, this is epoch {event.epoch}")
        blocks = self._store.owned(event.worker_id, event.epoch) or Blocks(expires_at=0.0)
        follows = event.seq > blocks.seq if event.op is Op.SNAPSHOT_BEGIN else event.seq == blocks.seq + 1
        whole = event.op is not Op.SNAPSHOT_END or len(blocks.parts) == event.num_keys
        if lease is None or lease.epoch < event.epoch or not follows or not whole:
            return IndexAnswer(IndexOutcome.RESYNC, blocks.seq)
        blocks.seq = event.seq
        blocks.expires_at = self._store.clock() + self._blocks_ttl_s
        self._store.blocks[event.worker_id, event.epoch] = blocks
        _change(blocks, event)
        await self._append(event)
        return IndexAnswer(IndexOutcome.APPLIED, event.seq)

    async def position(self, worker_id: str, epoch: int) -> int:
        blocks = self._store.owned(worker_id, epoch)
        return blocks.seq if blocks else 0

    async def state(self) -> IndexState:
        leases = {worker: lease for worker in self._store.leases if (lease := self._store.lease(worker))}
        owners = {
            worker: Position(lease.epoch, await self.position(worker, lease.epoch)) for worker, lease in leases.items()
        }
        return IndexState(self._store.boot, owners, self._tip())

    async def snapshot(self, worker_id: str, epoch: int) -> tuple[int, set[bytes]]:
        blocks = self._store.owned(worker_id, epoch)
        return (blocks.seq, set(blocks.owned)) if blocks else (0, set())

    async def read(self, cursor: Cursor, wait_s: float) -> Sequence[tuple[Cursor, BlockEvent | None]]:
        if cursor >= self._tip() and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s), self._grown:
                    await self._grown.wait_for(lambda: self._tip() > cursor)
            except TimeoutError:
                return []
        start = max(cursor[1] - self._num_trimmed, 0)
        events = self._stream[start : start + READ_EVENTS]
        return [((0, self._num_trimmed + start + n), event) for n, event in enumerate(events, 1)]

    async def close(self) -> None:
        """Nothing to close."""

    def _tip(self) -> Cursor:
        return (ORIGIN[0], self._num_trimmed + len(self._stream))

    async def _append(self, event: BlockEvent) -> None:
        self._stream.append(event)
        excess = len(self._stream) - self._stream_max_events
        if excess > 0:
            del self._stream[:excess]
            self._num_trimmed += excess
        async with self._grown:
            self._grown.notify_all()


def _change(blocks: Blocks, event: BlockEvent) -> None:
    match event.op:
        case Op.STORED:
            blocks.owned.update(event.entries)
        case Op.REMOVED:
            blocks.owned.difference_update(event.entries)
        case Op.CLEARED:
            blocks.owned.clear()
        case Op.SNAPSHOT_BEGIN:
            blocks.parts = set()
        case Op.SNAPSHOT_PART:
            blocks.parts.update(event.entries)
        case Op.SNAPSHOT_END:
            blocks.owned, blocks.parts = blocks.parts, set()
