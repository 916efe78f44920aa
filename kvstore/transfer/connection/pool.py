"""Connections of one sender: opened on first use, and closed when there are too many, the longest idle first.

The first connection with a peer uses the best kind of transport that opens quickly. Better kinds that open slowly, and
kinds that could not be opened, are tried in parallel, after longer and longer pauses. When one opens, it replaces the
current connection, which ends with the transfers that are on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.errors import BatonError, TransferError, TransferRefused, WorkerFailed
from kvstore.transfer.connection.control_stream import Peer
from kvstore.transfer.connection.outgoing import OutgoingConnection
from kvstore.transfer.transport.select import (
    LocalRank,
    StagingPools,
    gpu_names,
    like_all,
    num_connections_kept,
    quick_and_slow,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from baton.config import TransferConfig
    from baton.messages import Hello
    from kvstore.transfer.local_worker import LocalWorker


logger = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0


@dataclass(slots=True)
class Pauses:
    """Pauses of one route to a peer: each is twice as long as the previous one. Times are on one clock."""

    pause_s: float = 0.0
    try_at_s: float = 0.0
    """Earliest time of the next attempt."""

    def are_over(self, now: float) -> bool:
        """Return whether another attempt may start."""
        return now >= self.try_at_s

    def put_off(self, now: float, *, for_long: bool = False) -> None:
        """Postpone the next attempt, because one has failed."""
        longer_s = min(2 * self.pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        self.pause_s = LONGEST_PAUSE_S if for_long else longer_s
        self.try_at_s = now + self.pause_s


@dataclasses.dataclass(slots=True)
class _Route:
    """Route from one rank of this worker to one rank of a peer."""

    opening: asyncio.Future[OutgoingConnection]
    num_waiting: int = 0
    """Transfers that are about to be put on the connection."""
    missed: tuple[str, ...] = ()
    """Better kinds than the connection's that were not tried yet, or could not be opened."""
    improving: asyncio.Task[None] | None = None
    """Task that opens a connection of a better kind."""
    pauses: Pauses = dataclasses.field(default_factory=Pauses)
    """Pauses before a better kind is tried again."""
    is_ahead: bool = False
    """True if it was opened before a transfer needed it."""

    @property
    def may_improve(self) -> bool:
        """True if a connection of a better kind should be opened now."""
        is_busy = self.improving is not None and not self.improving.done()
        return bool(self.missed) and not is_busy and self.pauses.are_over(time.monotonic())

    @property
    def connection(self) -> OutgoingConnection | None:
        """The connection if it is open; None otherwise."""
        is_open = self.opening.done() and not self.opening.cancelled() and self.opening.exception() is None
        return self.opening.result() if is_open else None

    @property
    def is_over(self) -> bool:
        """True if the route needs another connection."""
        return self.opening.done() and (self.connection is None or self.connection.is_over)

    @property
    def is_idle(self) -> bool:
        """True if its connection is open and unused."""
        connection = self.connection
        return not self.is_over and not self.num_waiting and connection is not None and connection.is_idle


