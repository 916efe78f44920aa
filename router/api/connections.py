"""Bounds of a client's HTTP connection: what its requests are made of, how slowly they come, and how much waits.

uvicorn takes a head of any length, trailers without an end and a body in a million pieces, reads as many requests as a
client sends though it reads no answer, and waits for the rest of a request for ever, so that one client can hold a
router's loop, its memory or its descriptors. Here all of that has bounds:

- A head has a length, a number of fields and a time, a body a rate (as of Apache's mod_reqtimeout).
- Nothing is parsed behind a request before that is answered, and little of it is kept.
- Requests wait for their turns, and longer if they come in many small pieces (`router.api.lane`).
- Connections, and what they hold, have a number for each client and for all (`router.api.places`).

What breaks a bound is answered 400, 408, 413, 414, 431 or 503, and closed. A connection whose client does not read its
answer is ended.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.tls import names_in_connection
from router.api.framing import Framing
from router.api.lane import Flow
from router.api.places import PROGRESS_BYTES, ConnectionPlace, OpenConnections

CERTIFICATE_NAMES = "certificate_names"
"""Where a request's state has the names in its client's certificate, which was verified; missing without one."""
UNSENT_BYTES = 16 * 2**10
"""What a connection holds for a client that does not read, beside what it is given at once: then writes to it wait."""
AHEAD_BYTES = 16 * 2**10
"""What is kept of what a client sends behind a request that is not answered yet. One that sends more gets its answer,
and its connection is closed."""
PIECES_AT_ONCE = 64
"""Pieces of a request that are parsed, or received, before it waits for turns."""
SMALL_BYTES = 1024
"""What comes at once and is shorter is a piece."""
PAUSE_S = 1.0
"""The time between two looks at a body that is not read at the moment."""
LINGER_S = 1.0
"""Time in which a client may read why it was refused; closed at once, what it has sent since would drop the answer."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection of uvicorn's, within bounds.

    Args:
        open_connections: those of the server.
        place: the connection's among them, if it has taken one.
        uvicorn: what uvicorn makes its protocols of.
    """

    flow: Flow

    def __init__(
        self, open_connections: OpenConnections, *, place: ConnectionPlace | None = None, **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._open, self._limits, self._place = open_connections, open_connections.limits, place
        self._framing = Framing()
        self._waiting = b""
        """What has come and is not parsed yet."""
        self._is_begun = False
        """Whether the head of a request is parsed, and its end is not."""
        self._is_whole = False
        """Whether a request is parsed whose answer is not complete."""
        self._num_pieces = 0
        self._is_dropping = False
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._late_s = 0.0
        """When a body is late, on the loop's clock."""
        self._names: tuple[str, ...] = ()
        self._num_held = 0
        self._num_unread = 0
        """Bytes that waited to be sent at the latest progress, which was `_read_s` on the loop's clock."""
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

    # -- what comes ----------------------------------------------------------------------------------------------------

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
        """Parses what waits, to the end of a request at most."""
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
                pass  # the request is answered as one that asks for none
            except httptools.HttpParserError:
                if not self._is_refused:
                    self._refuse(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")

    def _rest(self) -> None:
        """Reads and parses no more until it is the connection's turn."""
        if not self.flow.rests:
            self.flow.rest()
            self._open.slow_lane.wait(self._client, self._go_on)

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.wake()
            self._parse()

    def _drop(self) -> None:
        """Closes the connection after its answer; until then what comes is dropped, so that its end is seen."""
        self._waiting, self._is_dropping = b"", True
        if self._is_whole:
            self.cycle.keep_alive = False
        else:
            self._close()

    # -- what the parser finds -----------------------------------------------------------------------------------------

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
            # The parser takes what follows for another protocol's, but it is this request's body.
            self._refuse(HTTPStatus.BAD_REQUEST, "a request with a body cannot ask for an upgrade; leave that out")
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
        rate = f"{self._limits.body_bytes_s} bytes a second"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the body comes more slowly than {rate}")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        self._parse()

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
        """Says how much is held, and that there was progress, but of little nothing."""
        has_progressed = abs(num_bytes - self._num_held) >= PROGRESS_BYTES
        if has_progressed or (self._num_held and not num_bytes):
            self._num_held = num_bytes
            self._open.hold(self, self._client, num_bytes)

    def give_up(self) -> None:
        self._num_held = 0
        if self._is_begun and not self.cycle.response_started:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "many long requests are on their way; try again later")
        else:
            self._open.log_end(self._client, "it reads slowly, and much waits to be read")
            self.transport.abort()

    # -- the end -------------------------------------------------------------------------------------------------------

    def eof_received(self) -> None:
        self._close()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        self._expect_reading()

    def _close(self) -> None:
        """Closes the connection once all is sent, or its client has not read for too long."""
        self.transport.close()
        self._expect_reading()

    @property
    def _client(self) -> str:
        return self._place.client if self._place is not None else ""

    def _refuse_long_head(self, what: str) -> None:
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the request's head {what}")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Answers, unless an answer is under way already, and closes soon; what comes until then is dropped."""
        self._open.log_end(self._client, reason)
        self._is_refused, self._waiting = True, b""
        self._unset_keepalive_if_required()
        has_answer = self._is_begun and self.cycle.response_started
        if self._is_begun and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what reads the body or answers ends
            self.cycle.body = bytearray()
            self.cycle.message_event.set()
        if not has_answer:
            self.transport.write(_answer(status, reason))
            self._expect_reading()
        self._wake_in(LINGER_S, self._close)


class _StopParsing(Exception):
    """Raised in the parser, so that it stops: the connection is refused."""


def _answer(status: HTTPStatus, reason: str) -> bytes:
    kind = "server_error" if status.value >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": reason, "type": kind, "param": None, "code": None}}).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"x-request-id: req-{uuid.uuid4().hex}\r\n"
    )
    return head.encode() + b"connection: close\r\n\r\n" + body
