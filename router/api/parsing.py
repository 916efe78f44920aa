"""Reads bodies: no reading is to hold the event loop for long, or again and again.

Python's parser cannot be interrupted, and what it makes of a body takes up to twenty times the bytes of that. So
objects and lists are counted first, and long bodies are read one at a time, with pauses between them in which others
are served; tenants take turns.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

from baton.errors import InvalidRequest
from router.admission import Turns

MAX_NODES = 32_768
"""Objects and lists in a body: many times those of the longest chat with the most tools."""
LONG_BYTES = 256 * 2**10
"""Longest body that is read at once, in a few milliseconds."""
MAX_WAITING_BYTES = 64 * 2**20
PAUSE = 3.0
"""Time between two long bodies, as a multiple of what the first one took."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class BodyParser:
    """The reader of JSON bodies of one HTTP server."""

    def __init__(self) -> None:
        self._turns = Turns(1, MAX_WAITING_BYTES)
        self._next_s = 0.0
        """When the next long body may be read, on the monotonic clock."""

    async def parse(self, body: bytes, tenant_id: str) -> Any:
        """The value that a body has.

        Raises:
            InvalidRequest: it has too many parts.
            Overloaded: many long ones wait.
            ValueError, RecursionError: it is no JSON.
        """
        if len(body) <= LONG_BYTES:
            return json.loads(body)
        async with self._turns.turn(tenant_id, len(body)):
            await asyncio.sleep(self._next_s - time.monotonic())
            began_s = time.monotonic()
            try:
                check_nodes(body)
                return json.loads(body)
            finally:
                now_s = time.monotonic()
                self._next_s = now_s + PAUSE * (now_s - began_s)


def check_nodes(body: bytes) -> None:
    """Raises InvalidRequest for a JSON text of more than MAX_NODES objects and lists."""
    if _num_nodes(body) > MAX_NODES and (num_nodes := _num_nodes(_STRING.sub(b"", body))) > MAX_NODES:
        raise InvalidRequest(f"the body has {num_nodes} objects and lists; send at most {MAX_NODES}")


def _num_nodes(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")
