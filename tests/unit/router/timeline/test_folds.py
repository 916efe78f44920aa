"""Stages of a request's life, what is held against its objectives, and who is to blame."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster import Role
from baton.messages import PrefillReport, Transferred
from router.placement import Mode, Objective, Placement
from router.timeline.events import (
    Attempted,
    ChoiceTimeline,
    Computed,
    Decoded,
    KvTransferred,
    Migrated,
    Placed,
    Reserved,
)
from router.timeline.folds import SloOutcome, Stage, StagePhase, Stages, blame, choice_phases, classify, phases

QUEUE, ADMISSION, PREFILL, TRANSFER, DECODE, RECOVERY = Stage
TTFT, ITL, E2E = SloOutcome.TTFT_MISSED, SloOutcome.ITL_MISSED, SloOutcome.E2E_MISSED
SECONDS = st.floats(0, 1000)


class Written:
    """A choice's timeline, written event by event."""

    def __init__(self) -> None:
        self.choice = ChoiceTimeline()
        self._attempt = -1

    def attempt(self, at_s: float) -> None:
        self._attempt += 1
        self.choice.add(Attempted(at_s, self._attempt, self.choice.last_token_s))

    def asks_for_room(self, at_s: float) -> None:
        placement = Placement(mode=Mode.DISAGGREGATED, decode_worker="d", prefill_worker="p")
        self.choice.add(Placed(at_s, self._attempt, 0.0, placement, placement.prediction, 0))

    def has_room(self, at_s: float) -> None:
        self.choice.add(Reserved(at_s, self._attempt, "d"))

    def computed(self, at_s: float, prefill_s: float, room_s: float = 0.0) -> None:
        report = PrefillReport(prefill_s=prefill_s, room_s=room_s)
        self.choice.add(Computed(at_s, self._attempt, "p", Role.PREFILL, 0, report))

    def decodes(self, at_s: float) -> None:
        self.choice.add(Decoded(at_s, self._attempt))

    def transferred(self, at_s: float, exposed_s: float) -> None:
        self.choice.add(KvTransferred(at_s, self._attempt, "d", Transferred(1, 1, exposed_s, exposed_s)))

    def until(self, now_s: float) -> list[StagePhase]:
        return choice_phases(self.choice, now_s)


@pytest.mark.parametrize("num_before", range(7))
def test_a_stage_whose_end_is_dropped_does_not_last_until_the_next_one(num_before: int) -> None:
    """Whichever event is the last one before those that are dropped."""
    log = Written()
    for _ in range(num_before):
        log.choice.add(Migrated(10.0, 0, "d"))
    for at_s in range(10, 4010, 100):
        log.attempt(at_s)
        log.asks_for_room(at_s)
        log.has_room(at_s + 0.5)
        log.computed(at_s + 1.0, 0.25)
        log.choice.last_token_s = at_s + 99.0
        log.decodes(at_s + 1.0)
        log.transferred(at_s + 1.0, 0.0)
    assert log.choice.num_left_out
    stages = Stages.of(phases(10.0, 11.0, 4010.0, log.until(4010.0)), 11.0)
    assert 0 < stages.recovery_s < 39 * 2.0
    assert stages.total_s == pytest.approx(4000.0)


def served() -> Written:
    """Placed at 11, a ticket at 13, first token at 20, second at 21, on the last of which the KV transfer took 0.5
    s."""
    log = Written()
    log.attempt(11.0)
    log.asks_for_room(12.0)
    log.has_room(13.0)
    log.computed(20.0, 4.0)
    log.choice.last_token_s = 20.0
    log.decodes(21.0)
    log.transferred(21.5, 0.5)
    return log


def test_a_life_in_order() -> None:
    assert phases(10.0, 20.0, 30.0, served().until(30.0)) == [
        (QUEUE, 10.0, 12.0),
        (ADMISSION, 12.0, 13.0),
        (QUEUE, 13.0, 16.0),
        (PREFILL, 16.0, 20.0),
        (TRANSFER, 20.0, 20.5),
        (DECODE, 20.5, 30.0),
    ]


