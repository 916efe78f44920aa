"""A bound on the choices being served at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from baton.errors import InvalidRequest, Overloaded

SMOOTHING = 0.1
"""Weight of the newest duration in the moving average."""


class Limiter:
    """Counts requests in flight; refuses at once beyond the limit, saying when to come back."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.num_in_flight = 0
        self._request_ids: set[str] = set()
        self._mean_duration_s = 1.0

    @contextlib.contextmanager
    def slot(self, request_id: str, num_choices: int) -> Iterator[None]:
        """Room for one request while the block is entered.

        Raises:
            Overloaded: the limit is reached. `retry_after_s` is the mean time until a slot frees.
            InvalidRequest: a request of this id is in flight.
        """
        if num_choices > self.max_in_flight:
            raise InvalidRequest(f"sampling.n must be at most {self.max_in_flight} here; lower it", "n")
        if self.num_in_flight + num_choices > self.max_in_flight:
            raise Overloaded(
                f"{self.num_in_flight} of at most {self.max_in_flight} answers are being generated; try again later",
                retry_after_s=max(0.1, self._mean_duration_s * num_choices / self.max_in_flight),
            )
        if request_id in self._request_ids:
            raise InvalidRequest(
                f"request_id {request_id!r} is in flight; choose another or leave it empty", "request_id"
            )
        self._request_ids.add(request_id)
        self.num_in_flight += num_choices
        try:
            yield
        finally:
            self.num_in_flight -= num_choices
            self._request_ids.discard(request_id)

    def record(self, duration_s: float) -> None:
        """Books how long a finished request took, for the estimate in refusals."""
        self._mean_duration_s += SMOOTHING * (duration_s - self._mean_duration_s)
