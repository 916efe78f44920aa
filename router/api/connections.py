"""Bounds of a client's HTTP connection: how long its requests' heads are, how slowly they come, and how many there are.

uvicorn's own parser takes a head of any length, joins its pieces in quadratic time, and waits for the rest of a request
for ever, so that one client can hold a router's loop, its memory or its descriptors. Here a head has a length and a
time, a body a rate (as of Apache's mod_reqtimeout), and connections a number, of a client's and of all. What breaks a
bound is answered 431, 408 or 503, and closed. A connection whose client does not read its answer is ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.tls import names_in_connection

logger = logging.getLogger(__name__)
CERTIFICATE_NAMES = "certificate_names"
"""Where a request's state has the names in its client's certificate, which was verified; missing without one."""
UNSENT_BYTES = 16 * 2**10
"""What a connection holds for a client that does not read, beside what it is given at once: then writes to it wait."""
PAUSE_S = 1.0
"""The time between two looks at a body that is not read at the moment."""
LINE_BYTES = len(": ") + len("\r\n")
LINGER_S = 1.0
"""Time in which a client may read why it was refused; closed at once, what it has sent since would drop the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The bounds of connections."""

    max_connections: int
    max_per_client: int
    """Connections from one address."""
    head_bytes: int = 64 * 2**10
    head_s: float = 10.0
    """Longest time from a connection's begin, or a further request's, to the end of the head."""
    body_s: float = 30.0
    """Longest time of a body, beside that of its bytes."""
    body_bytes_s: int = 4096
    """Bytes of a body that have to come in a second."""
    stall_s: float = 30.0
    """Longest time in which a client may read nothing of what waits for it."""


@dataclass(slots=True)
class OpenConnections:
    """The connections of one server, by the client's address."""

    limits: ConnectionLimits
    num_of: Counter[str] = field(default_factory=Counter)

    def enter(self, client: str) -> str:
        """Counts a connection. Returns why it is one too many; empty: it is not."""
        self.num_of[client] += 1
        if self.num_of.total() > self.limits.max_connections:
            return f"this router has {self.limits.max_connections} connections; try again later"
        if self.num_of[client] > self.limits.max_per_client:
            return f"this client has {self.limits.max_per_client} connections; use those, or close some"
        return ""

    def leave(self, client: str) -> None:
        """Counts one less."""
        self.num_of[client] -= 1
        if not self.num_of[client]:
            del self.num_of[client]


class BoundedProtocol(HttpToolsProtocol):
    """A connection of uvicorn's, within bounds.

    Args:
        open_connections: those of the server.
        is_counted: whether the connection is one of them already.
        uvicorn: what uvicorn makes its protocols of.
    """

    def __init__(self, open_connections: OpenConnections, *, is_counted: bool = False, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._open, self._limits, self._is_counted = open_connections, open_connections.limits, is_counted
        self._address = ""
        self._num_head = 0
        """Bytes since the head began, and what came before it in the same packet."""
        self._is_in_head = False
        self._num_body = 0
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._names: tuple[str, ...] = ()
        self._num_unread = 0
        """Bytes that waited to be sent at the latest progress, which was `_read_s` on the loop's clock."""
        self._read_s = 0.0
        self._reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._address = self.client[0] if self.client else ""
        self._names = names_in_connection(transport.get_extra_info("peercert"))
        if not self._is_counted and (reason := self._open.enter(self._address)):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, reason)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.leave(self._address)
        self._stop_timer()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        self._num_head += len(data)
        if self._is_in_head and self._num_head > self._limits.head_bytes and not self._is_refused:
            self._refuse_long_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._names:
            self.scope["state"][CERTIFICATE_NAMES] = self._names
        self._is_in_head, self._num_head = True, 0
        if self.cycle is not None:  # the first one's time began with the connection
            self._expect_head()

    def on_headers_complete(self) -> None:
        length = len(self.url) + sum(len(name) + len(value) + LINE_BYTES for name, value in self.headers)
        if length > self._limits.head_bytes:
            self._refuse_long_head()
        if self._is_refused:
            return
        self._is_in_head, self._num_body = False, 0
        self._expect_body(self.loop.time())
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            self._num_body += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            self._stop_timer()
            super().on_message_complete()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _expect_head(self) -> None:
        self._wake_in(self._limits.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.flow.read_paused:
            self._expect_head()
        elif self._is_in_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the head was not whole within {self._limits.head_s:g} s")
        else:
            self.transport.close()

    def _expect_body(self, began_s: float) -> None:
        late_s = began_s + self._limits.body_s + self._num_body / self._limits.body_bytes_s
        if (left_s := late_s - self.loop.time()) > 0 or self.flow.read_paused:
            self._wake_in(left_s if left_s > 0 else PAUSE_S, lambda: self._expect_body(began_s))
            return
        rate = f"{self._limits.body_bytes_s} bytes a second"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the body comes more slowly than {rate}")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_reading()

    def _expect_reading(self) -> None:
        """Watches how what waits to be sent becomes less, as nothing is added to it, until it is sent."""
        if self._reading_timer is None and (num_unread := self.transport.get_write_buffer_size()):
            self._num_unread, self._read_s = num_unread, self.loop.time()
            self._reading_timer = self.loop.call_later(self._limits.stall_s / 8, self._look_at_reading)

    def _look_at_reading(self) -> None:
        num_unread, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        if num_unread < self._num_unread:
            self._read_s = now_s
        self._num_unread, self._reading_timer = num_unread, None
        if now_s - self._read_s >= self._limits.stall_s:
            logger.info("a connection of %s is ended: it has not read for %g s", self._address, self._limits.stall_s)
            self.transport.abort()
        elif num_unread:
            self._reading_timer = self.loop.call_later(self._limits.stall_s / 8, self._look_at_reading)

    def _stop_watching(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _wake_in(self, seconds: float, wake: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, wake)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the end -------------------------------------------------------------------------------------------------------

    def _refuse_long_head(self) -> None:
        reason = f"the request's head is longer than {self._limits.head_bytes} bytes"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Answers, unless an answer is under way already, and closes soon; what comes until then is dropped."""
        logger.info("a connection of %s is closed: %s", self._address, reason)
        self._is_refused = True
        self._unset_keepalive_if_required()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # what reads the body or answers ends when the connection does
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_answer(status, reason))
            self._expect_reading()
        self._wake_in(LINGER_S, self.transport.close)


def _answer(status: HTTPStatus, reason: str) -> bytes:
    kind = "server_error" if status.value >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": reason, "type": kind, "param": None, "code": None}}).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    return head.encode() + b"connection: close\r\n\r\n" + body
