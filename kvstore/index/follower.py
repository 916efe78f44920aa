"""Follower that keeps a router's mirror up to date.

    start     note the stream's tip, scan every live worker's set, replay from the tip
    then      read the stream; every `poll_s` compare positions and leases
    a worker's events miss one, or the stream was trimmed past them: scan that worker again, and only that one
    Redis is unavailable: the mirror stays as it is, and the follower retries
    Redis lost its state (a new boot token): read the new stream from its origin; workers publish snapshots there
    an event cannot be read: skip it; its worker's next event shows that it was missed

The comparison is exact: `IndexState` is read with its tip last, so once the stream is read up to that tip, a mirror
that is behind a position has missed an event.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from baton.cluster import MAX_WORKERS
from baton.errors import StoreUnavailable
from baton.tasks import paced
from kvstore.index.backoff import backoff_s
from kvstore.index.events import ORIGIN, Cursor, Position
from kvstore.index.mirror import Applied
from kvstore.index.protocol import READ_EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.index.mirror import Mirror
    from kvstore.index.protocol import PrefixIndex

logger = logging.getLogger(__name__)
GATHER_S = 0.1
"""Pause after a read of events; one read of several events costs little more than a read of one."""


class MirrorFollower:
    """Updater of `mirror` from `index` while `run` runs. The caller owns that task, the index and the mirror.

    Args:
        clock: monotonic, in seconds.
        on_load: called with the worker, the epoch and the load that an event reports.
    """

    def __init__(
        self,
        index: PrefixIndex,
        mirror: Mirror,
        *,
        poll_s: float = 1.0,
        lease_s: float = 10.0,
        blocks_ttl_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        on_load: Callable[[str, int, bytes], None] | None = None,
    ) -> None:
        self.mirror = mirror
        self._on_load = on_load
        self.connected = False
        self.num_rescans = 0
        """Number of scans of one worker's set, including those at the start."""
        self._index = index
        self._poll_s = poll_s
        self._lease_s = lease_s
        self._blocks_ttl_s = blocks_ttl_s
        self._clock = clock
        self._cursor: Cursor = ORIGIN
        self._boot = ""
        self._behind_since: float | None = clock()
        self._epochs: dict[str, int] = {}
        self._absent_since: dict[str, float] = {}
        self._grace_until = float("-inf")

    @property
    def lag_s(self) -> float:
        """Seconds for which the mirror has been known to lag behind the index; 0 if it is up to date."""
        return 0.0 if self._behind_since is None else self._clock() - self._behind_since

    async def run(self) -> None:
        """Follow the index until cancelled. An unavailable Redis is not an error."""
        num_failures = 0
        while True:
            try:
                await self._poll()
                num_failures = 0
                await self._read_until(self._clock() + self._poll_s)
            except StoreUnavailable as error:
                num_failures += 1
                if num_failures == 1:
                    logger.warning("the index is unavailable, its mirror becomes stale: %s", error)
                self._fall_behind()
                self.connected = False
                await asyncio.sleep(backoff_s(num_failures))

    async def _poll(self) -> None:
        seen = {worker_id: self.mirror.position(worker_id) for worker_id in self.mirror.workers()}
        state = await self._index.state()
        if state.boot != self._boot:
            self._fall_behind()
            # At the first start, the scans below cover the past. Later, the new stream's past is short.
            self._cursor = ORIGIN if self._boot else state.tip
            self._grace_until = self._clock() + self._lease_s if self._boot else self._grace_until
            self._boot = state.boot
        self._cursor = min(self._cursor, state.tip)  # the cursor is beyond the tip if another stream replaced ours
        self._note_leases({worker_id: position.epoch for worker_id, position in state.owners.items()})
        await self._read_up_to(state.tip)
        missed = {
            worker_id: position
            for worker_id, position in state.owners.items()
            if self._missed(seen.get(worker_id), self.mirror.position(worker_id), position)
        }
        # If more workers were missed than a cluster may have, each poll scans a random part of them.
        for worker_id in random.sample(sorted(missed), min(len(missed), MAX_WORKERS)):
            await self._rescan(worker_id, missed[worker_id].epoch)
        if len(missed) <= MAX_WORKERS:
            self._behind_since = None
        self.connected = True
        while self.mirror.sweep():  # noqa: ASYNC110 - other tasks run between two slices of work
            await asyncio.sleep(0)

    def _note_leases(self, epochs: Mapping[str, int]) -> None:
        now = self._clock()
        for worker_id, epoch in epochs.items():
            # An epoch without a lease came with an event that its worker was not allowed to write.
            if (position := self.mirror.position(worker_id)) and position.epoch > epoch:
                self.mirror.forget(worker_id)
        # Right after Redis lost its state, a missing lease means nothing: the worker has not renewed it yet.
        self._epochs = {**self._epochs, **epochs} if now < self._grace_until else dict(epochs)
        self.mirror.set_leased(self._epochs)
        absent = self.mirror.workers().keys() - self._epochs.keys()
        self._absent_since = {worker_id: self._absent_since.get(worker_id, now) for worker_id in absent}
        for worker_id, since in self._absent_since.items():
            if now - since >= self._blocks_ttl_s:
                self.mirror.forget(worker_id)

    @staticmethod
    def _missed(seen: Position | None, mirrored: Position | None, applied: Position) -> bool:
        """Return whether the mirror of a worker, read up to the tip, can no longer catch up by itself."""
        if mirrored is None or mirrored.epoch != applied.epoch or not applied.seq:
            return False  # nothing published yet, or the epoch has ended
        # The mirror was ahead before the index was asked: the worker counts from 1 again.
        is_reset = seen is not None and seen.epoch == applied.epoch and seen.seq > applied.seq
        return mirrored.seq < applied.seq or is_reset

    async def _read_until(self, deadline: float) -> None:
        while (wait_s := deadline - self._clock()) > 0:
            num_read = await self._read(wait_s)
            if 0 < num_read < READ_EVENTS:
                await asyncio.sleep(max(0.0, min(GATHER_S, deadline - self._clock())))

    async def _read_up_to(self, tip: Cursor) -> None:
        while self._cursor < tip:
            if not await self._read(0):
                self._cursor = tip  # the stream was truncated

    async def _read(self, wait_s: float) -> int:
        entries = await self._index.read(self._cursor, wait_s)
        gaps: dict[str, int] = {}
        async for cursor, event in paced(entries):
            if event is not None:
                if self.mirror.apply(event) is Applied.GAP:
                    gaps[event.worker_id] = event.epoch
                if event.load and self._on_load is not None:
                    self._on_load(event.worker_id, event.epoch, event.load)
            self._cursor = cursor
        if len(entries) == READ_EVENTS:
            self._fall_behind()
        for worker_id, epoch in gaps.items():
            await self._rescan(worker_id, epoch)
        if len(entries) < READ_EVENTS and self.connected:
            self._behind_since = None
        return len(entries)

    async def _rescan(self, worker_id: str, epoch: int) -> None:
        self._fall_behind()
        self.num_rescans += 1
        seq, keys = await self._index.snapshot(worker_id, epoch)
        async for _ in paced(self.mirror.replacing(worker_id, epoch, seq, keys)):
            pass  # others run between two parts

    def _fall_behind(self) -> None:
        if self._behind_since is None:
            self._behind_since = self._clock()
