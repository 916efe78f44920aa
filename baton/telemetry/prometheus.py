"""Counters, histograms and gauges as Prometheus shows them.

A value is booked in a microsecond or two, a tenth of what OpenTelemetry's SDK takes, and requests book a dozen. Names,
units and labels are OpenTelemetry's and come out as its exporter writes them. All of it belongs to the event loop.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

Labels = frozenset[tuple[str, str]]
NO_LABELS: Mapping[str, str] = {}
UNITS = {"": "", "s": "seconds", "By": "bytes"}


class Observation(NamedTuple):
    value: float
    labels: Mapping[str, str] = NO_LABELS


class Instrument(Protocol):
    def collect(self) -> Iterable[Metric]:
        """What Prometheus is shown: nothing as long as nothing was booked."""
        ...


class Counter:
    def __init__(self, name: str, description: str, unit: str = "") -> None:
        self._family = _Family(CounterMetricFamily, name, description, unit)
        self._values: dict[Labels, float] = {}

    def add(self, amount: float, labels: Mapping[str, str] = NO_LABELS) -> None:
        key = frozenset(labels.items())
        self._values[key] = self._values.get(key, 0.0) + amount

    def collect(self) -> Iterable[Metric]:
        return self._family.of([(labels, {"value": value}) for labels, value in self._values.items()])


class Histogram:
    """
    Args:
        bounds: the largest value of each bucket but the last, ascending.
    """

    def __init__(self, name: str, description: str, bounds: Sequence[float], unit: str = "") -> None:
        self._family = _Family(HistogramMetricFamily, name, description, unit)
        self._bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def record(self, value: float, labels: Mapping[str, str] = NO_LABELS) -> None:
        key = frozenset(labels.items())
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(self._bounds) + 1)
            self._sums[key] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[key] += value

    def collect(self) -> Iterable[Metric]:
        names = [*map(str, self._bounds), "+Inf"]
        return self._family.of(
            [
                (
                    key,
                    {"buckets": [*zip(names, itertools.accumulate(counts), strict=True)], "sum_value": self._sums[key]},
                )
                for key, counts in self._counts.items()
            ]
        )


class Observed:
    """A gauge, or a counter that others count, read when Prometheus asks."""

    def __init__(
        self,
        name: str,
        description: str,
        observe: Callable[[], Iterable[Observation]],
        unit: str = "",
        *,
        is_counter: bool = False,
    ) -> None:
        self._family = _Family(CounterMetricFamily if is_counter else GaugeMetricFamily, name, description, unit)
        self._observe = observe

    def collect(self) -> Iterable[Metric]:
        return self._family.of([(frozenset(labels.items()), {"value": value}) for value, labels in self._observe()])


class Collector:
    """What a `prometheus_client.CollectorRegistry` asks."""

    def __init__(self, instruments: Sequence[Instrument]) -> None:
        self._instruments = instruments

    def collect(self) -> Iterator[Metric]:
        for instrument in self._instruments:
            yield from instrument.collect()

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that a registry does not have to collect in order to learn the names."""
        return ()


class _Family:
    """A metric of Prometheus. Each of its rows has every label that any row has; those that it lacks are empty."""

    def __init__(self, kind: Callable[..., Any], name: str, description: str, unit: str) -> None:
        self._new = kind
        self._name = name.replace(".", "_")
        self._description = description
        self._unit = UNITS[unit]

    def of(self, rows: Sequence[tuple[Labels, dict[str, Any]]]) -> Iterable[Metric]:
        if not rows:
            return
        names = sorted({name for labels, _ in rows for name, _ in labels})
        family = self._new(self._name, self._description, labels=[_label(name) for name in names], unit=self._unit)
        for labels, values in rows:
            given = dict(labels)
            family.add_metric([given.get(name, "") for name in names], **values)
        yield family


def _label(name: str) -> str:
    return name.replace(".", "_")
