"""Scraper of a router's metrics, for the commands that show or check them."""

from __future__ import annotations

import http.client
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from baton.errors import NoWorker
from baton.tls import Tls
from deploy.operator.client import OPEN, Access, metadata_of

METRICS = "/api/metrics"
"""Path on the HTTP port at which operators read the metrics that Prometheus scrapes at /metrics."""
NOWHERE = ("0.0.0.0", "[::]", "::", "")
"""Hosts to listen on that are not addresses to connect to."""


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


class Samples:
    """Samples of one scrape. A missing metric sums to 0: nothing of its kind has happened yet."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def without(self, label: str) -> Samples:
        """Return the samples that lack a label, for example without the many samples of workers."""
        return Samples(each for samples in self._by_name.values() for each in samples if label not in each.labels)

    def of(self, name: str, **labels: str) -> Iterator[Sample]:
        for sample in self._by_name.get(name, ()):
            if all(sample.labels.get(label) == value for label, value in labels.items()):
                yield sample

    def sum(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in self.of(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> Counter[str]:
        """Return the sum for each value of a label."""
        sums: Counter[str] = Counter()
        for sample in self.of(name, **labels):
            sums[sample.labels.get(label, "")] += sample.value  # type: ignore[assignment]
        return sums

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, summed over its other labels."""
        sums = self.by("le", f"{name}_bucket", **labels)
        return dict(sorted((float(bound), count) for bound, count in sums.items()))


def parse(text: str) -> Samples:
    """Parse the body of a scrape. Raises ValueError if it is not in Prometheus' text format."""
    families = text_string_to_metric_families(text)
    return Samples(Sample(s.name, s.labels, s.value) for family in families for s in family.samples)


class Scraper:
    """Scraper that uses one connection, so that all scrapes reach the same router if several routers share a port.

    Args:
        addresses: host:port candidates, the likeliest first; the first that answers is kept.
        access: credentials of this client, with an operator key.
    """

    def __init__(self, addresses: Iterable[str], access: Access = OPEN, timeout_s: float = 2.0) -> None:
        self._addresses = list(addresses)
        self._headers, self._tls = dict(metadata_of(access.api_key)), access.tls
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def read(self) -> Samples:
        """Scrape the router. Raises NoWorker if none of the addresses answers with metrics."""
        reasons = []
        for address in self._addresses:
            try:
                samples = parse(self._get(address, METRICS))
            except (OSError, ValueError, http.client.HTTPException) as error:
                self.close()
                reasons.append(f"{address}: {error or type(error).__name__}")
            else:
                self._addresses = [address]
                return samples
        raise NoWorker(f"no metrics ({'; '.join(reasons)})")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _get(self, address: str, path: str) -> str:
        if self._connection is None:
            self._connection = http_connection(address, self._timeout_s, self._tls)
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise ValueError(f"HTTP status {answer.status}")
        return body.decode()


def http_connection(address: str, timeout_s: float, tls: Tls | None) -> http.client.HTTPConnection:
    """Return a connection to host:port, which opens at its first request. Raises ValueError for an invalid address."""
    host, port = split(address)
    if tls is None:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls.client_context())


def split(address: str) -> tuple[str, int]:
    """Split host:port. The host may be an IPv6 address in brackets. Raises ValueError for an invalid address."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def seen_from(announced: str, asked: str) -> list[str]:
    """Return the addresses to try for a port that a router announces, for a client that reached it at `asked`.

    They are the announced address, and its port on the host of `asked`, because the announced host may be known only
    inside the cluster.
    """
    host, _, port = announced.rpartition(":")
    asked_host = asked.rpartition(":")[0]
    found = [] if host in NOWHERE else [announced]
    return list(dict.fromkeys([*found, f"{asked_host}:{port}"]))
