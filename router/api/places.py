"""How many connections an HTTP server has, and how many bytes they hold that are on their way.

A connection takes a place of its client's address, and gives it back when it ends, in whatever way. What it holds of
requests that are not whole yet, and of answers that their client has not read yet, has a bound, too: of an address, and
of all. Beyond it, the connection is ended whose latest progress is longest ago. So a client that sends or reads as fast
as it can is served, however many others keep theirs waiting.
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
"""What must come or be read so that it counts as progress: else a byte now and then would do."""
MAX_TOLD = 64
"""Connections beyond the bound that get an answer which says so, at a time; further ones are closed without a word."""
STARTS_AT_ONCE = 4
SLOW_AT_ONCE, SLOW_REST_S = 8, 0.01
LOG_EVERY_S = 1.0
"""Time between two lines of the log on connections that are closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The bounds of connections."""

    max_connections: int
    max_per_client: int
    """Connections from one address."""
    head_bytes: int = 32 * 2**10
    """Longest head, and longest trailers."""
    head_fields: int = 256
    url_bytes: int = 8 * 2**10
    head_s: float = 10.0
    """Longest time from a connection's begin, or a further request's, to the end of the head."""
    body_bytes: int = 16 * MIB
    """Most bytes of a body that are read, though it was refused long before: so its client can send on until it reads
    why."""
    body_s: float = 30.0
    """Longest time of a body, beside that of its bytes."""
    body_bytes_s: int = 16 * 2**10
    """Bytes of a body that have to come in a second."""
    framing_bytes: int = 16 * 2**10
    """Bytes of the lines between the chunks of a body, beside a sixteenth of its own."""
    stall_s: float = 30.0
    """Longest time in which a client may read nothing of what waits for it, or send nothing of a body."""
    held_bytes: int = 64 * MIB
    """Bytes of requests and answers on their way, of all clients."""
    held_bytes_per_client: int = 16 * MIB
    """Bytes of requests and answers on their way, of one address."""


class Holder(Protocol):
    """A connection that holds bytes."""

    def give_up(self) -> None:
        """Ends, because too much is held, and holds nothing any more."""
        ...


@dataclass(slots=True, kw_only=True)
class OpenConnections:
    """The connections of one server, by the client's address."""

    limits: ConnectionLimits
    starts: Lane = field(default_factory=lambda: Lane(STARTS_AT_ONCE, 0.0))
    """Where requests wait that have come."""
    slow_lane: Lane = field(default_factory=lambda: Lane(SLOW_AT_ONCE, SLOW_REST_S))
    """Where connections wait whose requests come in many small pieces: each piece costs the loop about as much as a
    whole request, and its client next to nothing."""
    num_of: Counter[str] = field(default_factory=Counter)
    num_held: Counter[str] = field(default_factory=Counter)
    """Bytes that they hold."""
    _num_told: int = 0
    _num_unlogged: int = 0
    _logs_from_s: float = 0.0
    """When the next line may be logged, on the monotonic clock."""
    _holders: dict[str, dict[Holder, int]] = field(default_factory=dict)
    """Client -> connection -> bytes, the one first whose progress is longest ago."""

    @property
    def filled(self) -> tuple[int, int]:
        """How many connections there are, and how many there may be."""
        return self.num_of.total(), self.limits.max_connections

    def enter(self, client: str) -> ConnectionPlace:
        """Counts a connection until its place is left."""
        self.num_of[client] += 1
        refusal = ""
        if self.num_of.total() > self.limits.max_connections:
            refusal = f"this router has {self.limits.max_connections} connections; try again later"
        elif self.num_of[client] > self.limits.max_per_client:
            refusal = f"this client has {self.limits.max_per_client} connections; use those, or close some"
        self._num_told += bool(refusal)
        is_told = bool(refusal) and self._num_told <= MAX_TOLD
        return ConnectionPlace(of=self, client=client, refusal=refusal, is_told=is_told)

    def hold(self, holder: Holder, client: str, num_bytes: int) -> None:
        """Says what a connection holds after it has made progress. If that is too much, others give up, or it does."""
        holders = self._holders.setdefault(client, {})
        self.num_held[client] += num_bytes - holders.pop(holder, 0)
        if num_bytes:
            holders[holder] = num_bytes  # the last one from now on
        if not holders:
            del self._holders[client], self.num_held[client]
        while self.num_held[client] > self.limits.held_bytes_per_client:
            self._end_slowest(client)
        while self.num_held.total() > self.limits.held_bytes:
            self._end_slowest(max(self.num_held, key=self.num_held.__getitem__))

    def log_end(self, client: str, reason: str) -> None:
        """Logs why a connection is ended; of many, one a second: what is written costs more than what is refused."""
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
        """Counts a connection no longer; its place calls this once."""
        self._num_told -= bool(place.refusal)
        self.num_of[place.client] -= 1
        if not self.num_of[place.client]:
            del self.num_of[place.client]


@dataclass(slots=True, eq=False, kw_only=True)
class ConnectionPlace:
    """A connection's place."""

    of: OpenConnections
    client: str
    refusal: str
    """Why it is one too many; empty: it is not."""
    is_told: bool
    """Whether a client that is one too many gets an answer."""
    has_left: bool = False

    def leave(self) -> None:
        """Gives it back. Idempotent: a connection that ends in its handshake has two that do."""
        if not self.has_left:
            self.has_left = True
            self.of.leave(self)