def test_sums_of_it() -> None:
    stages = Stages.of(phases(10.0, 20.0, 30.0, served().until(30.0)), 20.0)
    assert stages == Stages(queue_s=5.0, decode_admission_s=1.0, prefill_s=4.0, transfer_s=0.5, decode_s=9.5)
    assert stages.total_s == 20.0
    assert stages.by_stage() == {QUEUE: 5.0, ADMISSION: 1.0, PREFILL: 4.0, TRANSFER: 0.5, DECODE: 9.5, RECOVERY: 0.0}


def test_the_first_tokens_way_to_the_client_makes_no_phase() -> None:
    """The prefill ends where the client gets the token; as long as before."""
    life = phases(10.0, 20.25, 30.0, served().until(30.0))
    assert life[2:5] == [(QUEUE, 13.0, 16.25), (PREFILL, 16.25, 20.25), (TRANSFER, 20.25, 20.5)]


def test_where_one_worker_does_both_its_wait_for_room_comes_before_the_prompt() -> None:
    log = Written()
    log.attempt(11.0)
    log.computed(20.0, 4.0, room_s=3.0)
    assert phases(10.0, 20.0, 21.0, log.until(21.0)) == [
        (QUEUE, 10.0, 13.0),
        (ADMISSION, 13.0, 16.0),
        (PREFILL, 16.0, 20.0),
        (DECODE, 20.0, 21.0),
    ]


def test_a_kv_transfer_takes_no_longer_than_to_the_second_token() -> None:
    """Whether its report comes before that token or after it."""
    for recorded in ("after", "before"):
        log = Written()
        log.attempt(1.0)
        log.computed(2.0, 0.5)
        if recorded == "after":
            log.decodes(2.75)
            log.transferred(9.0, 5.0)
        else:
            log.transferred(2.75, 5.0)
            log.decodes(3.0)
        assert log.until(10.0)[-1] == (TRANSFER, 2.0, 2.75)


def test_attempts_that_fail_before_the_first_token_are_recovery_whatever_they_did() -> None:
    log = Written()
    log.attempt(1.0)
    log.asks_for_room(1.5)
    log.has_room(2.0)
    log.attempt(4.0)
    log.asks_for_room(4.5)
    log.attempt(5.0)
    log.asks_for_room(6.0)
    log.has_room(6.5)
    log.computed(8.0, 1.0)
    life = phases(0.0, 8.0, 9.0, log.until(9.0))
    assert life == [
        (QUEUE, 0.0, 1.0),
        (RECOVERY, 1.0, 5.0),
        (QUEUE, 5.0, 6.0),
        (ADMISSION, 6.0, 6.5),
        (QUEUE, 6.5, 7.0),
        (PREFILL, 7.0, 8.0),
        (DECODE, 8.0, 9.0),
    ]
    assert Stages.of(life, 8.0).early_recovery_s == 4.0


def test_after_it_recovery_is_the_gap_that_the_client_sees() -> None:
    """The worker fell silent at 25 and was given up at 27; its successor's first token came at 29."""
    log = served()
    log.choice.last_token_s = 25.0
    log.attempt(27.0)
    log.attempt(27.5)
    log.asks_for_room(27.6)
    log.has_room(27.7)
    log.computed(29.0, 1.0)
    log.decodes(29.5)
    log.transferred(29.6, 0.25)
    life = phases(10.0, 20.0, 32.0, log.until(32.0))
    assert life[4:] == [
        (TRANSFER, 20.0, 20.5),
        (DECODE, 20.5, 25.0),
        (RECOVERY, 25.0, 29.0),
        (TRANSFER, 29.0, 29.25),
        (DECODE, 29.25, 32.0),
    ]
    stages = Stages.of(life, 20.0)
    assert (stages.early_recovery_s, stages.late_recovery_s, stages.prefill_s) == (0.0, 4.0, 4.0)


