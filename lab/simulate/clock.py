"""Virtual time."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Heap of future events. Events of the same time happen in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        """Add an event."""
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    def run(self) -> None:
        """Let the events happen, in order of time, until none is left."""
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
