"""The router's own load: shares are of the time that they say, and a loop that is blocked is seen."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from router.cluster.watch import LONG_S, NOTE_EVERY, SHOWN_S, TICK_S, LoadMeter
from tests.support.waiting import until


class Times:
    """A clock, and the processor's time beside it."""

    now_s = cpu_s = 1000.0

    def clock(self) -> float:
        return self.now_s

    def cpu(self) -> float:
        return self.cpu_s

    def pass_by(self, meter: LoadMeter, for_s: float, share: float) -> None:
        """Lets time pass in which the process uses a share of a processor."""
        period_s = TICK_S * NOTE_EVERY
        for _ in range(round(for_s / period_s)):
            self.now_s += period_s
            self.cpu_s += period_s * share
            meter.note()


def measured(times: Times) -> LoadMeter:
    return LoadMeter(lambda: (3, 512), lambda: (5, 256), times.clock, times.cpu)


def test_shares_are_of_the_latest_seconds_and_of_minutes() -> None:
    times = Times()
    meter = measured(times)
    assert meter.now().cpu_share == 0
    times.pass_by(meter, 20, 0.5)
    assert (meter.now().cpu_share, meter.now().long_cpu_share) == pytest.approx((0.5, 10 / LONG_S))
    times.pass_by(meter, LONG_S, 0.2)
    times.pass_by(meter, SHOWN_S, 1.0)
    assert meter.now().cpu_share == pytest.approx(1.0)
    assert meter.now().long_cpu_share == pytest.approx((0.2 * (LONG_S - SHOWN_S) + SHOWN_S) / LONG_S)
    times.pass_by(meter, 3 * LONG_S, 0.0)
    assert meter.now().long_cpu_share == 0


def test_it_shows_what_is_open_and_what_may_be() -> None:
    load = measured(Times()).now()
    assert (load.connections, load.max_connections, load.in_flight, load.max_in_flight) == (3, 512, 5, 256)
    process = psutil.Process()
    assert load.memory_bytes == pytest.approx(process.memory_info().rss, rel=0.2)
    assert load.open_files == process.num_fds()
    assert load.max_files == 0 or load.max_files > load.open_files


async def test_a_loop_that_is_blocked_is_late_and_then_forgotten() -> None:
    meter = LoadMeter(lambda: (0, 1), lambda: (0, 1))
    task = asyncio.create_task(meter.run())
    await asyncio.sleep(0)
    time.sleep(TICK_S + 0.3)  # noqa: ASYNC251
    await until(lambda: meter.now().loop_lag_s > 0.3)
    task.cancel()
