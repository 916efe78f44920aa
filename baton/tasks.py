"""Tasks that do not outlive their starter, and the events and queues by which they wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
SLICE_S = 0.005
"""Time that `paced` works before it lets other tasks run."""


class Flag:
    """An event like `asyncio.Event` that allocates no memory for waiters until there are some.

    An `asyncio.Event` takes 800 bytes, and each of a router's calls has several.
    """

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it: all waiting tasks continue, and later ones do not wait."""
        self._is_set = True
        for each in self._waiting:
            if not each.done():
                each.set_result(None)

    def clear(self) -> None:
        """Clear it: later callers of `wait` wait again."""
        self._is_set = False

    async def wait(self) -> None:
        """Wait until it is set."""
        if self._is_set:
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting += (mine,)
        try:
            await mine
        finally:
            self._waiting = tuple(each for each in self._waiting if each is not mine)


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and return once all of them have ended.

    Their results and errors are dropped, so a caller that needs them awaits the task itself. A caller that is cancelled
    in the meantime cancels the tasks once more, and waits for their end in any case.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    try:
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in filter(asyncio.Future.done, tasks):  # all, unless this coroutine is closed
            _drop_error(task)


async def paced(items: Iterable[T], slice_s: float = SLICE_S) -> AsyncIterator[T]:
    """Yield items whose number, or the work with each, may be large: other tasks run after every `slice_s`.

    async for lease in paced(leases):
        decode(lease)
    """
    began_s = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began_s >= slice_s:
            await asyncio.sleep(0)
            began_s = time.monotonic()


async def seen_through(future: asyncio.Future[T]) -> None:
    """Wait until a future is done, even if cancelled in the meantime.

    The cancellation is raised afterwards, and an error of the future is dropped.

    Raises:
        CancelledError: the caller was cancelled, and the future is done.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return
    _drop_error(future)
    try:
        raise cancelled
    finally:
        del cancelled  # otherwise error and frame would reference one another, and everything that the caller holds


def _drop_error(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future that is done.

    Otherwise asyncio would log it. A cancelled future would keep its error with all frames that it has passed, which
    often reference the future: a cycle, whose memory only the garbage collector frees.
    """
    with contextlib.suppress(asyncio.CancelledError):
        future.exception()


class Outbox(Generic[T]):
    """Items that wait to be written to a stream, in order. Unbounded.

    Both ends of the stream between a router and a worker write whole frames from one.
    """

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
