"""Several prompts of one request: each is a request of its own, and their answers come as one's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import astuple, replace

from baton.api import GenerateChunk, Usage
from baton.tasks import cancel_and_wait

MAX_PROMPTS = 128
MAX_AT_ONCE = 16
"""Prompts of one request that are served side by side; the others follow as these end."""

Start = Callable[[], AsyncGenerator[GenerateChunk]]


async def together(starts: Sequence[Start], num_choices: int) -> AsyncGenerator[GenerateChunk]:
    """Yields the chunks of all prompts as they come. Choice `i` of prompt `p` is choice `p * num_choices + i`.

    Usage is that of all prompts so far, and timing the first prompt's. When one fails, or the reader leaves, all end.

    Args:
        starts: begin a prompt's answers.

    Raises:
        BatonError: what the first prompt that fails raises.
    """
    if len(starts) == 1:
        async with contextlib.aclosing(starts[0]()) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    queue: asyncio.Queue[tuple[int, GenerateChunk | Exception | None]] = asyncio.Queue(maxsize=MAX_AT_ONCE)
    seats = asyncio.Semaphore(MAX_AT_ONCE)

    async def pump(prompt: int) -> None:
        async with seats:
            try:
                async with contextlib.aclosing(starts[prompt]()) as chunks:
                    async for chunk in chunks:
                        await queue.put((prompt, chunk))
                await queue.put((prompt, None))
            except Exception as error:  # raised by the reader of the queue
                await queue.put((prompt, error))

    tasks = [asyncio.create_task(pump(prompt)) for prompt in range(len(starts))]
    usages = dict.fromkeys(range(len(starts)), Usage(0, 0, 0))
    num_left = len(starts)
    try:
        while num_left:
            prompt, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
                continue
            usages[prompt] = item.usage or usages[prompt]
            yield replace(
                item,
                choice_index=prompt * num_choices + item.choice_index,
                usage=_sum(usages.values()) if item.usage else None,
                timing=item.timing if prompt == 0 else None,
            )
    finally:
        await cancel_and_wait(tasks)


def _sum(usages: Iterable[Usage]) -> Usage:
    return Usage(*(sum(counts) for counts in zip(*map(astuple, usages), strict=True)))
