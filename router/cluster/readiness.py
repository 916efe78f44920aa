"""Readiness of this router, as /readyz and gRPC's health service report it."""

from __future__ import annotations

from collections.abc import Callable

from baton.cluster import Role
from router.placement.pool_view import PoolView


class Readiness:
    """Decides whether a router is ready: as soon as it has workers, and for `timeout_s` after it has lost them.

    All routers usually lose their workers at the same time. If none of them was ready then, a load balancer would
    refuse clients although a short wait is enough. The cost is that clients leave a router that alone has lost its
    workers later by `timeout_s`.

    Args:
        needs_prefill: requests also need a prefill worker.
        timeout_s: time for which a request waits for a worker (`router.worker_wait_s`).
        clock: monotonic seconds.
    """

    def __init__(self, pools: PoolView, needs_prefill: bool, timeout_s: float, clock: Callable[[], float]) -> None:
        self._pools = pools
        self._needs_prefill = needs_prefill
        self._timeout_s = timeout_s
        self._clock = clock
        self._served_at_s: float | None = None
        """Time at which the needed workers were last ready."""
        self._is_stopping = False

    def why_not(self) -> str:
        """Return the reason why the router is not ready; empty: it is ready. Call this at short intervals."""
        if self._is_stopping:
            return "the router is stopping"
        now, lacking = self._clock(), self._lacking()
        if not lacking:
            self._served_at_s = now
        is_waited_for = self._served_at_s is not None and now - self._served_at_s <= self._timeout_s
        return "" if is_waited_for else lacking

    def stop(self) -> None:
        """Make the router not ready from now on."""
        self._is_stopping = True

    def _lacking(self) -> str:
        if not self._pools.is_ready(Role.DECODE):
            return "no decode worker is ready"
        if self._needs_prefill and not self._pools.is_ready(Role.PREFILL):
            return "no prefill worker is ready, and router.mode is disaggregated"
        return ""
