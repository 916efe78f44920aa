"""Tasks that do not outlive what started them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from baton.tasks import seen_through


@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_cancelled_caller_waits_and_what_the_task_raised_is_in_no_log(is_broken: bool) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    may_end = asyncio.Event()

    async def write() -> None:
        await may_end.wait()
        if is_broken:
            raise ConnectionError("the client has left")

    async def wait() -> None:
        writing = asyncio.create_task(write())
        waiting = asyncio.create_task(seen_through(writing))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done(), "it was cancelled, but the task goes on"
        may_end.set()
        await asyncio.wait([waiting])
        assert writing.done()
        assert waiting.cancelled()

    await wait()
    gc.collect()
    assert logged == []
