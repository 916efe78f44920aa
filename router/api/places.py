"""Limits the connections of an HTTP server, and the bytes that they hold in transit.

A connection occupies a place, counted by its client's address, and frees it whenever it ends. It holds bytes of
requests that are incomplete, and of answers that its client has not read. These bytes are limited per address and in
total. Above a limit, the connection with the least recent progress is ended. So a client that sends or reads as fast as
it can is served, however many other clients stall.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from router.api.lane import Lane

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