def test_what_has_not_ended_ends_with_the_request() -> None:
    log = Written()
    assert phases(1.0, 0.0, 3.0, log.until(3.0)) == [(QUEUE, 1.0, 3.0)]
    log.attempt(2.0)
    log.asks_for_room(2.5)
    assert phases(1.0, 0.0, 3.0, log.until(3.0)) == [(QUEUE, 1.0, 2.5), (ADMISSION, 2.5, 3.0)]
    log.has_room(2.75)
    assert phases(1.0, 0.0, 3.0, log.until(3.0))[-1] == (QUEUE, 2.75, 3.0)
    log.computed(4.0, 1.0)
    log.choice.last_token_s = 5.0
    log.attempt(6.0)
    assert phases(1.0, 4.0, 9.0, log.until(9.0))[-2:] == [(DECODE, 4.0, 5.0), (RECOVERY, 5.0, 9.0)]


def test_another_choices_first_token_cuts_what_is_before_it() -> None:
    log = Written()
    log.attempt(1.0)
    log.asks_for_room(1.5)
    log.has_room(4.0)
    log.computed(6.0, 1.5)
    assert phases(0.0, 5.0, 7.0, log.until(7.0)) == [
        (QUEUE, 0.0, 1.5),
        (ADMISSION, 1.5, 4.0),
        (QUEUE, 4.0, 4.5),
        (PREFILL, 4.5, 5.0),
        (DECODE, 5.0, 7.0),
    ]


def test_who_computes_and_decodes_is_not_asked_for_room() -> None:
    choice = ChoiceTimeline()
    choice.add(Attempted(1.0, 0, 0.0))
    placement = Placement(mode=Mode.AGGREGATED, decode_worker="d")
    choice.add(Placed(2.0, 0, 1.0, placement, placement.prediction, 0))
    assert choice_phases(choice, 3.0) == []


def test_a_migration_counts_as_decoding() -> None:
    log = served()
    log.choice.last_token_s = 24.0
    log.choice.add(Migrated(24.5, 1, "d1"))
    log.has_room(24.75)
    log.transferred(25.0, 0.5)
    log.decodes(25.5)
    assert log.until(30.0) == served().until(30.0)


@given(
    SECONDS,
    st.none() | SECONDS,
    SECONDS,
    st.lists(st.builds(lambda s, b, d: StagePhase(s, b, b + d), st.sampled_from(Stage), st.floats(-10, 2000), SECONDS)),
)
def test_stages_follow_one_another_and_add_up(
    arrived_s: float, ttft_s: float | None, lasts_s: float, noted: list[StagePhase]
) -> None:
    """Whatever was noted."""
    arrived_s += 1.0
    ended_s = arrived_s + lasts_s
    first_s = 0.0 if ttft_s is None else arrived_s + ttft_s
    life = phases(arrived_s, first_s, ended_s, noted)
    if ended_s > arrived_s:
        assert (life[0].begin_s, life[-1].end_s) == (arrived_s, ended_s)
    assert all(one.end_s == next_.begin_s for one, next_ in pairwise(life))
    assert all(phase.end_s > phase.begin_s for phase in life)
    before = [phase.stage for phase in life if not first_s or phase.end_s <= first_s]
    after = [phase.stage for phase in life if first_s and phase.begin_s >= first_s]
    assert len(before) + len(after) == len(life), "none is on both sides of the first token"
    assert {*before} <= {QUEUE, ADMISSION, PREFILL, RECOVERY}
    assert {*after} <= {TRANSFER, DECODE, RECOVERY}
    stages = Stages.of(life, first_s)
    assert stages.total_s == pytest.approx(ended_s - arrived_s, abs=1e-9)


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "e2e_s", "outcome"),
    [
        (1.0, 0.1, 10.0, SloOutcome.MET),
        (1.01, 0.1, 10.0, TTFT),
        (1.01, 0.2, 11.0, TTFT),
        (1.0, 0.11, 10.0, ITL),
        (1.0, 0.11, 11.0, ITL),
        (1.0, 0.1, 10.1, E2E),
    ],
)
def test_outcomes(ttft_s: float, itl_s: float, e2e_s: float, outcome: SloOutcome) -> None:
    """An objective that is just met is met; the first one missed counts."""
    assert classify(ttft_s, itl_s, e2e_s, Objective(1.0, 0.1, 10.0)) is outcome
    assert classify(ttft_s, itl_s, e2e_s, Objective()) is SloOutcome.MET


