"""The one thread that owns one link: it runs blocking jobs in the order they came."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Lane:
    """A daemon thread, and futures of its jobs on the event loop that made it.

    Attributes:
        ended: done once the thread has left its last job and no more run.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Its result; cancelling the future does not stop a job that has begun."""
        future: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(_seen)
        if self._closed:
            future.cancel()
        else:
            self._jobs.put((job, future))
        return future

    def close(self, last: Callable[[], None]) -> None:
        """Cancels waiting jobs, lets a running one end, runs `last` and ends the thread. Does not wait; see `ended`."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while item := self._jobs.get_nowait():
                item[1].cancel()
        self._jobs.put((last, self._loop.create_future()))
        self._jobs.put(None)

    async def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended; it may still be in a blocked operation."""
        await asyncio.wait([self.ended], timeout=timeout_s)
        if self.ended.done():
            self._thread.join()
        return self.ended.done()

    def _run(self) -> None:
        while item := self._jobs.get():
            job, future = item
            try:
                result = job()
            except Exception as error:  # whatever it was, it belongs to the job's future
                self._post(_fail, future, error)
            else:
                self._post(_finish, future, result)
            del item, job, future
        self._post(_finish, self.ended, None)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it all who would want to know
            self._loop.call_soon_threadsafe(callback, *args)


def _finish(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _seen(future: asyncio.Future[Any]) -> None:
    """A failed job whose owner was cancelled is not an unretrieved exception."""
    if not future.cancelled():
        future.exception()
