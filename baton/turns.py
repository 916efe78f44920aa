"""Slots of a scarce resource, granted fairly between tenants.

The tenants are served round robin, one job at a time, whatever each of them has in the queue. Among the jobs of one
tenant, a smaller one may overtake a larger one that came a little earlier, so that many large jobs do not delay a small
one, and the larger one does not wait forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator

from baton.errors import Overloaded

PATIENCE_S = 5.0
"""Seconds by which the arrival of a job of LARGE is postponed."""
LARGE = 2**20
_Waiting = tuple[float, int, int, asyncio.Future[None]]
"""Effective arrival time, number, size, and the future that is set when the job gets its slot."""


class Turns:
    """Slots for a number of jobs at a time; one tenant may have all but one of them, if there are several.

    Args:
        num_at_once: number of jobs that run at the same time.
        max_waiting: maximum total size of the waiting jobs of all tenants; one tenant may have half of it.
    """

    def __init__(self, num_at_once: int, max_waiting: int) -> None:
        self._num_free = num_at_once
        self._most_of_one = max(1, num_at_once - 1)
        self._max_waiting = max_waiting
        self._queues: dict[str, list[_Waiting]] = {}
        """Waiting jobs by tenant, in round-robin order: the tenant served last is last."""
        self._num_running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        """Total size of the waiting jobs, by tenant."""
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, size: int) -> AsyncGenerator[None]:
        """Context manager: wait for a slot, and hold it inside the context.

        Args:
            owner: the tenant.
            size: of the job, in bytes or characters.

        Raises:
            Overloaded: too many jobs wait already.
        """
        await self.take(owner, size)
        try:
            yield
        finally:
            self.end(owner)

    async def take(self, owner: str, size: int) -> None:
        """Wait for a slot, which `end` releases; see `turn`."""
        if not self._queues and self._num_free and self._num_running[owner] < self._most_of_one:
            self._num_free -= 1
            self._num_running[owner] += 1
            return
        if self._waiting.total() + size > self._max_waiting or self._waiting[owner] + size > self._max_waiting / 2:
            raise Overloaded("the queue is full; try again later")
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        comes_s = time.monotonic() + PATIENCE_S * size / LARGE
        heapq.heappush(self._queues.setdefault(owner, []), (comes_s, next(self._numbers), size, granted))
        self._waiting[owner] += size
        self._pass_on()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._drop_cancelled(owner)
            else:
                self.end(owner)  # the slot was granted
            raise

    def _drop_cancelled(self, owner: str) -> None:
        queue = self._queues.pop(owner, [])
        self._waiting.pop(owner, 0)
        if left := [each for each in queue if not each[-1].cancelled()]:
            heapq.heapify(left)
            self._queues[owner] = left
            self._waiting[owner] = sum(size for _, _, size, _ in left)

    def end(self, owner: str) -> None:
        """Release a slot."""
        self._num_free += 1
        self._num_running[owner] -= 1
        if not self._num_running[owner]:
            del self._num_running[owner]
        self._pass_on()

    def _pass_on(self) -> None:
        """Grant the free slots, one per tenant in each round."""
        while owners := [owner for owner in self._queues if self._may_have(owner)]:
            for owner in owners:
                if self._may_have(owner) and self._take(owner):
                    self._num_free -= 1
                    self._num_running[owner] += 1

    def _may_have(self, owner: str) -> bool:
        return owner in self._queues and self._num_free > 0 and self._num_running[owner] < self._most_of_one

    def _take(self, owner: str) -> bool:
        """Take the first job from a tenant's queue, and return whether it still wants its slot."""
        queue = self._queues.pop(owner)
        _, _, size, granted = heapq.heappop(queue)
        self._waiting[owner] -= size
        if queue:
            self._queues[owner] = queue  # the last one from now on
        else:
            del self._waiting[owner]
        if granted.cancelled():
            return False
        granted.set_result(None)
        return True
