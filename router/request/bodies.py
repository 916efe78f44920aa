"""Records HTTP bodies before they become requests: ignored fields, and refused bodies."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from baton.errors import Overloaded
from baton.telemetry.request_metrics import RequestMetrics
from router.request.record import FirstChoice, RequestRecord
from router.request.request_log import RequestLog
from router.serve.events import EventKind, EventLog, error_text
from router.slo import phases


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedBody:
    """A body that was refused before it became a request."""

    request_id: str
    """Id in the response."""
    tenant: str
    operation: str
    arrived_s: float
    """Arrival on the monotonic clock."""
    error: Exception
    field: str
    """Label of the invalid field; empty: no single field is invalid."""


class BodyBook:
    """Recorder of bodies, in the metrics and in the request log, as `Settlement` records requests.

    Args:
        model_id: the served model's name.
    """

    def __init__(self, requests: RequestLog, instruments: RequestMetrics, model_id: str) -> None:
        self._requests = requests
        self._instruments = instruments
        self._model = {"model": model_id}

    def ignored(self, fields: Iterable[str]) -> None:
        """Count the ignored fields of one request, by label."""
        for field in fields:
            self._instruments.ignored_fields.add(1, {"field": field})

    def refused(self, body: RefusedBody) -> None:
        """Count a refused body, and add it to the request log."""
        outcome = "rejected" if isinstance(body.error, Overloaded) else "invalid"
        self._instruments.requests.add(1, {**self._model, "outcome": outcome})
        self._instruments.tenant_requests.add(1, {"tenant": body.tenant, "outcome": outcome})
        if body.field:
            self._instruments.refused_fields.add(1, {"field": body.field})
        now_s, events, error = time.monotonic(), EventLog(), error_text(body.error)
        if body.field:
            error = f"{error}: {body.field}"
        events.note(body.arrived_s, EventKind.ARRIVED, "arrived")
        events.note(now_s, EventKind.ENDED, f"{outcome}: {error}")
        self._requests.remember(
            RequestRecord(
                request_id=body.request_id,
                tenant=body.tenant,
                operation=body.operation,
                is_streamed=False,
                claim=None,
                arrived_s=body.arrived_s,
                arrived_at_s=time.time() - (now_s - body.arrived_s),
                ended_s=now_s,
                outcome=outcome,
                error=error,
                blamed_stage="",
                num_prompt_tokens=0,
                num_tokens=0,
                num_choices=0,
                first_token_s=0.0,
                itl_s=None,
                life=phases(body.arrived_s, 0.0, now_s, []),
                first=FirstChoice(),
                events=events,
                choices=(),
            )
        )
