"""The connections of one sender: opened when first needed, over the best kind of transport that works, and closed when
there are too many, those that were idle longest first.
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
from kvstore.transfer.transport.select import LocalRank, StagingPools, gpu_id, num_connections_kept

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from baton.config import TransferConfig
    from baton.messages import Hello
    from kvstore.transfer.local_worker import LocalWorker
    from kvstore.transfer.transport.faults import Faults

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Route:
    """The way from one rank here to one rank of a peer."""

    opening: asyncio.Task[OutgoingConnection]
    num_waiting: int = 0
    """Transfers that are about to be put on the connection."""

    @property
    def connection(self) -> OutgoingConnection | None:
        """The connection, once it is open; None if it could not be opened."""
        is_open = self.opening.done() and not self.opening.cancelled() and self.opening.exception() is None
        return self.opening.result() if is_open else None

    @property
    def is_over(self) -> bool:
        """Whether it needs another connection."""
        return self.opening.done() and (self.connection is None or self.connection.is_over)

    @property
    def is_idle(self) -> bool:
        """Whether its connection is open and unused."""
        connection = self.connection
        return not self.is_over and not self.num_waiting and connection is not None and connection.is_idle


class ConnectionPool:
    """The connections of one sender. For one event loop.

    Args:
        hello: what each connection begins with, except for the ranks.
    """

    def __init__(self, worker: LocalWorker, hello: Hello, config: TransferConfig, faults: Faults) -> None:
        self.staging = StagingPools(config)
        self._hello = hello
        self._ranks = tuple(LocalRank(worker.host, device, self.staging) for device in worker.devices)
        self._config = config
        self._faults = faults
        self._max_connections = config.max_pairs or num_connections_kept(hello.links, len(self._ranks))
        self._routes: dict[tuple[int, Peer], _Route] = {}
        self._alive: set[OutgoingConnection] = set()
        """Connections whose stream, transport or thread has not ended yet."""
        self._closing = False
        self._past_fenced = 0
        self._past_resent = 0

    # -- what operators see ------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Number of connections that are good."""
        return sum(connection.failure is None for connection in self._alive)

    @property
    def num_fenced(self) -> int:
        """Number of dropped answers about unknown or past transfers, since the start."""
        return self._past_fenced + sum(connection.num_fenced for connection in self._alive)

    @property
    def num_resent(self) -> int:
        """Number of messages sent again because no answer came, since the start."""
        return self._past_resent + sum(connection.num_resent for connection in self._alive)

    # -- using them --------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def open(self, rank: int, peer: Peer) -> AsyncGenerator[OutgoingConnection]:
        """Yields the open connection with a peer, and does not close it for being idle meanwhile.

        Raises:
            TransferError: it cannot be opened.
            WorkerFailed: the peer is gone.
        """
        route = self._routes.get((rank, peer))
        if route is None or route.is_over:
            self._routes = {key: other for key, other in self._routes.items() if not other.is_over}
            route = self._routes[rank, peer] = _Route(asyncio.create_task(self._open(rank, peer)))
            route.opening.add_done_callback(lambda opening: opening.cancelled() or opening.exception())
        route.num_waiting += 1
        try:
            connection = await asyncio.shield(route.opening)
            self.make_room()
            yield connection
        finally:
            route.num_waiting -= 1

    def transport_kind(self, rank: int, peer: Peer) -> str:
        """Returns the kind of the open connection with a peer; "" if there is none."""
        route = self._routes.get((rank, peer))
        connection = route.connection if route is not None else None
        return connection.transport_kind if connection is not None else ""

    def make_room(self) -> None:
        """Closes the connections that were idle longest, if there are too many."""
        surplus = self.num_open - self._max_connections
        if surplus <= 0:
            return
        idle = [route.connection for route in self._routes.values() if route.is_idle and route.connection is not None]
        for connection in sorted(idle, key=lambda connection: connection.used_s)[:surplus]:
            connection.lose(WorkerFailed("the connection made room for another"))

    async def close(self) -> None:
        """Ends all connections and their threads."""
        self._closing = True
        for route in self._routes.values():
            route.opening.cancel()
        for connection in list(self._alive):
            connection.lose(WorkerFailed("this worker shuts down"))
        if self._alive:
            await asyncio.wait([connection.closed for connection in self._alive])

    async def _open(self, rank: int, peer: Peer) -> OutgoingConnection:
        """Opens a connection over the best kind of transport that works between the two sides."""
        links = self._hello.links
        while True:
            local = self._ranks[rank]
            gpu = gpu_id(local.device)
            hello = dataclasses.replace(self._hello, links=links, gpu_id=gpu, rank=rank, peer_rank=peer.rank)
            connection = OutgoingConnection(peer, hello, self._config, local, self._faults)
            self._alive.add(connection)
            connection.closed.add_done_callback(partial(self._gone, connection))
            try:
                await asyncio.shield(connection.opened)
                return connection
            except TransferRefused:
                raise
            except TransferError as error:
                failed = connection.transport_kind
                links = tuple(kind for kind in links if kind != failed)
                if self._closing or not failed or not links:
                    raise
                logger.warning(
                    "no %s transport to worker %s, trying %s: %s", failed, peer.worker_id, ", ".join(links), error
                )

    def _gone(self, connection: OutgoingConnection, _: asyncio.Task[None]) -> None:
        self._alive.discard(connection)
        self._past_fenced += connection.num_fenced
        self._past_resent += connection.num_resent
