"""Metrics of impending failures: no capacity, failing workers, a full Redis, expiring certificates.

They are read from the cluster's status at every scrape, like those of `observed`. All routers report the same, except
that each shows its own certificates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton.cluster import ClusterStatus, PoolTrouble
from baton.telemetry.observed import ObservedMetric, model_labels
from baton.telemetry.prometheus import Observation


def _pools(status: ClusterStatus, value: Callable[[PoolTrouble], int]) -> Iterable[Observation]:
    for model in status.models:
        for each in model.controller.trouble if model.controller is not None else ():
            yield Observation(value(each), {"pool": each.pool, **model_labels(model)})


def _store_memory(status: ClusterStatus) -> Iterable[Observation]:
    if (memory := status.store_memory) is not None:
        yield Observation(memory.used_bytes, {"kind": "used"})
        if memory.limit_bytes:
            yield Observation(memory.limit_bytes, {"kind": "limit"})


def _evicted(status: ClusterStatus) -> Iterable[Observation]:
    if status.store_memory is not None:
        yield Observation(status.store_memory.num_evicted)


def _certificates(status: ClusterStatus) -> Iterable[Observation]:
    for each in status.certificates:
        yield Observation(each.begin_s, {"certificate": each.name, "end": "begins"})
        yield Observation(each.end_s, {"certificate": each.name, "end": "ends"})


TROUBLE: tuple[ObservedMetric, ...] = (
    ObservedMetric(
        name="baton.controller_up",
        description="1 while the router knows a model's controller, which starts and stops its workers, else 0.",
        observe=lambda s: [Observation(int(m.controller is not None), model_labels(m)) for m in s.models],
    ),
    ObservedMetric(
        name="baton.unplaced_workers",
        description="Workers of a pool that wait for a node with capacity for them.",
        observe=lambda s: _pools(s, lambda each: each.num_unplaced),
    ),
    ObservedMetric(
        name="baton.worker_failures",
        description="Times that a worker of a pool died or could not start, as the controller counts them.",
        observe=lambda s: _pools(s, lambda each: each.num_failures),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.redis_memory",
        description="Memory of Redis by kind: used, and limit, if it has one.",
        observe=_store_memory,
        unit="By",
    ),
    ObservedMetric(
        name="baton.redis_evicted_keys",
        description="Keys that Redis evicted. After the first one, the prefix index may be wrong.",
        observe=_evicted,
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.certificate_validity",
        description="Unix time at which the validity of a certificate starts and ends, by owner of the certificate: "
        "members or routers.",
        observe=_certificates,
        unit="s",
    ),
)
