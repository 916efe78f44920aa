"""Records of requests that routers keep, without any of their content: a line for a list, and a timeline of each.

`baton status --explain` and the HTTP port's `/api/requests` show the same JSON, which is built here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from baton.api import Explanation

RUNNING = "running"
OUTCOMES = (
    RUNNING,
    "met",
    "ttft_missed",
    "itl_missed",
    "e2e_missed",
    "error",
    "rejected",
    "limited",
    "invalid",
    "cancelled",
)
"""Possible states of a request: none yet, or the outcomes of `baton_tenant_requests_total`."""
DEFAULT_LIMIT, MAX_LIMIT = 50, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of a request's life in each stage, which `router.timeline.folds` defines."""

    queue: float = 0.0
    decode_admission: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode: float = 0.0
    recovery: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """One request. Times are seconds of its router's clocks; None: unknown, or not yet known."""

    request_id: str
    router: str
    """Id of the router that served it."""
    tenant: str
    slo_class: str
    priority: int
    operation: str
    """chat or text_completion."""
    is_streamed: bool
    arrived_s: float
    """Seconds since 1970."""
    outcome: str
    """One of OUTCOMES."""
    error: str = ""
    """Kind of the error that ended it, and its message unless that may quote the request; empty: no error."""
    blamed_stage: str = ""
    """Stage responsible for a missed objective; empty: none was missed."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    """Number of tokens sent to the client, of all choices."""
    num_choices: int = 0
    ttft_s: float | None = None
    itl_s: float | None = None
    """Mean time between two tokens of the first choice."""
    total_s: float = 0.0
    """Time from the arrival to the end, or to now."""
    ttft_objective_s: float = math.inf
    itl_objective_s: float = math.inf
    e2e_objective_s: float = math.inf
    stages: StageSeconds = field(default_factory=StageSeconds)
    """Stages add up to `total_s`."""
    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    retries: int = 0
    model: str = ""
    """Name of the model or adapter that the client requested; empty: it is not known."""
    release: str = ""
    """Release that served it; empty: the request was refused before one was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePhase:
    """A period of one stage, in seconds since the arrival."""

    stage: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """An event in the life of a request."""

    at_s: float
    """Seconds since the arrival."""
    what: str
    """The kind, such as placed or failed; see `router.timeline.explain`."""
    choice_index: int = 0
    attempt: int = 0
    worker: str = ""
    text: str = ""
    """A line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """Complete record of one request."""

    summary: RequestSummary
    phases: tuple[TimelinePhase, ...] = ()
    """Phases follow one another without a gap, from the arrival to the end."""
    events: tuple[TimelineEvent, ...] = ()
    num_events_left_out: int = 0
    placements: tuple[Explanation, ...] = ()
    """The first placement of each choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestList:
    """Requests of one router that match a query, the latest first."""

    router: str
    now_s: float
    """Seconds since 1970."""
    num_kept: int
    """Number of requests that the router has records of, before filters."""
    requests: tuple[RequestSummary, ...] = ()


def list_json(found: RequestList) -> dict[str, Any]:
    """Return the response to `GET /api/requests`."""
    return {**asdict(replace(found, requests=())), "requests": [summary_json(each) for each in found.requests]}


def summary_json(summary: RequestSummary) -> dict[str, Any]:
    """Return one request of the list."""
    return _finite(asdict(summary))


def timeline_json(timeline: RequestTimeline) -> dict[str, Any]:
    """Return one request with its timeline, as in `GET /api/requests/ID` and `baton status --explain ID --json`."""
    whole = asdict(timeline)
    del whole["summary"]
    for placement in whole["placements"]:
        placement["measured_ttft_s"] = placement["measured_ttft_s"] or None
    whole["placements"] = [_finite(placement) for placement in whole["placements"]]
    return {**summary_json(timeline.summary), **whole}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values for JSON, which has no infinity: null is an objective that cannot be missed."""
    return {name: None if value == math.inf else value for name, value in values.items()}
