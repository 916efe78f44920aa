"""Where the time of steps goes: kernels by class, and the gaps between them."""

from __future__ import annotations

import heapq
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from tests.gpu.hour.checks import is_rehearsal
from tests.gpu.hour.models import synchronize

ATTENTION = ("attend", "combine", "flash", "fmha", "attention", "cutlassf", "mergestates")
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "splitk", "cublas", "::mm", "::addmm")
"""Parts of the names of kernels, in lower case: those that attend, and of the others those that multiply."""
MARK = "spin_kernel"
"""The kernel that `torch.cuda._sleep` launches."""


class Span(NamedTuple):
    """A kernel or a copy, in microseconds."""

    start: float
    end: float
    name: str

    @property
    def kind(self) -> str:
        name = self.name.lower()
        if any(part in name for part in ATTENTION):
            return "attention"
        return "products" if any(part in name for part in PRODUCTS) else "rest"


class StepsAhead:
    """Steps of an engine, each launched before the one before it is collected: as by a worker that plans ahead.

    Attributes:
        num_ahead: steps that were.
        host: microseconds that each thing the host does has taken, `wait` being for the device.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_ahead = 0
        self.host: Counter[str] = Counter()
        self._step = engine.schedule(0.0)[0]
        self._launched = engine.runner.launch(self._step)

    def next(self, *, is_marked: bool = False) -> None:
        """Launches the next step, and collects the one before it.

        Args:
            is_marked: whether the device is given a kernel between the two that does nothing.
        """
        engine = self._engine
        scheduled = self._timed("schedule", engine.schedule_ahead, self._step, 0.0)
        if scheduled is not None:
            self.num_ahead += 1
            following = scheduled[0], self._launch(scheduled[0], is_marked)
        output = self._timed("wait", self._launched.collect)
        self._timed("commit", engine.commit, self._step, output, 1.0)
        if scheduled is None:
            step = engine.schedule(0.0)[0]
            following = step, self._launch(step, is_marked)
        self._step, self._launched = following

    def end(self) -> None:
        """Collects what is under way."""
        self._launched.collect()

    def _launch(self, step: Any, is_marked: bool) -> Any:
        if is_marked:
            mark()
        return self._timed("launch", self._engine.runner.launch, step)

    def _timed(self, name: str, job: Any, *args: Any) -> Any:
        began = time.perf_counter()
        found = job(*args)
        self.host[name] += round((time.perf_counter() - began) * 1e6)
        return found


def mark() -> None:
    """Launches a kernel that does nothing, and is found again among the spans."""
    if is_rehearsal():
        with torch.profiler.record_function(MARK):
            return
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]


def profiled(job: Any) -> list[Span]:
    """Runs a job, and returns the spans of what it did on the device, in the order in which they start."""
    device = "CPU" if is_rehearsal() else "CUDA"
    activities = [getattr(torch.profiler.ProfilerActivity, device)]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        job()
        synchronize()
    return sorted(
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type.name == device
    )


def figures_of(spans: Sequence[Span]) -> dict[str, Any]:
    """What spans of several steps, with a mark before each, say of one of them.

    Args:
        spans: in the order in which they start.
    """
    marks = [place for place, span in enumerate(spans) if MARK in span.name]
    by_step = [spans[begin + 1 : end] for begin, end in pairwise([*marks, len(spans)])]
    gaps = [
        spans[mark + 1].start - spans[mark - 1].end - (spans[mark].end - spans[mark].start)
        for mark in marks
        if 0 < mark < len(spans) - 1
    ]
    busy_us, idle_us = 0.0, 0.0
    by_name: defaultdict[str, float] = defaultdict(float)
    by_kind: defaultdict[str, float] = defaultdict(float)
    for step in by_step:
        last = step[0].start
        for span in step:
            by_name[span.name[:70]] += span.end - span.start
            by_kind[span.kind] += span.end - span.start
            idle_us += max(0.0, span.start - last)
            busy_us += max(0.0, span.end - max(span.start, last))
            last = max(last, span.end)
    number = len(by_step)
    longest = heapq.nlargest(8, by_name.items(), key=itemgetter(1))
    return {
        "kernels_a_step": sum(map(len, by_step)) // number,
        "kernels_ms": round(busy_us / number / 1e3, 3),
        **{f"{kind}_ms": round(by_kind[kind] / number / 1e3, 3) for kind in ("products", "attention", "rest")},
        "gap_us": round(statistics.median(gaps or [0.0]), 1),
        "longest_gap_us": round(max(gaps, default=0.0), 1),
        "idle_in_step_us": round(idle_us / number, 1),
        "longest_ms": {name: round(us / number / 1e3, 3) for name, us in longest},
    }
