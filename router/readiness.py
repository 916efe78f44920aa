"""Whether this router should be sent requests: what /readyz and gRPC's health service say."""

from __future__ import annotations

import math
from collections.abc import Callable

from baton.cluster import Role
from router.pools import PoolView


class Readiness:
    """Not before the first workers are there; then for as long as requests have somebody to wait for.

    All routers lose their workers at once: after the first look without any, no router would be left to whom a load
    balancer could send clients, and they would be turned away where a short wait would have done.

    Args:
        needs_prefill: nothing is served without a prefill worker.
        patience_s: how long a request waits for a worker (`router.worker_wait_s`).
        clock: monotonic seconds.
    """

    def __init__(self, pools: PoolView, needs_prefill: bool, patience_s: float, clock: Callable[[], float]) -> None:
        self._pools = pools
        self._needs_prefill = needs_prefill
        self._patience_s = patience_s
        self._clock = clock
        self._served_at_s = -math.inf
        """When workers were there last."""
        self._is_stopping = False

    def why_not(self) -> str:
        """The reason why requests should go elsewhere; empty when they can come. To be asked at short intervals."""
        if self._is_stopping:
            return "the router is stopping"
        now, lacking = self._clock(), self._lacking()
        if not lacking:
            self._served_at_s = now
        return lacking if now - self._served_at_s > self._patience_s else ""

    def stop(self) -> None:
        """From now on the router is not ready."""
        self._is_stopping = True

    def _lacking(self) -> str:
        if not self._pools.is_ready(Role.DECODE):
            return "no decode worker is ready"
        if self._needs_prefill and not self._pools.is_ready(Role.PREFILL):
            return "no prefill worker is ready, and router.mode is split"
        return ""
