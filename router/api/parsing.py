"""Reads bodies: no reading is to hold the event loop for long, or again and again.

Python's parser cannot be interrupted, and what it makes of a body takes up to twenty times the bytes of that. So its
parts are counted while it comes in, and long bodies are read one at a time, with pauses between them in which others
are served; tenants take turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from baton.errors import InvalidRequest
from router.admission import Turns

MAX_NODES = 32_768
"""Objects and lists in a body: many times those of the longest chat with the most tools."""
MAX_VALUES = 2**20
"""Numbers and texts in a body: as many as the token ids of the longest prompt that any model takes."""
LONG_BYTES = 256 * 2**10
"""Longest body that is read at once, in a few milliseconds."""
MAX_WAITING_BYTES = 64 * 2**20
PAUSE = 3.0
"""Time between two long bodies, as a multiple of what the first one took."""


class PartCount:
    """Counts the parts of a body whose pieces are added as they come in."""

    def __init__(self) -> None:
        self._num_nodes = self._num_commas = 0
        self._is_in_string = False
        self._escape = b""
        """A backslash at the end of the last piece, which escapes the first byte of the next one."""

    def add(self, piece: bytes) -> None:
        """Adds the next bytes. Raises InvalidRequest when the body has more parts so far than any may have."""
        piece = (self._escape + piece).replace(rb"\\", b"")
        self._escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        self._num_nodes += outside.count(b"{") + outside.count(b"[")
        self._num_commas += outside.count(b",")
        if self._num_commas >= MAX_VALUES:
            raise InvalidRequest(f"the body has more than {MAX_VALUES} values; shorten the prompt")
        if self._num_nodes > MAX_NODES:
            raise InvalidRequest(f"the body has more than {MAX_NODES} objects and lists; send fewer")


class BodyParser:
    """The reader of JSON bodies of one HTTP server."""

    def __init__(self) -> None:
        self._turns = Turns(1, MAX_WAITING_BYTES)
        self._next_s = 0.0
        """When the next long body may be read, on the monotonic clock."""

    async def parse(self, body: bytes, tenant_id: str) -> Any:
        """The value that a body has.

        Raises:
            Overloaded: many long ones wait.
            ValueError, RecursionError: it is no JSON.
        """
        if len(body) <= LONG_BYTES:
            return _value(body)
        async with self._turns.turn(tenant_id, len(body)):
            await asyncio.sleep(self._next_s - time.monotonic())
            began_s = time.monotonic()
            try:
                return _value(body)
            finally:
                now_s = time.monotonic()
                self._next_s = now_s + PAUSE * (now_s - began_s)


def _value(body: bytes) -> Any:
    """The value that a JSON text has. UTF-8 alone is read (RFC 8259): Python would read other encodings, in which the
    parts cannot be counted by their bytes.
    """
    return json.loads(body.decode("utf-8-sig", "surrogatepass"))
