"""Log of the requests that a router serves and has lately served, for listing and explaining them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.timelines import DEFAULT_LIMIT, MAX_LIMIT, OUTCOMES, RequestList, RequestTimeline
from router.request.record import RequestRecord, summary_of, timeline_of
from router.request.settlement import Settlement

LATEST = 1024
"""Number of latest requests that are kept, whatever their outcome: some KiB each."""
TROUBLED = 512
"""Number of requests beyond LATEST that are kept because they failed, were refused or missed an objective."""


PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Prefixes that the APIs add to a client's x-request-id to form the request's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Filter for requests; an empty field matches all of them."""

    tenant: str = ""
    slo_class: str = ""
    outcomes: Collection[str] = ()
    limit: int = DEFAULT_LIMIT

    def __post_init__(self) -> None:
        """Raise InvalidRequest if an outcome is unknown or the limit is out of range."""
        if unknown := sorted(set(self.outcomes) - set(OUTCOMES)):
            raise InvalidRequest(f"outcome must be one of {', '.join(OUTCOMES)}; got {unknown[0]!r:.100}", "outcome")
        if not 1 <= self.limit <= MAX_LIMIT:
            raise InvalidRequest(f"limit must be from 1 to {MAX_LIMIT}, got {self.limit}", "limit")

    def passes(self, record: RequestRecord) -> bool:
        """Return whether a request matches the filter."""
        if self.tenant and record.tenant != self.tenant:
            return False
        if self.slo_class and (record.claim is None or record.claim.slo_class != self.slo_class):
            return False
        return not self.outcomes or record.outcome in self.outcomes


class RequestLog:
    """Log of one router's requests.

    Args:
        router: id of the router.
    """

    def __init__(self, router: str = "") -> None:
        self._router = router
        self._running: dict[Settlement, None] = {}
        """Running requests, in the order of their arrival."""
        self._latest: deque[RequestRecord] = deque()
        self._troubled: deque[RequestRecord] = deque(maxlen=TROUBLED)

    @contextlib.contextmanager
    def keeping(self, settlement: Settlement) -> Iterator[Settlement]:
        """Context manager: lists a request as running, settles it on exit, and keeps its record."""
        self._running[settlement] = None
        try:
            with settlement:
                yield settlement
        finally:
            del self._running[settlement]
            self.remember(settlement.record())

    def remember(self, record: RequestRecord) -> None:
        """Keep the record of a request that has ended."""
        self._latest.append(record)
        if len(self._latest) > LATEST:
            oldest = self._latest.popleft()
            if not oldest.is_harmless:
                self._troubled.append(oldest)

    def _records(self) -> list[RequestRecord]:
        """Return all known requests, latest arrival first."""
        known = [*self._troubled, *self._latest, *(settlement.record() for settlement in self._running)]
        return sorted(known, key=lambda record: -record.arrived_s)

    @property
    def keeps(self) -> str:
        """Clause for error messages that describes which requests are known."""
        return f"it keeps the latest {LATEST} that it has served, and {TROUBLED} that failed or were late"

    def listed(self, wanted: RequestFilter) -> RequestList:
        """Return the latest requests that match a filter."""
        known = self._records()
        passing = [record for record in known if wanted.passes(record)]
        return RequestList(
            router=self._router,
            now_s=time.time(),
            num_kept=len(known),
            requests=tuple(summary_of(record, self._router) for record in passing[: wanted.limit]),
        )

    def explain(self, request_id: str, tenant: str = "") -> list[RequestTimeline]:
        """Return all known calls with this id, latest first; empty: none is known, or no longer.

        Args:
            request_id: the request's id, or the client's x-request-id header.
            tenant: id of the tenant; empty: any tenant.
        """
        ids = {f"{prefix}{request_id}" for prefix in ("", *PREFIXES)}
        return [
            timeline_of(record, self._router)
            for record in self._records()
            if record.request_id in ids and tenant in ("", record.tenant)
        ]
