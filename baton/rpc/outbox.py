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
        self._alone: list[T] = []
        """Queued items that fill a frame, in order."""
        self._ready = asyncio.Event()

    def put(self, item: T, *, fills_frame: bool = False) -> None:
        """Add an item.

        Args:
            fills_frame: it is so long that its frame has no other item.
        """
        self._items.append(item)
        if fills_frame:
            self._alone.append(item)
        self._ready.set()

    async def take(self, most: int) -> list[T]:
        """Wait for an item, then return all queued items, up to `most`, or up to an item that fills a frame."""
        await self._ready.wait()
        if self._alone:
            most = self._num_before_alone(most)
        taken, self._items = self._items[:most], self._items[most:]
        if not self._items:
            self._ready.clear()
        return taken

    def _num_before_alone(self, most: int) -> int:
        """Return the length of the next frame, and count the item that fills it as taken if it is the first one."""
        place = next((i for i, item in enumerate(self._items[:most]) if item is self._alone[0]), most)
        if place == 0:
            del self._alone[0]
        return max(place, 1)
