"""Tasks that do not outlive what started them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton.tasks import Flag, cancel_and_wait, paced, seen_through
from tests.support.turns import counted_turns


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


async def test_others_run_between_slices_of_long_work() -> None:
    async def work(slice_s: float) -> list[int]:
        return [number async for number in paced(range(50), slice_s)]

    found, num_turns = await counted_turns(work(0.0))
    assert found == list(range(50))
    assert num_turns >= 45
    _, num_turns = await counted_turns(work(60.0))
    assert num_turns < 10


class _Answer:
    """Something that is large in a caller's frame, and has what it waits for, as objects with tasks do."""

    waits_for: asyncio.Task[None] | None = None


async def _sees_through(answer: _Answer) -> None:
    await seen_through(asyncio.create_task(asyncio.sleep(0.001)))


async def _cancels(answer: _Answer) -> None:
    async def read() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.001)  # as what frees something does
            assert answer.waits_for is not None

    answer.waits_for = asyncio.create_task(read())
    await asyncio.sleep(0)
    await cancel_and_wait((answer.waits_for,))


@pytest.mark.parametrize(("wait", "is_cancelled"), [(_sees_through, True), (_cancels, True), (_cancels, False)])
async def test_a_cancellation_keeps_nothing_that_only_a_collection_frees(
    wait: Callable[[_Answer], Awaitable[None]], is_cancelled: bool
) -> None:
    async def call() -> weakref.ref[_Answer]:
        answer = _Answer()
        waiting = asyncio.ensure_future(wait(answer))
        for _ in range(3):
            await asyncio.sleep(0)
        if is_cancelled:
            waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() == is_cancelled
        return weakref.ref(answer)

    gc.collect()
    gc.disable()
    try:
        kept = await call()
        await asyncio.sleep(0)
        assert kept() is None
    finally:
        gc.enable()


async def test_a_wait_that_is_closed_does_not_wait() -> None:
    task = asyncio.create_task(asyncio.sleep(10))
    closed = cancel_and_wait((task,))
    closed.send(None)
    closed.close()
    assert not task.done()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_flag_is_waited_for_by_several_and_by_nobody_once_it_is_set() -> None:
    flag = Flag()
    flag.set()
    assert flag.is_set()
    await flag.wait()
    flag.clear()
    assert not flag.is_set()
    first, left, second = (asyncio.create_task(flag.wait()) for _ in range(3))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    assert left.cancelled()
    assert not first.done()
    flag.set()
    flag.set()
    flag.clear()  # who waited goes on all the same
    await asyncio.wait_for(asyncio.gather(first, second), 5)
    assert flag._waiting == ()
