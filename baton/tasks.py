"""Tasks that do not outlive what started them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels the tasks and returns once all of them have ended.

    What they return or raise is dropped, so a caller that needs it awaits the task itself. A caller that is cancelled
    meanwhile cancels the tasks once more, and waits for their end all the same.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
