"""A TLS listener that counts and limits each connection from the moment it is accepted.

uvicorn's protocol sees a connection only after its handshake. Without this listener a connection would not be counted
until then, and a silent client would hold a descriptor for a minute, the event loop's handshake timeout.
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
"""Pause after a connection could not be accepted, for example for lack of descriptors."""
SHUTDOWN_S = 5.0
"""Longest time that a client may take to confirm that a connection is closed."""


class MakeProtocol(Protocol):
    """Factory of the protocol that owns a connection after its handshake, and leaves its place when it is lost."""

    def __call__(self, *, place: ConnectionPlace) -> asyncio.Protocol: ...


class TlsListener:
    """Accepts connections and performs their TLS handshakes. It is closed like an asyncio server.

    Args:
        listening: a bound socket; its owner closes it.
        context: certificates for the server and requirements on clients.
        make_protocol: see there.
        open_connections: connections of the server; each connection is counted there when it is accepted.
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
        """Start accepting connections; up to `backlog` may wait in the kernel."""
        self._listening.setblocking(False)
        self._listening.listen(backlog)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stop accepting, and cancel the handshakes in progress. Established connections continue."""
        for task in (self._accepting, *self._handshakes):
            if task is not None:
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait until everything that `close` cancels has ended."""
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
        """Perform the handshake. A connection over the limit is closed silently: its client could not read an error."""
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
