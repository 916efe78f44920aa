"""Pure functions of a timeline: stages, SLO outcome and the stage to blame, usage, timing, and measured placement.

    arrived                                          first token                                   ended
    | queue | decode admission | queue | prefill     | transfer | decode ...    | recovery | decode ... |
              waiting for room           computing    not hidden   further tokens  a worker failed
                                                      by computing

- **queue**: all time before the first token that belongs to no other stage: the wait until a model is awake, router,
  tokenizing, placement, the worker's queue, pulling a prefix.
- **decode admission**: from the call that asks the decode worker for room to its ticket. If one worker computes and
  decodes, the part of its queue that was due to a lack of room.
- **prefill**: the time of computing the prompt, as its worker reports it; it ends with the first token.
- **transfer**: the part of the KV transfer after the first token, up to the second token.
- **decode**: all time after the first token that belongs to no other stage, including the wait for longer choices.
- **recovery**: the cost of failed attempts. Before the first token: from the start of the first attempt to the start of
  the last one. After it: from the last token before the failure to the next token. In between the KV is computed again.

The stages follow one another without a gap, so they add up to the time from arrival to end. Times are on the router's
monotonic clock. Other processes report only durations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import NamedTuple

from baton.api import PlacementSeconds, Timing, Usage
from baton.errors import InvalidRequest, ModelWaking, Overloaded, QuotaExceeded, Unsupported
from baton.messages import PrefillReport
from router.placement import Objective, Prediction
from router.timeline.events import (
    Attempted,
    ChoiceTimeline,
    Computed,
    Decoded,
    Ended,
    KvTransferred,
    Migrated,
    Placed,
    Refused,
    Reserved,
    Timeline,
    error_text,
    is_disaggregated,
)


class Stage(StrEnum):
    """The stages of a request's life, as the module's docstring defines them."""

    QUEUE = "queue"
    DECODE_ADMISSION = "decode_admission"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    RECOVERY = "recovery"


class SloOutcome(StrEnum):
    """SLO outcome of a completed request: all objectives met, or the first one missed."""

    MET = "met"
    TTFT_MISSED = "ttft_missed"
    ITL_MISSED = "itl_missed"
    E2E_MISSED = "e2e_missed"


EARLY = frozenset((Stage.RECOVERY, Stage.DECODE_ADMISSION, Stage.PREFILL))
"""Stages before the first token, in addition to the queue."""
LATE = frozenset((Stage.RECOVERY, Stage.TRANSFER))
"""Stages after the first token, in addition to decoding."""


class StagePhase(NamedTuple):
    """Interval of one stage, on the router's monotonic clock."""

    stage: Stage
    begin_s: float
    end_s: float


def choice_phases(choice: ChoiceTimeline, now_s: float) -> list[StagePhase]:
    """Return the phases of a choice other than queue and decode, in order; one in progress ends at `now_s`.

    A migration to another decode worker counts as decoding.
    """
    noted: list[StagePhase] = []
    began_s = asked_s = lost_s = first_token_s = second_token_s = 0.0
    is_migration, gap = False, choice.gap
    for index, event in enumerate(choice.events):
        if index == gap:  # the end of what was in progress may be among the dropped events
            asked_s = lost_s = first_token_s = second_token_s = 0.0
        match event:
            case Attempted(at_s, _, last_token_s):
                if last_token_s:
                    lost_s = lost_s or last_token_s
                elif began_s:
                    noted = [StagePhase(Stage.RECOVERY, began_s, at_s)]
                began_s, asked_s = began_s or at_s, 0.0
            case Placed(at_s):
                asked_s, is_migration = at_s if is_disaggregated(event) else 0.0, False
            case Migrated():
                is_migration = True
            case Reserved(at_s) if asked_s:
                noted.append(StagePhase(Stage.DECODE_ADMISSION, asked_s, at_s))
                asked_s = 0.0
            case Computed(at_s, report=report):
                noted += [StagePhase(Stage.RECOVERY, lost_s, at_s)] if lost_s else _computed_phases(at_s, report)
                lost_s, first_token_s, second_token_s = 0.0, at_s, 0.0
            case Decoded(at_s):
                second_token_s = second_token_s or at_s
            case KvTransferred(at_s, report=report) if not is_migration:
                # The report may come before or after the second token.
                until_s = min(first_token_s + report.exposed_s, second_token_s or at_s)
                noted.append(StagePhase(Stage.TRANSFER, first_token_s, until_s))
    if lost_s:
        noted.append(StagePhase(Stage.RECOVERY, lost_s, now_s))
    elif asked_s:
        noted.append(StagePhase(Stage.DECODE_ADMISSION, asked_s, now_s))
    return noted


