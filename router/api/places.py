"""Limits the connections of an HTTP server, and the bytes that they hold in transit.

A connection occupies a place, counted by its client's address, and frees it whenever it ends. It holds bytes of
requests that are incomplete, and of answers that its client has not read. These bytes are limited per address and in
total. Above a limit, the connection with the least recent progress is ended. So a client that sends or reads as fast as
it can is served, however many other clients stall.

A `Lane` schedules connections fairly, so that one client's many connections cannot block the event loop: the loop runs
all ready callbacks before it polls again. A hundred requests that come at once, or a thousand packets of one byte,
would delay every other client by their total time. A lane runs a few callbacks, then lets the loop serve others, and
the waiting addresses take turns.

A TLS listener counts and limits each connection from the moment it is accepted. uvicorn's protocol sees a connection
only after its handshake. Without this listener a connection would not be counted until then, and a silent client would
hold a descriptor for a minute, the event loop's handshake timeout.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl

logger = logging.getLogger(__name__)
MIB = 2**20
PROGRESS_BYTES = 16 * 2**10
"""Minimum change of the held bytes that counts as progress, so that a byte now and then does not suffice."""
MAX_TOLD = 64
"""Maximum number of refused connections at a time that get an error response; further ones are closed silently."""
STARTS_AT_ONCE = 4
SLOW_AT_ONCE, SLOW_REST_S = 8, 0.01
LOG_EVERY_S = 1.0
"""Minimum time between two log lines about closed connections."""
PAUSE_S = 0.1
"""Pause after a connection could not be accepted, for example for lack of descriptors."""
SHUTDOWN_S = 5.0
"""Longest time that a client may take to confirm that a connection is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of the connections of one server."""

    max_connections: int
    max_per_client: int
    """Maximum number of connections from one address."""
    head_bytes: int = 32 * 2**10
    """Maximum length of the head, and of the trailers."""
    head_fields: int = 256
    url_bytes: int = 8 * 2**10
    head_s: float = 10.0
    """Longest time from the start of a connection, or of a further request, to the end of the head."""
    body_bytes: int = 16 * MIB
    """Maximum number of body bytes that are read, even though a long body is refused earlier. The client can keep
    sending until it reads the refusal."""
    body_s: float = 30.0
    """Longest time of a body, in addition to the time for its bytes at `body_bytes_s`."""
    body_bytes_s: int = 16 * 2**10
    """Minimum rate of a body, in bytes per second."""
    framing_bytes: int = 16 * 2**10
    """Maximum number of bytes between the chunks of a body, in addition to a sixteenth of the body."""
    stall_s: float = 30.0
    """Longest time in which a client may read nothing of the pending bytes, or send nothing of a body."""
    held_bytes: int = 64 * MIB
    """Maximum number of bytes of requests and answers in transit, for all clients."""
    held_bytes_per_client: int = 16 * MIB
    """Maximum number of bytes of requests and answers in transit, for one address."""


class Holder(Protocol):
    """Connection that holds bytes."""

    def give_up(self) -> None:
        """End the connection because too much is held. It holds nothing from then on."""
        ...


@dataclass(slots=True, kw_only=True)
class OpenConnections:
    """Connections of one server, by the client's address."""

    limits: ConnectionLimits
    starts: Lane = field(default_factory=lambda: Lane(STARTS_AT_ONCE, 0.0))
    """Lane of requests that wait to be started."""
    slow_lane: Lane = field(default_factory=lambda: Lane(SLOW_AT_ONCE, SLOW_REST_S))
    """Lane of connections whose requests come in many small pieces. Each piece costs the loop about as much as a whole
    request, and the client almost nothing."""
    num_of: Counter[str] = field(default_factory=Counter)
    """Number of connections by address."""
    num_held: Counter[str] = field(default_factory=Counter)
    """Held bytes by address."""
    _num_told: int = 0
    _num_unlogged: int = 0
    _logs_from_s: float = 0.0
    """Earliest time of the next log line, on the monotonic clock."""
    _holders: dict[str, dict[Holder, int]] = field(default_factory=dict)
    """Client -> connection -> bytes, ordered from the least to the most recent progress."""

    @property
    def filled(self) -> tuple[int, int]:
        """The number of connections and its limit."""
        return self.num_of.total(), self.limits.max_connections

    def enter(self, client: str) -> ConnectionPlace:
        """Count a new connection, and return its place. It counts until the place is left."""
        self.num_of[client] += 1
        refusal = ""
        if self.num_of.total() > self.limits.max_connections:
            refusal = f"this router has {self.limits.max_connections} connections; try again later"
        elif self.num_of[client] > self.limits.max_per_client:
            refusal = f"this client has {self.limits.max_per_client} connections; reuse or close some of them"
        self._num_told += bool(refusal)
        is_told = bool(refusal) and self._num_told <= MAX_TOLD
        return ConnectionPlace(of=self, client=client, refusal=refusal, is_told=is_told)

    def hold(self, holder: Holder, client: str, num_bytes: int) -> None:
        """Record the bytes that a connection holds after progress. Above a limit, the slowest connections are ended."""
        holders = self._holders.setdefault(client, {})
        self.num_held[client] += num_bytes - holders.pop(holder, 0)
        if num_bytes:
            holders[holder] = num_bytes  # moves to the end of the order
        if not holders:
            del self._holders[client], self.num_held[client]
        while self.num_held[client] > self.limits.held_bytes_per_client:
            self._end_slowest(client)
        while self.num_held.total() > self.limits.held_bytes:
            self._end_slowest(max(self.num_held, key=self.num_held.__getitem__))

    def log_end(self, client: str, reason: str) -> None:
        """Log why a connection is ended, at most once per second: a log line costs more than a refusal."""
        now_s = time.monotonic()
        if now_s < self._logs_from_s:
            self._num_unlogged += 1
            return
        others = f" (and before it {self._num_unlogged} others, which are not logged)" if self._num_unlogged else ""
        logger.info("a connection of %s is closed: %s%s", client, reason, others)
        self._num_unlogged, self._logs_from_s = 0, now_s + LOG_EVERY_S

    def _end_slowest(self, client: str) -> None:
        slowest = next(iter(self._holders[client]))
        self.hold(slowest, client, 0)
        slowest.give_up()

    def leave(self, place: ConnectionPlace) -> None:
        """Stop counting a connection. Its place calls this once."""
        self._num_told -= bool(place.refusal)
        self.num_of[place.client] -= 1
        if not self.num_of[place.client]:
            del self.num_of[place.client]


