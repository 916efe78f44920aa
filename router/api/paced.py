"""Work of several milliseconds that anybody may ask for: it holds the event loop for a part of the time alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from baton.turns import Turns

PAUSE = 3.0
"""Time for which others are served after a piece of work, as a multiple of what that took."""


class PacedWork:
    """Jobs that are done one at a time, in pieces, with a pause after each in which others are served; the owners of
    jobs take turns.

        async with work.turn(tenant, size):
            async with work.piece():
                text = write(report)

    Args:
        max_waiting: what the waiting jobs may have in sizes, together; of one owner half of it.
    """

    def __init__(self, max_waiting: int) -> None:
        self.turn = Turns(1, max_waiting).turn
        self._next_s = 0.0
        """When the next piece may be done, on the monotonic clock."""

    @contextlib.asynccontextmanager
    async def piece(self) -> AsyncGenerator[None]:
        """Enters the block once others have been served for long enough."""
        await asyncio.sleep(self._next_s - time.monotonic())
        began_s = time.monotonic()
        try:
            yield
        finally:
            now_s = time.monotonic()
            self._next_s = now_s + PAUSE * (now_s - began_s)