def _computed_phases(at_s: float, report: PrefillReport) -> list[StagePhase]:
    """Return the phases of a worker that has computed the prompt; before it, the worker may have lacked room."""
    began_s = at_s - report.prefill_s
    prefill = StagePhase(Stage.PREFILL, began_s, at_s)
    if report.room_s <= 0:
        return [prefill]
    return [StagePhase(Stage.DECODE_ADMISSION, began_s - report.room_s, began_s), prefill]


def life(timeline: Timeline, until_s: float) -> list[StagePhase]:
    """Return the consecutive phases of a request from its arrival until a time: those of its first choice."""
    noted = choice_phases(timeline.choices[0], until_s) if timeline.choices else []
    return phases(timeline.arrived_s, timeline.first_token_s, until_s, noted)


def phases(arrived_s: float, first_token_s: float, ended_s: float, noted: Iterable[StagePhase]) -> list[StagePhase]:
    """Return the phases of a request from its arrival to its end, without gaps and overlaps.

    Args:
        first_token_s: 0: no token came.
        noted: phases in order. A phase is clipped to its side of the first token, and begins after the previous one.
    """
    if not first_token_s:
        return _laid(arrived_s, ended_s, noted, EARLY, Stage.QUEUE)
    first_s = min(max(first_token_s, arrived_s), ended_s)
    before = [_ended_at(first_s, phase) if phase.stage is Stage.PREFILL else phase for phase in noted]
    return _laid(arrived_s, first_s, before, EARLY, Stage.QUEUE) + _laid(first_s, ended_s, noted, LATE, Stage.DECODE)


def _ended_at(first_s: float, prefill: StagePhase) -> StagePhase:
    """Shift a prefill phase to end with the first token; the token's way to the client counts as queue."""
    took_s = prefill.end_s - prefill.begin_s
    return StagePhase(Stage.PREFILL, first_s - took_s, first_s) if prefill.end_s < first_s else prefill


def _laid(
    begin_s: float, end_s: float, noted: Iterable[StagePhase], stages: frozenset[Stage], otherwise: Stage
) -> list[StagePhase]:
    """Return the phases of `stages` between two times, with `otherwise` in the gaps."""
    laid: list[StagePhase] = []
    at_s = begin_s
    for phase in noted:
        if phase.stage not in stages:
            continue
        from_s = min(max(phase.begin_s, at_s), end_s)
        to_s = min(phase.end_s, end_s)
        if to_s > from_s:
            if from_s > at_s:
                laid.append(StagePhase(otherwise, at_s, from_s))
            laid.append(StagePhase(phase.stage, from_s, to_s))
            at_s = to_s
    if end_s > at_s:
        laid.append(StagePhase(otherwise, at_s, end_s))
    return laid


@dataclass(slots=True, kw_only=True)
class Stages:
    """Seconds that a request spent in each stage."""

    queue_s: float = 0.0
    decode_admission_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    early_recovery_s: float = 0.0
    """Cost of failed attempts before the first token."""
    late_recovery_s: float = 0.0

    @staticmethod
    def of(life: Iterable[StagePhase], first_token_s: float) -> Stages:
        """Sum up the result of `phases`.

        Args:
            first_token_s: 0: no token came.
        """
        seconds, late_recovery_s = dict.fromkeys(Stage, 0.0), 0.0
        for stage, begin_s, end_s in life:
            if stage is Stage.RECOVERY and 0 < first_token_s <= begin_s:
                late_recovery_s += end_s - begin_s
            else:
                seconds[stage] += end_s - begin_s
        return Stages(
            queue_s=seconds[Stage.QUEUE],
            decode_admission_s=seconds[Stage.DECODE_ADMISSION],
            prefill_s=seconds[Stage.PREFILL],
            transfer_s=seconds[Stage.TRANSFER],
            decode_s=seconds[Stage.DECODE],
            early_recovery_s=seconds[Stage.RECOVERY],
            late_recovery_s=late_recovery_s,
        )

    @property
    def recovery_s(self) -> float:
        """Cost of failed attempts, before and after the first token."""
        return self.early_recovery_s + self.late_recovery_s

    @property
    def total_s(self) -> float:
        """Time from arrival to end."""
        return sum(self.by_stage().values())

    def by_stage(self) -> dict[Stage, float]:
        """Return the seconds of each stage."""
        return {
            Stage.QUEUE: self.queue_s,
            Stage.DECODE_ADMISSION: self.decode_admission_s,
            Stage.PREFILL: self.prefill_s,
            Stage.TRANSFER: self.transfer_s,
            Stage.DECODE: self.decode_s,
            Stage.RECOVERY: self.recovery_s,
        }


