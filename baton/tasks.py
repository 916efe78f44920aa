"""Tasks that do not outlive what started them, and what they wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
SLICE_S = 0.005
"""How long `paced` works before others have their turn."""


class Flag:
    """An event as `asyncio.Event` is one, which takes no memory for those who wait while nobody does: asyncio's takes
    800 bytes, and each of a router's calls has several.
    """

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Sets it: all who wait go on, and who waits from now on need not."""
        self._is_set = True
        for each in self._waiting:
            if not each.done():
                each.set_result(None)

    def clear(self) -> None:
        """Has those wait who do so from now on."""
        self._is_set = False

    async def wait(self) -> None:
        """Waits until it is set."""
        if self._is_set:
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting += (mine,)
        try:
            await mine
        finally:
            self._waiting = tuple(each for each in self._waiting if each is not mine)


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels the tasks and returns once all of them have ended.

    What they return or raise is dropped, so a caller that needs it awaits the task itself. A caller that is cancelled
    meanwhile cancels the tasks once more, and waits for their end all the same.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    try:
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in filter(asyncio.Future.done, tasks):  # all, unless this coroutine is closed
            _drop_error(task)


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yields items whose number, or the work with each, may be large: other tasks run after every `SLICE_S`.

    async for lease in paced(leases):
        decode(lease)
    """
    began_s = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began_s >= SLICE_S:
            await asyncio.sleep(0)
            began_s = time.monotonic()


async def seen_through(future: asyncio.Future[T]) -> None:
    """Waits until a future is done, even if cancelled meanwhile; the cancellation follows then, and what the future has
    raised is dropped.

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
        del cancelled  # else error and frame would hold one another, and all that the caller has


def _drop_error(future: asyncio.Future[Any]) -> None:
    """Takes note of what a future that is done has raised. Else asyncio would log it; and one that was cancelled would
    keep its error, with all frames that it has passed, which often have the future in turn: a cycle, and memory that
    only the garbage collector gives back.
    """
    with contextlib.suppress(asyncio.CancelledError):
        future.exception()
