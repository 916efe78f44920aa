"""How long others of an event loop wait for their turn, in processor time, which other processes do not stretch."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable
from typing import TypeVar

from baton.tasks import cancel_and_wait

T = TypeVar("T")


async def longest_turn(work: Awaitable[T]) -> tuple[T, float]:
    """Awaits something. Returns its result, and the most processor time, in seconds, of one turn of the event loop.

    Garbage is not collected meanwhile: what other tests have left would count as the work's.
    """
    longest_s = 0.0

    async def take_turns() -> None:
        nonlocal longest_s
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)

    gc.disable()
    turns = asyncio.create_task(take_turns())
    try:
        result = await work
        for _ in range(2):  # the last turn counts, too
            await asyncio.sleep(0)
        return result, longest_s
    finally:
        gc.enable()
        await cancel_and_wait([turns])


async def counted_turns(work: Awaitable[T]) -> tuple[T, int]:
    """Awaits something. Returns its result, and how often others of the event loop had their turn meanwhile."""
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    turns = asyncio.create_task(take_turns())
    try:
        return await work, num_turns
    finally:
        await cancel_and_wait([turns])
