"""Publisher of the changes of a worker's prefix cache to the index.

engine step -> stored / removed / cleared -> pending (50 ms, bounded) -> apply, one event at a time, numbered
                                                  |
   too many, RESYNC, or Redis unavailable: drop --+--> a snapshot, once it can be published

Pending holds only the latest change of each key. So however many steps the engine has made during a slow round trip,
the next few events carry their changes, and no queue of past changes delays the present ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from baton.errors import StoreUnavailable
from kvstore.index.backoff import backoff_s
from kvstore.index.events import BlockEvent, IndexOutcome, Op

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.index.protocol import PrefixIndex

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Failures that lengthen the pause before the next try: it has 0.8 s at most, so that the index is complete soon after
Redis has room again."""
MAX_EVENT_KEYS = 1024
"""Keys in one event; Redis applies an event in well under a millisecond."""
GATHER_S = 0.05
"""Time for which changes are gathered before they are published: an event of several steps costs Redis and each router
little more than an event of one."""
ListKeys = Callable[[], Collection[bytes]]
"""Returns the keys of all blocks that can be reused now."""


class IndexPublisher:
    """Publisher for one epoch of one worker while `run` runs. The caller owns that task and the index.

    `snapshot` returns the keys of all blocks that can be reused now. It must contain every key that was reported stored
    and not removed since, and may be ahead of the reports. Call it, `stored`, `removed` and `cleared` on the event
    loop. Report blocks as stored once they can be read, and as removed before they are reused.
    """

    def __init__(
        self,
        index: PrefixIndex,
        worker_id: str,
        epoch: int,
        snapshot: ListKeys,
        *,
        check_s: float = 3.0,
        gather_s: float = GATHER_S,
        max_pending_keys: int = 65_536,
    ) -> None:
        self.num_snapshots = 0
        """Number of complete snapshots published; the first one opens the sequence."""
        self._index = index
        self._worker_id = worker_id
        self._epoch = epoch
        self._snapshot = snapshot
        self._check_s = check_s
        self._gather_s = gather_s
        self._max_pending_keys = max_pending_keys
        self._seq = 0
        self._pending: dict[bytes, Op] = {}
        self._is_cleared = False
        """True if the cache was cleared before the pending changes."""
        self._needs_snapshot = True
        self._load = b""
        """Load to be reported with the next event."""
        self._num_reported = 0
        self._is_current = False
        """False if the index did not take the latest event."""
        self._work = asyncio.Event()
        self._work.set()

    def stored(self, keys: Iterable[bytes]) -> None:
        self._report(Op.STORED, keys)

    def removed(self, keys: Iterable[bytes]) -> None:
        self._report(Op.REMOVED, keys)

    def cleared(self) -> None:
        if not self._needs_snapshot:
            self._pending.clear()
            self._is_cleared = True
            self._work.set()

    def report(self, number: int, load: bytes) -> bool:
        """Report the worker's load with the next event.

        Args:
            number: rises with each load; one that was reported is not reported again.

        Returns:
            False if events cannot be published at present.
        """
        if not self._is_current or self._needs_snapshot:
            return False
        if number > self._num_reported:
            self._load, self._num_reported = load, number
            self._work.set()
        return True

    @property
    def is_settled(self) -> bool:
        """True if the index has everything that was reported."""
        return not self._work.is_set()

    async def run(self) -> None:
        """Publish until cancelled. An unavailable Redis is not an error.

        Raises:
            Fenced: a newer epoch of this worker holds the lease, so this one must not publish any more.
        """
        num_failures = 0
        while True:
            try:
                self._is_current = is_current = await self._publish()
                if is_current:
                    num_failures = 0
                    await self._wait_or_check()
            except StoreUnavailable as error:
                if num_failures == 0:
                    logger.warning("the index is unavailable, a snapshot will follow: %s", error)
                self._is_current = is_current = False
            if not is_current:
                self._load, self._num_reported = b"", 0
                self._resync()
                num_failures = min(num_failures + 1, MAX_FAILURES)
                await asyncio.sleep(backoff_s(num_failures))

    def _report(self, op: Op, keys: Iterable[bytes]) -> None:
        if self._needs_snapshot:
            return  # the following snapshot will contain it
        self._pending |= dict.fromkeys(keys, op)
        if len(self._pending) > self._max_pending_keys:
            self._resync()
        if self._pending:
            self._work.set()

    def _resync(self) -> None:
        self._pending.clear()
        self._is_cleared = False
        self._needs_snapshot = True
        self._work.set()

    async def _publish(self) -> bool:
        """Publish everything that is pending; returns False if the index wants a snapshot."""
        while self._needs_snapshot or self._is_cleared or self._pending or self._load:
            published = await (self._publish_snapshot() if self._needs_snapshot else self._publish_changes())
            if not published:
                return False
            if self._is_cleared or self._pending or self._load:  # reported during the round trip
                await asyncio.sleep(self._gather_s)
        self._work.clear()
        return True

    async def _wait_or_check(self) -> None:
        """Wait for work; every `check_s`, check that the index has lost nothing, or schedule a snapshot."""
        try:
            async with asyncio.timeout(self._check_s):
                await self._work.wait()
            await asyncio.sleep(self._gather_s)
        except TimeoutError:
            if await self._index.position(self._worker_id, self._epoch) != self._seq:
                self._resync()

    async def _publish_changes(self) -> bool:
        """Publish pending changes, removals first, so that the index never claims too much between two events."""
        pending, self._pending = self._pending, {}
        load, self._load = self._load, b""
        is_cleared, self._is_cleared = self._is_cleared, False
        changes: list[tuple[Op, tuple[bytes, ...]]] = [(Op.CLEARED, ())] if is_cleared else []
        for op in (Op.REMOVED, Op.STORED):
            changes += [(op, chunk) for chunk in _chunks([key for key, last in pending.items() if last is op])]
        if load and not changes:
            changes.append((Op.STORED, ()))
        for number, (op, chunk) in enumerate(changes, 1):
            if not await self._apply(op, chunk, load=load if number == len(changes) else b""):
                return False
        return True

    async def _publish_snapshot(self) -> bool:
        self._needs_snapshot = False
        keys = list(dict.fromkeys(self._snapshot()))  # changes that are reported from here on are published after it
        if not await self._apply(Op.SNAPSHOT_BEGIN):
            return False
        for chunk in _chunks(keys):
            if not await self._apply(Op.SNAPSHOT_PART, chunk):
                return False
        if not await self._apply(Op.SNAPSHOT_END, num_keys=len(keys)):
            return False
        self.num_snapshots += 1
        return True

    async def _apply(self, op: Op, keys: tuple[bytes, ...] = (), num_keys: int = 0, load: bytes = b"") -> bool:
        self._seq += 1
        event = BlockEvent(
            worker_id=self._worker_id,
            epoch=self._epoch,
            seq=self._seq,
            op=op,
            keys=keys,
            num_keys=num_keys,
            load=load,
        )
        answer = await self._index.apply(event)
        self._seq = max(self._seq, answer.seq)
        return answer.outcome is IndexOutcome.APPLIED


def _chunks(keys: list[bytes]) -> list[tuple[bytes, ...]]:
    return [tuple(keys[at : at + MAX_EVENT_KEYS]) for at in range(0, len(keys), MAX_EVENT_KEYS)]
