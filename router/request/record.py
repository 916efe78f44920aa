"""Record of a request: raw values while it runs and when it ends, and their readable form. It has no content.

Raw records are created for every request. They are not frozen, because that would take three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.timelines import RequestSummary, RequestTimeline, StageSeconds, TimelineEvent, TimelinePhase
from router.admission import Claim
from router.placement import NO_OBJECTIVE
from router.serve.choice import Choice
from router.serve.decisions import PlacementDecision, explained
from router.serve.events import EventKind, EventLog, LifeEvent
from router.slo import StagePhase, Stages

MOST_CHOICES = 8
"""Maximum number of choices of a request whose events and placements are kept."""
HARMLESS = frozenset(("met", "limited", "invalid", "cancelled"))
"""Outcomes that do not indicate a problem of the cluster."""


@dataclass(slots=True, kw_only=True, eq=False)
class ChoiceRecord:
    """Record of one choice."""

    index: int
    events: EventLog
    decision: PlacementDecision | None

    @staticmethod
    def of(choice: Choice) -> ChoiceRecord:
        """Return the record of a choice. It shares the choice's events and placement, so it stays current."""
        return ChoiceRecord(index=choice.index, events=choice.events, decision=choice.decision)


@dataclass(slots=True, kw_only=True, eq=False)
class FirstChoice:
    """Latest placement of a request's first choice, and its prefix hit."""

    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    retries: int = 0
    num_cached_tokens: int = 0

    @staticmethod
    def of(choices: Sequence[Choice]) -> FirstChoice:
        """Return the values for a request with these choices; without choices, it was never placed."""
        if not choices:
            return FirstChoice()
        first = choices[0]
        return FirstChoice(
            mode=first.mode,
            prefill_worker=first.prefill_worker,
            decode_worker=first.decode_worker,
            retries=first.machine.retries,
            num_cached_tokens=first.num_cached_tokens or 0,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """Record of one request. Times are on the router's monotonic clock, unless stated otherwise."""

    request_id: str
    tenant: str
    operation: str
    is_streamed: bool
    claim: Claim | None
    """None: the request was not valid."""
    arrived_s: float
    arrived_at_s: float
    """Arrival as Unix time."""
    ended_s: float
    """End of the request, or the current time while it runs."""
    outcome: str
    error: str
    blamed_stage: str
    num_prompt_tokens: int
    num_tokens: int
    num_choices: int
    first_token_s: float
    """0: there was no token."""
    itl_s: float | None
    life: Sequence[StagePhase]
    """Consecutive phases from the arrival to the end."""
    first: FirstChoice
    events: EventLog
    """Events of the request as a whole."""
    choices: Sequence[ChoiceRecord]

    @property
    def is_harmless(self) -> bool:
        """True if its outcome does not indicate a problem of the cluster."""
        return self.outcome in HARMLESS


def summary_of(record: RequestRecord, router: str) -> RequestSummary:
    """Return the summary of a request, for a list.

    Args:
        router: id of this router.
    """
    claim, first = record.claim, record.first
    objective = claim.objective if claim is not None else NO_OBJECTIVE
    seconds = Stages.of(record.life, record.first_token_s).by_stage()
    return RequestSummary(
        request_id=record.request_id,
        router=router,
        tenant=record.tenant,
        slo_class=claim.slo_class if claim is not None else "",
        priority=claim.priority if claim is not None else 0,
        operation=record.operation,
        is_streamed=record.is_streamed,
        arrived_s=record.arrived_at_s,
        outcome=record.outcome,
        error=record.error,
        blamed_stage=record.blamed_stage,
        num_prompt_tokens=record.num_prompt_tokens,
        num_cached_tokens=first.num_cached_tokens,
        num_tokens=record.num_tokens,
        num_choices=record.num_choices,
        ttft_s=record.first_token_s - record.arrived_s if record.first_token_s else None,
        itl_s=record.itl_s,
        total_s=record.ended_s - record.arrived_s,
        ttft_objective_s=objective.ttft_s,
        itl_objective_s=objective.itl_s,
        e2e_objective_s=objective.e2e_s,
        stages=StageSeconds(**{stage.value: spent_s for stage, spent_s in seconds.items()}),
        mode=first.mode,
        prefill_worker=first.prefill_worker,
        decode_worker=first.decode_worker,
        retries=first.retries,
    )


def timeline_of(record: RequestRecord, router: str) -> RequestTimeline:
    """Return a request with its time line.

    Args:
        router: id of this router.
    """
    logs = [(0, record.events), *((choice.index, choice.events) for choice in record.choices)]
    happened = [(index, event) for index, log in logs for event in log.events]
    happened.sort(key=lambda pair: (pair[1].at_s, pair[1].what is EventKind.ENDED))
    return RequestTimeline(
        summary=summary_of(record, router),
        phases=tuple(
            TimelinePhase(stage=stage.value, begin_s=begin_s - record.arrived_s, end_s=end_s - record.arrived_s)
            for stage, begin_s, end_s in record.life
        ),
        events=tuple(_event(record.arrived_s, index, each) for index, each in happened),
        num_events_left_out=sum(log.num_left_out for _, log in logs),
        placements=tuple(explained(choice.decision) for choice in record.choices if choice.decision is not None),
    )


def _event(arrived_s: float, choice_index: int, event: LifeEvent) -> TimelineEvent:
    values = {**event._asdict(), "at_s": event.at_s - arrived_s, "what": event.what.value}
    return TimelineEvent(choice_index=choice_index, **values)
