"""What a ServingPool says, and what is said of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from baton.cluster import Role
from baton.config import MAX_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What a ServingPool asks for."""

    size: int
    """Within the bounds."""
    asked: int
    """As it stands there."""
    least: int = 0
    most: int | None = None
    drain_timeout_s: float | None = None
    """None: `cluster.drain_timeout_s`."""
    is_paused: bool = False
    """The size is not followed."""
    selector: str = ""
    """Label selector of the pool's pods, for whoever scales by their metrics."""
    generation: int = 0

    def why_not(self, size: int) -> str:
        """Why it must not have that size; empty: it may."""
        if self.is_paused:
            return "its ServingPool is paused"
        if not self.least <= size <= (size if self.most is None else self.most):
            return f"its ServingPool allows {self.least} to {'any number' if self.most is None else self.most}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """What becomes of it: the status."""

    desired: int
    num_workers: int
    """Of the pool that there are, whatever they do."""
    num_ready: int
    num_draining: int
    refusal: str = ""
    """Why the size that is asked for is not the desired one; empty: it is."""


def spec_of(role: Role, pool: Any) -> PoolSpec:
    """Of a ServingPool that has a size."""
    spec, instance = pool.spec, (pool.metadata.labels or {}).get("app.kubernetes.io/instance", "")
    least, most = int(spec.get("minReplicas", 0)), spec.get("maxReplicas")
    asked = int(spec["replicas"])
    drain_timeout_s = spec.get("drainTimeoutSeconds")
    return PoolSpec(
        size=max(least, asked if most is None else min(asked, int(most))),
        asked=asked,
        least=least,
        most=None if most is None else int(most),
        drain_timeout_s=None if drain_timeout_s is None else min(float(drain_timeout_s), MAX_TIMEOUT_S),
        is_paused=bool(spec.get("paused", False)),
        selector=f"app.kubernetes.io/instance={instance},baton.dev/pool={role.value}",
        generation=int(pool.metadata.generation or 0),
    )


def status_of(spec: PoolSpec, report: PoolReport, before: Mapping[str, Any]) -> dict[str, Any]:
    """Args:
    before: the same as it was written last.
    """
    limit = report.refusal
    if not limit and spec.size != spec.asked:
        limit = f"{spec.asked} is outside of what minReplicas and maxReplicas allow"
    elif not limit and spec.is_paused and report.desired != spec.size:
        limit = "paused: the size is not followed"
    is_ready = report.num_ready >= report.desired
    return {
        "replicas": report.num_workers,
        "readyReplicas": report.num_ready,
        "drainingReplicas": report.num_draining,
        "desiredReplicas": report.desired,
        "selector": spec.selector,
        "observedGeneration": spec.generation,
        "conditions": [
            _condition("Ready", is_ready, f"{report.num_ready} of {report.desired} workers serve", before),
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
