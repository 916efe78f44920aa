"""The requests that a router serves, and the latest that it has served, to be listed and explained."""

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
"""Requests that are remembered, whatever became of them: some KiB each."""
TROUBLED = 512
"""Requests that failed, were refused or missed an objective, and are remembered after LATEST others have come."""


PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""What the APIs put before the id in a client's header x-request-id, which an answer has as it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Which requests are asked for; what is empty asks for all."""

    tenant: str = ""
    slo_class: str = ""
    outcomes: Collection[str] = ()
    limit: int = DEFAULT_LIMIT

    def __post_init__(self) -> None:
        """Raise InvalidRequest: there is no such outcome, or the limit is out of bounds."""
        if unknown := sorted(set(self.outcomes) - set(OUTCOMES)):
            raise InvalidRequest(f"outcome must be one of {', '.join(OUTCOMES)}; got {unknown[0]!r:.100}", "outcome")
        if not 1 <= self.limit <= MAX_LIMIT:
            raise InvalidRequest(f"limit must be from 1 to {MAX_LIMIT}, got {self.limit}", "limit")

    def passes(self, record: RequestRecord) -> bool:
        """Return whether the request is one of those that are asked for."""
        if self.tenant and record.tenant != self.tenant:
            return False
        if self.slo_class and (record.claim is None or record.claim.slo_class != self.slo_class):
            return False
        return not self.outcomes or record.outcome in self.outcomes


class RequestLog:
    """Requests of one router.

    Args:
        router: its id.
    """

    def __init__(self, router: str = "") -> None:
        self._router = router
        self._running: dict[Settlement, None] = {}
        """Records that are open, in the order of their requests' arrival."""
        self._latest: deque[RequestRecord] = deque()
        self._troubled: deque[RequestRecord] = deque(maxlen=TROUBLED)

    @contextlib.contextmanager
    def keeping(self, settlement: Settlement) -> Iterator[Settlement]:
        """Open a request's books while the block is entered, and remembers what is in them."""
        self._running[settlement] = None
        try:
            with settlement:
                yield settlement
        finally:
            del self._running[settlement]
            self.remember(settlement.record())

    def remember(self, record: RequestRecord) -> None:
        """Remember a request that has ended."""
        self._latest.append(record)
        if len(self._latest) > LATEST:
            oldest = self._latest.popleft()
            if not oldest.is_harmless:
                self._troubled.append(oldest)

    def _records(self) -> list[RequestRecord]:
        """All that are known, the latest arrival first."""
        known = [*self._troubled, *self._latest, *(settlement.record() for settlement in self._running)]
        return sorted(known, key=lambda record: -record.arrived_s)

    @property
    def keeps(self) -> str:
        """A clause that says which requests are known."""
        return f"it keeps the latest {LATEST} that it has served, and {TROUBLED} that failed or were late"

    def listed(self, wanted: RequestFilter) -> RequestList:
        """The latest requests that pass."""
        known = self._records()
        passing = [record for record in known if wanted.passes(record)]
        return RequestList(
            router=self._router,
            now_s=time.time(),
            num_kept=len(known),
            requests=tuple(summary_of(record, self._router) for record in passing[: wanted.limit]),
        )

    def explain(self, request_id: str, tenant: str = "") -> list[RequestTimeline]:
        """All calls with this id that are known, the latest first; empty: none is, or not any more.

        Args:
            request_id: the request's id, or the one that its client sent in the header x-request-id.
            tenant: whose they are; empty: anybody's.
        """
        ids = {f"{prefix}{request_id}" for prefix in ("", *PREFIXES)}
        return [
            timeline_of(record, self._router)
            for record in self._records()
            if record.request_id in ids and tenant in ("", record.tenant)
        ]