class ConnectionPool:
    """Connections of one sender. For one event loop.

    Args:
        hello: the first message of each connection, except for the ranks.
    """

    def __init__(self, worker: LocalWorker, hello: Hello, config: TransferConfig) -> None:
        self.staging = StagingPools(config)
        self._hello = hello
        self._tls = worker.tls
        self._ranks = tuple(
            LocalRank(
                host=worker.host,
                device=device,
                staging=self.staging,
                keys=worker.keys,
                is_sealed=worker.tls is not None,
                testing=worker.testing,
            )
            for device in worker.devices
        )
        self._config = config
        self._max_connections = config.max_connections or num_connections_kept(hello.transports, len(self._ranks))
        self._routes: dict[tuple[int, Peer], _Route] = {}
        self._replaced: set[OutgoingConnection] = set()
        """Connections that end once no transfer is on them."""
        self._alive: set[OutgoingConnection] = set()
        """Connections whose stream, transport or thread has not ended yet."""
        self._improving = asyncio.Lock()
        """Held while a better connection is opened.

        Two at once would only wait for each other's GPU, and each would delay the transfers of one.
        """
        self._closing = False
        self._past_fenced = 0
        self._past_resent = 0
        self.num_failed_openings = 0
        """Number of transports that could not be opened, since the start."""

    # -- what operators see ------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Number of connections that are good."""
        return sum(connection.failure is None for connection in self._alive)

    @property
    def open_kinds(self) -> list[str]:
        """Transport of each open connection."""
        return [c.transport_kind for c in self._alive if c.failure is None and c.opened.done()]

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
        """Yield the open connection with a peer, which is not closed as idle in the meantime.

        Raises:
            TransferError: it cannot be opened.
            WorkerFailed: the peer is gone.
        """
        route = self._good_route(rank, peer)
        if route.is_ahead:
            await asyncio.wait([route.opening])
            if not self._closing:  # otherwise it was cancelled
                route = self._good_route(rank, peer)  # another one, if that one could not be opened
        route.num_waiting += 1
        try:
            await asyncio.shield(route.opening)
            self._improve(rank, peer, route)
            self.make_room()
            yield route.opening.result()  # the best one that has opened in the meantime
        finally:
            route.num_waiting -= 1

    @property
    def opens_slowly(self) -> bool:
        """True if connections of this sender may take seconds to reach their best kind."""
        return bool(quick_and_slow(self._hello.transports)[1])

    def lacks(self, rank: int, peer: Peer) -> bool:
        """Return whether a connection with a peer, or a better one, may be opened before a transfer needs it."""
        route = self._routes.get((rank, peer))
        if route is None or route.is_over:
            return self.num_open < self._max_connections
        return route.opening.done() and route.may_improve

    async def open_ahead(self, rank: int, peer: Peer) -> None:
        """Open the best connection with a peer that can be opened now, and wait until it is open.

        Raises:
            TransferError, WorkerFailed: none can be opened.
        """
        route = self._good_route(rank, peer, is_ahead=True)
        await asyncio.shield(route.opening)
        self._improve(rank, peer, route)
        if route.improving is not None:
            await asyncio.wait([route.improving])

    def transport_kind(self, rank: int, peer: Peer) -> str:
        """Return the kind of a peer's open connection; if there is none, one like all possible kinds, or ""."""
        route = self._routes.get((rank, peer))
        connection = route.connection if route is not None and not route.is_over else None
        return connection.transport_kind if connection is not None else like_all(self._hello.transports)

    def make_room(self) -> None:
        """Close the replaced connections that are idle, and the longest idle ones if there are too many."""
        for connection in [connection for connection in self._replaced if connection.is_idle]:
            connection.lose(WorkerFailed("a better connection has replaced it"))
        surplus = self.num_open - self._max_connections
        if surplus <= 0:
            return
        idle = [route.connection for route in self._routes.values() if route.is_idle and route.connection is not None]
        for connection in sorted(idle, key=lambda connection: connection.used_s)[:surplus]:
            connection.lose(WorkerFailed("the idle connection was closed because too many were open"))

    async def close(self) -> None:
        """End all connections and their threads."""
        self._closing = True
        for route in self._routes.values():
            route.opening.cancel()
            if route.improving is not None:
                route.improving.cancel()
        for connection in list(self._alive):
            connection.lose(WorkerFailed("this worker shuts down"))
        if self._alive:
            await asyncio.wait([connection.closed for connection in self._alive])

    def _good_route(self, rank: int, peer: Peer, *, is_ahead: bool = False) -> _Route:
        """Return the route to a peer. If no good one exists, return a new one whose connection is being opened."""
        route = self._routes.get((rank, peer))
        if route is None or route.is_over:
            self._routes = {key: other for key, other in self._routes.items() if not other.is_over}
            route = self._routes[rank, peer] = self._new_route(rank, peer)
            route.is_ahead = is_ahead
        return route

    def _new_route(self, rank: int, peer: Peer) -> _Route:
        quick, slow = quick_and_slow(self._hello.transports)
        route = _Route(asyncio.get_running_loop().create_future(), missed=slow if quick else ())
        route.opening = asyncio.create_task(self._open(rank, peer, quick or slow, route))
        route.opening.add_done_callback(lambda opening: opening.cancelled() or opening.exception())
        return route

    async def _open(self, rank: int, peer: Peer, transports: tuple[str, ...], route: _Route) -> OutgoingConnection:
        """Open a connection over the best of these kinds that works between the two sides."""
        while True:
            local = self._ranks[rank]
            gpu_id, gpu_uuid = gpu_names(local.device)
            hello = dataclasses.replace(
                self._hello, transports=transports, gpu_id=gpu_id, gpu_uuid=gpu_uuid, rank=rank, peer_rank=peer.rank
            )
            connection = OutgoingConnection(peer, hello, self._config, local, self._tls)
            self._alive.add(connection)
            connection.closed.add_done_callback(partial(self._gone, connection))
            try:
                await asyncio.shield(connection.opened)
            except TransferRefused:
                raise
            except TransferError as error:
                failed = connection.transport_kind
                transports = tuple(kind for kind in transports if kind != failed)
                if self._closing or not failed:
                    raise
                self.num_failed_openings += 1
                if not transports:
                    raise
                route.missed = (*route.missed, failed)
                route.pauses.put_off(time.monotonic())
                logger.warning(
                    "no %s transport to worker %s, trying %s: %s", failed, peer.worker_id, ", ".join(transports), error
                )
            else:
                rank_of = self._hello.transports.index
                best = rank_of(connection.transport_kind)
                route.missed = tuple(kind for kind in route.missed if rank_of(kind) < best)
                return connection

    def _improve(self, rank: int, peer: Peer, route: _Route) -> None:
        """Start to open a better connection, if there may be one and it is time."""
        if route.may_improve and not self._closing:
            route.improving = asyncio.create_task(self._replace(rank, peer, route))

    async def _replace(self, rank: int, peer: Peer, route: _Route) -> None:
        """Open a connection of a missed kind, and let it replace the current one."""
        kinds, route.missed = route.missed, ()
        try:
            async with self._improving:
                better = await self._open(rank, peer, kinds, route)
        except BatonError as error:
            is_refused = isinstance(error, TransferRefused)
            route.missed = kinds
            route.pauses.put_off(time.monotonic(), for_long=is_refused)
            text = "no %s transport to worker %s yet; next try in %g s at the earliest: %s"
            level = logging.INFO if is_refused else logging.WARNING
            logger.log(level, text, ", ".join(kinds), peer.worker_id, route.pauses.pause_s, error)
            return
        connection = route.connection
        if connection is None or self._routes.get((rank, peer)) is not route:
            better.lose(WorkerFailed("the connection that it was to replace has ended"))
            return
        self._replaced.add(connection)
        route.opening = asyncio.get_running_loop().create_future()
        route.opening.set_result(better)
        self.make_room()

    def _gone(self, connection: OutgoingConnection, _: asyncio.Task[None]) -> None:
        self._alive.discard(connection)
        self._replaced.discard(connection)
        self._past_fenced += connection.num_fenced
        self._past_resent += connection.num_resent


class OpeningsAhead:
    """Opens connections before a transfer needs them: a GPU opens its nccl transports one by one, in seconds each.

    They are those of one sender. For one event loop; opens one connection at a time.
    """

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
