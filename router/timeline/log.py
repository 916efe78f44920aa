"""Records the timelines of a router's requests, and keeps the latest for listing and explaining them.

    with log.recording(request, tenant, ingress, trace, served) as recording:
        recording.admitted(choices, params, num_prompt_tokens, resume_from, digest)
        yield recording.sent(chunk)

When the request ends, successfully or not, `router.timeline.sinks` derives its usage record, metrics and span.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from opentelemetry.context import Context

from baton.api import Chat, GenerateChunk, GenerateRequest
from baton.errors import InvalidRequest, Overloaded
from baton.sampling import SamplingParams
from baton.telemetry import logs, tracing
from baton.telemetry.request_metrics import RequestMetrics
from baton.timelines import DEFAULT_LIMIT, MAX_LIMIT, OUTCOMES, RequestList, RequestTimeline
from kvstore.leases import RecordKey
from router.admission import Charge, SloCounts
from router.admission.tenants import Tenant
from router.timeline import folds, sinks
from router.timeline.events import (
    Admitted,
    Arrived,
    ChoiceTimeline,
    Ended,
    Finished,
    FirstTokenSent,
    Timeline,
    error_text,
)
from router.timeline.explain import summary_of, timeline_of
from router.timeline.usage_log import UsageBook
from router.timeline.usage_record import UsageCall

LATEST = 1024
"""Number of latest requests that are kept, whatever their outcome: some KiB each."""
TROUBLED = 512
"""Number of requests beyond LATEST that are kept because they failed, were refused or missed an objective."""
WITH_CANDIDATES = 256
"""Number of latest choices whose placements keep their candidates. On a large pool those take some tens of KiB each."""
HARMLESS = frozenset(("met", "limited", "invalid", "cancelled"))
"""Outcomes that do not indicate a problem of the cluster."""
PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Prefixes that the APIs add to a client's x-request-id to form the request's id."""


@dataclass(frozen=True, slots=True)
class Ingress:
    """Server address at which a request arrived, for its span."""

    address: str = ""
    """Host; empty: unknown."""
    port: int = 0
    is_streamed: bool = True
    """True if the client reads the answer as it comes."""


UNKNOWN_INGRESS = Ingress()


@dataclass(frozen=True, slots=True)
class Served:
    """The model of a request."""

    model: str
    """Name that the request has in metrics, span and usage record."""
    release: str
    counts: SloCounts
    """Counts of the release's requests, which the log updates."""


