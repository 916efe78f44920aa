"""A pure state machine that the event loop and data threads drive together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Machine = TypeVar("Machine")
Instruction = TypeVar("Instruction")
T = TypeVar("T")


class DrivenMachine(Generic[Machine, Instruction]):
    """Events apply one at a time, under a lock; instructions are carried out on the event loop, in their order.

    Args:
        carry_out: called on the event loop that made this.
    """

    def __init__(self, machine: Machine, carry_out: Callable[[Instruction], None]) -> None:
        self._machine = machine
        self._carry_out = carry_out
        self._lock = threading.Lock()
        self._decided: deque[Instruction] = deque()
        self._loop = asyncio.get_running_loop()

    def ask(self, question: Callable[[Machine], T]) -> T:
        """From any thread: something that brings no instructions."""
        with self._lock:
            return question(self._machine)

    def apply(self, event: Callable[[Machine], list[Instruction]]) -> None:
        """From the event loop: what it brings is carried out before this returns."""
        with self._lock:
            self._decided.extend(event(self._machine))
        self._carry_out_all()

    def apply_in_thread(self, event: Callable[[Machine], list[Instruction]]) -> None:
        """From a data thread."""
        with self._lock:
            instructions = event(self._machine)
            self._decided.extend(instructions)
        if instructions:
            post(self._loop, self._carry_out_all)

    def _carry_out_all(self) -> None:
        while self._decided:
            self._carry_out(self._decided.popleft())


async def seen_through(future: asyncio.Future[T]) -> None:
    """Waits until it is done, even when cancelled meanwhile; the cancellation follows then.

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
        raise cancelled


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    """`call_soon_threadsafe`, unless the loop is gone, and with it all who would want to know."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
