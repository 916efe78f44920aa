"""Turns at what is scarce, fair between tenants.

The tenants take turns, one job at a time, whatever each of them has waiting. Of one tenant's jobs a smaller one may
overtake a larger one that came a little earlier, so that many large ones make no small one wait, and the larger one
does not wait for ever.
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
"""Seconds by which a job of LARGE counts as come later."""
LARGE = 2**20
_Waiting = tuple[float, int, int, asyncio.Future[None]]
"""When it counts as come, its number, its size, and what is set when it has its turn."""


class Turns:
    """So many jobs at a time, of one tenant one less, if there are several.

    Args:
        num_at_once: jobs that have their turn at the same time.
        max_waiting: what the waiting jobs of all tenants may have in sizes, together; of one tenant half of it.
    """

    def __init__(self, num_at_once: int, max_waiting: int) -> None:
        self._num_free = num_at_once
        self._most_of_one = max(1, num_at_once - 1)
        self._max_waiting = max_waiting
        self._queues: dict[str, list[_Waiting]] = {}
        """What waits, by tenant; who had a turn last is last."""
        self._num_running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        """Sizes of what waits, by tenant."""
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, size: int) -> AsyncGenerator[None]:
        """Waits for a turn, and has it while the block is entered.

        Args:
            owner: the tenant.
            size: of the job, in bytes or characters.

        Raises:
            Overloaded: too much waits already.
        """
        await self.take(owner, size)
        try:
            yield
        finally:
            self.end(owner)

    async def take(self, owner: str, size: int) -> None:
        """Waits for a turn, which `end` ends; see `turn`."""
        if not self._queues and self._num_free and self._num_running[owner] < self._most_of_one:
            self._num_free -= 1
            self._num_running[owner] += 1
            return
        if self._waiting.total() + size > self._max_waiting or self._waiting[owner] + size > self._max_waiting / 2:
            raise Overloaded("too much waits for its turn; try again later")
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
                self.end(owner)  # it was granted
            raise

    def _drop_cancelled(self, owner: str) -> None:
        queue = self._queues.pop(owner, [])
        self._waiting.pop(owner, 0)
        if left := [each for each in queue if not each[-1].cancelled()]:
            heapq.heapify(left)
            self._queues[owner] = left
            self._waiting[owner] = sum(size for _, _, size, _ in left)

    def end(self, owner: str) -> None:
        """Ends a turn."""
        self._num_free += 1
        self._num_running[owner] -= 1
        if not self._num_running[owner]:
            del self._num_running[owner]
        self._pass_on()

    def _pass_on(self) -> None:
        """Gives out what is free, one turn a tenant in each round."""
        while owners := [owner for owner in self._queues if self._may_have(owner)]:
            for owner in owners:
                if self._may_have(owner) and self._take(owner):
                    self._num_free -= 1
                    self._num_running[owner] += 1

    def _may_have(self, owner: str) -> bool:
        return owner in self._queues and self._num_free > 0 and self._num_running[owner] < self._most_of_one

    def _take(self, owner: str) -> bool:
        """Takes the first out of a tenant's queue, and returns whether it still wants its turn."""
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
