"""Layer groups with tables of their own, and with block sizes that differ."""

from __future__ import annotations

from dataclasses import replace

from baton.blocks import block_keys
from engine.core.block_pool import Removed, Stored
from engine.core.group_pool import GroupPool
from engine.core.runner import EMPTY_PLACE, KVSpec, LayerGroup, StateSpec
from engine.core.scheduler import Scheduler, SchedulerLimits
from engine.core.sequence import Purpose, Sequence
from tests.unit.engine.core.test_engine import make_spec, numbers

NARROW = LayerGroup(name="narrow", layers=(0,), block_size=16, num_kv_heads=1, k_dim=1, v_dim=1, dtype="int64")
WIDE = replace(NARROW, name="wide", layers=(1,), block_size=48)
SPEC = KVSpec((NARROW, WIDE))


def make(num_blocks: tuple[int, ...] = (12, 4), spec: KVSpec = SPEC) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=256, output_reservation=0)
    return Scheduler(GroupPool(spec, num_blocks), limits)


def compute(scheduler: Scheduler, sequence: Sequence) -> None:
    """One step of a sequence alone."""
    (part,) = scheduler.schedule(0.0).step.parts
    assert part.num_kv_tokens == (part.end,) * len(part.block_ids)
    sequence.num_computed_tokens, sequence.num_kv_tokens = part.end, part.num_kv_tokens
    scheduler.blocks.register_computed(sequence)
    sequence.append(7, frozenset(), 10**6)
    scheduler.check()


def add(scheduler: Scheduler, tokens: list[int], name: str = "r") -> Sequence:
    sequence = Sequence(spec=make_spec(tokens, 100, name=name), purpose=Purpose.GENERATE, arrival_s=0.0)
    scheduler.add(sequence)
    return sequence


def test_each_group_has_a_table_and_a_count_of_its_own() -> None:
    scheduler = make()
    sequence = add(scheduler, numbers(1, 100))
    compute(scheduler, sequence)
    assert [len(table) for table in sequence.block_ids] == [7, 3]
    assert sequence.num_kv_tokens == (100, 100)
    assert sequence.num_block_tokens == 112, "the narrow group is full first"
    assert SPEC.block_size == 48


def test_a_prefix_is_cached_where_every_group_holds_it_whole() -> None:
    scheduler = make()
    tokens = numbers(1, 130)
    first = add(scheduler, tokens)
    compute(scheduler, first)
    keys = block_keys(b"tenant", tokens, 16)
    whole = keys[2::3]
    assert scheduler.pool.take_events() == [Stored(key) for key in whole[:2]], "96 of 128 tokens"
    assert scheduler.pool.keys() == whole[:2]
    assert scheduler.pool.num_matching_tokens(keys) == 96
    second = add(scheduler, [*tokens[:100], 5], "second")
    scheduler.remove(first, first.status.FINISHED)
    compute(scheduler, second)
    assert second.num_cached_tokens == 96
    assert [table[:2] for table in second.block_ids][1] == second.block_ids[1][:2]


def test_a_prefix_is_gone_with_the_first_group_that_evicts_it() -> None:
    scheduler = make((12, 3))
    tokens = numbers(1, 97)
    first = add(scheduler, tokens)
    compute(scheduler, first)
    scheduler.remove(first, first.status.FINISHED)
    scheduler.pool.take_events()
    taken = scheduler.pool.allocate((0, 2))
    assert taken is not None
    (gone,) = scheduler.pool.take_events()
    assert gone == Removed(block_keys(b"tenant", tokens, 48)[1])
    assert scheduler.pool.num_matching_tokens(block_keys(b"tenant", tokens, 16)) == 48


def test_blocks_are_taken_in_every_group_or_in_none() -> None:
    scheduler = make((20, 3))
    compute(scheduler, add(scheduler, numbers(1, 60)))
    free = [pool.counts().free for pool in scheduler.pool.pools]
    waiting = add(scheduler, numbers(2, 97), "waiting")
    schedule = scheduler.schedule(0.0)
    assert schedule.admitted == ()
    assert waiting.block_ids == ()
    assert free == [16, 1]
    assert [pool.counts().free for pool in scheduler.pool.pools] == free


def test_a_sequence_with_a_state_takes_two_rows() -> None:
    scheduler = make((12, 4, 4), KVSpec((NARROW, WIDE), (StateSpec("sum", (1,), "int64"),)))
    sequences = [add(scheduler, numbers(number, 20), str(number)) for number in range(3)]
    schedule = scheduler.schedule(0.0)
    assert schedule.admitted == tuple(sequences[:2]), "there are four rows"
    assert [sequence.block_ids[2] for sequence in sequences[:2]] == [(EMPTY_PLACE, 0, 1), (EMPTY_PLACE, 2, 3)]


def test_a_place_may_be_empty() -> None:
    """A window's blocks that were given back: nobody holds them, and the table keeps its places."""
    scheduler = make()
    sequence = add(scheduler, numbers(1, 100))
    compute(scheduler, sequence)
    narrow, wide = sequence.block_ids
    scheduler.pool.release((narrow[:3],))
    sequence.block_ids = ((EMPTY_PLACE,) * 3 + narrow[3:], wide)
    scheduler.check()
    scheduler.pool.acquire(sequence.block_ids)
    scheduler.check(pinned=[sequence.block_ids])
    scheduler.pool.release(sequence.block_ids)
    compute(scheduler, sequence)
    scheduler.remove(sequence, sequence.status.FINISHED)
    scheduler.check()


def test_a_table_is_another_one_only_where_a_block_is() -> None:
    """The second sequence computes what the first one has, and takes the first one's blocks."""
    pool = GroupPool(SPEC, (12, 4))
    keys = block_keys(b"tenant", numbers(1, 48), 16)
    tables = [pool.allocate((4, 1)) for _ in range(2)]
    assert tables[0] is not None
    assert tables[1] is not None
    first, second = tables[0][0], tables[1][0]
    assert pool.register(first, 0, 0, keys[:2]) is first
    assert pool.register(first, 0, 2, keys) is first
    assert pool.register(second, 0, 0, keys) == (*first[:3], second[3])
