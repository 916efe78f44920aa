"""Specification and status of a ServingPool. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from baton.cluster import Role
from baton.config import MAX_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Specification of a ServingPool."""

    size: int
    """Effective size: `asked`, limited to the bounds."""
    asked: int
    """Size in `spec.replicas`."""
    min_size: int = 0
    max_size: int | None = None
    drain_timeout_s: float | None = None
    """None: `cluster.drain_timeout_s`."""
    is_paused: bool = False
    """The size is ignored."""
    selector: str = ""
    """Label selector of the pool's pods, for autoscalers that read their metrics."""
    generation: int = 0

    def size_problem(self, size: int) -> str:
        """Return the reason why the pool must not have that size; empty: it may."""
        if self.is_paused:
            return "its ServingPool is paused"
        if not self.min_size <= size <= (size if self.max_size is None else self.max_size):
            limit = "any number" if self.max_size is None else self.max_size
            return f"its ServingPool allows {self.min_size} to {limit}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """Values for the status of a ServingPool."""

    desired: int
    num_workers: int
    """Workers of the pool in any phase except DOWN."""
    num_ready: int
    num_draining: int
    refusal: str = ""
    """Reason why the requested size is not followed; empty: it is."""
    engine: tuple[str, ...] = ()
    """Settings of its workers' engine that differ from the other pool's, such as tensor_parallel=2."""


def spec_of(role: Role, pool: Any) -> PoolSpec:
    """Return the specification of a ServingPool that has a size."""
    spec, instance = pool.spec, (pool.metadata.labels or {}).get("app.kubernetes.io/instance", "")
    min_size, max_size = int(spec.get("minReplicas", 0)), spec.get("maxReplicas")
    asked = int(spec["replicas"])
    drain_timeout_s = spec.get("drainTimeoutSeconds")
    return PoolSpec(
        size=max(min_size, asked if max_size is None else min(asked, int(max_size))),
        asked=asked,
        min_size=min_size,
        max_size=None if max_size is None else int(max_size),
        drain_timeout_s=None if drain_timeout_s is None else min(float(drain_timeout_s), MAX_TIMEOUT_S),
        is_paused=bool(spec.get("paused", False)),
        selector=f"app.kubernetes.io/instance={instance},baton.dev/pool={role.value}",
        generation=int(pool.metadata.generation or 0),
    )


def status_of(spec: PoolSpec, report: PoolReport, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status to write.

    Args:
        before: the status written last, whose transition times are kept.
    """
    limit = report.refusal
    if not limit and spec.size != spec.asked:
        limit = f"{spec.asked} is outside of what minReplicas and maxReplicas allow"
    elif not limit and spec.is_paused and report.desired != spec.size:
        limit = "paused: the size is not followed"
    is_ready = report.num_ready >= report.desired
    serving = f"{report.num_ready} of {report.desired} workers serve"
    if report.engine:
        serving += f", with {', '.join(report.engine)}"
    return {
        "replicas": report.num_workers,
        "readyReplicas": report.num_ready,
        "drainingReplicas": report.num_draining,
        "desiredReplicas": report.desired,
        "selector": spec.selector,
        "observedGeneration": spec.generation,
        "conditions": [
            _condition("Ready", is_ready, serving, before),
            _condition("Limited", bool(limit), limit or "the desired size is the one asked for", before),
        ],
    }


def _condition(kind: str, holds: bool, message: str, before: Mapping[str, Any]) -> dict[str, Any]:
    status = "True" if holds else "False"
    past = next((c for c in before.get("conditions", ()) if (c["type"], c["status"]) == (kind, status)), None)
    return {
        "type": kind,
        "status": status,
        "reason": kind if holds else f"Not{kind}",
        "message": message,
        "lastTransitionTime": past["lastTransitionTime"] if past else datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
