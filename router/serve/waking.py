"""Asks the controller to wake a model that sleeps, and bounds how long the model's requests wait for it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from baton.config import RouterConfig
from baton.errors import BatonError, NoController, NoWorker
from baton.tasks import cancel_and_wait
from router.placement.pool_view import PoolView

logger = logging.getLogger(__name__)
ASK_S = 1.0
"""Minimum time between the starts of two wake requests of one router for one model."""
ASK_TIMEOUT_S = 5.0
"""Time that a controller has to answer a wake request."""
USUAL_WAKE_S = 30.0
"""Assumed duration of a wake-up of a model that was not woken before."""


class Waker:
    """Asks the controller of one model to wake it: at most once per ASK_S, however many requests wait.

    Every waiter calls `ask` when it starts to wait and after each change of the pools. The registry reports a change at
    least once per poll.

    Args:
        wake: sends one wake request; see `Admin.WakeModel`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pools: PoolView,
        wake: Callable[[], Awaitable[object]],
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._wake = wake
        self._config = config
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = -math.inf
        """Start of the latest wake request."""
        self._began_s: float | None = None
        """Start of the first wake request of this sleep; None: there was none."""
        self._failure = ""
        """Error of the latest wake request; empty: it succeeded, or there was none."""
        self._reported: set[str] = set()
        """Kinds of failures that were logged during this sleep."""

    def ask(self) -> None:
        """Send a wake request, unless one is on its way or was sent within the last ASK_S seconds."""
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
            self._pools.on_change(self._look)
        if self._asking is not None or now_s - self._asked_s < ASK_S:
            return
        self._asked_s = now_s
        self._asking = asyncio.create_task(self._ask(), name="wake")

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await self._wake()
            self._failure = ""
        except TimeoutError:
            self._report(NoController(f"the controller did not answer within {ASK_TIMEOUT_S:g} s"))
        except Exception as error:
            self._report(error)
        finally:
            self._asking = None

    def _report(self, error: Exception) -> None:
        """Record why a wake request failed, and log the first failure of each kind. The next request may succeed."""
        self._failure, kind = str(error), type(error).__name__
        if kind not in self._reported:
            self._reported.add(kind)
            logger.warning(
                "the model is not woken yet: %s: %s", kind, error, exc_info=not isinstance(error, BatonError)
            )

    def _look(self) -> None:
        """Forget this sleep when it is over."""
        if self._pools.sleeps:
            self._pools.on_change(self._look)
        else:
            self._began_s, self._failure = None, ""
            self._reported.clear()

    def wait_until_s(self, began_s: float, until_s: float) -> float:
        """Ask to wake the model, and return the time until which a request waits for one of its workers.

        A request waits at most `router.wake_wait_s` while the model sleeps or wakes, and `router.worker_wait_s` after
        that.

        Args:
            began_s: start of its wait.
            until_s: the previous result for this request; for the first call `began_s + router.worker_wait_s`.
        """
        self.ask()
        return max(until_s, min(began_s + self._config.wake_wait_s, self._clock() + self._config.worker_wait_s))

    @property
    def left_s(self) -> float:
        """Expected time until the model is awake, at least 1 second."""
        took_s = self._pools.sleep.wake_s or USUAL_WAKE_S
        return max(1.0, took_s - (0.0 if self._began_s is None else self._clock() - self._began_s))

    def why_asleep(self) -> NoWorker:
        """Return the error of a request that has waited for as long as it may."""
        if self._pools.sleep.problem:
            reason = self._pools.sleep.problem
        elif self._failure:
            reason = f"the router cannot ask its controller to wake it: {self._failure}"
        else:
            reason = "no decode worker became ready"
        return NoWorker(
            f"the model sleeps, and was not awake within {self._config.wake_wait_s:g} s: {reason}; `baton status` "
            "shows its pools"
        )

    async def close(self) -> None:
        """End the wake request that is on its way, if there is one."""
        if self._asking is not None:
            await cancel_and_wait((self._asking,))
