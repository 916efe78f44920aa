"""Limits the number of choices that the router serves at once, in total and by tenant."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator

from baton.errors import InvalidRequest, Overloaded
from router.admission.tenants import DEFAULT_TENANT, Tenant

SMOOTHING = 0.1
"""Weight of the newest duration in the moving average."""
CROWDED = 0.8
"""Share of the limit up to which every tenant may take free slots; above it, each tenant is limited to its share."""
CROWDED_S = 30.0
"""Time after a refusal during which the router counts as crowded."""


class Limiter:
    """Counter of choices in flight. Beyond the limit it refuses requests at once, with the seconds until a retry."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.num_in_flight = 0
        self._request_ids: set[tuple[str, str]] = set()
        self._by_tenant: Counter[str] = Counter()
        """Choices in flight, by tenant; tenants without any are not listed."""
        self._weights: dict[str, float] = {}
        """Weights of the tenants above and below, as of their latest request: the tenants' file may change."""
        self._refused: set[str] = set()
        """Tenants refused since the router became crowded: free slots are kept for tenants below their share."""
        self._mean_duration_s = 1.0
        self._refused_s = -math.inf
        """Time of the latest refusal."""

    @property
    def is_crowded(self) -> bool:
        """True if a request was refused within the last CROWDED_S seconds."""
        return time.monotonic() - self._refused_s < CROWDED_S

    @contextlib.contextmanager
    def slot(self, request_id: str, num_choices: int, tenant: Tenant = DEFAULT_TENANT) -> Iterator[None]:
        """Context manager: holds the slots of one request.

        Raises:
            Overloaded: the limit is reached, or it is near and the tenant has its share, by weight among the tenants
                in service. `retry_after_s` is the mean time until a slot is free.
            InvalidRequest: the tenant has a request of this id in flight.
        """
        if num_choices > self.max_in_flight:
            raise InvalidRequest(f"sampling.n must be at most {self.max_in_flight} here; lower it", "n")
        self._weights[tenant.id] = tenant.weight
        if self.num_in_flight + num_choices > self._limit_of(tenant):
            self._refused.add(tenant.id)
            self._refused_s = time.monotonic()
            raise Overloaded(
                f"{self.num_in_flight} of at most {self.max_in_flight} answers are being generated, "
                f"{self._by_tenant[tenant.id]} of them yours; try again later",
                retry_after_s=max(0.1, self._mean_duration_s * num_choices / self.max_in_flight),
            )
        if (tenant.id, request_id) in self._request_ids:
            raise InvalidRequest(
                f"request_id {request_id!r} is in flight; choose another or leave it empty", "request_id"
            )
        self._request_ids.add((tenant.id, request_id))
        self._book(tenant.id, num_choices)
        try:
            yield
        finally:
            self._book(tenant.id, -num_choices)
            self._request_ids.discard((tenant.id, request_id))

    def _limit_of(self, tenant: Tenant) -> float:
        """Return the limit on choices in flight, over all tenants, that applies to a request of this tenant."""
        others = sum(self._weights[other] for other in self._by_tenant.keys() | self._refused if other != tenant.id)
        share = self.max_in_flight * tenant.weight / (tenant.weight + others)
        has_share = self._by_tenant[tenant.id] >= share
        return CROWDED * self.max_in_flight if has_share else self.max_in_flight

    def _book(self, tenant_id: str, num_choices: int) -> None:
        self.num_in_flight += num_choices
        self._by_tenant[tenant_id] += num_choices
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]
        if self.num_in_flight < CROWDED * self.max_in_flight:
            self._refused.clear()

    def record(self, duration_s: float) -> None:
        """Record the duration of a finished request, for the estimate in refusals."""
        self._mean_duration_s += SMOOTHING * (duration_s - self._mean_duration_s)
