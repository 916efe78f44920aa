"""Tasks that do not outlive what started them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels the tasks and returns once all of them have ended.

    What they return or raise is dropped, so a caller that needs it awaits the task itself. A caller that is cancelled
    meanwhile cancels the tasks once more, and waits for their end all the same.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # else asyncio would log one that nobody asks for
        raise cancelled
