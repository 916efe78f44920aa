"""The scheduler alone: decisions in, decisions out, no model. `compute` books a step as the engine would."""

from __future__ import annotations

import pytest

from baton.engine.block_pool import BlockPool
from baton.engine.scheduler import Batch, Scheduler, SchedulerLimits
from baton.engine.sequence import Purpose, Sequence, Status
from tests.unit.test_engine import make_spec

EOS: frozenset[int] = frozenset()


def make_scheduler(
    num_blocks: int = 64,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    output_reservation: int = 16,
    num_state_slots: int = 0,
) -> Scheduler:
    limits = SchedulerLimits(16, max_num_seqs, max_num_batched_tokens, output_reservation, num_state_slots)
    return Scheduler(BlockPool(num_blocks), limits)


def add(
    scheduler: Scheduler,
    num_tokens: int,
    *,
    purpose: Purpose = Purpose.GENERATE,
    arrival_s: float = 0.0,
    first: int = 1,
    max_tokens: int = 1000,
) -> Sequence:
    """Queues a sequence of the tokens `first`, `first + 1`, ..."""
    sequence = Sequence(make_spec(range(first, first + num_tokens), max_tokens), purpose, arrival_s)
    scheduler.add(sequence)
    return sequence


def compute(scheduler: Scheduler, batch: Batch) -> None:
    for part in batch:
        part.sequence.num_computed_tokens += part.num_tokens
        scheduler.register_computed_blocks(part.sequence)
        if part.sample:
            part.sequence.append(7, EOS, 10**6)
    scheduler.check()


def run_step(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    batch, _ = scheduler.schedule(0.0)
    compute(scheduler, batch)
    return [(part.sequence, part.num_tokens) for part in batch]


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
    scheduler.limits = SchedulerLimits(16, 8, 120, 16, 0)
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
    (part,), _ = scheduler.schedule(0.0)
    assert (part.token_ids, part.start, part.sample) == (tuple(range(1, 25)), 0, False)
    assert part.block_table == tuple(sequence.block_table[:2])
    compute(scheduler, (part,))
    (part,), _ = scheduler.schedule(0.0)
    assert (part.token_ids, part.start, part.sample) == (tuple(range(25, 41)), 24, True)
    assert part.block_table == tuple(sequence.block_table[:3])
    compute(scheduler, (part,))
    (part,), _ = scheduler.schedule(0.0)
    assert (part.token_ids, part.start, part.sample) == ((7,), 40, True)


def test_no_more_sequences_than_allowed_run_or_are_reserved() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    received = add(scheduler, 3, purpose=Purpose.RECEIVE)
    a, b, c = (add(scheduler, 3, first=100 * i) for i in range(1, 4))
    batch, admitted = scheduler.schedule(0.0)
    assert [part.sequence for part in batch] == [a, b]
    assert admitted == [received, a, b]
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
    assert len(sequence.block_table) == num_blocks


def test_a_prefill_takes_no_room_for_an_answer() -> None:
    scheduler = make_scheduler(output_reservation=512)
    sequence = add(scheduler, 32, purpose=Purpose.PREFILL)
    scheduler.schedule(0.0)
    assert len(sequence.block_table) == 2


def test_a_block_exactly_full_needs_the_next_one_for_the_next_token() -> None:
    scheduler = make_scheduler(output_reservation=0)
    sequence = add(scheduler, 16)
    run_step(scheduler)
    assert len(sequence.block_table) == 1
    assert len(scheduler.pool.keys()) == 1
    run_step(scheduler)
    assert len(sequence.block_table) == 2
    assert len(scheduler.pool.keys()) == 1


def test_reservations_need_blocks_and_no_budget() -> None:
    scheduler = make_scheduler(8, max_num_batched_tokens=16)
    prompt = add(scheduler, 40, max_tokens=1)
    receiver = add(scheduler, 30, purpose=Purpose.RECEIVE, first=100, max_tokens=2)
    batch, admitted = scheduler.schedule(4.0)
    assert [part.sequence for part in batch] == [prompt]
    assert admitted == [prompt, receiver]
    assert (receiver.status, receiver.scheduled_s, len(receiver.block_table)) == (Status.RESERVED, 4.0, 2)
    second = add(scheduler, 50, purpose=Purpose.RECEIVE, first=300)
    compute(scheduler, batch)
    batch, admitted = scheduler.schedule(5.0)
    assert admitted == []
    assert (second.status, second.block_table) == (Status.WAITING, [])


def test_an_inserted_sequence_decodes_in_the_next_step() -> None:
    scheduler = make_scheduler()
    receiver = add(scheduler, 20, purpose=Purpose.RECEIVE)
    scheduler.schedule(0.0)
    assert run_step(scheduler) == []
    receiver.num_computed_tokens = 20
    receiver.append(5, EOS, 1000)
    scheduler.insert(receiver)
    (part,), _ = scheduler.schedule(0.0)
    assert (part.token_ids, part.start) == ((5,), 20)
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
    assert (young.num_computed_tokens, young.block_table, young.status) == (0, [], Status.WAITING)
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
    batch, _ = scheduler.schedule(0.0)
    assert [(part.sequence, part.start, part.num_tokens) for part in batch] == [(old, 48, 1), (young, 16, 1)]
    assert young.num_cached_tokens == 0, "a hit of its own blocks is none for the client"


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
    scheduler.limits = SchedulerLimits(16, 8, 2, 0, 0)  # so that the prefill stays in progress
    table = list(prefill.block_table)
    assert run_step(scheduler) == [(old, 1), (prefill, 1)]
    assert (young.status, scheduler.num_preemptions) == (Status.WAITING, 1)
    assert prefill.block_table == table


def test_with_nobody_to_give_way_but_prefills_it_sits_a_step_out() -> None:
    scheduler = make_scheduler(4, max_num_batched_tokens=50, output_reservation=0)
    sequence = add(scheduler, 32, arrival_s=2.0)
    prefill = add(scheduler, 30, purpose=Purpose.PREFILL, arrival_s=3.0, first=100)
    assert run_step(scheduler) == [(sequence, 32), (prefill, 18)]
    assert run_step(scheduler) == [(prefill, 12)]
    assert (sequence.status, scheduler.num_preemptions) == (Status.RUNNING, 0)
    assert len(sequence.block_table) == 2, "it keeps what it has"
    scheduler.remove(prefill, Status.HELD)
    assert scheduler.schedule(0.0) == ((), [])
    scheduler.remove(prefill, Status.FINISHED)
    assert run_step(scheduler) == [(sequence, 1)]


def test_pinned_blocks_count_as_held() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 20)
    run_step(scheduler)
    pinned = list(sequence.block_table)
    scheduler.pool.acquire(pinned)
    scheduler.check(pinned=pinned)
    with pytest.raises(AssertionError, match="more or fewer references than holders"):
        scheduler.check()
    scheduler.remove(sequence, Status.FINISHED)
    scheduler.check(pinned=pinned)
    with pytest.raises(AssertionError, match="3 blocks in use, 0 held"):
        scheduler.check()


def test_state_slots_are_given_and_taken_with_the_blocks() -> None:
    scheduler = make_scheduler(num_state_slots=2)
    a, b, c = (add(scheduler, 20, first=100 * i) for i in range(1, 4))
    assert [sequence for sequence, _ in run_step(scheduler)] == [a, b]
    assert sorted((a.state_slot, b.state_slot)) == [0, 1]
    scheduler.remove(a, Status.FINISHED)
    assert a.state_slot == -1
    assert (c, 20) in run_step(scheduler)
    assert scheduler.pool.keys() == []


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
