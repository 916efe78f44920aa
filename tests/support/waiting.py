"""One way to wait for what no event announces. A wait that ends at its deadline says what was seen last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Seen = TypeVar("Seen")


def wait_until(
    condition: Callable[[], Seen | None],
    within_s: float = 30.0,
    *,
    every_s: float = 0.02,
    seen: Callable[[], object] | None = None,
    not_yet: tuple[type[Exception], ...] = (),
) -> Seen:
    """Asks until the answer is truthy, and returns it.

    Args:
        within_s: a deadline for what is broken, many times what a healthy condition takes on a busy machine.
        every_s: the pause between two questions.
        seen: called at the deadline for the failure's message; by default the last answer is shown.
        not_yet: errors of the condition that count as a no.

    Raises:
        AssertionError: the deadline has passed.
    """
    wait = _Wait(condition, within_s, seen, not_yet)
    while not wait.is_over():
        time.sleep(every_s)
    return wait.answer


async def until(
    condition: Callable[[], Seen | None],
    within_s: float = 30.0,
    *,
    every_s: float = 0.005,
    seen: Callable[[], object] | None = None,
    not_yet: tuple[type[Exception], ...] = (),
) -> Seen:
    """Waits like `wait_until`, and lets the event loop run meanwhile."""
    wait = _Wait(condition, within_s, seen, not_yet)
    while not wait.is_over():  # noqa: ASYNC110 - no event announces it
        await asyncio.sleep(every_s)
    return wait.answer


class _Wait(Generic[Seen]):
    """A wait for one condition, without the pauses."""

    answer: Seen

    def __init__(
        self,
        condition: Callable[[], Seen | None],
        within_s: float,
        seen: Callable[[], object] | None,
        not_yet: tuple[type[Exception], ...],
    ) -> None:
        self._condition = condition
        self._within_s = within_s
        self._seen = seen
        self._not_yet = not_yet
        self._began_s = time.monotonic()

    def is_over(self) -> bool:
        # The clock is read before the question: a process that slept past the deadline still asks once more.
        has_time = time.monotonic() - self._began_s < self._within_s
        last: object
        try:
            answer = self._condition()
            if answer:
                self.answer = answer
                return True
            last = answer
        except self._not_yet as error:
            last = error
        assert has_time, f"not within {self._within_s:g} s; seen last: {(self._seen() if self._seen else last)!r}"
        return False
