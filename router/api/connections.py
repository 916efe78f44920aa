"""Limits on a client's HTTP connection: size and structure of its requests, their rate, and the bytes that wait.

uvicorn accepts a head of any length, endless trailers and a body in a million pieces. It reads as many requests as a
client sends even if the client reads no response, and waits for the rest of a request for ever. So one client could
exhaust a router's event loop, memory or descriptors. This module adds limits:

- The length, number of fields and duration of a head, and the rate of a body (like Apache's mod_reqtimeout).
- A pipelined request is not parsed before the one before it is answered, and few of its bytes are kept.
- Requests wait for their turn, and longer if they come in many small pieces (`router.api.places`).
- The number of connections, and the bytes that they hold, per client and in total (`router.api.places`).

A connection that exceeds a limit is answered with 400, 408, 413, 414, 431 or 503, and closed. A connection whose client
does not read its response is ended.

The parser consumes all that it is fed, so it would read thousands of pipelined requests before the first is answered.
This module cuts the received bytes at the end of each head, chunk and body. It also counts the bytes that belong to
neither a head nor a body: the lines between chunks, and trailers. Only the parser decides what is valid.
"""

from __future__ import annotations

import asyncio
import enum
import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.tls import names_in_connection
from router.api.places import PROGRESS_BYTES, ConnectionPlace, Flow, OpenConnections

