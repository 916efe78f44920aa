"""True if this router should be sent requests: what /readyz and gRPC's health service say."""

from __future__ import annotations

from collections.abc import Callable

from baton.cluster import Role
from router.placement.pool_view import PoolView


class Readiness:
    """Decides whether a router reports ready: from its first workers on, and for `timeout_s` after the last is gone.

    What takes all workers away takes them from every router at the same time. Were no router ready from then on, a load
    balancer would turn clients away where a short wait would have done. A router that is cut off by itself is left by
    its clients so much later.

    Args:
        needs_prefill: nothing is served without a prefill worker.
        timeout_s: how long a request waits for a worker (`router.worker_wait_s`).
        clock: monotonic seconds.
    """

    def __init__(self, pools: PoolView, needs_prefill: bool, timeout_s: float, clock: Callable[[], float]) -> None:
        self._pools = pools
        self._needs_prefill = needs_prefill
        self._timeout_s = timeout_s
        self._clock = clock
        self._served_at_s: float | None = None
        """When workers were there last."""
        self._is_stopping = False

    def why_not(self) -> str:
        """The reason why requests should go elsewhere; empty when they can come. To be asked at short intervals."""
        if self._is_stopping:
            return "the router is stopping"
        now, lacking = self._clock(), self._lacking()
        if not lacking:
            self._served_at_s = now
        is_waited_for = self._served_at_s is not None and now - self._served_at_s <= self._timeout_s
        return "" if is_waited_for else lacking

    def stop(self) -> None:
        """Make the router not ready, from now on."""
        self._is_stopping = True

    def _lacking(self) -> str:
        if not self._pools.is_ready(Role.DECODE):
            return "no decode worker is ready"
        if self._needs_prefill and not self._pools.is_ready(Role.PREFILL):
            return "no prefill worker is ready, and router.mode is disaggregated"
        return ""
