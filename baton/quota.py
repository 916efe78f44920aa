"""Remaining quota of a tenant, as shown to its clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimit:
    """One limit."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until the full limit is available again, without further requests."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Rate limits of a tenant, as they were when a request was admitted or rejected."""

    requests: RateLimit | None = None
    """None: the number of requests is not limited."""
    tokens: RateLimit | None = None
    """The token limit, per minute or per day, with the smaller rest; None: there is none."""


UNLIMITED = Quota()