CERTIFICATE_NAMES = "certificate_names"
"""Key in a request's state for the names in its client's verified certificate; absent without a certificate."""
UNSENT_BYTES = 16 * 2**10
"""High-water mark of the write buffer, in bytes: above it writes wait for the client to read."""
AHEAD_BYTES = 16 * 2**10
"""Maximum number of pipelined bytes that are kept while a request is unanswered. If a client sends more, it gets its
response and the connection is closed."""
PIECES_AT_ONCE = 64
"""Number of small pieces of a request that are parsed, or received, before it must wait for turns."""
SMALL_BYTES = 1024
"""Data that arrives at once and is shorter than this is a small piece."""
PAUSE_S = 1.0
"""Time between two checks of a body while the application does not read it."""
LINGER_S = 1.0
"""Time in which a client can read its refusal. If the connection were closed at once, bytes that the client has sent
since would reset it, and the response would be lost."""
_HEAD_END = b"\r\n\r\n"
_OVERLAP = len(_HEAD_END) - 1
_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")
_SIZE_BYTES = 32
"""Leading bytes of a chunk's line that are kept to read its size."""
_CRLF = len("\r\n")


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with limits.

    Args:
        open_connections: all connections of the server.
        place: the connection's place among them, if it already has one.
        uvicorn: uvicorn's own arguments of a protocol.
    """

    flow: Flow

    def __init__(
        self, open_connections: OpenConnections, *, place: ConnectionPlace | None = None, **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._open, self._limits, self._place = open_connections, open_connections.limits, place
        self._framing = Framing()
        self._waiting = b""
        """Received bytes that are not parsed yet."""
        self._is_begun = False
        """Whether the head of a request is parsed, but not its end."""
        self._is_whole = False
        """Whether a request is fully parsed, but not fully answered."""
        self._num_pieces = 0
        self._is_dropping = False
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._late_s = 0.0
        """Deadline of the body, on the loop's clock."""
        self._names: tuple[str, ...] = ()
        self._num_held = 0
        self._num_unread = 0
        """Unsent bytes at the latest check. The client last made progress at `_read_s` on the loop's clock."""
        self._read_s = 0.0
        self._reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._names = names_in_connection(transport.get_extra_info("peercert"))
        self._place = self._place or self._open.enter(self.client[0] if self.client else "")
        if not self._place.refusal:
            self._expect_head()
        elif self._place.is_told:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, self._place.refusal)
        else:
            self._is_refused = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._place is not None:
            self._place.leave()
        self._waiting = b""
        self._hold(0)
        self._stop_timer()
        self._stop_watching()
        super().connection_lost(exc)

    # -- received bytes ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._is_dropping:
            self._rest()
            return
        if self._timer is None and not self._is_whole:
            self._expect_head()
        self._waiting = self._waiting + data if self._waiting else data
        self._parse()
        if len(data) < SMALL_BYTES:
            self._num_pieces += 1
            if self._num_pieces > PIECES_AT_ONCE:
                self._rest()

    def _parse(self) -> None:
        """Parse the waiting bytes, at most to the end of a request."""
        data, begin, most = self._waiting, 0, PIECES_AT_ONCE
        view = memoryview(data)
        while begin < len(data) and most and self._may_parse():
            end = self._framing.end_of_piece(data, begin)
            self._feed(view[begin:end])
            most -= end - begin < SMALL_BYTES
            begin = end
        self._waiting = b"" if self._is_refused else data[begin:]
        if self._waiting and self._may_parse():
            self._rest()
        elif len(self._waiting) > AHEAD_BYTES:
            self._drop()
        self._hold_what_is_underway()

    def _may_parse(self) -> bool:
        if self._is_refused or self._is_whole or self.transport.is_closing():
            return False
        return not (self.flow.write_paused and self._framing.is_in_head)

    def _feed(self, piece: memoryview) -> None:
        framing, limits = self._framing, self._limits
        if framing.num_head > limits.head_bytes:
            self._refuse_long_head(f"is longer than {limits.head_bytes} bytes")
        elif framing.num_trailers > limits.head_bytes:
            reason = f"the request's trailers are longer than {limits.head_bytes} bytes"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason)
        elif framing.num_framing > limits.framing_bytes + framing.num_body // 16:
            self._refuse(HTTPStatus.BAD_REQUEST, "the body comes in very small chunks; send longer ones")
        elif framing.num_body > limits.body_bytes:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {limits.body_bytes} bytes")
        else:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                pass  # the upgrade is ignored, and the request is answered normally
            except httptools.HttpParserError:
                if not self._is_refused:
                    self._refuse(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request")

    def _rest(self) -> None:
        """Stop reading and parsing until it is the connection's turn."""
        if not self.flow.rests:
            self.flow.rest()
            self._open.slow_lane.wait(self._client, self._go_on)

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.wake()
            self._parse()

    def _drop(self) -> None:
        """Close the connection after its response. Until then, drop received bytes, so that a disconnect is seen."""
        self._waiting, self._is_dropping = b"", True
        if self._is_whole:
            self.cycle.keep_alive = False
        else:
            self._close()

    # -- events of the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._names:
            self.scope["state"][CERTIFICATE_NAMES] = self._names

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.url_bytes:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, f"the URL is longer than {self._limits.url_bytes} bytes")
            raise _StopParsing

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._framing.is_in_head:
            return  # trailers
        if len(self.headers) == self._limits.head_fields:
            self._refuse_long_head(f"has more than {self._limits.head_fields} fields")
            raise _StopParsing
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._framing.head_ends(self.headers)
        if self.parser.should_upgrade() and not self._framing.is_in_head:
            # The parser would treat the following bytes as another protocol, but they are this request's body.
            self._refuse(HTTPStatus.BAD_REQUEST, "a request with a body cannot ask for an upgrade; remove the header")
            raise _StopParsing
        super().on_headers_complete()
        self._is_begun = True
        self._late_s = self.loop.time() + self._limits.body_s
        self._expect_body()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._open.starts.wait(self._client, partial(self._start, cycle, app))

    def _start(self, cycle: Any, app: Any) -> None:
        if not cycle.disconnected:
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        now_s, limits = self.loop.time(), self._limits
        self._late_s = min(now_s + limits.stall_s, self._late_s + len(body) / limits.body_bytes_s)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._framing.request_ends()
        self._is_begun, self._is_whole, self._num_pieces = False, not self.cycle.response_complete, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_reading()
        self._is_whole = False
        if self._waiting and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            if not self._is_begun:
                self._expect_head()
            self._parse()
        self._hold_what_is_underway()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _expect_head(self) -> None:
        self._wake_in(self._limits.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._framing.num_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the head was not whole within {self._limits.head_s:g} s")
        else:
            self._close()

    def _expect_body(self) -> None:
        left_s = self._late_s - self.loop.time()
        if left_s <= 0 and self.flow.is_full:
            left_s, self._late_s = PAUSE_S, self._late_s + PAUSE_S
        if left_s > 0:
            self._wake_in(min(left_s, self._limits.stall_s), self._expect_body)
            return
        rate = f"{self._limits.body_bytes_s} bytes per second"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the body comes more slowly than {rate}")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        self._parse()

    def _expect_reading(self) -> None:
        """Watch the unsent bytes shrink until all are sent. Nothing is added to them meanwhile."""
        if self._reading_timer is None and (num_unread := self.transport.get_write_buffer_size()):
            self._num_unread, self._read_s = num_unread, self.loop.time()
            self._reading_timer = self.loop.call_later(self._limits.stall_s / 8, self._look_at_reading)

    def _look_at_reading(self) -> None:
        num_unread, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        if num_unread < self._num_unread:
            self._read_s = now_s
        self._num_unread, self._reading_timer = num_unread, None
        self._hold_what_is_underway()
        if now_s - self._read_s >= self._limits.stall_s:
            self._open.log_end(self._client, f"it has not read for {self._limits.stall_s:g} s")
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

    # -- memory --------------------------------------------------------------------------------------------------------

    def _hold_what_is_underway(self) -> None:
        is_coming = self._is_begun and not (self._is_refused or self.cycle.response_complete)
        num_coming = self._framing.num_head + (self._framing.num_body if is_coming else 0)
        self._hold(num_coming + len(self._waiting) + self.transport.get_write_buffer_size())

    def _hold(self, num_bytes: int) -> None:
        """Report the held bytes as progress. Small changes are not reported."""
        has_progressed = abs(num_bytes - self._num_held) >= PROGRESS_BYTES
        if has_progressed or (self._num_held and not num_bytes):
            self._num_held = num_bytes
            self._open.hold(self, self._client, num_bytes)

    def give_up(self) -> None:
        self._num_held = 0
        if self._is_begun and not self.cycle.response_started:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many long requests are in transit; try again later")
        else:
            self._open.log_end(self._client, "it reads slowly, and too many bytes wait to be read")
            self.transport.abort()

    # -- closing -------------------------------------------------------------------------------------------------------

    def eof_received(self) -> None:
        self._close()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        self._expect_reading()

    def _close(self) -> None:
        """Close the connection once all bytes are sent, or its client has not read for too long."""
        self.transport.close()
        self._expect_reading()

    @property
    def _client(self) -> str:
        return self._place.client if self._place is not None else ""

    def _refuse_long_head(self, what: str) -> None:
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the request's head {what}")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Send an error, unless a response has started, and close soon. Bytes received until then are dropped."""
        self._open.log_end(self._client, reason)
        self._is_refused, self._waiting = True, b""
        self._unset_keepalive_if_required()
        has_answer = self._is_begun and self.cycle.response_started
        if self._is_begun and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application stops reading the body and answering
            self.cycle.body = bytearray()
            self.cycle.message_event.set()
        if not has_answer:
            self.transport.write(_answer(status, reason))
            self._expect_reading()
        self._wake_in(LINGER_S, self._close)


class _StopParsing(Exception):
    """Raised in a callback to stop the parser, because the connection is refused."""


def _answer(status: HTTPStatus, reason: str) -> bytes:
    kind = "server_error" if status.value >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": reason, "type": kind, "param": None, "code": None}}).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"x-request-id: req-{uuid.uuid4().hex}\r\n"
    )
    return head.encode() + b"connection: close\r\n\r\n" + body


