"""What a tenant has left of its limits, as its clients may see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimit:
    """One limit."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until all of it is there again, if nothing is asked meanwhile."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a tenant that are rates, as they were when a request was admitted or refused."""

    requests: RateLimit | None = None
    """None: its requests are not limited."""
    tokens: RateLimit | None = None
    """The limit of tokens, a minute or a day, of which less is left; None: there is none."""


UNLIMITED = Quota()
