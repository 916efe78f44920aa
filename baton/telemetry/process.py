"""Metrics of the router's own process, under the names that all Prometheus clients give them."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import psutil

from baton.cluster import ClusterStatus
from baton.telemetry.observed import ObservedMetric
from baton.telemetry.prometheus import Observation


def _cpu(_: ClusterStatus) -> Iterable[Observation]:
    times = psutil.Process().cpu_times()
    yield Observation(times.user + times.system)


def _max_fds(_: ClusterStatus) -> Iterable[Observation]:
    most, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        yield Observation(most)


PROCESS: tuple[ObservedMetric, ...] = (
    ObservedMetric(
        name="process.cpu",
        description="Processor time of the router. Its limit is about 1 per second: one thread serves all requests.",
        observe=_cpu,
        unit="s",
        is_counter=True,
    ),
    ObservedMetric(
        name="process.resident_memory",
        description="Memory of the router.",
        observe=lambda _: [Observation(psutil.Process().memory_info().rss)],
        unit="By",
    ),
    ObservedMetric(
        name="process.start_time",
        description="Unix time at which the router started.",
        observe=lambda _: [Observation(psutil.Process().create_time())],
        unit="s",
    ),
    ObservedMetric(
        name="process.open_fds",
        description="Files and connections that the router has open.",
        observe=lambda _: [Observation(psutil.Process().num_fds())],
    ),
    ObservedMetric(
        name="process.max_fds",
        description="Maximum number of files and connections that the router may open.",
        observe=_max_fds,
    ),
)
