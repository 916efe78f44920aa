"""What a request is held against, the stages of its life, and the stage to blame when it was late.

    arrived                                          first token                                   ended
    | queue | decode admission | queue | prefill     | transfer | decode ...    | recovery | decode ... |
              waiting for room           computing    what no      further tokens  a worker failed
                                                      computing hid

- **queue**: everything before the first token that is nothing of the rest: router, tokenizing, placement, the worker's
  queue, a prefix that is pulled.
- **decode admission**: from the call that asks the decode worker for room to its ticket. Where one worker computes and
  decodes: what of its queue was for want of room.
- **prefill**: what the worker that computed the prompt says that it took; it ends with the first token.
- **transfer**: of the KV transfer, what came after the first token, and no more than the time to the second one.
- **decode**: everything after the first token that is nothing of the rest, other choices that take longer included.
- **recovery**: what failed attempts cost. Before the first token: from the first attempt's begin to the last one's.
  After it: from the last token before the failure to the first one after it, for which all is computed again.

The stages follow one another without a gap, so they add up to the time from arrival to end. Times are the router's
monotonic clock; of other processes it takes durations only.
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
    """How a request that was answered to its end met its objectives."""

    MET = "met"
    TTFT_MISSED = "ttft_missed"
    ITL_MISSED = "itl_missed"
    E2E_MISSED = "e2e_missed"


EARLY = frozenset((Stage.RECOVERY, Stage.DECODE_ADMISSION, Stage.PREFILL))
"""Stages before a first token, besides the queue."""
LATE = frozenset((Stage.RECOVERY, Stage.TRANSFER))
"""Stages after it, besides decoding."""


class StagePhase(NamedTuple):
    """A stretch of one stage, on the router's monotonic clock."""

    stage: Stage
    begin_s: float
    end_s: float

    @property
    def took_s(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(slots=True, kw_only=True)
class StageLog:
    """What the router notes of a choice while it runs."""

    last_token_s: float = 0.0
    """When the client was given its last token so far; 0: it has none."""
    noted: list[StagePhase] = field(default_factory=list)
    _began_s: float = 0.0
    """The first attempt."""
    _asked_s: float = 0.0
    """Room was asked for, and is not there yet."""
    _lost_s: float = 0.0
    """The last token before a failure; 0: nothing is being recovered."""
    _first_token_s: float = 0.0
    """When the first token of the attempt that is served came to the router."""
    _second_token_s: float = 0.0

    def attempt(self, now_s: float) -> None:
        """Record that the choice is placed; earlier attempts have failed."""
        if self.last_token_s:
            self._lost_s = self._lost_s or self.last_token_s
        elif self._began_s:
            self.noted = [StagePhase(Stage.RECOVERY, self._began_s, now_s)]
        self._began_s = self._began_s or now_s
        self._asked_s = 0.0

    def asks_for_room(self, now_s: float) -> None:
        """Record that a decode worker is asked for room."""
        self._asked_s = now_s

    def has_room(self, now_s: float) -> None:
        """Record that it has given a ticket."""
        self.noted.append(StagePhase(Stage.DECODE_ADMISSION, self._asked_s, now_s))
        self._asked_s = 0.0

    def computed(self, now_s: float, prefill_s: float, room_s: float = 0.0) -> None:
        """The attempt's first token has come from the worker that computed the prompt in `prefill_s`.

        Args:
            room_s: before that, for want of room there.
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
        """Record that the attempt's second token has come."""
        self._second_token_s = now_s

    def transferred(self, now_s: float, exposed_s: float) -> None:
        """Record the report of the KV transfer, before or after that."""
        latest_s = self._second_token_s or now_s
        self.noted.append(
            StagePhase(Stage.TRANSFER, self._first_token_s, min(self._first_token_s + exposed_s, latest_s)),
        )

    def until(self, now_s: float) -> list[StagePhase]:
        """All that is noted; a stage that has not ended ends now."""
        if self._lost_s:
            return [*self.noted, StagePhase(Stage.RECOVERY, self._lost_s, now_s)]
        if self._asked_s:
            return [*self.noted, StagePhase(Stage.DECODE_ADMISSION, self._asked_s, now_s)]
        return self.noted


def phases(arrived_s: float, first_token_s: float, ended_s: float, noted: Iterable[StagePhase]) -> list[StagePhase]:
    """A request's life in phases that follow one another, from its arrival to its end.

    Args:
        first_token_s: 0: none came.
        noted: in order. What lies outside of its part of the life, or in another one's place, is cut.
    """
    if not first_token_s:
        return _laid(arrived_s, ended_s, noted, EARLY, Stage.QUEUE)
    first_s = min(max(first_token_s, arrived_s), ended_s)
    before = [_ended_at(first_s, phase) if phase.stage is Stage.PREFILL else phase for phase in noted]
    return _laid(arrived_s, first_s, before, EARLY, Stage.QUEUE) + _laid(first_s, ended_s, noted, LATE, Stage.DECODE)


def _ended_at(first_s: float, prefill: StagePhase) -> StagePhase:
    """The way of the first token to the client is no stage of its own."""
    took_s = prefill.end_s - prefill.begin_s
    return StagePhase(Stage.PREFILL, first_s - took_s, first_s) if prefill.end_s < first_s else prefill


def _laid(
    begin_s: float, end_s: float, noted: Iterable[StagePhase], stages: frozenset[Stage], otherwise: Stage
) -> list[StagePhase]:
    """The phases of `stages` between two times, and `otherwise` in the gaps."""
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
    """Seconds of a request's life in each stage."""

    queue_s: float = 0.0
    decode_admission_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    early_recovery_s: float = 0.0
    """Time that failed attempts cost before the first token."""
    late_recovery_s: float = 0.0

    @staticmethod
    def of(life: Iterable[StagePhase], first_token_s: float) -> Stages:
        """The sums of what `phases` returns.

        Args:
            first_token_s: 0: none came.
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
        """Time that failed attempts cost, before and after the first token."""
        return self.early_recovery_s + self.late_recovery_s

    @property
    def total_s(self) -> float:
        """Time from arrival to end."""
        return sum(self.by_stage().values())

    def by_stage(self) -> dict[Stage, float]:
        """Seconds of each stage."""
        return {
            Stage.QUEUE: self.queue_s,
            Stage.DECODE_ADMISSION: self.decode_admission_s,
            Stage.PREFILL: self.prefill_s,
            Stage.TRANSFER: self.transfer_s,
            Stage.DECODE: self.decode_s,
            Stage.RECOVERY: self.recovery_s,
        }


def classify(ttft_s: float, itl_s: float, e2e_s: float, objective: Objective) -> SloOutcome:
    """The first objective that was missed, if one was."""
    if ttft_s > objective.ttft_s:
        return SloOutcome.TTFT_MISSED
    if itl_s > objective.itl_s:
        return SloOutcome.ITL_MISSED
    return SloOutcome.E2E_MISSED if e2e_s > objective.e2e_s else SloOutcome.MET


def blame(outcome: SloOutcome, stages: Stages, objective: Objective, num_gaps: int) -> Stage:
    """The stage to blame for a missed objective: the longest of those that count.

    Computing that fits its objective by itself is never to blame: an idle cluster would have met it. So, of what
    computes, prefill counts for a first token that it alone made late; decode for tokens between which it alone took
    too long; both for an answer that they alone made late. What computes nothing always counts, on its side of the
    first token.

        missed | always counts                                          | counts if that alone is longer than allowed
        ttft   | queue, decode admission, recovery before the first token | prefill
        itl    | transfer, recovery after the first token               | decode
        e2e    | queue, decode admission, transfer, recovery            | prefill and decode together

    Args:
        stages: of the request; for a missed ITL, up to the last token between which and the first it was measured.
        num_gaps: between those tokens.
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