def classify(ttft_s: float, itl_s: float, e2e_s: float, objective: Objective) -> SloOutcome:
    """Return the first missed objective, or MET."""
    if ttft_s > objective.ttft_s:
        return SloOutcome.TTFT_MISSED
    if itl_s > objective.itl_s:
        return SloOutcome.ITL_MISSED
    return SloOutcome.E2E_MISSED if e2e_s > objective.e2e_s else SloOutcome.MET


def blame(outcome: SloOutcome, stages: Stages, objective: Objective, num_gaps: int) -> Stage:
    """Return the stage to blame for a missed objective: the longest one that counts.

    A computing stage counts only if it alone exceeds the objective, because otherwise an idle cluster would have met
    it. Stages that only wait always count, on their side of the first token:

        missed | always counts                                          | counts if it alone exceeds the objective
        ttft   | queue, decode admission, recovery before the first token | prefill
        itl    | transfer, recovery after the first token               | decode
        e2e    | queue, decode admission, transfer, recovery            | prefill and decode together

    Args:
        stages: stages of the request; for a missed ITL only up to the last token of the measurement.
        num_gaps: number of gaps between the measured tokens.
    """
    computing: dict[Stage, float]
    if outcome is SloOutcome.TTFT_MISSED:
        counting = {
            Stage.QUEUE: stages.queue_s,
            Stage.DECODE_ADMISSION: stages.decode_admission_s,
            Stage.RECOVERY: stages.early_recovery_s,
        }
        computing, allowed_s = {Stage.PREFILL: stages.prefill_s}, objective.ttft_s
    elif outcome is SloOutcome.ITL_MISSED:
        counting = {Stage.TRANSFER: stages.transfer_s, Stage.RECOVERY: stages.late_recovery_s}
        computing, allowed_s = {Stage.DECODE: stages.decode_s}, objective.itl_s * num_gaps
    else:
        assert outcome is SloOutcome.E2E_MISSED
        counting = stages.by_stage()
        computing = {stage: counting.pop(stage) for stage in (Stage.PREFILL, Stage.DECODE)}
        allowed_s = objective.e2e_s
    if sum(computing.values()) > allowed_s:
        counting |= computing
    return max(counting, key=counting.__getitem__)


def itl_s(timeline: Timeline) -> float | None:
    """Return the mean seconds between two tokens of the first choice; None: it has fewer than two tokens."""
    if not timeline.choices or timeline.choices[0].num_sent < 2:
        return None
    first = timeline.choices[0]
    return max(0.0, first.last_token_s - timeline.first_token_s) / (first.num_sent - 1)


def slo(timeline: Timeline, stages: Stages, objective: Objective) -> tuple[SloOutcome, Stage | None]:
    """Return the SLO outcome of a completed request, and the stage to blame; None: all objectives are met."""
    outcome = classify(timeline.first_token_s - timeline.arrived_s, itl_s(timeline) or 0.0, stages.total_s, objective)
    if outcome is SloOutcome.MET:
        return outcome, None
    first = timeline.choices[0]
    if outcome is SloOutcome.ITL_MISSED:  # measured until the last token of the first choice, not of the request
        stages = Stages.of(life(timeline, first.last_token_s), timeline.first_token_s)
    return outcome, blame(outcome, stages, objective, first.num_sent - 1)


