"""Keeper of one worker's lease for the lifetime of the process."""

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
REPORT_S = 1.0
"""Interval at which other processes see a changed load, in seconds."""
DescribeWorker = Callable[[], tuple[WorkerInfo, WorkerLoad]]
"""Returns the worker's description for the next renewal."""


class LeaseKeeper:
    """Keeper of a lease: `acquire`, then `run` in a task of the caller, both again when `run` returns, then `close`.

    A renewal under the same epoch also restores the lease after Redis has lost its state, so other processes do not
    notice. The caller owns `leases`.

    Args:
        renew_s: interval of renewals.
        report_s: interval at which the worker's description and load are compared with those of the last renewal; if
            they differ, the lease is renewed at once.
        report: reports a load that has changed in another way than by a renewal, and returns whether it could.
    """

    def __init__(
        self,
        leases: LeaseStore,
        worker_id: str,
        *,
        renew_s: float = 3.0,
        report_s: float = REPORT_S,
        report: Callable[[WorkerLoad], bool] | None = None,
    ) -> None:
        self.epoch = 0
        """The lease's epoch; 0 until it is acquired."""
        self.fenced = asyncio.Event()
        """Set once a newer incarnation holds the lease; never cleared."""
        self.connected = False
        self._leases = leases
        self._worker_id = worker_id
        self._renew_s = renew_s
        self._report_s = min(report_s, renew_s)
        self._report = report
        self._due = asyncio.Event()
        self._num_unused = 0
        """Number of consecutive epochs that were acquired and never renewed."""

    async def acquire(self) -> int:
        """Acquire the lease under a new epoch, and return the epoch.

        Waits for the store without a limit, and pauses first if the previous epoch was never renewed.

        Raises:
            Fenced: the lease was held before, and a newer incarnation has acquired it since.
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
                    logger.warning("%s continues as epoch %d", self._worker_id, self.epoch)
                self.connected = True
                self._num_unused += 1
                return self.epoch

    async def run(self, describe: DescribeWorker) -> None:
        """Renew the lease with the result of `describe` every `renew_s`, if it changes, and after each `renew_soon`.

        Returns only when the epoch has ended and the next one must be acquired: the lease has expired because this
        process or the connection to the store stalled, or the clock was set back.

        Raises:
            Fenced: a newer incarnation holds the lease; this one must stop.
        """
        num_failures = 0
        while True:
            self._due.clear()
            described = describe()
            try:
                if not await self._leases.renew(*described):
                    if not self._num_unused:
                        logger.warning("%s: the lease of epoch %d has ended", self._worker_id, self.epoch)
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
            await self._wait_until_due(describe, described)

    async def _wait_until_due(self, describe: DescribeWorker, described: tuple[WorkerInfo, WorkerLoad]) -> None:
        loop = asyncio.get_running_loop()
        due_at = loop.time() + self._renew_s
        while (left_s := due_at - loop.time()) > 0 and not self._due.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._report_s)):
                    await self._due.wait()
            info, load = describe()
            if info != described[0] or (load != described[1] and not (self._report and self._report(load))):
                return

    def renew_soon(self) -> None:
        """Renew at once, so that other processes see a change: the worker is ready, or draining."""
        self._due.set()

    async def close(self) -> None:
        """Release the lease; call this after `run`. If the store is unavailable, the lease expires by itself."""
        if not self.epoch or self.fenced.is_set():
            return
        try:
            await self._leases.release(self._worker_id, self.epoch)
        except StoreUnavailable as error:
            logger.warning("%s: the lease could not be released and will expire: %s", self._worker_id, error)

    async def _back_off(self, num_failures: int, error: StoreUnavailable) -> None:
        self.connected = False
        if num_failures == 1:
            logger.warning("%s: the lease store is unavailable, retrying: %s", self._worker_id, error)
        await asyncio.sleep(backoff_s(num_failures))
