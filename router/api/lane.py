"""Turns of the connections of one server, so that the many of one client do not hold the event loop.

What the loop has ready, it does before it looks for anything else: a hundred requests that come at once, or a thousand
packets of one byte, delay everybody by the time of all of them together. In a lane some go on at once, then others are
served, and the addresses that wait take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class Lane:
    """Callbacks that wait for their turn.

    Args:
        num_at_once: those that are called before others are served.
        rest_s: the time for which others are; 0: as long as they have something to do.
    """

    def __init__(self, num_at_once: int, rest_s: float) -> None:
        self._num_at_once, self._rest_s = num_at_once, rest_s
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """Callbacks by the client's address; the client that had a turn last is last."""
        self._is_awake = False

    def wait(self, client: str, go_on: Callable[[], None]) -> None:
        """Calls back once, in a turn of the client's; the connection may have ended by then."""
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
            self._waiting[client] = queue  # the last one from now on
        return go_on


class Flow(FlowControl):
    """uvicorn's flow control, of a connection that may wait for a turn."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.is_full = False
        """Whether what has come is not taken at the moment."""
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
