"""SLO outcomes of requests, the stages of a request, and the stage to blame for a missed objective.

    arrived                                          first token                                   ended
    | queue | decode admission | queue | prefill     | transfer | decode ...    | recovery | decode ... |
              waiting for room           computing    not hidden   further tokens  a worker failed
                                                      by computing

- **queue**: all time before the first token that belongs to no other stage: router, tokenizing, placement, the worker's
  queue, pulling a prefix.
- **decode admission**: from the call that asks the decode worker for room to its ticket. If one worker computes and
  decodes, the part of its queue that was due to a lack of room.
- **prefill**: the duration that the worker that computed the prompt reports; it ends with the first token.
- **transfer**: the part of the KV transfer after the first token, up to the second token.
- **decode**: all time after the first token that belongs to no other stage, including the wait for longer choices.
- **recovery**: the cost of failed attempts. Before the first token: from the start of the first attempt to the start of
  the last one. After it: from the last token before the failure to the next token, for which the KV is recomputed.

The stages follow one another without a gap, so they add up to the time from arrival to end. Times are on the router's
monotonic clock. Other processes report only durations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from router.placement import Objective


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

    @property
    def took_s(self) -> float:
        """Duration of the phase in seconds."""
        return self.end_s - self.begin_s


@dataclass(slots=True, kw_only=True)
class StageLog:
    """Phases of a choice, recorded while it runs."""

    last_token_s: float = 0.0
    """Time of the last token sent to the client; 0: none yet."""
    noted: list[StagePhase] = field(default_factory=list)
    _began_s: float = 0.0
    """Start of the first attempt."""
    _asked_s: float = 0.0
    """Time of a request for room that is not granted yet; 0: there is none."""
    _lost_s: float = 0.0
    """Time of the last token before a failure; 0: no recovery is in progress."""
    _first_token_s: float = 0.0
    """Arrival at the router of the first token of the current attempt."""
    _second_token_s: float = 0.0

    def attempt(self, now_s: float) -> None:
        """Record the start of an attempt; all earlier attempts have failed."""
        if self.last_token_s:
            self._lost_s = self._lost_s or self.last_token_s
        elif self._began_s:
            self.noted = [StagePhase(Stage.RECOVERY, self._began_s, now_s)]
        self._began_s = self._began_s or now_s
        self._asked_s = 0.0

    def asks_for_room(self, now_s: float) -> None:
        """Record that the router asks a decode worker for room."""
        self._asked_s = now_s

    def has_room(self, now_s: float) -> None:
        """Record that the decode worker has returned a ticket."""
        self.noted.append(StagePhase(Stage.DECODE_ADMISSION, self._asked_s, now_s))
        self._asked_s = 0.0

    def computed(self, now_s: float, prefill_s: float, room_s: float = 0.0) -> None:
        """Record the attempt's first token, from the worker that computed the prompt in `prefill_s`.

        Args:
            room_s: time before that in which the worker lacked room.
        """
        if self._lost_s:
            self.noted.append(StagePhase(Stage.RECOVERY, self._lost_s, now_s))
            self._lost_s = 0.0
        else:
            began_s = now_s - prefill_s
            if room_s > 0:
                self.noted.append(StagePhase(Stage.DECODE_ADMISSION, began_s - room_s, began_s))
            self.noted.append(StagePhase(Stage.PREFILL, began_s, now_s))
        self._first_token_s, self._second_token_s = now_s, 0.0

    def decodes(self, now_s: float) -> None:
        """Record the arrival of the attempt's second token."""
        self._second_token_s = now_s

    def transferred(self, now_s: float, exposed_s: float) -> None:
        """Record the report of the KV transfer, which may come before or after the second token."""
        latest_s = self._second_token_s or now_s
        self.noted.append(
            StagePhase(Stage.TRANSFER, self._first_token_s, min(self._first_token_s + exposed_s, latest_s)),
        )

    def until(self, now_s: float) -> list[StagePhase]:
        """Return the recorded phases; a phase in progress ends at `now_s`."""
        if self._lost_s:
            return [*self.noted, StagePhase(Stage.RECOVERY, self._lost_s, now_s)]
        if self._asked_s:
            return [*self.noted, StagePhase(Stage.DECODE_ADMISSION, self._asked_s, now_s)]
        return self.noted


def phases(arrived_s: float, first_token_s: float, ended_s: float, noted: Iterable[StagePhase]) -> list[StagePhase]:
    """Return the phases of a request from its arrival to its end, without gaps and overlaps.

    Args:
        first_token_s: 0: no token came.
        noted: phases in order. A phase is clipped to its side of the first token and to the end of the previous one.
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
