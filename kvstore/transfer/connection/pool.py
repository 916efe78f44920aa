"""The pairs of one sender: made when first needed, over the best kind of link that works, and closed when there are
too many, those that were idle longest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING

from baton.errors import TransferError, TransferRefused, WorkerFailed
from kvstore.transfer.connection.outgoing import OutgoingConnection, Peer
from kvstore.transfer.transport.select import StagingPools

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import torch

    from baton.config import TransferConfig
    from baton.messages import Hello
    from kvstore.transfer.transport.faults import Faults

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Route:
    """From one rank here to one rank of a peer."""

    making: asyncio.Task[OutgoingConnection]
    num_waiting: int = 0
    """Transfers that are about to be put on the pair."""

    @property
    def pair(self) -> OutgoingConnection | None:
        """Once it is made."""
        is_made = self.making.done() and not self.making.cancelled() and self.making.exception() is None
        return self.making.result() if is_made else None

    @property
    def is_over(self) -> bool:
        return self.making.done() and (self.pair is None or self.pair.is_over)

    @property
    def is_idle(self) -> bool:
        return not self.is_over and not self.num_waiting and self.pair is not None and self.pair.is_idle


class ConnectionPool:
    """For one event loop.

    Args:
        devices: of the caches, one a rank.
    """

    def __init__(
        self, hello: Hello, devices: Sequence[torch.device], config: TransferConfig, host: str, faults: Faults
    ) -> None:
        self._hello = hello
        self._devices = tuple(devices)
        self._config = config
        self._host = host
        self._faults = faults
        self._max_pairs = config.max_pairs or (8 if "nccl" in hello.links else 64 * len(devices))
        self._routes: dict[tuple[int, Peer], _Route] = {}
        self._alive: set[OutgoingConnection] = set()
        """ConnectionPool whose stream, link or thread is not gone yet."""
        self._closing = False
        self._past_fenced = 0
        self._past_resent = 0
        self.staging = StagingPools(config)

    # -- what operators see ------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return sum(pair.failure is None for pair in self._alive)

    @property
    def num_fenced(self) -> int:
        return self._past_fenced + sum(pair.num_fenced for pair in self._alive)

    @property
    def num_resent(self) -> int:
        return self._past_resent + sum(pair.num_resent for pair in self._alive)

    # -- using them --------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def open(self, rank: int, peer: Peer) -> AsyncGenerator[OutgoingConnection]:
        """The pair with a peer, open; while the block is entered it is not closed for being idle.

        Raises:
            TransferError, WorkerFailed: it cannot be made.
        """
        route = self._routes.get((rank, peer))
        if route is None or route.is_over:
            self._routes = {key: other for key, other in self._routes.items() if not other.is_over}
            route = self._routes[rank, peer] = _Route(asyncio.create_task(self._make(rank, peer)))
            route.making.add_done_callback(lambda making: making.cancelled() or making.exception())
        route.num_waiting += 1
        try:
            pair = await asyncio.shield(route.making)
            self.make_room()
            yield pair
        finally:
            route.num_waiting -= 1

    def transport_kind(self, rank: int, peer: Peer) -> str:
        """Of the pair that is open; "" where there is none."""
        route = self._routes.get((rank, peer))
        return route.pair.transport_kind if route is not None and route.pair is not None else ""

    def make_room(self) -> None:
        """Closes the pairs that were idle longest, where there are too many."""
        surplus = self.num_open - self._max_pairs
        if surplus <= 0:
            return
        idle = [route.pair for route in self._routes.values() if route.is_idle and route.pair is not None]
        for pair in sorted(idle, key=lambda pair: pair.used_s)[:surplus]:
            pair.lose(WorkerFailed("the pair made room for another"))

    async def close(self) -> None:
        """Ends all pairs and their threads."""
        self._closing = True
        for route in self._routes.values():
            route.making.cancel()
        for pair in list(self._alive):
            pair.lose(WorkerFailed("this worker shuts down"))
        if self._alive:
            await asyncio.wait([pair.closed for pair in self._alive])

    async def _make(self, rank: int, peer: Peer) -> OutgoingConnection:
        """Over the best kind of link that both sides can make."""
        links = self._hello.links
        while True:
            hello = dataclasses.replace(self._hello, links=links, rank=rank, peer_rank=peer.rank)
            pair = OutgoingConnection(
                peer, hello, self._config, self._host, self._devices[rank], self.staging, self._faults
            )
            self._alive.add(pair)
            pair.closed.add_done_callback(partial(self._gone, pair))
            try:
                await asyncio.shield(pair.opened)
                return pair
            except TransferRefused:
                raise
            except TransferError as error:
                links = tuple(kind for kind in links if kind != pair.transport_kind)
                if self._closing or not pair.transport_kind or not links:
                    raise
                logger.warning(
                    "no %s link to worker %s, trying %s: %s",
                    pair.transport_kind,
                    peer.worker_id,
                    ", ".join(links),
                    error,
                )

    def _gone(self, pair: OutgoingConnection, _: asyncio.Task[None]) -> None:
        self._alive.discard(pair)
        self._past_fenced += pair.num_fenced
        self._past_resent += pair.num_resent
