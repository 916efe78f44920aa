"""Load of this router's process: processor, event loop, memory, files, connections, answers in flight.

One thread serves all requests of a router. If that thread is busy all the time, the processor share approaches 1, the
event loop lags, and streams stutter. `/metrics` exports processor, memory and files as counters for Prometheus
(`baton.telemetry.process`); this module computes current values for the page.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import psutil

TICK_S = 0.25
"""Seconds between two measurements of the event loop. A block for longer is always detected."""
SHOWN_S = 10.0
"""Window of `cpu_share` and `loop_lag_s`, in seconds."""
LONG_S = 300.0
"""Window of `long_cpu_share`, which BatonRouterBusy uses, in seconds."""
NOTE_EVERY = 8
"""Number of ticks between two measurements of the processor time."""

Bounded = Callable[[], tuple[int, int]]
"""Returns a current number and its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """A router's own load."""

    cpu_share: float
    """Processors in use over the last `SHOWN_S`; near 1 the router is at its limit."""
    long_cpu_share: float
    """Processors in use over the last `LONG_S`."""
    loop_lag_s: float
    """The longest time by which the event loop was late, in the last `SHOWN_S`."""
    memory_bytes: int
    """Resident memory."""
    open_files: int
    max_files: int
    """0: there is no limit."""
    connections: int
    """Open connections to the HTTP port."""
    max_connections: int
    in_flight: int
    """Answers that are being generated, over HTTP and gRPC: a request counts once for each of its choices."""
    max_in_flight: int


class LoadMeter:
    """Measures the load while `run` runs.

    Args:
        connections: returns the open connections to the HTTP port.
        in_flight: returns the number of answers that are being generated.
        clock: monotonic time in seconds.
        cpu: processor time in seconds that all threads of the process have used.
    """

    def __init__(
        self,
        connections: Bounded,
        in_flight: Bounded,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._connections, self._in_flight = connections, in_flight
        self._clock, self._cpu = clock, cpu
        self._lags: deque[float] = deque(maxlen=round(SHOWN_S / TICK_S))
        self._noted: deque[tuple[float, float]] = deque(maxlen=round(LONG_S / (TICK_S * NOTE_EVERY)) + 1)
        """Pairs of a time and the processor time until then."""
        self._process = psutil.Process()
        self.note()

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            for _ in range(NOTE_EVERY):
                before_s = self._clock()
                await asyncio.sleep(TICK_S)
                self._lags.append(max(0.0, self._clock() - before_s - TICK_S))
            self.note()

    def note(self) -> None:
        """Record the processor time; `run` does so every `NOTE_EVERY` ticks."""
        self._noted.append((self._clock(), self._cpu()))

    def now(self) -> RouterLoad:
        """Return the load as of now."""
        most_files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        connections, max_connections = self._connections()
        in_flight, max_in_flight = self._in_flight()
        return RouterLoad(
            cpu_share=self._share(SHOWN_S),
            long_cpu_share=self._share(LONG_S),
            loop_lag_s=max(self._lags, default=0.0),
            memory_bytes=self._process.memory_info().rss,
            open_files=self._process.num_fds(),
            max_files=0 if most_files == resource.RLIM_INFINITY else most_files,
            connections=connections,
            max_connections=max_connections,
            in_flight=in_flight,
            max_in_flight=max_in_flight,
        )

    def _share(self, for_s: float) -> float:
        """Return the mean number of processors in use over the last `for_s`.

        Time before the first measurement counts as idle, so that loading the tokenizer at the start does not make a
        router look busy.
        """
        now_s, cpu_s = self._clock(), self._cpu()
        old = [each for each in self._noted if now_s - each[0] >= for_s]
        then_s, then_cpu_s = old[-1] if old else self._noted[0]
        return (cpu_s - then_cpu_s) / max(for_s, now_s - then_s)
