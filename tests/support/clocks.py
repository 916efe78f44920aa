"""Clocks of processes under test that can be set while they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_double
from functools import partial
from multiprocessing.sharedctypes import RawValue


class SetClock:
    """How far a process's wall clock is from the machine's; in memory that it shares with the test."""

    def __init__(self) -> None:
        self._by_s = RawValue(c_double, 0.0)

    @property
    def by_s(self) -> float:
        return self._by_s.value

    def set_by(self, seconds: float) -> None:
        """Sets the clock so far ahead of the machine's, or behind it."""
        self._by_s.value = seconds


def settable(clock: SetClock) -> Callable[[], None]:
    """What a process calls before anything else, so that its wall clock is this one."""
    return partial(_use, clock)


def _use(clock: SetClock) -> None:
    machine_s, machine_ns = time.time, time.time_ns
    time.time = lambda: machine_s() + clock.by_s
    time.time_ns = lambda: machine_ns() + int(clock.by_s * 1e9)
