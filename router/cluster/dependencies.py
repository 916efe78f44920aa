"""Dependencies that can break a healthy cluster: the memory of Redis, and certificates that expire."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from baton.cluster import CertificateTerm, StoreMemory
from baton.errors import StoreUnavailable
from baton.tls import Tls
from kvstore.index import RedisConnection

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""Seconds between two requests for the memory of Redis."""


class Dependencies:
    """The state of Redis' memory and of certificates, as one router sees it.

    Attributes:
        store_memory: latest report of Redis; None: Redis has never reported it, for example because the router's
            Redis user lacks the permission.

    Args:
        tls: the router's certificates by the group of processes that uses them; None stands for plain text.
    """

    def __init__(self, redis: RedisConnection, tls: Mapping[str, Tls | None]) -> None:
        self.store_memory: StoreMemory | None = None
        self._redis = redis
        self._tls = tls
        self._next_s = float("-inf")

    async def look(self, now_s: float) -> None:
        """Ask Redis for its memory, unless the last request was less than `LOOK_S` ago."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_S
        try:
            info = await self._redis.call("INFO")
        except StoreUnavailable as error:
            logger.debug("Redis does not report its memory: %s", error)
        else:
            used, limit, evicted = (int(info.get(name, 0)) for name in ("used_memory", "maxmemory", "evicted_keys"))
            self.store_memory = StoreMemory(used, limit, evicted)

    def certificates(self) -> tuple[CertificateTerm, ...]:
        """Return the validity periods of the certificates in use."""
        return tuple(CertificateTerm(name, *tls.now().term_s) for name, tls in self._tls.items() if tls is not None)
