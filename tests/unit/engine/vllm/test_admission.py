"""Reservations and order of the sequences that vLLM gets. No clock and no process: time is a number."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.costs import PRIOR
from engine.core.sequence import Purpose
from engine.vllm.admission import LEAST_STEP, MARGIN, STEPS_AHEAD, Admission, Change, Hosted, blocks_of
from engine.vllm.messages import Group
from tests.support.builders import sequence_spec, step_costs

FULL = Group("full", 2, 16, 0)
GENERATE, PREFILL, RECEIVE = Purpose.GENERATE, Purpose.PREFILL, Purpose.RECEIVE
STEP_TOKENS, RESERVED = 128, 32


def an_admission(num_blocks: int = 64, groups: tuple[Group, ...] = (FULL,), **values: int) -> Admission:
    limits = {"max_num_seqs": 8, "max_step_tokens": STEP_TOKENS, "output_reservation": RESERVED}
    return Admission(groups, num_blocks, **limits | values)


def a_sequence(
    num_tokens: int = 16, most_tokens: int = 0, purpose: Purpose = GENERATE, arrival_s: float = 0.0, **values: Any
) -> Hosted:
    """All tokens are prompt tokens, unless `num_prompt_tokens` is given."""
    spec = sequence_spec([1] * num_tokens, **values)
    return Hosted(spec=spec, purpose=purpose, arrival_s=arrival_s, most_tokens=most_tokens or num_tokens + 100)


def advance(admission: Admission, now: float = 100.0, *, num_uncomputed: int = 0) -> Change:
    change = admission.advance(now, num_uncomputed=num_uncomputed)
    admission.check()
    return change


def admitted(admission: Admission, *sequences: Hosted) -> None:
    """Admits all sequences, one after the other."""
    for sequence in sequences:
        admission.add(sequence)
        assert advance(admission).admitted == [sequence]


def generates(sequence: Hosted, number: int) -> None:
    sequence.token_ids += [1] * number
    sequence.first_token_s = sequence.first_token_s or 100.0


# -- how many blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_a_sequence_takes_whole_blocks(num_tokens: int, expected: int) -> None:
    assert blocks_of([FULL], num_tokens, STEP_TOKENS) == expected
    assert blocks_of([FULL, FULL._replace(block_size=32)], num_tokens, STEP_TOKENS) == expected + -(-expected // 2)


def test_layers_of_other_kinds_take_what_they_keep() -> None:
    window, state, other = Group("window", 2, 16, 64), Group("state", 2, 512, 0), Group("other", 1, 16, 0)
    assert blocks_of([window], 32, STEP_TOKENS) == 2, "shorter than the window"
    most = (64 + STEP_TOKENS) // 16 + 1
    assert [blocks_of([window], n, STEP_TOKENS) for n in (16 * (most - 1), 16 * most, 10_000)] == [most - 1, most, most]
    assert [blocks_of([state], n, STEP_TOKENS) for n in (0, 1, 10_000)] == [0, 2, 2]
    assert blocks_of([other], 10_000, STEP_TOKENS) == 625
    assert blocks_of([FULL, window, state, other], 10_000, STEP_TOKENS) == 625 + most + 2 + 625


@pytest.mark.parametrize(
    ("groups", "num_blocks", "most", "expected"),
    [
        ((FULL,), 10, 8192, 160),
        ((FULL,), 10, 100, 100),
        ((FULL, FULL), 10, 8192, 80),
        ((FULL, Group("state", 2, 512, 0)), 10, 8192, 128),
        ((Group("window", 2, 16, 64),), 13, 8192, 8192),
        ((Group("window", 2, 16, 64),), 12, 8192, 192),
        ((Group("state", 2, 512, 0),), 1, 8192, 0),
    ],
)
def test_the_longest_sequence_is_the_longest_that_fits(
    groups: tuple[Group, ...], num_blocks: int, most: int, expected: int
) -> None:
    assert an_admission(num_blocks, groups).longest(most) == expected


# -- admission --------------------------------------------------------------------------------------------------------


def test_a_sequence_reserves_its_prompt_and_the_start_of_its_answer() -> None:
    admission = an_admission()
    long, short = a_sequence(16, 400), a_sequence(16, 20)
    admitted(admission, long, short)
    assert (long.num_reserved_tokens, short.num_reserved_tokens) == (16 + RESERVED, 20)
    assert admission.num_free == 64 - 3 - 2
    assert [sequence.scheduled_s for sequence in (long, short)] == [100.0, 100.0]
    assert long.name != short.name


def test_the_first_that_waits_is_overtaken_by_none() -> None:
    admission = an_admission(num_blocks=8)
    admitted(admission, running := a_sequence(80, 112))
    large, small = a_sequence(32, 64, arrival_s=1.0), a_sequence(1, 2, arrival_s=2.0)
    admission.add(large)
    admission.add(small)
    assert advance(admission, 110.0).admitted == []
    assert admission.waiting == [large, small]
    assert admission.remove(running) == 0
    assert advance(admission, 113.0).admitted == [large, small]
    assert (large.blocked_s, small.blocked_s) == (3.0, 3.0)
    assert running.blocked_s == 0


def test_time_without_room_counts_from_the_arrival_and_until_the_admission() -> None:
    admission = an_admission(num_blocks=8)
    admitted(admission, running := a_sequence(80, 112))
    admission.add(first := a_sequence(80, 100, arrival_s=1.0))
    advance(admission, 110.0)
    admission.add(later := a_sequence(16, 20, arrival_s=112.0))
    advance(admission, 114.0)
    assert (first.blocked_s, later.blocked_s) == (4.0, 2.0)
    admission.remove(running)
    assert advance(admission, 120.0).admitted == [first]
    advance(admission, 130.0)
    assert (first.blocked_s, later.blocked_s) == (10.0, 18.0), "the later one lacks room behind the first"


def test_vllm_gets_at_most_so_many_sequences() -> None:
    admission = an_admission(max_num_seqs=2)
    sequences = [a_sequence(arrival_s=number) for number in range(3)]
    for sequence in sequences:
        admission.add(sequence)
    assert advance(admission).admitted == sequences[:2]
    admission.remove(sequences[0])
    assert advance(admission).admitted == sequences[2:]


def test_vllms_queue_has_the_prompts_of_few_steps_and_received_ones_do_not_count() -> None:
    admission = an_admission(num_blocks=1000)
    prompts = [a_sequence(STEP_TOKENS, arrival_s=number) for number in range(4)]
    received = a_sequence(STEP_TOKENS, purpose=RECEIVE, arrival_s=9)
    for sequence in (*prompts, received):
        admission.add(sequence)
    assert advance(admission, num_uncomputed=STEPS_AHEAD * STEP_TOKENS).admitted == []
    assert advance(admission, num_uncomputed=1).admitted == prompts[:2]
    admission.waiting.sort(key=lambda sequence: sequence is not received)
    received.spec = sequence_spec([1] * 16, priority=1)
    assert advance(admission, num_uncomputed=1000).admitted == [received]


def in_order(*sequences: Hosted, now: float = 100.0) -> list[Hosted]:
    admission = an_admission(num_blocks=10_000, max_num_seqs=100, max_step_tokens=10_000)
    for sequence in sequences:
        admission.add(sequence)
    return advance(admission, now).admitted


def test_the_order_is_priority_then_deadline_then_arrival() -> None:
    plain, earlier = a_sequence(arrival_s=99.0), a_sequence(arrival_s=98.0)
    due = a_sequence(arrival_s=99.5, ttft_s=50.0)
    due_sooner = a_sequence(arrival_s=99.6, ttft_s=10.0)
    urgent = a_sequence(arrival_s=99.9, priority=1)
    assert in_order(plain, earlier, due, due_sooner, urgent) == [urgent, due_sooner, due, earlier, plain]


def test_a_late_sequence_comes_after_those_that_can_be_in_time() -> None:
    """A request that is late in any order must not make others late."""
    late = a_sequence(arrival_s=90.0, ttft_s=10.0)
    hopeless = a_sequence(8000, arrival_s=99.0, ttft_s=1.1)
    assert PRIOR.prefill_s(8000, 0, 10_000) > 0.1
    in_time, without = a_sequence(arrival_s=99.0, ttft_s=60.0), a_sequence(arrival_s=99.0)
    assert in_order(late, hopeless, in_time, without) == [in_time, without, late, hopeless]


def test_received_kv_takes_no_time_and_so_is_not_late() -> None:
    received = a_sequence(8000, purpose=RECEIVE, arrival_s=99.0, ttft_s=1.1)
    in_time = a_sequence(arrival_s=99.0, ttft_s=60.0)
    assert in_order(in_time, received) == [received, in_time]


def test_an_answer_that_has_begun_continues_before_others_begin() -> None:
    due = a_sequence(arrival_s=0.0, ttft_s=100.5)
    continued = a_sequence(20, num_prompt_tokens=16, arrival_s=99.0)
    sooner = a_sequence(20, num_prompt_tokens=16, arrival_s=98.0, ttft_s=1.0)
    urgent = a_sequence(arrival_s=99.0, priority=1)
    assert in_order(due, continued, sooner, urgent) == [urgent, sooner, continued, due]


# -- growth ------------------------------------------------------------------------------------------------------------


def test_a_reservation_grows_before_its_end_is_reached() -> None:
    admission = an_admission()
    admitted(admission, sequence := a_sequence(16, 500))
    generates(sequence, RESERVED - MARGIN)
    advance(admission)
    assert sequence.num_reserved_tokens == 16 + RESERVED, "vLLM may be some tokens ahead"
    generates(sequence, 1)
    advance(admission)
    assert sequence.num_reserved_tokens == sequence.num_tokens + RESERVED
    for _ in range(400):
        generates(sequence, 1)
        advance(admission)
        assert min(500, sequence.num_tokens + MARGIN) <= sequence.num_reserved_tokens <= 500


def test_a_reservation_grows_less_where_there_is_little_room() -> None:
    admission = an_admission(num_blocks=9, output_reservation=64)
    admitted(admission, sequence := a_sequence(16, 500))
    assert sequence.num_reserved_tokens == 80
    generates(sequence, 49)
    assert advance(admission).left == []
    assert sequence.num_reserved_tokens == sequence.num_tokens + 64 == 129
    generates(sequence, 49)
    admission.pin(-2, -2)  # eleven blocks
    advance(admission)
    assert sequence.num_reserved_tokens == 114 + 2 * MARGIN == 146


@pytest.mark.parametrize("output_reservation", [-1, 0, 1, MARGIN])
def test_a_reservation_covers_what_vllm_is_ahead_whatever_the_setting(output_reservation: int) -> None:
    admission = an_admission(output_reservation=output_reservation)
    admitted(admission, sequence := a_sequence(16, 500))
    for _ in range(60):
        assert MARGIN <= sequence.num_reserved_tokens - sequence.num_tokens <= 2 * MARGIN
        generates(sequence, 1)
        advance(admission)


def test_a_held_sequence_neither_grows_nor_leaves() -> None:
    admission = an_admission(num_blocks=9)
    held = [a_sequence(32, 33, PREFILL, priority=-1), a_sequence(16, 500, RECEIVE, priority=-1)]
    admitted(admission, *held)
    pinned, sequence = a_sequence(16, 17, priority=-1), a_sequence(16, 500)
    pinned.num_pins = 1
    admission.add(pinned)
    advance(admission)
    assert admission.num_free == 1
    admission.add(sequence)
    assert advance(admission).admitted == []
    reserved = [each.num_reserved_tokens for each in (*held, pinned)]
    generates(held[1], 40)
    assert advance(admission) == ([], [], STEP_TOKENS)
    assert [each.num_reserved_tokens for each in (*held, pinned)] == reserved


def full_of(*sequences: Hosted) -> Admission:
    """A pool without free blocks, after each of these sequences has grown by a block."""
    admission = an_admission(num_blocks=3 * len(sequences))
    admitted(admission, *sequences)
    assert admission.num_free == 0
    return admission


def test_without_room_the_least_urgent_leaves_and_the_others_grow() -> None:
    urgent, early, late = (
        a_sequence(16, 500, arrival_s=3.0, priority=1),
        a_sequence(16, 500, arrival_s=1.0),
        a_sequence(16, 500, arrival_s=2.0),
    )
    admission = full_of(urgent, early, late)
    names = [sequence.name for sequence in (urgent, early, late)]
    generates(urgent, 17)
    change = advance(admission)
    assert change.left == [(late, names[2])]
    assert change.admitted == [], "a preempted sequence is not admitted again at once"
    assert (late.name, late.num_reserved_tokens, admission.waiting) == (-1, 0, [late])
    assert urgent.num_reserved_tokens == 33 + RESERVED
    assert early.num_reserved_tokens == 48
    assert admission.num_preemptions == 1
    assert advance(admission).admitted == []
    assert admission.remove(urgent) == names[0]
    assert advance(admission).admitted == [late]
    assert late.name not in names, "vLLM may not have forgotten its old name"
    assert late.scheduled_s == 100.0


def test_a_sequence_that_is_itself_the_least_urgent_leaves() -> None:
    early, late = a_sequence(16, 500, arrival_s=1.0), a_sequence(16, 500, arrival_s=2.0)
    admission = full_of(early, late)
    generates(late, 17)
    assert [each for each, _ in advance(admission).left] == [late]
    assert early.num_reserved_tokens == 48


def test_held_blocks_are_never_taken_back() -> None:
    held = a_sequence(16, 500, RECEIVE, arrival_s=9.0, priority=-1)
    early, late = a_sequence(16, 500, arrival_s=1.0), a_sequence(16, 500, arrival_s=2.0)
    admission = full_of(held, early, late)
    generates(early, 17)
    assert [each for each, _ in advance(admission).left] == [late]
    generates(early, 17)
    assert advance(admission).left == []
    generates(early, 40)
    assert [each for each, _ in advance(admission).left] == [early]
    assert admission.running == [held]


# -- how much of a prompt a step may compute ---------------------------------------------------------------------------


COSTS = step_costs(s_per_token=1e-3, s_weights=0.01, s_overhead=0.001)


def budget(admission: Admission, now: float = 100.0) -> int:
    return admission.advance(now, COSTS).num_prompt_tokens


def decoding(number: int = 1, **values: Any) -> tuple[Admission, Hosted]:
    admission = an_admission(num_blocks=1000, max_step_tokens=1024)
    for index in range(number):
        sequence = a_sequence(16, 500, arrival_s=index, **values if not index else {})
        admission.add(sequence)
        admission.advance(100.0, COSTS)
        generates(sequence, 1)
    return admission, admission.running[0]


def test_without_an_objective_a_step_is_full() -> None:
    assert budget(an_admission(max_step_tokens=1024)) == 1024
    admission, _ = decoding(3)
    assert budget(admission) == 1024


def test_a_step_takes_no_longer_than_the_next_token_may() -> None:
    admission, sequence = decoding(itl_s=0.3)
    # Of 0.27 s, which is 90 % of the objective, 1 ms is overhead and 1 ms the sequence's own token.
    assert budget(admission) == pytest.approx(268, abs=1)
    assert budget(admission, 99.9) > 300, "it is ahead of its objective"
    generates(sequence, 2)
    assert budget(admission, 100.81 - 0.2) == pytest.approx(198, abs=1), "and not only since its last token"
    assert budget(admission, 200.0) == int((LEAST_STEP * 0.3 - 0.002) / 1e-3), (
        "a step has half of the objective at least"
    )


def test_prompts_get_their_least_share_whatever_the_objective() -> None:
    admission, _ = decoding(itl_s=0.001)
    assert budget(admission) == 1024 // 8
    assert an_admission(max_step_tokens=4).advance(100.0, COSTS).num_prompt_tokens == 4


def test_the_strictest_objective_counts_and_those_of_held_sequences_do_not() -> None:
    admission, sequence = decoding(3, itl_s=0.3)
    admission.running[1].spec = sequence_spec([1] * 16, itl_s=0.5)
    assert budget(admission) == pytest.approx(266, abs=1)
    sequence.num_pins = 1
    assert budget(admission) == pytest.approx(447, abs=1)
    admission.remove(admission.running[1])
    assert budget(admission) == 1024


# -- random events ----------------------------------------------------------------------------------------------------


GROUPS = st.lists(
    st.builds(Group, st.sampled_from(["full", "window", "state", "other"]), st.just(2), st.just(16), st.just(48)),
    min_size=1,
    max_size=3,
)


@given(st.data())
def test_never_is_more_reserved_than_there_is_and_all_of_it_comes_back(data: st.DataObject) -> None:
    """Sequences come, generate and leave, and prefixes are pinned, in any order; every sequence ends in the end."""
    admission = an_admission(
        num_blocks := data.draw(st.integers(8, 40)),
        tuple(data.draw(GROUPS)),
        max_step_tokens=32,
        output_reservation=data.draw(st.sampled_from([0, 1, 16, 64])),
    )
    longest = admission.longest(400)
    known: list[Hosted] = []
    pins: list[int] = []
    now = 0.0

    def moves_on() -> None:
        nonlocal now
        now += 1
        held = [each for each in admission.running if each.is_held]
        preempted = admission.num_preemptions
        change = admission.advance(now, num_uncomputed=data.draw(st.sampled_from([0, 0, 0, 50])))
        admission.check()
        assert not {id(each) for each, _ in change.left} & set(map(id, held)), "a held one has left"
        assert len(change.left) == admission.num_preemptions - preempted
        assert all(each in admission.waiting and name >= 0 for each, name in change.left)
        assert len(admission.running) <= 8
        assert {*map(id, admission.running), *map(id, admission.waiting)} == set(map(id, known))
        for each in admission.running:
            enough = each.is_held or each.num_reserved_tokens >= min(each.most_tokens, each.num_tokens + MARGIN)
            assert enough or each in change.admitted
            assert each.num_reserved_tokens <= each.most_tokens

    def leaves(sequence: Hosted) -> None:
        known.remove(sequence)
        was_running, name = sequence in admission.running, sequence.name
        assert admission.remove(sequence) == (name if was_running else -1)
        assert admission.remove(sequence) == -1

    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["add", "add", "token", "token", "remove", "pin", "unpin", "advance"])):
            case "add" if longest > 2:
                most = data.draw(st.integers(2, longest))
                sequence = a_sequence(
                    data.draw(st.integers(1, most - 1)),
                    most,
                    data.draw(st.sampled_from(Purpose)),
                    arrival_s=now,
                    priority=data.draw(st.integers(0, 1)),
                )
                known.append(sequence)
                admission.add(sequence)
            case "token" if admission.running:
                sequence = data.draw(st.sampled_from(admission.running))
                number = data.draw(st.integers(1, 24))
                generates(sequence, max(0, min(number, sequence.most_tokens - sequence.num_tokens)))
            case "remove" if known:
                leaves(data.draw(st.sampled_from(known)))
            case "pin" if admission.num_free > 0:
                pins.append(data.draw(st.integers(1, admission.num_free)))
                admission.pin(pins[-1], pins[-1])
            case "unpin" if pins:
                admission.pin(0, -pins.pop())
        moves_on()
    while pins:
        admission.pin(0, -pins.pop())
    for _ in range(20 + 10 * len(known)):
        for sequence in list(admission.running):
            if sequence.is_held or sequence.num_tokens >= sequence.most_tokens:
                leaves(sequence)
            else:
                generates(sequence, min(16, sequence.most_tokens - sequence.num_tokens))
        moves_on()
    assert known == []
    assert admission.num_free == num_blocks


def test_pinned_blocks_stay_counted_when_a_sequence_that_shares_them_ends() -> None:
    """Which sequence shares them is not known, so any that ends may have been the last one."""
    admission = an_admission(num_blocks=12)
    sharing, other = a_sequence(80, 96), a_sequence(16, 32)
    admitted(admission, sharing, other)
    admission.pin(1, 5)
    admission.pin(0, 2)
    assert admission.num_free == 12 - 6 - 2 - 1
    admission.remove(other)
    assert admission.num_free == 12 - 6 - 3
    admission.remove(sharing)
    assert admission.num_free == 12 - 7, "all pinned blocks count"
    admission.pin(0, -5)
    assert admission.num_free == 12 - 2
    admission.pin(0, -2)
    assert admission.num_free == 12


def test_it_notices_accounts_that_do_not_agree() -> None:
    admission = an_admission()
    admitted(admission, sequence := a_sequence())
    admission.pin(65, 65)
    with pytest.raises(AssertionError, match="4 blocks too many are reserved"):
        admission.check()
    admission.pin(0, -65)
    sequence.num_reserved_tokens += 16
    with pytest.raises(AssertionError, match="3 blocks of 4 are reserved"):
        admission.check()
    sequence.num_reserved_tokens -= 16
    sequence.name = -1
    with pytest.raises(AssertionError, match="a running sequence has no name"):
        admission.check()
    assert math.isinf(sequence.deadline_s)
