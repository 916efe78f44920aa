"""Claim of a request: its tenant, priority and objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.api import GenerateRequest
from baton.config import DEFAULT_CLASS, RouterConfig
from baton.errors import InvalidRequest
from router.admission.tenants import Tenant
from router.placement import Objective, Weights

LEAST_PRIORITY = -1000
CUSTOM_CLASS = "custom"
"""SLO class of requests that set their own objectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Tenant, priority and objectives of one request."""

    tenant: Tenant
    priority: int
    slo_class: str
    objective: Objective
    weights: Weights
    arrived_s: float
    """Arrival of the request, on the monotonic clock."""


@dataclass(slots=True)
class SloCounts:
    """SLO outcomes of requests since the router started. Cancelled requests are not counted."""

    met: int = 0
    missed: int = 0
    rejected: int = 0


def claim_of(request: GenerateRequest, tenant: Tenant, config: RouterConfig, arrived_s: float) -> Claim:
    """Return the claim of a request.

    Raises:
        InvalidRequest: an objective is not a positive number, or the priority is outside the tenant's range.
    """
    if request.priority < LEAST_PRIORITY:
        raise InvalidRequest(
            f"priority must be at least {LEAST_PRIORITY}, got {request.priority}; raise it", "priority"
        )
    if request.priority > tenant.max_priority:
        raise InvalidRequest(
            f"priority must be at most {tenant.max_priority} for {tenant.id!r}, got {request.priority}; lower it, or "
            "have the operator raise the tenant's max_priority",
            "priority",
        )
    slo = config.slo_class(tenant.slo_class)
    asked = {"ttft_ms": request.ttft_ms, "itl_ms": request.itl_ms, "e2e_ms": request.e2e_ms}
    for name, value in asked.items():
        if value is not None and not 0 < value < math.inf:
            raise InvalidRequest(f"slo.{name} must be a positive number of milliseconds, got {value}", f"slo.{name}")
    is_custom = any(value is not None for value in asked.values())
    return Claim(
        tenant=tenant,
        priority=request.priority,
        slo_class=CUSTOM_CLASS if is_custom else tenant.slo_class or DEFAULT_CLASS,
        objective=Objective(
            (slo.ttft_ms if request.ttft_ms is None else request.ttft_ms) / 1e3,
            (slo.itl_ms if request.itl_ms is None else request.itl_ms) / 1e3,
            (slo.e2e_ms if request.e2e_ms is None else request.e2e_ms) / 1e3,
        ),
        weights=Weights(slo.affinity_weight, slo.interference_weight),
        arrived_s=arrived_s,
    )