def usage(timeline: Timeline) -> Usage:
    """Return the usage of the whole answer, including the tokens that the client had before this call.

    All `best_of` answers and all beams of a search count, although the client gets only some of them.
    """
    if timeline.is_search:
        num_tokens = timeline.num_computed
    elif timeline.comes_at_once:
        num_tokens = timeline.num_drawn
    else:
        num_tokens = timeline.num_delivered + timeline.num_sent
    num_cached = timeline.choices[0].num_cached_tokens or 0
    num_reasoning = sum(choice.num_reasoning for choice in timeline.choices)
    return Usage(timeline.num_prompt_tokens, num_tokens, num_cached, num_reasoning)


def num_reasoning_sent(timeline: Timeline) -> int:
    """Return the number of reasoning tokens sent in this call.

    Reasoning comes first in an answer, so the tokens that the client had before are reasoning tokens first.
    """
    return sum(max(0, choice.num_reasoning - choice.num_delivered) for choice in timeline.choices)


def timing(timeline: Timeline, stages: Stages) -> Timing:
    """Return the timing that the client gets with the last chunk."""
    first = timeline.choices[0]
    return Timing(
        ttft_s=timeline.first_token_s - timeline.arrived_s,
        total_s=stages.total_s,
        queue_s=stages.queue_s,
        admission_s=stages.decode_admission_s,
        prefill_s=stages.prefill_s,
        transfer_s=stages.transfer_s,
        decode_s=stages.decode_s,
        recovery_s=stages.recovery_s,
        prefill_worker=first.prefill_worker,
        decode_worker=first.decode_worker,
        mode=first.mode,
        retries=first.retries,
    )


def ended(timeline: Timeline, stages: Stages, error: BaseException | None) -> Ended:
    """Return the last event of a request: how it ended.

    Args:
        error: what it raised; None: the answer is complete.
    """
    status = _status(error)
    if error is not None:
        is_error = isinstance(error, Exception)
        kind, text = (type(error).__name__, error_text(error)) if is_error else (status, "")
        return Ended(timeline.ended_s, status, status, error_type=kind, error=text)
    if timeline.claim is None:
        return Ended(timeline.ended_s, status, status)
    outcome, blamed = slo(timeline, stages, timeline.claim.objective)
    return Ended(timeline.ended_s, status, outcome.value, blamed.value if blamed is not None else "")


def _status(error: BaseException | None) -> str:
    match error:
        case None:
            return "ok"
        case QuotaExceeded():
            return "limited"
        case Overloaded() | ModelWaking():
            return "rejected"
        case InvalidRequest() | Unsupported():
            return "invalid"
        case Exception():
            return "error"
    return "cancelled"


def predicted_seconds(prediction: Prediction) -> PlacementSeconds:
    """Return the parts of a prediction."""
    return PlacementSeconds(**{each.name: getattr(prediction, each.name) for each in fields(PlacementSeconds)})


class MeasuredPlacement(NamedTuple):
    """The first placement of a choice, and what was then measured."""

    placed: Placed
    outcome: str
    """Either `admitted`, or why the choice was refused or preempted."""
    ttft_s: float
    """Time from the start of the first attempt to its first token; 0: that attempt has produced none."""
    seconds: PlacementSeconds
    """Measured times, with the names of the prediction. A time that is not known yet is None."""


def measured_placement(choice: ChoiceTimeline, step_s: float | None = None) -> MeasuredPlacement | None:
    """Return the first placement of a choice with its measured times; None: it was never placed.

    Args:
        step_s: measured time of a decode step.
    """
    placed: Placed | None = None
    outcome, ttft_s, seconds = "admitted", 0.0, PlacementSeconds(step_s=step_s)
    for event in choice.events:
        match event:
            case Placed() if placed is None:
                placed = event
            case Refused(_, reason):
                outcome = f"refused: {reason}"
            case Reserved(at_s, 0) if placed is not None:
                seconds = replace(seconds, room_s=at_s - placed.at_s)
            case Computed(at_s, 0, report=report) if placed is not None:
                ttft_s = at_s - placed.at_s + placed.waited_s
                room_s = report.room_s if seconds.room_s is None else seconds.room_s
                wait_s = max(0.0, report.queue_s - report.pull_s - report.room_s)
                seconds = replace(
                    seconds, room_s=room_s, wait_s=wait_s, pull_s=report.pull_s, compute_s=report.prefill_s
                )
            case KvTransferred(_, 0, report=transferred):
                seconds = replace(seconds, exposed_s=transferred.exposed_s)
    return None if placed is None else MeasuredPlacement(placed, outcome, ttft_s, seconds)
