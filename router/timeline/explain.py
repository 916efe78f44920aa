"""Texts about requests for operators: a request's line in the list, and its timeline in detail."""

from __future__ import annotations

from baton.api import Explanation, Option
from baton.cluster import Role, with_role
from baton.messages import PrefillReport
from baton.timelines import RequestSummary, RequestTimeline, StageSeconds, TimelineEvent, TimelinePhase
from router.admission import Claim
from router.placement import NO_OBJECTIVE
from router.timeline import folds
from router.timeline.events import (
    MOST_CHOICES,
    Admitted,
    Arrived,
    Attempted,
    ChoiceEvent,
    Computed,
    Decoded,
    Ended,
    Failed,
    Finished,
    FirstTokenSent,
    Held,
    KvTransferred,
    LackedImages,
    Left,
    Migrated,
    Placed,
    Refused,
    RequestEvent,
    Reserved,
    Timeline,
    is_disaggregated,
)
from router.timeline.folds import MeasuredPlacement, Stages

SLOW_PLACEMENT_S = 0.01
"""A placement that takes longer counts as a wait for a worker, and its text says so."""


def summary_of(timeline: Timeline, router: str, now_s: float) -> RequestSummary:
    """Return the summary of a request, for a list.

    Args:
        router: id of this router.
        now_s: the current time, until which a running request is shown.
    """
    claim, ended, ended_s = timeline.claim, timeline.ended, timeline.ended_s or now_s
    objective = claim.objective if claim is not None else NO_OBJECTIVE
    seconds = Stages.of(folds.life(timeline, ended_s), timeline.first_token_s).by_stage()
    first = timeline.choices[0] if timeline.choices else None
    return RequestSummary(
        request_id=timeline.request_id,
        router=router,
        tenant=timeline.tenant,
        model=timeline.model,
        release=timeline.release,
        slo_class=claim.slo_class if claim is not None else "",
        priority=claim.priority if claim is not None else 0,
        operation=timeline.operation,
        is_streamed=timeline.is_streamed,
        arrived_s=timeline.arrived_ns / 1e9,
        outcome=timeline.outcome,
        error=ended.error if ended is not None else "",
        blamed_stage=ended.blamed_stage if ended is not None else "",
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_cached_tokens=(first.num_cached_tokens or 0) if first is not None else 0,
        num_tokens=timeline.num_sent,
        num_choices=timeline.num_choices,
        ttft_s=timeline.first_token_s - timeline.arrived_s if timeline.first_token_s else None,
        itl_s=folds.itl_s(timeline),
        total_s=ended_s - timeline.arrived_s,
        ttft_objective_s=objective.ttft_s,
        itl_objective_s=objective.itl_s,
        e2e_objective_s=objective.e2e_s,
        stages=StageSeconds(**{stage.value: spent_s for stage, spent_s in seconds.items()}),
        mode=first.mode if first is not None else "",
        prefill_worker=first.prefill_worker if first is not None else "",
        decode_worker=first.decode_worker if first is not None else "",
        retries=first.retries if first is not None else 0,
    )


def timeline_of(timeline: Timeline, router: str, now_s: float) -> RequestTimeline:
    """Return a request with its phases, events and first placements.

    Args:
        router: id of this router.
        now_s: the current time, until which a running request is shown.
    """
    arrived_s, ended_s, choices = timeline.arrived_s, timeline.ended_s or now_s, timeline.choices
    happened: list[tuple[int, RequestEvent | ChoiceEvent]] = [(0, event) for event in timeline.events]
    for index, choice in enumerate(choices[:MOST_CHOICES]):
        happened += [(index, event) for event in choice.events]
    happened.sort(key=lambda pair: (pair[1].at_s, isinstance(pair[1], Ended)))
    described = (_described(event, index, event.at_s - arrived_s) for index, event in happened)
    return RequestTimeline(
        summary=summary_of(timeline, router, now_s),
        phases=tuple(
            TimelinePhase(stage=stage.value, begin_s=begin_s - arrived_s, end_s=end_s - arrived_s)
            for stage, begin_s, end_s in folds.life(timeline, ended_s)
        ),
        events=tuple(event for event in described if event is not None),
        num_events_left_out=sum(each.num_left_out for each in choices),
        placements=tuple(
            _explained(timeline, timeline.claim, index, measured)
            for index, choice in enumerate(choices[:MOST_CHOICES])
            if timeline.claim is not None
            and (measured := folds.measured_placement(choice, None if index else folds.itl_s(timeline))) is not None
        ),
    )


