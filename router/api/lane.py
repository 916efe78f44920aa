"""Fair scheduling of a server's connections, so that one client's many connections cannot block the event loop.

The event loop runs all ready callbacks before it polls again. A hundred requests that come at once, or a thousand
packets of one byte, would delay every other client by their total time. A lane runs a few callbacks, then lets the loop
serve others, and the waiting addresses take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


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
        """Whether uvicorn has paused reading, because the application has not consumed what came."""
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