class Recording:
    """Context manager: records the timeline of one request. The request has arrived when this is created.

    Args:
        trace: trace context of the client.
    """

    def __init__(
        self,
        log: RequestLog,
        request: GenerateRequest,
        tenant: Tenant,
        *,
        ingress: Ingress,
        trace: Context | None,
        served: Served,
    ) -> None:
        self.timeline = Timeline(
            request_id=request.request_id,
            tenant=tenant.id,
            model=served.model,
            release=served.release,
            operation="chat" if isinstance(request.prompt, Chat) else "text_completion",
            is_streamed=ingress.is_streamed,
            arrived_s=time.monotonic(),
            arrived_ns=time.time_ns(),
        )
        self.timeline.add(Arrived(self.timeline.arrived_s))
        self.charge = Charge()
        """Charge to the tenant."""
        self._log = log
        self._counts = served.counts
        self._labels = {"model": served.model, "release": served.release}
        self._span = sinks.start_span(self.timeline, request, trace)
        if self._span.is_recording() and ingress.address:
            self._span.set_attributes({"server.address": ingress.address, "server.port": ingress.port})
        self.trace = tracing.context_of(self._span)
        logs.about(self._span.get_span_context())
        self._continuous_usage = request.continuous_usage
        self._digest = b""
        self._is_resumption = False
        self._usage_call: UsageCall | None = None
        """This call in the usage log; None: no token was sent yet, or there is no log."""
        self._num_unfinished = 0
        self._life: list[folds.StagePhase] = []
        """Phases of the request when it has ended."""
        self._stages = folds.Stages()

    def admitted(
        self,
        choices: tuple[ChoiceTimeline, ...],
        params: SamplingParams,
        num_prompt_tokens: int,
        resume_from: Mapping[int, int],
        digest: bytes,
    ) -> None:
        """Record the request's choices when they are known.

        Args:
            choices: timelines of all choices that are drawn; the client gets the first `params.n`.
            resume_from: number of tokens that the client already has, by choice.
            digest: digest of everything that determines the answer.
        """
        timeline, self._digest = self.timeline, digest
        self._is_resumption = bool(resume_from)  # even if the client says that it has no tokens
        timeline.drawn, timeline.choices = choices, choices[: params.n]
        timeline.num_choices = self._num_unfinished = len(timeline.choices)
        timeline.num_prompt_tokens = num_prompt_tokens
        timeline.is_search, timeline.comes_at_once = params.use_beam_search, params.comes_at_once
        timeline.num_delivered = sum(resume_from.values())
        for index, num_tokens in resume_from.items():
            timeline.choices[index].num_delivered = num_tokens
        timeline.add(Admitted(time.monotonic(), num_prompt_tokens))
        if self._span.is_recording():
            sinks.write_parameters(self._span, timeline, params)

    def drawn(self, chunk: GenerateChunk) -> GenerateChunk:
        """Count a chunk of a choice, even if the client does not get it, and return it."""
        self.timeline.num_drawn += len(chunk.token_ids)
        return chunk

    def sent(self, chunk: GenerateChunk) -> GenerateChunk:
        """Record a chunk that is sent to the client, and return it; the last one gets usage and timing."""
        timeline, now_s = self.timeline, time.monotonic()
        choice, num_tokens = timeline.choices[chunk.choice_index], len(chunk.token_ids)
        if not timeline.first_token_s:
            chunk = self._first(chunk, now_s)
        if num_tokens:
            if choice.num_sent:
                gap_s = (now_s - choice.last_token_s) / num_tokens
                self._log.instruments.inter_token_latency.record(gap_s, self._labels, num_tokens)
            choice.last_token_s = now_s
            choice.num_sent += num_tokens
            timeline.num_sent += num_tokens
        if chunk.num_reasoning_tokens:
            choice.num_reasoning = chunk.num_reasoning_tokens
        if chunk.finish_reason is not None:
            choice.add(Finished(now_s, choice.num_sent, chunk.finish_reason))
            self._num_unfinished -= 1
        if self._num_unfinished:
            return replace(chunk, usage=folds.usage(timeline)) if self._continuous_usage else chunk
        self._end(now_s)
        self.charge.settle(timeline.num_computed)  # before the client gets the last chunk and sends a new request
        return replace(chunk, usage=folds.usage(timeline), timing=folds.timing(timeline, self._stages))

    def _end(self, now_s: float) -> None:
        timeline = self.timeline
        timeline.ended_s, self._life = now_s, folds.life(timeline, now_s)
        self._stages = folds.Stages.of(self._life, timeline.first_token_s)

    def _first(self, chunk: GenerateChunk, now_s: float) -> GenerateChunk:
        """Record the first chunk, and return it with the tenant's quota."""
        timeline, book = self.timeline, self._log.usage_book
        timeline.first_token_s = now_s
        timeline.add(FirstTokenSent(now_s))
        if book is not None and book.is_kept:
            self._usage_call = book.placed(self._key, self._digest, self._is_resumption)
        return chunk if self.charge.quota is None else replace(chunk, quota=self.charge.quota)

    @property
    def _key(self) -> RecordKey:
        return RecordKey(self.timeline.tenant, self.timeline.request_id)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """End the timeline, once. GeneratorExit and CancelledError mean that the client has disconnected."""
        timeline, log = self.timeline, self._log
        if timeline.choices and self._num_unfinished == 0:
            error = None  # the answer was complete
        if not timeline.ended_s:
            self._end(time.monotonic())
        self.charge.settle(timeline.num_computed)  # no effect if the last chunk has settled it
        timeline.add(folds.ended(timeline, self._stages, error))
        if log.usage_book is not None and self._usage_call is not None:
            log.usage_book.ended(self._key, self._usage_call, sinks.usage_record(timeline, self._usage_call))
        sinks.record_metrics(timeline, self._stages, log.instruments, self._counts)
        sinks.end_span(self._span, self.trace, timeline, self._life, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedBody:
    """A body that was refused before it became a request."""

    request_id: str
    """Id in the response."""
    tenant: str
    model: str
    """Name of the model; empty: it is not known."""
    operation: str
    arrived_s: float
    """Arrival on the monotonic clock."""
    error: Exception
    field: str
    """Label of the invalid field; empty: no single field is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Filter for requests; an empty field matches all of them."""

    tenant: str = ""
    slo_class: str = ""
    outcomes: Collection[str] = ()
    model: str = ""
    """Name or release of the model."""
    limit: int = DEFAULT_LIMIT

    def __post_init__(self) -> None:
        """Raise InvalidRequest if an outcome is unknown or the limit is out of range."""
        if unknown := sorted(set(self.outcomes) - set(OUTCOMES)):
            raise InvalidRequest(f"outcome must be one of {', '.join(OUTCOMES)}; got {unknown[0]!r:.100}", "outcome")
        if not 1 <= self.limit <= MAX_LIMIT:
            raise InvalidRequest(f"limit must be from 1 to {MAX_LIMIT}, got {self.limit}", "limit")

    def passes(self, timeline: Timeline) -> bool:
        """Return whether a request matches the filter."""
        if self.tenant and timeline.tenant != self.tenant:
            return False
        if self.model and self.model not in (timeline.model, timeline.release):
            return False
        if self.slo_class and (timeline.claim is None or timeline.claim.slo_class != self.slo_class):
            return False
        return not self.outcomes or timeline.outcome in self.outcomes


class RequestLog:
    """The timelines of one router's requests, and of the HTTP bodies that did not become requests.

    Args:
        router: id of the router.
        usage_book: None: there is no usage log.
    """

    def __init__(
        self,
        router: str = "",
        *,
        instruments: RequestMetrics | None = None,
        usage_book: UsageBook | None = None,
    ) -> None:
        self.instruments = instruments or RequestMetrics()
        self.usage_book = usage_book
        self._router = router
        self._running: dict[Timeline, None] = {}
        """Running requests, in the order of their arrival."""
        self._latest: deque[Timeline] = deque()
        self._troubled: deque[Timeline] = deque(maxlen=TROUBLED)
        self._with_candidates: deque[ChoiceTimeline] = deque()

    @contextlib.contextmanager
    def recording(
        self, request: GenerateRequest, tenant: Tenant, ingress: Ingress, trace: Context | None, served: Served
    ) -> Iterator[Recording]:
        """Context manager: lists a request as running, and records and keeps its timeline."""
        recording = Recording(self, request, tenant, ingress=ingress, trace=trace, served=served)
        self._running[recording.timeline] = None
        served.counts.in_flight += 1
        try:
            with recording:
                yield recording
        finally:
            served.counts.in_flight -= 1
            del self._running[recording.timeline]
            self._keep(recording.timeline)

    def ignored(self, fields: Iterable[str]) -> None:
        """Count the ignored fields of one request, by label."""
        for field in fields:
            self.instruments.ignored_fields.add(1, {"field": field})

    def refused(self, body: RefusedBody) -> None:
        """Record a refused body."""
        now_s, outcome = time.monotonic(), "rejected" if isinstance(body.error, Overloaded) else "invalid"
        self.instruments.requests.add(1, {"model": body.model, "release": "", "outcome": outcome})
        self.instruments.tenant_requests.add(1, {"tenant": body.tenant, "outcome": outcome})
        error = error_text(body.error)
        if body.field:
            self.instruments.refused_fields.add(1, {"field": body.field})
            error = f"{error}: {body.field}"
        timeline = Timeline(
            request_id=body.request_id,
            tenant=body.tenant,
            model=body.model,
            operation=body.operation,
            arrived_s=body.arrived_s,
            arrived_ns=time.time_ns() - round((now_s - body.arrived_s) * 1e9),
            ended_s=now_s,
        )
        timeline.add(Arrived(body.arrived_s))
        timeline.add(Ended(now_s, outcome, outcome, error=error))
        self._keep(timeline)

    def _keep(self, timeline: Timeline) -> None:
        """Keep a request that has ended."""
        timeline.trim()
        self._with_candidates += timeline.choices
        while len(self._with_candidates) > WITH_CANDIDATES:
            self._with_candidates.popleft().drop_candidates()
        self._latest.append(timeline)
        if len(self._latest) > LATEST:
            oldest = self._latest.popleft()
            if oldest.outcome not in HARMLESS:
                self._troubled.append(oldest)

    def _timelines(self) -> list[Timeline]:
        """Return all known requests, latest arrival first."""
        return sorted([*self._troubled, *self._latest, *self._running], key=lambda timeline: -timeline.arrived_s)

    @property
    def keeps(self) -> str:
        """Clause for error messages that describes which requests are known."""
        return f"it keeps the latest {LATEST} that it has served, and {TROUBLED} that failed or were late"

    def listed(self, wanted: RequestFilter) -> RequestList:
        """Return the latest requests that match a filter."""
        known, now_s = self._timelines(), time.monotonic()
        passing = [timeline for timeline in known if wanted.passes(timeline)]
        return RequestList(
            router=self._router,
            now_s=time.time(),
            num_kept=len(known),
            requests=tuple(summary_of(timeline, self._router, now_s) for timeline in passing[: wanted.limit]),
        )

    def explain(self, request_id: str, tenant: str = "") -> list[RequestTimeline]:
        """Return all known calls with this id, latest first; empty: none is known, or no longer.

        Args:
            request_id: the request's id, or the client's x-request-id header.
            tenant: id of the tenant; empty: any tenant.
        """
        now_s = time.monotonic()
        ids = {f"{prefix}{request_id}" for prefix in ("", *PREFIXES)}
        return [
            timeline_of(timeline, self._router, now_s)
            for timeline in self._timelines()
            if timeline.request_id in ids and tenant in ("", timeline.tenant)
        ]
