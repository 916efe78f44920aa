"""Counters, histograms and gauges as Prometheus shows them.

Recording a value takes a microsecond or two, a tenth of the time in OpenTelemetry's SDK; every request records a dozen.
Names, units and labels are OpenTelemetry's, written as its exporter does. Use all of it on the event loop only.
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


class Definition(NamedTuple):
    """Name, kind and description of a metric, as Prometheus shows them."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    description: str


class Instrument(Protocol):
    @property
    def definition(self) -> Definition: ...

    def collect(self) -> Iterable[Metric]:
        """Return the metric for Prometheus; none until something was recorded."""
        ...


Relabel = Callable[[Mapping[str, str]], Mapping[str, str] | None]
"""Maps a row's labels to those under another name. Rows with equal labels are summed; None: the row is not shown."""


class Counter:
    def __init__(self, name: str, description: str, unit: str = "") -> None:
        self._family = _Family(CounterMetricFamily, name, description, unit)
        self.definition = self._family.definition
        self._values: dict[Labels, float] = {}

    def add(self, amount: float, labels: Mapping[str, str] = NO_LABELS) -> None:
        key = frozenset(labels.items())
        self._values[key] = self._values.get(key, 0.0) + amount

    def collect(self) -> Iterable[Metric]:
        return self._family.of([(labels, {"value": value}) for labels, value in self._values.items()])

    def totals(self, *names: str) -> dict[tuple[str, ...], float]:
        """Return the sums of the rows that have the same values of these labels, by those values."""
        sums: dict[tuple[str, ...], float] = {}
        for labels, value in self._values.items():
            given = dict(labels)
            key = tuple(given.get(name, "") for name in names)
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def renamed(self, name: str, description: str, relabel: Relabel) -> Counter:
        """Return a new counter with the current values."""
        other = Counter(name, description)
        for labels, value in self._values.items():
            if (shown := relabel(dict(labels))) is not None:
                other.add(value, shown)
        return other


class Histogram:
    """Distribution of values in buckets.

    Args:
        bounds: the largest value of each bucket but the last, ascending.
    """

    def __init__(self, name: str, description: str, bounds: Sequence[float], unit: str = "") -> None:
        self._family = _Family(HistogramMetricFamily, name, description, unit)
        self.definition = self._family.definition
        self.bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def record(self, value: float, labels: Mapping[str, str] = NO_LABELS, times: int = 1) -> None:
        key = frozenset(labels.items())
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(self.bounds) + 1)
            self._sums[key] = 0.0
        counts[bisect_left(self.bounds, value)] += times
        self._sums[key] += value * times

    def totals(self, *names: str) -> dict[tuple[str, ...], dict[str, int]]:
        """Return the sums of the rows that have the same values of these labels, by those values: the number of values
        per bucket, by upper bound as shown.
        """
        sums: dict[tuple[str, ...], list[int]] = {}
        for labels, counts in self._counts.items():
            given = dict(labels)
            key = tuple(given.get(name, "") for name in names)
            sums[key] = [a + b for a, b in zip(sums[key], counts, strict=True)] if key in sums else counts
        bounds = [*map(str, self.bounds), "+Inf"]
        return {key: dict(zip(bounds, counts, strict=True)) for key, counts in sums.items()}

    def collect(self) -> Iterable[Metric]:
        names = [*map(str, self.bounds), "+Inf"]
        return self._family.of(
            [
                (
                    key,
                    {"buckets": [*zip(names, itertools.accumulate(counts), strict=True)], "sum_value": self._sums[key]},
                )
                for key, counts in self._counts.items()
            ]
        )

    def renamed(self, name: str, description: str, relabel: Relabel) -> Histogram:
        """Return a new histogram with the current values."""
        other = Histogram(name, description, self.bounds)
        for labels, counts in self._counts.items():
            if (shown := relabel(dict(labels))) is not None:
                key = frozenset(shown.items())
                before = other._counts.get(key, [0] * len(counts))
                other._counts[key] = [a + b for a, b in zip(before, counts, strict=True)]
                other._sums[key] = other._sums.get(key, 0.0) + self._sums[labels]
        return other

    def divide(self, at: Iterable[float]) -> None:
        """Add bounds below the last one, which stays. Call this before the first value is recorded."""
        assert not self._counts
        self.bounds = sorted({*self.bounds, *(bound for bound in at if 0 < bound < self.bounds[-1])})


class Renamed:
    """Counter or histogram that is shown a second time under another name. Values are recorded once."""

    def __init__(self, source: Counter | Histogram, name: str, description: str, relabel: Relabel) -> None:
        self._source = source
        self._name = name
        self._description = description
        self._relabel = relabel

    @property
    def definition(self) -> Definition:
        return self._source.renamed(self._name, self._description, lambda labels: None).definition

    def collect(self) -> Iterable[Metric]:
        return self._source.renamed(self._name, self._description, self._relabel).collect()


class Observed:
    """Gauge, or counter that is counted elsewhere, read at every scrape."""

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
        self.definition = self._family.definition
        self._observe = observe

    def collect(self) -> Iterable[Metric]:
        return self._family.of([(frozenset(labels.items()), {"value": value}) for value, labels in self._observe()])


class Collector:
    """Instruments, in the form that a `prometheus_client.CollectorRegistry` collects."""

    def __init__(self, instruments: Sequence[Instrument]) -> None:
        self._instruments = instruments

    def collect(self) -> Iterator[Metric]:
        for instrument in self._instruments:
            yield from instrument.collect()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that a registry need not collect values to learn the names."""
        return ()


class _Family:
    """Metric family of Prometheus. Every row has the labels of all rows, with empty values for those that it lacks."""

    def __init__(self, kind: Callable[..., Any], name: str, description: str, unit: str) -> None:
        self._new = kind
        self._name = name.replace(".", "_")
        self._description = description
        self._unit = UNITS[unit]
        shown: Metric = kind(self._name, description, unit=self._unit)
        total = "_total" if shown.type == "counter" else ""
        self.definition = Definition(shown.name + total, shown.type, description)

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
