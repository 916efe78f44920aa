"""The scheduler alone: decisions in, decisions out, no model. `compute` books a step as the engine would."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.costs import ITL_TARGET, StepCosts
from engine.core.group_pool import GroupPool
from engine.core.runner import BlockTables, KVSpec, LayerGroup, StateSpec, StepInput
from engine.core.scheduler import LEAST_STEP, Schedule, Scheduler, SchedulerLimits, urgency
from engine.core.sequence import Purpose, Sequence, Status
from tests.support.builders import step_costs
from tests.unit.engine.core.test_engine import make_spec, num_blocks

EOS: frozenset[int] = frozenset()


def make_scheduler(
    num_blocks: int = 64,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    output_reservation: int = 16,
    num_states: int = 0,
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        output_reservation=output_reservation,
    )
    group = LayerGroup(name="all", layers=(0,), block_size=16, num_kv_heads=1, k_dim=1, v_dim=1, dtype="int64")
    states = (StateSpec("sum", (1,), "int64"),) if num_states else ()
    num_state_blocks = (num_states,) if num_states else ()
    return Scheduler(GroupPool(KVSpec((group,), states), (num_blocks, *num_state_blocks)), limits)


KNOWN: dict[int, Sequence] = {}
"""Sequences that tests have added, by key."""


def add(
    scheduler: Scheduler,
    num_tokens: int,
    *,
    purpose: Purpose = Purpose.GENERATE,
    arrival_s: float = 0.0,
    first: int = 1,
    max_tokens: int = 1000,
    **objectives: Any,
) -> Sequence:
    """Queues a sequence of the tokens `first`, `first + 1`, ...; `objectives` are fields of its spec."""
    spec = replace(make_spec(range(first, first + num_tokens), max_tokens), **objectives)
    sequence = Sequence(spec=spec, purpose=purpose, arrival_s=arrival_s)
    scheduler.add(sequence)
    KNOWN[sequence.key] = sequence
    return sequence


def sequences(batch: StepInput) -> list[Sequence]:
    """Whose the parts of a step are."""
    return [KNOWN[part.sequence_key] for part in batch.parts]


def compute(scheduler: Scheduler, batch: StepInput, pinned: Iterable[BlockTables] = ()) -> None:
    for part, sequence in zip(batch.parts, sequences(batch), strict=True):
        sequence.num_computed_tokens += part.num_scheduled_tokens
        sequence.num_kv_tokens = part.num_kv_tokens
        if scheduler.pool.rows is not None:
            scheduler.pool.release(scheduler.blocks.advance(sequence))
        scheduler.blocks.register_computed(sequence)
        if part.sample:
            sequence.append(7, EOS, 10**6)
    scheduler.check(pinned=pinned)


def run_step(scheduler: Scheduler, now: float = 0.0, pinned: Iterable[BlockTables] = ()) -> list[tuple[Sequence, int]]:
    batch = scheduler.schedule(now).step
    compute(scheduler, batch, pinned)
    return [(KNOWN[part.sequence_key], part.num_scheduled_tokens) for part in batch.parts]


def test_the_budget_is_shared_in_order_of_arrival() -> None:
    scheduler = make_scheduler()
    a, b, c = (add(scheduler, 40, first=100 * i) for i in range(3))
    assert run_step(scheduler) == [(a, 40), (b, 24)]
    assert run_step(scheduler) == [(a, 1), (b, 16), (c, 40)]
    assert run_step(scheduler) == [(a, 1), (b, 1), (c, 1)]


def test_decodes_come_before_prompt_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20)
    long = add(scheduler, 100, first=1000)
    run_step(scheduler)
    scheduler.limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=120, output_reservation=16)
    short = add(scheduler, 5)
    assert run_step(scheduler) == [(long, 80), (short, 5)]
    third = add(scheduler, 200, first=2000)
    assert run_step(scheduler) == [(long, 1), (short, 1), (third, 118)]
    assert run_step(scheduler) == [(long, 1), (short, 1), (third, 82)]


def test_a_prompt_in_progress_gives_way_to_decodes_that_came_after_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40)
    long = add(scheduler, 200, first=1000)
    receiver = add(scheduler, 20, purpose=Purpose.RECEIVE)
    assert run_step(scheduler) == [(long, 40)]
    receiver.num_computed_tokens = 20
    receiver.append(5, EOS, 1000)
    scheduler.insert(receiver)
    assert run_step(scheduler) == [(receiver, 1), (long, 39)]


def test_what_a_part_says() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=24)
    sequence = add(scheduler, 40)
    batch = scheduler.schedule(0.0).step
    (part,) = batch.parts
    assert (part.token_ids, part.num_computed_tokens, part.sample) == (tuple(range(1, 25)), 0, False)
    assert (part.block_ids, part.num_kv_tokens) == (sequence.block_ids, (24,))
    compute(scheduler, batch)
    batch = scheduler.schedule(0.0).step
    (part,) = batch.parts
    assert (part.token_ids, part.num_computed_tokens, part.sample) == (tuple(range(25, 41)), 24, True)
    assert (part.block_ids, part.num_kv_tokens) == (sequence.block_ids, (40,))
    compute(scheduler, batch)
    batch = scheduler.schedule(0.0).step
    (part,) = batch.parts
    assert (part.token_ids, part.num_computed_tokens, part.sample) == ((7,), 40, True)


def test_no_more_sequences_than_allowed_run_or_are_reserved() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    received = add(scheduler, 3, purpose=Purpose.RECEIVE)
    a, b, c = (add(scheduler, 3, first=100 * i) for i in range(1, 4))
    schedule = scheduler.schedule(0.0)
    batch, admitted = schedule.step, schedule.admitted
    assert sequences(batch) == [a, b]
    assert admitted == (received, a, b)
    compute(scheduler, batch)
    assert run_step(scheduler) == [(a, 1), (b, 1)]
    scheduler.remove(a, Status.FINISHED)
    assert run_step(scheduler) == [(b, 1), (c, 3)]


def test_nobody_overtakes_the_first_that_waits() -> None:
    scheduler = make_scheduler(8)
    running = add(scheduler, 60)
    large = add(scheduler, 100, first=200)
    small = add(scheduler, 3, first=400)
    assert run_step(scheduler) == [(running, 60)]
    assert run_step(scheduler) == [(running, 1)]
    assert [large.status, small.status] == [Status.WAITING, Status.WAITING]
    scheduler.remove(running, Status.FINISHED)
    assert run_step(scheduler) == [(large, 64)]


def test_waiting_for_room_is_told_from_waiting_for_ones_turn() -> None:
    scheduler = make_scheduler(8)
    running = add(scheduler, 60)
    assert run_step(scheduler, 1.0) == [(running, 60)]
    large, small = add(scheduler, 100, first=200), add(scheduler, 3, first=400)
    large.arrival_s, small.arrival_s = 2.0, 4.5
    run_step(scheduler, 4.0)
    assert large.blocked_s == small.blocked_s == 0.0, "nobody knew yet"
    run_step(scheduler, 5.0)
    assert (large.blocked_s, small.blocked_s) == (1.0, 0.5)
    scheduler.remove(running, Status.FINISHED)
    assert run_step(scheduler, 7.0) == [(large, 64)]
    assert (large.scheduled_s, large.blocked_s) == (7.0, 3.0)
    assert small.blocked_s == 2.5, "behind it"
    assert run_step(scheduler, 8.0) == [(large, 36)]
    assert small.blocked_s == 2.5, "then the budget was used up, which is no lack of room"
    assert run_step(scheduler, 9.0) == [(large, 1)]
    assert small.blocked_s == 3.5, "now it is the first, and the other has all blocks"
    assert large.blocked_s == 3.0


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "reservation", "num_blocks"),
    [
        (16, 1000, 0, 1),
        (17, 1000, 0, 2),
        (16, 1000, 16, 2),
        (16, 1000, 17, 3),
        (16, 3, 512, 2),
        (10, 6, 512, 1),
        (100, 1000, 10_000, 64),
    ],
)
def test_room_for_the_expected_answer_is_taken_up_front(
    num_tokens: int, max_tokens: int, reservation: int, num_blocks: int
) -> None:
    scheduler = make_scheduler(output_reservation=reservation)
    sequence = add(scheduler, num_tokens, max_tokens=max_tokens)
    scheduler.schedule(0.0)
    assert len(sequence.block_ids[0]) == num_blocks


def test_a_prefill_takes_no_room_for_an_answer() -> None:
    scheduler = make_scheduler(output_reservation=512)
    sequence = add(scheduler, 32, purpose=Purpose.PREFILL)
    scheduler.schedule(0.0)
    assert num_blocks(sequence) == 2


def test_a_block_exactly_full_needs_the_next_one_for_the_next_token() -> None:
    scheduler = make_scheduler(output_reservation=0)
    sequence = add(scheduler, 16)
    run_step(scheduler)
    assert num_blocks(sequence) == 1
    assert len(scheduler.pool.keys()) == 1
    run_step(scheduler)
    assert num_blocks(sequence) == 2
    assert len(scheduler.pool.keys()) == 1


def test_reservations_need_blocks_and_no_budget() -> None:
    scheduler = make_scheduler(8, max_num_batched_tokens=16)
    prompt = add(scheduler, 40, max_tokens=1)
    receiver = add(scheduler, 30, purpose=Purpose.RECEIVE, first=100, max_tokens=2)
    schedule = scheduler.schedule(4.0)
    batch, admitted = schedule.step, schedule.admitted
    assert sequences(batch) == [prompt]
    assert admitted == (prompt, receiver)
    assert (receiver.status, receiver.scheduled_s, num_blocks(receiver)) == (Status.RESERVED, 4.0, 2)
    second = add(scheduler, 50, purpose=Purpose.RECEIVE, first=300)
    compute(scheduler, batch)
    schedule = scheduler.schedule(5.0)
    batch, admitted = schedule.step, schedule.admitted
    assert admitted == ()
    assert (second.status, second.block_ids) == (Status.WAITING, ())


def test_an_inserted_sequence_decodes_in_the_next_step() -> None:
    scheduler = make_scheduler()
    receiver = add(scheduler, 20, purpose=Purpose.RECEIVE)
    scheduler.schedule(0.0)
    assert run_step(scheduler) == []
    receiver.num_computed_tokens = 20
    receiver.append(5, EOS, 1000)
    scheduler.insert(receiver)
    batch = scheduler.schedule(0.0).step
    (part,) = batch.parts
    assert (part.token_ids, part.num_computed_tokens) == ((5,), 20)
    with pytest.raises(AssertionError, match="RUNNING"):
        scheduler.insert(receiver)


def test_the_youngest_gives_way_and_waits_in_front() -> None:
    scheduler = make_scheduler(4, output_reservation=0)
    old = add(scheduler, 16, arrival_s=1.0)
    young = add(scheduler, 32, arrival_s=2.0, first=100)
    assert run_step(scheduler) == [(old, 16), (young, 32)]
    waiting = add(scheduler, 60, arrival_s=3.0, first=200)
    # One block is left and both want one. The elder is served first.
    assert run_step(scheduler) == [(old, 1)]
    assert scheduler.num_preemptions == 1
    assert list(scheduler.waiting) == [young, waiting]
    assert (young.num_computed_tokens, young.block_ids, young.status) == (0, (), Status.WAITING)
    assert young.num_tokens == 33, "what it has generated is kept"


def test_of_several_it_is_the_youngest_by_arrival() -> None:
    scheduler = make_scheduler(6, max_num_batched_tokens=120, output_reservation=0)
    youngest = add(scheduler, 48, arrival_s=9.0, first=500)
    old = add(scheduler, 16, arrival_s=1.0)
    middle = add(scheduler, 32, arrival_s=5.0, first=200)
    run_step(scheduler)
    assert run_step(scheduler) == [(old, 1), (middle, 1)]
    assert list(scheduler.waiting) == [youngest]


def test_a_preempted_sequence_finds_what_the_cache_kept() -> None:
    scheduler = make_scheduler(6, output_reservation=0)
    old = add(scheduler, 48, arrival_s=1.0)
    young = add(scheduler, 16, arrival_s=2.0, first=100)
    run_step(scheduler)
    scheduler._preempt(young)
    batch = scheduler.schedule(0.0).step
    assert [
        (KNOWN[part.sequence_key], part.num_computed_tokens, part.num_scheduled_tokens) for part in batch.parts
    ] == [
        (old, 48, 1),
        (young, 16, 1),
    ]
    assert young.num_cached_tokens == 0, "a hit of its own blocks is none for the client"


def prefill(scheduler: Scheduler, num_tokens: int, first: int) -> Sequence:
    """From its arrival to its end."""
    sequence = add(scheduler, num_tokens, first=first, purpose=Purpose.PREFILL)
    run_step(scheduler)
    scheduler.remove(sequence, Status.FINISHED)
    return sequence


def test_what_a_sequence_finds_is_kept_longer() -> None:
    scheduler = make_scheduler(6)
    scheduler.pool.pools[0]._cached.margin = 6.0
    beginning = prefill(scheduler, 48, first=1)
    prefill(scheduler, 49, first=1)
    prefill(scheduler, 32, first=1000)
    taken = scheduler.pool.allocate((3,))
    assert taken is not None
    assert scheduler.pool.num_matching_tokens(beginning.block_keys) == 48, "though it was used before the last one"


def test_what_a_sequence_finds_is_not_kept_longer_before_it_has_room() -> None:
    scheduler = make_scheduler(6)
    scheduler.pool.pools[0]._cached.margin = 6.0
    beginning = prefill(scheduler, 48, first=1)
    other = prefill(scheduler, 48, first=1000)
    read = tuple(tuple(table) for table in scheduler.pool.match(other.block_keys).tables)
    scheduler.pool.acquire(read)
    refused = add(scheduler, 49, first=1, purpose=Purpose.PREFILL)
    assert run_step(scheduler, pinned=[read]) == []
    scheduler.remove(refused, Status.FINISHED)
    scheduler.pool.release(read)
    taken = scheduler.pool.allocate((3,))
    assert taken is not None
    assert scheduler.pool.num_matching_tokens(beginning.block_keys) == 0


def test_alone_it_sits_a_step_out_while_transfers_hold_the_rest() -> None:
    scheduler = make_scheduler(4, output_reservation=0)
    sequence = add(scheduler, 32)
    receiver = add(scheduler, 32, purpose=Purpose.RECEIVE, first=100)
    assert run_step(scheduler) == [(sequence, 32)]
    assert run_step(scheduler) == []
    assert sequence.status is Status.RUNNING
    scheduler.remove(receiver, Status.FINISHED)
    assert run_step(scheduler) == [(sequence, 1)]


def test_a_prefill_is_never_the_one_that_gives_way() -> None:
    scheduler = make_scheduler(6, max_num_batched_tokens=49, output_reservation=0)
    old = add(scheduler, 16, arrival_s=1.0)
    young = add(scheduler, 16, arrival_s=2.0, first=100)
    prefill = add(scheduler, 64, purpose=Purpose.PREFILL, arrival_s=3.0, first=200)
    assert run_step(scheduler) == [(old, 16), (young, 16), (prefill, 17)]
    scheduler.limits = SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=2, output_reservation=0
    )  # so that the prefill stays in progress
    table = prefill.block_ids[0]
    assert run_step(scheduler) == [(old, 1), (prefill, 1)]
    assert (young.status, scheduler.num_preemptions) == (Status.WAITING, 1)
    assert prefill.block_ids[0] == table


def test_with_nobody_to_give_way_but_prefills_it_sits_a_step_out() -> None:
    scheduler = make_scheduler(4, max_num_batched_tokens=50, output_reservation=0)
    sequence = add(scheduler, 32, arrival_s=2.0)
    prefill = add(scheduler, 30, purpose=Purpose.PREFILL, arrival_s=3.0, first=100)
    assert run_step(scheduler) == [(sequence, 32), (prefill, 18)]
    assert run_step(scheduler) == [(prefill, 12)]
    assert (sequence.status, scheduler.num_preemptions) == (Status.RUNNING, 0)
    assert num_blocks(sequence) == 2, "it keeps what it has"
    scheduler.remove(prefill, Status.HELD)
    assert scheduler.schedule(0.0) == Schedule(StepInput(()))
    scheduler.remove(prefill, Status.FINISHED)
    assert run_step(scheduler) == [(sequence, 1)]


def test_pinned_blocks_count_as_held() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 20)
    run_step(scheduler)
    pinned = [sequence.block_ids]
    scheduler.pool.acquire(sequence.block_ids)
    scheduler.check(pinned=pinned)
    with pytest.raises(AssertionError, match="more or fewer references than holders"):
        scheduler.check()
    scheduler.remove(sequence, Status.FINISHED)
    scheduler.check(pinned=pinned)
    with pytest.raises(AssertionError, match="3 blocks in use, 0 held"):
        scheduler.check()


def test_states_are_given_and_taken_with_the_blocks() -> None:
    scheduler = make_scheduler(num_states=4)
    a, b, c = (add(scheduler, 20, first=100 * i) for i in range(1, 4))
    assert [sequence for sequence, _ in run_step(scheduler)] == [a, b]
    assert sorted(a.block_ids[-1] + b.block_ids[-1]) == [0, 1, 2, 3]
    scheduler.remove(a, Status.FINISHED)
    assert a.block_ids == ()
    assert (c, 16) in run_step(scheduler), "up to its last full block"


def test_a_held_sequence_keeps_its_blocks_until_given_back() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 20, purpose=Purpose.PREFILL)
    run_step(scheduler)
    scheduler.remove(sequence, Status.HELD)
    assert scheduler.pool.counts().in_use == 2
    scheduler.check([sequence])
    with pytest.raises(AssertionError, match="2 blocks in use, 0 held"):
        scheduler.check()
    scheduler.remove(sequence, Status.FINISHED)
    scheduler.check()


def test_a_preempted_sequence_whose_kv_was_received_waits_for_the_budget_like_any_other() -> None:
    """It is computed here now: admitting it with no budget left would schedule it with nothing to compute."""
    scheduler = make_scheduler(max_num_batched_tokens=32)
    first, second = (add(scheduler, 40, purpose=Purpose.RECEIVE, first=100 * i) for i in range(2))
    for sequence in (first, second):
        sequence.was_admitted = True  # and preempted since
    assert run_step(scheduler) == [(first, 32)]
    assert second.status is Status.WAITING
    assert run_step(scheduler) == [(first, 8), (second, 24)]


# -- who comes first ---------------------------------------------------------------------------------------------------

COSTS = step_costs(s_overhead=1.0, s_per_token=0.125)
"""40 tokens alone take 6 s, 64 take 9 s."""


def with_costs(costs: StepCosts = COSTS, **limits: int) -> Scheduler:
    scheduler = make_scheduler(**limits)
    scheduler.costs = costs
    return scheduler


def begun(scheduler: Scheduler, num_outputs: int, first_token_s: float, **objectives: Any) -> Sequence:
    """A sequence of 10 tokens that decodes, and has begun to answer at `first_token_s`."""
    sequence = add(scheduler, 10, first=9000, **objectives)
    run_step(scheduler)
    sequence.first_token_s = first_token_s
    while sequence.num_output_tokens < num_outputs:
        run_step(scheduler)
    return sequence


def test_the_prompt_whose_first_token_is_due_soonest_comes_first() -> None:
    scheduler = with_costs()
    late, none, soon = (add(scheduler, 40, first=100 * i, arrival_s=i) for i in range(3))
    late.spec, soon.spec = replace(late.spec, ttft_s=90.0), replace(soon.spec, ttft_s=30.0)
    assert run_step(scheduler, 2.0) == [(soon, 40), (late, 24)]
    assert run_step(scheduler, 11.0) == [(soon, 1), (late, 16), (none, 40)]


def test_a_deadline_counts_from_the_arrival() -> None:
    scheduler = with_costs()
    later = add(scheduler, 40, ttft_s=20.0, arrival_s=5.0)
    sooner = add(scheduler, 40, ttft_s=24.0, arrival_s=0.0, first=100)
    assert run_step(scheduler, 5.0) == [(sooner, 40), (later, 24)]


def test_equal_deadlines_are_served_in_order_of_arrival() -> None:
    scheduler = with_costs()
    second = add(scheduler, 40, ttft_s=40.0, arrival_s=5.0)
    first = add(scheduler, 40, ttft_s=45.0, arrival_s=0.0, first=100)
    assert run_step(scheduler, 5.0) == [(first, 40), (second, 24)]


@pytest.mark.parametrize(("ttft_s", "gives_way"), [(6.0, False), (5.9, True)])
def test_who_cannot_make_its_deadline_even_alone_gives_way(ttft_s: float, gives_way: bool) -> None:
    scheduler = with_costs()
    hopeless = add(scheduler, 40, ttft_s=ttft_s)
    other = add(scheduler, 40, ttft_s=100.0, first=100)
    order = [other, hopeless] if gives_way else [hopeless, other]
    assert run_step(scheduler) == [(order[0], 40), (order[1], 24)]
    assert run_step(scheduler) == [(order[0], 1), (order[1], 16)], "it comes later, when there is time"


def test_who_gives_way_goes_before_nobody_of_its_priority_and_after_those_without_a_deadline() -> None:
    scheduler = with_costs()
    worse = add(scheduler, 40, ttft_s=2.0)
    bad = add(scheduler, 40, ttft_s=1.0, first=100)
    patient = add(scheduler, 20, first=200, arrival_s=1.0)
    assert run_step(scheduler, 1.0) == [(patient, 20), (bad, 40), (worse, 4)]


def test_a_prompt_in_progress_needs_only_its_rest() -> None:
    """Of 100 tokens 64 are computed: 36 take 5.5 s, and would have taken 14.5 s from the beginning."""
    scheduler = with_costs()
    begun_one = add(scheduler, 100, ttft_s=15.0)
    assert run_step(scheduler) == [(begun_one, 64)]
    other = add(scheduler, 40, ttft_s=20.0, first=200, arrival_s=9.0)
    assert run_step(scheduler, 9.0) == [(begun_one, 36), (other, 28)]


@pytest.mark.parametrize(("ttft_s", "gives_way"), [(1.5, False), (1.4, True)])
def test_a_prompt_that_waits_needs_only_what_is_not_cached(ttft_s: float, gives_way: bool) -> None:
    """Of 100 tokens 96 are cached: four take 1.5 s, and all would have taken 14.5 s."""
    scheduler = with_costs()
    past = add(scheduler, 100)
    assert [run_step(scheduler), run_step(scheduler)] == [[(past, 64)], [(past, 36)]]
    scheduler.remove(past, Status.FINISHED)
    follower = add(scheduler, 100, ttft_s=ttft_s)
    other = add(scheduler, 60, ttft_s=100.0, first=200)
    assert run_step(scheduler) == ([(other, 60), (follower, 4)] if gives_way else [(follower, 4), (other, 60)])


def key_of(scheduler: Scheduler, sequence: Sequence, now: float) -> tuple[int, bool, float, float]:
    return urgency(sequence, now, scheduler.costs, scheduler.blocks, scheduler.limits.max_num_batched_tokens)


def test_who_waits_for_the_prefix_that_another_computes_can_make_its_deadline_then() -> None:
    scheduler = with_costs(max_num_seqs=1)
    first = add(scheduler, 100)
    assert run_step(scheduler) == [(first, 64)]
    follower = add(scheduler, 100, ttft_s=12.0)
    other = add(scheduler, 40, ttft_s=90.0, first=200)
    assert key_of(scheduler, follower, 1.0) < key_of(scheduler, other, 1.0), "64 of its tokens are there"
    assert key_of(scheduler, follower, 9.0) > key_of(scheduler, other, 9.0), "36 take 5.5 s"
    assert run_step(scheduler, 9.0) == [(first, 36)]
    assert key_of(scheduler, follower, 9.0) < key_of(scheduler, other, 9.0), "all but four are there"


def test_time_makes_a_deadline_hopeless() -> None:
    for now, first in ((3.0, 0), (3.1, 1)):
        scheduler = with_costs()
        both = [add(scheduler, 40, ttft_s=9.0), add(scheduler, 40, ttft_s=50.0, first=100)]
        assert run_step(scheduler, now)[0] == (both[first], 40)


def test_kv_that_is_computed_elsewhere_is_never_hopeless() -> None:
    scheduler = with_costs(max_num_seqs=1)
    add(scheduler, 10, ttft_s=50.0, arrival_s=0.0)
    receiver = add(scheduler, 60, purpose=Purpose.RECEIVE, ttft_s=1.0, first=100)
    assert scheduler.schedule(0.5).admitted == (receiver,)


def test_priorities_come_before_deadlines() -> None:
    scheduler = with_costs()
    soon = add(scheduler, 40, ttft_s=10.0)
    low = add(scheduler, 5, ttft_s=8.0, priority=-1, first=100)
    hopeless = add(scheduler, 20, ttft_s=1.0, priority=1, first=200)
    high = add(scheduler, 5, priority=1, first=300)
    assert run_step(scheduler) == [(high, 5), (hopeless, 20), (soon, 39)]
    assert run_step(scheduler) == [(high, 1), (hopeless, 1), (soon, 1), (low, 5)]


def test_who_must_be_computed_again_comes_first_of_its_priority() -> None:
    scheduler = with_costs()
    again = begun(scheduler, 3, first_token_s=1.0, ttft_s=1.0)
    scheduler._preempt(again)
    urgent = add(scheduler, 40, ttft_s=30.0, first=100)
    high = add(scheduler, 4, priority=1, first=200)
    assert run_step(scheduler, 20.0) == [(high, 4), (again, 13), (urgent, 40)]


def test_a_sequence_brought_here_with_a_part_of_its_answer_comes_first() -> None:
    """Its worker has died; its client has been waiting since the last token."""
    scheduler = with_costs()
    fresh = add(scheduler, 40, ttft_s=10.0)
    brought = add(scheduler, 40, num_prompt_tokens=30, first=100, arrival_s=3.0)
    assert run_step(scheduler, 3.0) == [(brought, 40), (fresh, 24)]


def test_the_youngest_of_the_least_priority_gives_way() -> None:
    scheduler = make_scheduler(4, output_reservation=0)
    cheap = add(scheduler, 32, arrival_s=1.0, first=100)
    dear = add(scheduler, 32, arrival_s=9.0)
    assert run_step(scheduler) == [(cheap, 32), (dear, 32)]
    dear.spec = replace(dear.spec, priority=2)
    assert run_step(scheduler) == [(dear, 1)], "the cheap one grows first, finds no block, and goes"
    assert scheduler.waiting == [cheap]


# -- how much beside who decodes ---------------------------------------------------------------------------------------


def step_s(scheduler: Scheduler, batch: StepInput) -> float:
    size = batch.size()
    return scheduler.costs.step_s(size.num_new, size.num_pairs, size.num_decoding, size.num_kv_tokens)


@pytest.mark.parametrize(
    ("num_outputs", "now", "allowed_s"),
    [
        (1, 10.0, ITL_TARGET * 4),  # the next is due 4 s after the first
        (2, 12.0, ITL_TARGET * 8 - 2),  # 6 s ahead of its objective
        (2, 15.0, ITL_TARGET * 8 - 5),
        (2, 18.0, LEAST_STEP * 4),  # behind: half the objective is left to prompts
        (2, 90.0, LEAST_STEP * 4),
    ],
)
def test_a_chunk_is_as_long_as_lets_who_decodes_keep_its_objective(
    num_outputs: int, now: float, allowed_s: float
) -> None:
    scheduler = with_costs(max_num_batched_tokens=40)
    begun(scheduler, num_outputs, first_token_s=10.0, itl_s=4.0)
    prompt = add(scheduler, 500, first=20_000)
    batch = scheduler.schedule(now).step
    assert sequences(batch)[1:] == [prompt]
    assert step_s(scheduler, batch) <= allowed_s < step_s(scheduler, batch) + 2 * COSTS.s_per_token
    assert batch.parts[1].num_scheduled_tokens > 40 // 8


def test_a_chunk_grows_with_what_who_decodes_has_to_spare() -> None:
    chunks = []
    for num_outputs in (1, 2, 3, 4):
        scheduler = with_costs(max_num_batched_tokens=150)
        begun(scheduler, num_outputs, first_token_s=10.0, itl_s=4.0)
        prompt = add(scheduler, 500, first=20_000)
        ((_, _), (sequence, num_tokens)) = run_step(scheduler, 10.0)
        assert sequence is prompt
        chunks.append(num_tokens)
    steps = [after - before for before, after in itertools.pairwise(chunks)]
    assert steps == pytest.approx([ITL_TARGET * 4 / COSTS.s_per_token] * 3, abs=1.5)


def test_prompts_get_an_eighth_of_the_tokens_whatever_becomes_of_who_decodes() -> None:
    """The overhead of a step alone breaks the objective."""
    scheduler = with_costs()
    decoding = begun(scheduler, 1, first_token_s=0.0, itl_s=0.5)
    small = add(scheduler, 3, first=500)
    large, waiting = (add(scheduler, 100, first=600 + 200 * i) for i in range(2))
    assert run_step(scheduler, 30.0) == [(decoding, 1), (small, 3), (large, 4)]
    assert run_step(scheduler, 60.0) == [(decoding, 1), (small, 1), (large, 62 // 8)]
    assert waiting.status is Status.WAITING


def test_several_prompts_share_what_a_step_has_left() -> None:
    """25 tokens fit beside who decodes."""
    scheduler = with_costs()
    decoding = begun(scheduler, 1, first_token_s=10.0, itl_s=(1 + 26 * 0.125) / ITL_TARGET + 1e-6)
    small = add(scheduler, 10, first=500)
    large = add(scheduler, 100, first=600)
    assert run_step(scheduler, 10.0) == [(decoding, 1), (small, 10), (large, 15)]


def test_the_hardest_objective_of_who_decodes_counts() -> None:
    scheduler = with_costs()
    begun(scheduler, 1, first_token_s=10.0, itl_s=100.0)
    hard = add(scheduler, 5, first=300, itl_s=4.0)
    run_step(scheduler, 10.0)
    add(scheduler, 5, first=400)
    run_step(scheduler, 10.0)
    hard.first_token_s = 10.0 - ITL_TARGET * 4  # so that its third token is due at 13.6
    add(scheduler, 500, first=20_000)
    batch = scheduler.schedule(10.0).step
    assert len(batch.parts) == 4
    assert 3.3 < step_s(scheduler, batch) <= ITL_TARGET * 4


def test_what_hides_behind_the_weights_is_free() -> None:
    scheduler = with_costs(replace(COSTS, s_weights=3.0))
    decoding = begun(scheduler, 1, first_token_s=0.0, itl_s=0.5)
    prompt = add(scheduler, 100, first=600)
    assert run_step(scheduler, 90.0) == [(decoding, 1), (prompt, 23)], "24 tokens take as long as the weights"


def test_what_decodes_leaves_less_room() -> None:
    costs = replace(COSTS, s_per_sequence=0.5, s_per_kv_token=0.0625)
    scheduler = with_costs(costs)
    begun(scheduler, 1, first_token_s=10.0, itl_s=4.0)
    add(scheduler, 500, first=20_000)
    batch = scheduler.schedule(10.0).step
    # 11 tokens of context and one sequence: 1.1875 s of the 3.6
    assert [part.num_scheduled_tokens for part in batch.parts] == [
        1,
        int((3.6 - 1 - 0.5 - 11 * 0.0625 - 0.125) / 0.125),
    ]


def test_a_later_chunk_is_shorter_since_its_tokens_attend_to_more() -> None:
    scheduler = with_costs(replace(COSTS, s_per_pair=0.0005))
    begun(scheduler, 1, first_token_s=10.0, itl_s=6.0)
    prompt = add(scheduler, 500, first=20_000)
    chunks = []
    for number in range(4):  # each token comes when it is due
        batch = scheduler.schedule(10.0 + number * ITL_TARGET * 6).step
        assert step_s(scheduler, batch) <= ITL_TARGET * 6 + 1e-9
        chunks.append(batch.parts[1].num_scheduled_tokens)
        compute(scheduler, batch)
    assert chunks == sorted(set(chunks), reverse=True)
    assert prompt.num_computed_tokens == sum(chunks)


def test_an_answer_that_was_begun_elsewhere_has_gained_nothing_there() -> None:
    """It brought 50 tokens: they came when they came. Here the second is due."""
    scheduler = with_costs(max_num_batched_tokens=60)
    brought = add(scheduler, 60, num_prompt_tokens=10, itl_s=4.0)
    assert run_step(scheduler) == [(brought, 60)]
    brought.first_token_s = 10.0
    add(scheduler, 500, first=20_000)
    batch = scheduler.schedule(10.0).step
    assert step_s(scheduler, batch) == pytest.approx(ITL_TARGET * 4, abs=COSTS.s_per_token)


def test_a_prompts_last_token_is_no_sequence_that_decodes() -> None:
    """Nothing of it is late: the others' chunk is as long as ever."""
    scheduler = with_costs()
    prompt = add(scheduler, 65, itl_s=0.5)
    assert run_step(scheduler) == [(prompt, 64)]
    other = add(scheduler, 200, first=500)
    assert run_step(scheduler, 90.0) == [(prompt, 1), (other, 63)]


