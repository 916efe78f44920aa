"""Queue before the stream between a router and a worker; both ends write whole frames from it."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

MAX_FRAME_COMMANDS = 16
"""Commands in one frame of a router: a worker accepts messages with this many prompts of maximum length."""
T = TypeVar("T")


class Outbox(Generic[T]):
    """Items that wait to be written to a stream, in order. Unbounded."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._ready = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._ready.set()

    async def take(self, most: int) -> list[T]:
        """Wait for an item, then return all queued items, up to `most`."""
        await self._ready.wait()
        taken, self._items = self._items[:most], self._items[most:]
        if not self._items:
            self._ready.clear()
        return taken
