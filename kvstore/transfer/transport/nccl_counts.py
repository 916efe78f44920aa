"""Counters of this process's NCCL communicators: open ones, and those that cannot be ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SLACK_S = 1.0


class Aborts:
    """Ends of communicators in this process, and the number of stuck ones; each may keep a thread and memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        self._num_begun = 0
        self._num_late = 0
        """Number of ends that took too long and have finished, or were abandoned."""

    @property
    def num_stuck(self) -> int:
        """Number of ends that did not finish in time, since the start."""
        now = time.monotonic()
        with self._lock:
            return self._num_late + sum(deadline < now for deadline in self._deadlines.values())

    @contextlib.contextmanager
    def under_way(self, timeout_s: float) -> Iterator[None]:
        """Context manager: counts the end that takes place inside it, if it takes too long."""
        with self._lock:
            self._num_begun += 1
            number = self._num_begun
            self._deadlines[number] = time.monotonic() + timeout_s + _SLACK_S
        try:
            yield
        finally:
            with self._lock:
                self._num_late += self._deadlines.pop(number) < time.monotonic()

    def abandon(self) -> None:
        """Count an end that was abandoned."""
        with self._lock:
            self._num_late += 1


ABORTS = Aborts()


class OpenCommunicators:
    """Communicators of this process, by the path that carries their bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num: Counter[str] = Counter()

    @contextlib.contextmanager
    def counted(self, carrier: str) -> Iterator[None]:
        """Context manager: counts a communicator."""
        with self._lock:
            self._num[carrier] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num[carrier] -= 1

    def by_carrier(self) -> dict[str, int]:
        """Return the current number of communicators."""
        with self._lock:
            return {carrier: number for carrier, number in self._num.items() if number}


COMMUNICATORS = OpenCommunicators()


def nccl_connections_by_carrier() -> dict[str, int]:
    """Return the number of open NCCL transports of this process, by the path that carries their bytes."""
    return COMMUNICATORS.by_carrier()


def num_stuck_aborts() -> int:
    """Return the number of communicators of this process that could not be ended in time, since the start."""
    return ABORTS.num_stuck
