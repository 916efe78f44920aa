"""What may end a cluster that is well itself: a Redis that is full, and certificates that expire."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from baton.cluster import CertificateTerm, StoreMemory
from baton.errors import StoreUnavailable
from baton.tls import Tls
from kvstore.index import RedisConnection

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""Seconds between two questions for Redis' memory."""


class Dependencies:
    """What a router sees of them.

    Attributes:
        store_memory: as Redis reported it last; None: it never did, as where this router's user may not ask.

    Args:
        tls: what this router shows, by who else shows it; None stands for plain text.
    """

    def __init__(self, redis: RedisConnection, tls: Mapping[str, Tls | None]) -> None:
        self.store_memory: StoreMemory | None = None
        self._redis = redis
        self._tls = tls
        self._next_s = float("-inf")

    async def look(self, now_s: float) -> None:
        """Ask Redis for its memory, unless it was asked within `LOOK_S`."""
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
        """The terms of the certificates in use now."""
        return tuple(CertificateTerm(name, *tls.now().term_s) for name, tls in self._tls.items() if tls is not None)