def _described(event: RequestEvent | ChoiceEvent, index: int, at_s: float) -> TimelineEvent | None:
    """Return an event with its kind and text; None: it only marks a time, and is not shown."""

    def shown(what: str, text: str, attempt: int = 0, worker: str = "") -> TimelineEvent:
        return TimelineEvent(at_s=at_s, what=what, choice_index=index, attempt=attempt, worker=worker, text=text)

    match event:
        case Attempted() | Decoded():
            return None
        case Arrived():
            return shown("arrived", "arrived")
        case Held(_, held_s):
            return shown("held", f"held for {held_s:.3f} s, until the model was awake")
        case Admitted(_, num_tokens):
            return shown("admitted", f"admitted: {num_tokens} prompt tokens")
        case Placed(_, attempt):
            return shown("placed", _placed_text(event), attempt, event.placement.decode_worker)
        case Migrated(_, attempt, worker):
            text = f"continues on {with_role(worker, Role.DECODE)}, which now has its KV"
            return shown("moved", text, attempt, worker)
        case Refused(_, reason):
            return shown("refused", f"refused: {reason}")
        case Reserved(_, attempt, worker):
            return shown("room", f"{with_role(worker, Role.DECODE)} has room", attempt, worker)
        case Computed(_, attempt, worker, role, report=report):
            return shown("computed", _computed_text(report, with_role(worker, role)), attempt, worker)
        case FirstTokenSent():
            return shown("first_token", "the first token leaves for the client")
        case KvTransferred(_, attempt, worker, report):
            text = (
                f"KV is on {with_role(worker, Role.DECODE)}: {report.num_bytes / 2**20:,.1f} MiB in "
                f"{report.transfer_s:.3f} s, of which {report.exposed_s:.3f} s after the prompt was computed"
            )
            return shown("transferred", text, attempt, worker)
        case Left(_, attempt, worker, role):
            return shown("leaving", f"{with_role(worker, role)} leaves its role: placed again", attempt, worker)
        case LackedImages(_, attempt, worker, role):
            text = f"{with_role(worker, role)} no longer holds the images: placed again with their bytes"
            return shown("images", text, attempt, worker)
        case Failed(_, attempt, worker, role, num_emitted, error):
            text = f"failed on {with_role(worker, role)} after {num_emitted} tokens: {error}"
            return shown("failed", text, attempt, worker)
        case Finished(_, num_tokens, reason):
            return shown("finished", f"finished after {num_tokens} tokens: {reason.value}")
        case Ended(_, _, outcome, error=error):
            return shown("ended", f"{outcome}: {error}" if error else outcome)


def _placed_text(placed: Placed) -> str:
    """Describe a placement, and the wait for a worker if there was one."""
    placement = placed.placement
    by_role = {Role.PREFILL: placement.prefill_worker, Role.DECODE: placement.decode_worker}
    workers = " -> ".join(with_role(worker_id, role) for role, worker_id in by_role.items() if worker_id)
    text = f"placed: {'disaggregated' if is_disaggregated(placed) else 'aggregated'} on {workers}"
    if placement.source:
        text += f", pulls {placement.source_tokens} tokens from {placement.source}"
    text += f"; first token predicted in {placement.prediction.ttft_s:.3f} s"
    if placed.waited_s < SLOW_PLACEMENT_S:
        return text
    return f"{text}; waited {placed.waited_s:.3f} s for a suitable worker"


def _computed_text(report: PrefillReport, worker: str) -> str:
    """Describe the time that a worker needed for a prompt."""
    text = f"{worker} has the first token: {report.queue_s:.3f} s in its queue"
    if report.num_pulled_tokens:
        text += f", {report.pull_s:.3f} s of them pulling {report.num_pulled_tokens} tokens"
    return f"{text}, {report.prefill_s:.3f} s computing; {report.num_cached_tokens} tokens were cached"


def _explained(timeline: Timeline, claim: Claim, index: int, measured: MeasuredPlacement) -> Explanation:
    """Return a placement as plain values; its candidates are ordered by predicted time, fastest first."""
    placed, placement, prediction = measured.placed, measured.placed.placement, measured.placed.prediction
    options = [
        Option(
            worker_id=terms.worker_id,
            role=terms.role,
            num_cached_tokens=terms.num_cached_tokens,
            wait_s=terms.wait_s,
            pull_s=terms.pull_s,
            compute_s=terms.compute_s,
            room_s=terms.room_s,
            exposed_s=terms.exposed_s,
            step_s=terms.step_s,
            cost_s=terms.first_s,
            load_s=terms.load_s,
        )
        for terms in sorted(placement.considered, key=lambda terms: terms.first_s)
    ]
    return Explanation(
        request_id=timeline.request_id,
        choice_index=index,
        tenant=claim.tenant.id,
        slo_class=claim.slo_class,
        priority=claim.priority,
        ttft_objective_s=claim.objective.ttft_s,
        itl_objective_s=claim.objective.itl_s,
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_expected_tokens=placed.num_expected_tokens,
        mode=placement.mode,
        prefill_worker=placement.prefill_worker,
        decode_worker=placement.decode_worker,
        source=placement.source,
        source_tokens=placement.source_tokens,
        outcome=measured.outcome,
        predicted_ttft_s=prediction.ttft_s,
        measured_ttft_s=measured.ttft_s,
        predicted=folds.predicted_seconds(prediction),
        measured=measured.seconds,
        options=tuple(options),
    )