FAIR = Stages(queue_s=0.2, decode_admission_s=0.1, prefill_s=0.6, transfer_s=0.1, decode_s=0.8)
OBJECTIVE = Objective(1.0, 0.1, 2.0)
GAPS = 10
"""So 1 s of decoding is allowed."""
CASES = [
    (TTFT, replace(FAIR, queue_s=0.7), QUEUE, "prefill is longer than the rest, but would have been in time"),
    (TTFT, replace(FAIR, decode_admission_s=0.5), ADMISSION, "no matter that the prefill is longer"),
    (TTFT, replace(FAIR, early_recovery_s=0.5), RECOVERY, "a worker failed"),
    (TTFT, replace(FAIR, prefill_s=1.5), PREFILL, "it alone is too long"),
    (TTFT, replace(FAIR, prefill_s=1.5, queue_s=2.0), QUEUE, "too long as well, but less"),
    (
        TTFT,
        replace(FAIR, queue_s=0.3, prefill_s=0.9, transfer_s=9.0, decode_s=9.0, late_recovery_s=9.0),
        QUEUE,
        "after",
    ),
    (ITL, replace(FAIR, transfer_s=0.5), TRANSFER, "decoding alone would have been in time"),
    (ITL, replace(FAIR, late_recovery_s=0.5), RECOVERY, "a worker failed"),
    (ITL, replace(FAIR, decode_s=1.5), DECODE, "it alone is too long"),
    (ITL, replace(FAIR, decode_s=1.5, late_recovery_s=2.0), RECOVERY, "too long as well, but less"),
    (ITL, replace(FAIR, queue_s=9.0, early_recovery_s=9.0, prefill_s=9.0, decode_s=0.95), TRANSFER, "before"),
    (E2E, replace(FAIR, queue_s=0.7), QUEUE, "the longest of what does not compute"),
    (E2E, replace(FAIR, decode_admission_s=0.7), ADMISSION, "the longest of what does not compute"),
    (E2E, replace(FAIR, transfer_s=0.7), TRANSFER, "the longest of what does not compute"),
    (E2E, replace(FAIR, early_recovery_s=0.2, late_recovery_s=0.2), RECOVERY, "both sides of the first token"),
    (E2E, replace(FAIR, prefill_s=1.5), PREFILL, "together they are too long, and it is longer"),
    (E2E, replace(FAIR, decode_s=1.9), DECODE, "together they are too long, and it is longer"),
    (E2E, replace(FAIR, prefill_s=1.3, queue_s=3.0), QUEUE, "too long as well, but less"),
]


@pytest.mark.parametrize(("outcome", "stages", "stage", "why"), CASES)
def test_the_stage_to_blame(outcome: SloOutcome, stages: Stages, stage: Stage, why: str) -> None:
    assert blame(outcome, stages, OBJECTIVE, GAPS) is stage, why


@given(st.builds(Stages, **dict.fromkeys(Stages.__slots__, SECONDS)), st.floats(0.001, 1000), st.integers(1, 100))
def test_who_is_blamed_made_it_late(stages: Stages, allowed_s: float, num_gaps: int) -> None:
    """Of any miss: the stage took time, on the right side of the first token; and computing that fits is not it."""
    ttft_s = stages.queue_s + stages.decode_admission_s + stages.prefill_s + stages.early_recovery_s
    after_s = stages.transfer_s + stages.decode_s + stages.late_recovery_s
    objective = Objective(allowed_s, allowed_s / num_gaps, allowed_s)
    for outcome, took_s, alone_s in (
        (TTFT, ttft_s, stages.prefill_s),
        (ITL, after_s, stages.decode_s),
        (E2E, ttft_s + after_s, stages.prefill_s + stages.decode_s),
    ):
        if took_s > allowed_s * (1 + 1e-9):
            stage = blame(outcome, stages, objective, num_gaps)
            assert stages.by_stage()[stage] > 0
            if stage in (PREFILL, DECODE):
                assert alone_s > allowed_s * (1 - 1e-9)
    assert math.isfinite(stages.total_s)
