"""Runs jobs of several milliseconds that any client may request, and limits their share of the event loop's time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from baton.turns import Turns

PAUSE = 3.0
"""Pause after a piece of work, as a multiple of the time that it took."""


class PacedWork:
    """Queue of jobs that run one at a time, in pieces with a pause after each; the owners of jobs take turns.

        async with work.turn(tenant, size):
            async with work.piece():
                text = write(report)

    Args:
        max_waiting: maximum total size of the waiting jobs; one owner may have half of it.
    """

    def __init__(self, max_waiting: int) -> None:
        self.turn = Turns(1, max_waiting).turn
        self._next_s = 0.0
        """Earliest start of the next piece, on the monotonic clock."""

    @contextlib.asynccontextmanager
    async def piece(self) -> AsyncGenerator[None]:
        """Context manager: waits until the pause after the previous piece is over."""
        await asyncio.sleep(self._next_s - time.monotonic())
        began_s = time.monotonic()
        try:
            yield
        finally:
            now_s = time.monotonic()
            self._next_s = now_s + PAUSE * (now_s - began_s)
