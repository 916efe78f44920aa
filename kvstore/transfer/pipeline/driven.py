"""A pure state machine that the event loop and transport threads drive together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Machine = TypeVar("Machine")
Instruction = TypeVar("Instruction")
T = TypeVar("T")

OnInstruction = Callable[[Instruction], None]
"""Executes one instruction of a machine; called on the event loop."""


class DrivenMachine(Generic[Machine, Instruction]):
    """Driver that applies events one at a time under a lock, and executes instructions on the event loop, in order.

    Args:
        on_instruction: called on the event loop that constructed this object.
    """

    def __init__(self, machine: Machine, on_instruction: OnInstruction[Instruction]) -> None:
        self._machine = machine
        self._on_instruction = on_instruction
        self._lock = threading.Lock()
        self._decided: deque[Instruction] = deque()
        self._loop = asyncio.get_running_loop()

    def ask(self, question: Callable[[Machine], T]) -> T:
        """Return the answer to a query, or apply an event that gives no instructions; called by any thread."""
        with self._lock:
            return question(self._machine)

    def apply(self, event: Callable[[Machine], list[Instruction]]) -> None:
        """Apply an event on the event loop; its instructions are executed before this returns."""
        with self._lock:
            self._decided.extend(event(self._machine))
        self._carry_out_all()

    def apply_in_thread(self, event: Callable[[Machine], list[Instruction]]) -> None:
        """Apply an event on a transport thread; the event loop executes its instructions later."""
        with self._lock:
            instructions = event(self._machine)
            self._decided.extend(instructions)
        if instructions:
            post(self._loop, self._carry_out_all)

    def _carry_out_all(self) -> None:
        while self._decided:
            self._on_instruction(self._decided.popleft())


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    """Call `callback` on the event loop soon. No effect once the loop is closed, since no task waits then."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
