"""Holds one worker's lease for as long as the process lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.cluster import WorkerInfo, WorkerLoad
from baton.errors import Fenced, StoreUnavailable
from kvstore.index.backoff import backoff_s

if TYPE_CHECKING:
    from kvstore.leases.protocol import LeaseStore

logger = logging.getLogger(__name__)
DescribeWorker = Callable[[], tuple[WorkerInfo, WorkerLoad]]
"""Returns what the next renewal says of the worker."""


class LeaseKeeper:
    """Holds a lease: `acquire`, then `run` in a task of the caller's, both again when `run` returns, then `close`.

    A renewal with the same epoch also restores the lease after Redis lost its state, so other processes need not
    notice. The caller owns `leases`.
    """

    def __init__(self, leases: LeaseStore, worker_id: str, *, renew_s: float = 3.0) -> None:
        self.epoch = 0
        """The lease's epoch; 0 until it is acquired."""
        self.fenced = asyncio.Event()
        """Set once a newer incarnation holds the lease; never cleared."""
        self.connected = False
        self._leases = leases
        self._worker_id = worker_id
        self._renew_s = renew_s
        self._due = asyncio.Event()
        self._num_unused = 0
        """Epochs in a row that were acquired and never renewed."""

    async def acquire(self) -> int:
        """Acquires the lease under a new epoch, and returns the epoch; waits for the store without a limit, and for a
        while if the epoch before was of no use.

        Raises:
            Fenced: the lease was held before, and a newer incarnation has taken it since.
        """
        num_failures, last = 0, self.epoch
        if self._num_unused:
            await asyncio.sleep(backoff_s(self._num_unused))
        while True:
            try:
                self.epoch = await self._leases.acquire(self._worker_id, last or None)
            except StoreUnavailable as error:
                num_failures += 1
                await self._back_off(num_failures, error)
            except Fenced:
                self.fenced.set()
                raise
            else:
                if last and not self._num_unused:
                    logger.warning("%s goes on as epoch %d", self._worker_id, self.epoch)
                self.connected = True
                self._num_unused += 1
                return self.epoch

    async def run(self, describe: DescribeWorker) -> None:
        """Renews with what `describe` returns, every `renew_s` and after `renew_soon`.

        Returns only when the epoch is over, and the next one has to be acquired: the lease has expired because this
        process or the way to the store stood still, or the clock was set back.

        Raises:
            Fenced: a newer incarnation holds the lease; this one must stop.
        """
        num_failures = 0
        while True:
            self._due.clear()
            try:
                if not await self._leases.renew(*describe()):
                    if not self._num_unused:
                        logger.warning("%s: the lease of epoch %d is over", self._worker_id, self.epoch)
                    return
                num_failures = self._num_unused = 0
                self.connected = True
            except StoreUnavailable as error:
                num_failures += 1
                await self._back_off(num_failures, error)
                continue
            except Fenced:
                self.fenced.set()
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._renew_s):
                    await self._due.wait()

    def renew_soon(self) -> None:
        """Renews at once, because other processes should see a change: the worker is ready, or draining."""
        self._due.set()

    async def close(self) -> None:
        """Releases the lease; call it after `run` has ended. If the store is away, the lease expires by itself."""
        if not self.epoch or self.fenced.is_set():
            return
        try:
            await self._leases.release(self._worker_id, self.epoch)
        except StoreUnavailable as error:
            logger.warning("%s: the lease could not be released and will expire: %s", self._worker_id, error)

    async def _back_off(self, num_failures: int, error: StoreUnavailable) -> None:
        self.connected = False
        if num_failures == 1:
            logger.warning("%s: the lease store is away, trying again: %s", self._worker_id, error)
        await asyncio.sleep(backoff_s(num_failures))
