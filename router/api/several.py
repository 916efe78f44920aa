"""Serves several prompts of one request: each prompt is a separate request, and their answers are merged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import astuple, replace

from baton.api import GenerateChunk, Usage
from baton.errors import InvalidRequest
from baton.tasks import cancel_and_wait
from router.admission.tenants import Tenant

MAX_PROMPTS = 128
MAX_AT_ONCE = 16
"""Maximum number of prompts of one request that are served concurrently."""

Start = Callable[[], AsyncGenerator[GenerateChunk]]


def at_once(tenant: Tenant, num_prompts: int, num_answers: int) -> int:
    """Return how many prompts of a request are served concurrently.

    Args:
        num_answers: answers that are generated for each prompt.

    Raises:
        InvalidRequest: the number of prompts exceeds the tenant's requests per minute.
    """
    limit = tenant.requests_per_minute
    if limit is not None and num_prompts > limit:
        raise InvalidRequest(
            f"prompt holds {num_prompts} prompts, and each counts as a request: that is above this API key's limit of "
            f"{limit} requests per minute; send fewer",
            "prompt",
        )
    most = MAX_AT_ONCE if tenant.max_in_flight is None else tenant.max_in_flight // max(1, num_answers)
    return max(1, min(MAX_AT_ONCE, most))


def together(
    starts: Sequence[Start], num_choices: int, num_at_once: int = MAX_AT_ONCE
) -> AsyncGenerator[GenerateChunk]:
    """Return the chunks of all prompts, as they come. Choice `i` of prompt `p` is choice `p * num_choices + i`.

    The usage is the sum over all prompts so far; the timing is the first prompt's. If one prompt fails, or the reader
    closes the generator, all prompts end.

    Args:
        starts: for each prompt a function that starts its answers.
        num_at_once: prompts that are served concurrently; the others follow as these end.

    Raises:
        BatonError: the error of the first prompt that fails.
    """
    return starts[0]() if len(starts) == 1 else _merged(starts, num_choices, num_at_once)


async def _merged(starts: Sequence[Start], num_choices: int, num_at_once: int) -> AsyncGenerator[GenerateChunk]:
    queue: asyncio.Queue[tuple[int, GenerateChunk | Exception | None]] = asyncio.Queue(maxsize=MAX_AT_ONCE)
    seats = asyncio.Semaphore(num_at_once)

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