def test_without_an_objective_who_decodes_holds_up_no_prompt() -> None:
    scheduler = with_costs(replace(COSTS, s_per_token=1e9))
    decoding = begun(scheduler, 1, first_token_s=0.0)
    prompt = add(scheduler, 100, first=600)
    assert run_step(scheduler, 90.0) == [(decoding, 1), (prompt, 63)]


ARRIVALS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 150)), min_size=1, max_size=12)


@given(ARRIVALS, st.integers(8, 100), st.integers(1, 8), st.sampled_from([COSTS, replace(COSTS, s_per_token=1e6)]))
def test_without_objectives_it_is_first_come_first_served(
    arrivals: list[tuple[int, int]], budget: int, max_num_seqs: int, costs: StepCosts
) -> None:
    """Whatever steps cost: those who decode, then as much of the eldest prompts as the budget holds."""
    scheduler = with_costs(costs, num_blocks=1000, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    queue: list[tuple[Sequence, int]] = []
    decoding: list[Sequence] = []
    for now in range(20):
        for number, (step, num_tokens) in enumerate(arrivals):
            if step == now:
                sequence = add(scheduler, num_tokens, arrival_s=float(now), first=1000 * number)
                queue.append((sequence, num_tokens))
        expected = [(sequence, 1) for sequence in decoding][:budget]
        left = budget - len(expected)
        rest = []
        for place, (sequence, num_missing) in enumerate(queue):
            num_tokens = min(left, num_missing) if len(decoding) + place < max_num_seqs else 0
            left -= num_tokens
            if num_tokens:
                expected.append((sequence, num_tokens))
            if num_tokens < num_missing:
                rest.append((sequence, num_missing - num_tokens))
        scheduled = run_step(scheduler, float(now))
        assert sorted(scheduled, key=str) == sorted(expected, key=str)
        assert scheduled[len(decoding) :] == expected[len(decoding) :]
        decoding += [sequence for sequence, _ in queue if sequence not in {waiting for waiting, _ in rest}]
        queue = rest
        # Now and then one is done.
        if now % 3 == 2 and decoding:
            scheduler.remove(decoding.pop(0), Status.FINISHED)


# -- room for the answer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "expected", "num_blocks"),
    [
        (16, 1000, 0, 2),  # nobody says: the worker's own 16
        (16, 1000, 1, 2),
        (16, 1000, 33, 4),
        (16, 8, 33, 2),  # no more than it may answer
        (15, 1000, 1, 1),
        (100, 10_000, 9000, 64),  # all there are
    ],
)
def test_room_is_taken_for_as_many_tokens_as_its_answer_is_expected_to_have(
    num_tokens: int, max_tokens: int, expected: int, num_blocks: int
) -> None:
    scheduler = make_scheduler(output_reservation=16)
    sequence = add(scheduler, num_tokens, max_tokens=max_tokens, num_expected_tokens=expected)
    scheduler.schedule(0.0)
    assert len(sequence.block_ids[0]) == num_blocks


@pytest.mark.parametrize(("num_answered", "num_blocks"), [(8, 3), (24, 3), (40, 4)])
def test_what_is_answered_already_is_a_part_of_what_was_expected(num_answered: int, num_blocks: int) -> None:
    """16 tokens of prompt and 32 expected: placed again, it needs room for what is left of them, and none if longer."""
    scheduler = make_scheduler()
    sequence = add(scheduler, 16 + num_answered, num_prompt_tokens=16, num_expected_tokens=32)
    scheduler.schedule(0.0)
    assert len(sequence.block_ids[0]) == num_blocks


@pytest.mark.parametrize(
    ("budget", "length", "expected"),
    [(2048, 256, 8), (512, 256, 2), (300, 256, 1), (100, 256, 1), (50, 16, 3), (96, 4, 20), (16, 1, 8)],
)
def test_as_many_sequences_run_as_a_step_has_room_for_canvases(budget: int, length: int, expected: int) -> None:
    """Each takes a token and a canvas, and the last one may begin while a token is left."""
    limits = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=budget, output_reservation=16)
    found = limits.with_canvases(length)
    assert (found.max_num_seqs, found.canvas_length, found.max_draft_tokens) == (expected, length, 0)
    assert (expected - 1) * (length + 1) < budget
