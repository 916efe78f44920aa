"""A listening socket of TLS connections, each counted and within bounds from its first moment.

A connection comes to uvicorn's protocol after its handshake only. Until then nobody would count it, and a client that
says nothing would keep a descriptor for the minute that event loops give a handshake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Protocol

from router.api.places import ConnectionPlace, OpenConnections

logger = logging.getLogger(__name__)
PAUSE_S = 0.1
"""The time until the next try when a connection could not be accepted, as for want of descriptors."""
SHUTDOWN_S = 5.0
"""Longest time in which a client answers that a connection is closed."""


class MakeProtocol(Protocol):
    """Makes what has a connection after its handshake, and leaves its place when it is lost."""

    def __call__(self, *, place: ConnectionPlace) -> asyncio.Protocol: ...


class TlsListener:
    """Accepts connections and leads them through the handshake. It is closed as an asyncio server is.

    Args:
        listening: a bound socket; closing it is its owner's.
        context: what is shown to clients and asked of them.
        make_protocol: see there.
        open_connections: those of the server; a connection is one of them from its first moment.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        make_protocol: MakeProtocol,
        open_connections: OpenConnections,
    ) -> None:
        self._listening, self._context, self._make_protocol = listening, context, make_protocol
        self._open = open_connections
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self, backlog: int) -> None:
        """Begins to accept connections, of which `backlog` may wait for it."""
        self._listening.setblocking(False)
        self._listening.listen(backlog)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Ends accepting, and the handshakes that are under way. Connections that are past theirs go on."""
        for task in (self._accepting, *self._handshakes):
            if task is not None:
                task.cancel()

    async def wait_closed(self) -> None:
        """Returns when all that `close` ends has ended."""
        await asyncio.gather(*self._handshakes, *filter(None, [self._accepting]), return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._listening)
            except OSError as error:
                logger.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            task = asyncio.create_task(self._shake_hands(accepted, str(address[0])))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, client: str) -> None:
        """One too many is closed without a word: before its handshake a client could not read any."""
        is_through = False
        place = self._open.enter(client)
        reason = place.refusal
        try:
            if not reason:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make_protocol(place=place),
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._open.limits.head_s,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
                is_through = True
        except (OSError, TimeoutError) as error:
            reason = f"no TLS handshake: {error}"
        finally:
            if not is_through:
                place.leave()
                accepted.close()
        if reason:
            self._open.log_end(client, reason)