@dataclass(slots=True, eq=False, kw_only=True)
class ConnectionPlace:
    """Place of one connection among those of its server."""

    of: OpenConnections
    client: str
    refusal: str
    """Why the connection is refused; empty: it is not."""
    is_told: bool
    """Whether a refused connection gets an error response."""
    has_left: bool = False

    def leave(self) -> None:
        """Free the place. Idempotent, because two callers free it if a connection ends during its handshake."""
        if not self.has_left:
            self.has_left = True
            self.of.leave(self)


class Lane:
    """Round-robin queue of callbacks, by client address.

    Args:
        num_at_once: number of callbacks that run before the loop serves others.
        rest_s: pause before the next callbacks run; 0: one iteration of the loop.
    """

    def __init__(self, num_at_once: int, rest_s: float) -> None:
        self._num_at_once, self._rest_s = num_at_once, rest_s
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """Callbacks by the client's address, in round-robin order."""
        self._is_awake = False

    def wait(self, client: str, go_on: Callable[[], None]) -> None:
        """Queue one callback for the client's turn. The connection may have ended when it runs."""
        self._waiting.setdefault(client, deque()).append(go_on)
        self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._is_awake:
            self._is_awake = True
            asyncio.get_running_loop().call_later(self._rest_s, self._pass_on)

    def _pass_on(self) -> None:
        for _ in range(self._num_at_once):
            if self._waiting:
                self._next()()
        self._is_awake = False
        self._wake()

    def _next(self) -> Callable[[], None]:
        client = next(iter(self._waiting))
        queue = self._waiting.pop(client)
        go_on = queue.popleft()
        if queue:
            self._waiting[client] = queue  # moves to the end of the order
        return go_on


class Flow(FlowControl):
    """uvicorn's flow control for a connection that may have to wait for its turn."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.is_full = False
        """True if uvicorn has paused reading, because the application has not consumed what came."""
        self.rests = False

    def pause_reading(self) -> None:
        self.is_full = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self.is_full = False
        if not self.rests:
            super().resume_reading()

    def rest(self) -> None:
        self.rests = True
        super().pause_reading()

    def wake(self) -> None:
        self.rests = False
        if not self.is_full:
            super().resume_reading()


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
