"""Opening of connections before a transfer needs them: a GPU opens its nccl transports one by one, in seconds each."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from baton.errors import BatonError
from kvstore.transfer.connection.pauses import Pauses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.transfer.connection.control_stream import Peer
    from kvstore.transfer.connection.pool import ConnectionPool

logger = logging.getLogger(__name__)


class OpeningsAhead:
    """Openings ahead of one sender. For one event loop; opens one connection at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._pauses: dict[Peer, Pauses] = {}
        """Pauses of peers to which no connection could be opened at all."""

    async def open_next(self, peers: Sequence[Peer]) -> bool:
        """Open the connection of the first peer that is due; see `KvSender.open_ahead`."""
        self._pauses = {peer: pauses for peer, pauses in self._pauses.items() if peer in peers}
        now = time.monotonic()
        due = (peer for peer in peers if peer not in self._pauses or self._pauses[peer].are_over(now))
        peer = next((peer for peer in due if self._pool.lacks(0, peer)), None)
        if peer is None:
            return False
        try:
            await self._pool.open_ahead(0, peer)
        except BatonError as error:
            pauses = self._pauses.setdefault(peer, Pauses())
            pauses.put_off(time.monotonic())
            text = "no connection to worker %s ahead of a transfer; next try in %g s at the earliest: %s"
            logger.info(text, peer.worker_id, pauses.pause_s, error)
        else:
            self._pauses.pop(peer, None)
        return True
