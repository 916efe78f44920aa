"""What this process counts of its NCCL communicators: those that are open, and those that cannot be ended."""

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
    """The ends of communicators in this process, and how many are stuck: each may keep a thread and memory for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        self._num_begun = 0
        self._num_late = 0
        """Number of those that took too long and have ended, or were given up."""

    @property
    def num_stuck(self) -> int:
        """Number of those that did not end in time, since the start."""
        now = time.monotonic()
        with self._lock:
            return self._num_late + sum(deadline < now for deadline in self._deadlines.values())

    @contextlib.contextmanager
    def under_way(self, timeout_s: float) -> Iterator[None]:
        """Counts an end that takes place within the block, if it takes too long."""
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
        """Counts an end that was given up."""
        with self._lock:
            self._num_late += 1


ABORTS = Aborts()


class OpenPairs:
    """The communicators of this process, by what moves their bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num: Counter[str] = Counter()

    @contextlib.contextmanager
    def counted(self, carrier: str) -> Iterator[None]:
        """Counts a communicator while the block is entered."""
        with self._lock:
            self._num[carrier] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num[carrier] -= 1

    def by_carrier(self) -> dict[str, int]:
        """Returns the number of communicators now."""
        with self._lock:
            return {carrier: number for carrier, number in self._num.items() if number}


PAIRS = OpenPairs()


def nccl_pairs_by_carrier() -> dict[str, int]:
    """Counts the NCCL transports of this process that are open, by what moves their bytes."""
    return PAIRS.by_carrier()


def num_stuck_aborts() -> int:
    """Counts the communicators of this process that could not be ended in time, since the start."""
    return ABORTS.num_stuck