class _Stretch(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    CHUNK_LINE = enum.auto()
    CHUNK = enum.auto()
    TRAILERS = enum.auto()


@dataclass(slots=True, kw_only=True)
class Framing:
    """Position of a connection's next byte within its request."""

    num_head: int = 0
    """Bytes of the head so far."""
    num_body: int = 0
    num_framing: int = 0
    """Bytes of a chunked body that are framing: size lines and line ends."""
    num_trailers: int = 0
    _section: _Stretch = _Stretch.HEAD
    _left: int = 0
    """Bytes of the body or the chunk that have not come yet."""
    _begun: bytes = b""
    """Last bytes of the head so far, or first bytes of a chunk's line."""

    @property
    def is_in_head(self) -> bool:
        """True if the next byte belongs to a head, or precedes one."""
        return self._section is _Stretch.HEAD

    def end_of_piece(self, data: bytes, begin: int) -> int:
        """Consume the next piece of `data` from `begin` on, and return its end there. `data` must have bytes left."""
        match self._section:
            case _Stretch.HEAD:
                end = self._end_of_head(data, begin)
                self.num_head += end - begin
            case _Stretch.BODY:
                end = min(len(data), begin + self._left)
                self._left -= end - begin
                self.num_body += end - begin
            case _Stretch.CHUNK:
                end = min(len(data), begin + self._left)
                self._left -= end - begin
                self.num_body += end - begin
                if not self._left:
                    self._section, self._begun = _Stretch.CHUNK_LINE, b""
                    self.num_body -= _CRLF
                    self.num_framing += _CRLF
            case _Stretch.CHUNK_LINE:
                end = self._end_of_line(data, begin)
                self.num_framing += end - begin
            case _Stretch.TRAILERS:
                end = (data.find(b"\n", begin) + 1) or len(data)
                self.num_trailers += end - begin
        return end

    def head_ends(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Record that the last piece completed a head with these fields. Their names are in lower case."""
        self._begun = b""
        for name, value in headers:
            if name == b"transfer-encoding":
                self._section = _Stretch.CHUNK_LINE
                return
            if name == b"content-length":
                self._section, self._left = _Stretch.BODY, int(value)

    def request_ends(self) -> None:
        """Record that the last piece completed a request."""
        self._section, self._begun, self._left = _Stretch.HEAD, b"", 0
        self.num_head = self.num_body = self.num_framing = self.num_trailers = 0

    def _end_of_head(self, data: bytes, begin: int) -> int:
        around = self._begun + data[begin : begin + _OVERLAP]
        found = around.find(_HEAD_END)
        if found >= 0:
            end = begin + found + len(_HEAD_END) - len(self._begun)
        else:
            found = data.find(_HEAD_END, begin)
            end = len(data) if found < 0 else found + len(_HEAD_END)
        self._begun = (self._begun + data[max(begin, end - _OVERLAP) : end])[-_OVERLAP:]
        return end

    def _end_of_line(self, data: bytes, begin: int) -> int:
        end = data.find(b"\n", begin) + 1
        self._begun += data[begin : min(end or len(data), begin + _SIZE_BYTES - len(self._begun))]
        if not end:
            return len(data)
        size = _SIZE.match(self._begun)
        self._left = int(size[0], 16) if size else 0
        if self._left:
            self._section, self._left = _Stretch.CHUNK, self._left + _CRLF
        else:
            self._section = _Stretch.TRAILERS
        return end
