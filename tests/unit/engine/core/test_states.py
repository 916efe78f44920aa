"""Models with recurrent states: rows, and snapshots from which later prompts continue."""

from __future__ import annotations

import random

import pytest

from baton.blocks import block_keys
from engine.core.block_pool import Removed, Stored
from engine.core.engine import Engine
from engine.core.outputs import Reserved
from engine.core.runner import StepInput
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose, Sequence
from engine.model.kv_cache import KVCache
from engine.testing import ArithmeticRunner, expected_tokens
from tests.support.guessing import run
from tests.unit.engine.core.test_engine import (
    BLOCK,
    drain,
    generated,
    is_empty,
    kv_transfer,
    make_engine,
    make_spec,
    numbers,
    step,
)

GRID = 64


def stateful(num_blocks: int = 256, **values: int) -> Engine:
    return make_engine(num_blocks, snapshot_tokens=GRID, with_state=True, **values)


def answer(engine: Engine, prompt: list[int], max_tokens: int, name: str) -> Sequence:
    """Answer a prompt, with exact tokens."""
    sequence = engine.add(make_spec(prompt, max_tokens, name=name), Purpose.GENERATE, 0.0)
    assert generated(drain(engine), sequence) == expected_tokens(prompt, max_tokens, with_state=True)
    return sequence


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("max_tokens", [2, 40, 100])
def test_a_second_turn_continues_within_a_block_of_the_first(num_prompt_tokens: int, max_tokens: int) -> None:
    engine, prompt = stateful(), numbers(num_prompt_tokens, num_prompt_tokens)
    first = answer(engine, prompt, max_tokens, "first")
    second = answer(engine, [*first.token_ids, *numbers(1, 30)], 5, "second")
    assert second.num_cached_tokens == (first.num_tokens - 1) // BLOCK * BLOCK
    assert is_empty(engine)


@pytest.mark.parametrize("num_common", [16, 40, 100, 130])
def test_a_common_beginning_is_found_from_the_third_prompt_on(num_common: int) -> None:
    engine, common = stateful(), numbers(1, num_common)
    found = [
        answer(engine, [*common, *numbers(10 + turn, 150)], 3, f"turn {turn}").num_cached_tokens for turn in range(4)
    ]
    assert found[1] == num_common // GRID * GRID, "the grid"
    assert found[2] == found[3] == num_common // BLOCK * BLOCK, "the branch"


def test_the_same_prompt_continues_after_its_last_full_block() -> None:
    engine, prompt = stateful(), numbers(1, 100)
    answer(engine, prompt, 1, "first")
    assert answer(engine, prompt, 20, "again").num_cached_tokens == 96


def test_a_snapshot_that_only_passes_is_replaced_by_the_next_one() -> None:
    """A long answer leaves the snapshots at multiples of the distance, and the last one."""
    engine, prompt = stateful(max_num_batched_tokens=512), numbers(1, 40)
    sequence = answer(engine, prompt, 150, "long")
    rows = engine.pool.rows
    assert rows is not None
    keys = block_keys(b"tenant", sequence.token_ids, BLOCK)
    held = [BLOCK * (1 + index) for index, key in enumerate(keys) if rows.holds(key)]
    assert held == [32, 64, 128, 176], "the prompt's last block, the grid, and the last block of all"
    assert set(engine.pool.keys()) == {keys[end // BLOCK - 1] for end in held}


def test_a_snapshot_that_another_sequence_keeps_does_not_pass() -> None:
    """The first answer passes where the second prompt's last full block ends."""
    engine, prompt = stateful(max_num_batched_tokens=256), numbers(1, 90)
    first = engine.add(make_spec(prompt, 60, name="first"), Purpose.GENERATE, 0.0)
    longer = [*prompt, *expected_tokens(prompt, 20, with_state=True)]
    second = engine.add(make_spec(longer, 2, name="second"), Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert generated(outputs, first) == expected_tokens(prompt, 60, with_state=True)
    assert generated(outputs, second) == expected_tokens(longer, 2, with_state=True)
    assert engine.num_cached_tokens(second.block_keys[:7]) == 96


def test_the_index_hears_of_each_resume_point() -> None:
    engine, known = stateful(24, max_num_seqs=4), set[bytes]()
    for turn in range(12):
        answer(engine, numbers(turn % 5, 90), 20, str(turn))
        for change in engine.take_block_events():
            match change:
                case Stored(key):
                    assert key not in known
                    known.add(key)
                case Removed(key):
                    known.remove(key)
        assert known == set(engine.pool.keys())
    assert known


def test_a_receiver_takes_all_blocks_and_needs_no_snapshot() -> None:
    """It has the prompt's blocks, of which no snapshot is left: nothing but the rest and the state is transferred."""
    prefill, decode, prompt = stateful(), stateful(), numbers(1, 100)
    answer(decode, prompt, 1, "before")
    rows = decode.pool.rows
    assert rows is not None
    for key in list(rows.keys()):
        rows.forget(key)
    receiver = decode.add(make_spec(prompt, 10), Purpose.RECEIVE, 0.0)
    (reserved,) = drain(decode)
    assert isinstance(reserved, Reserved)
    assert reserved.num_cached_tokens == 96
    source = prefill.add(make_spec(prompt, 10), Purpose.PREFILL, 0.0)
    outputs = drain(prefill)
    (first,) = generated(outputs, source)
    kv_transfer(prefill, source, decode, reserved)
    assert decode.insert(receiver, first, 0.0) is None
    assert [first, *generated(drain(decode), receiver)] == expected_tokens(prompt, 10, with_state=True)
    prefill.end(source)
    assert is_empty(prefill)
    assert is_empty(decode)


def test_a_held_prompt_keeps_one_row() -> None:
    engine = stateful()
    sequence = engine.add(make_spec(numbers(1, 50), 5), Purpose.PREFILL, 0.0)
    drain(engine)
    assert len(sequence.block_ids[-1]) == 1
    assert engine.pool.rows is not None
    assert engine.pool.rows.counts().in_use == 1


def test_a_step_computed_again_gives_the_same_tokens() -> None:
    """Each step is computed twice, as after a lack of memory: the second time from the same rows."""
    engine, prompt = stateful(), numbers(1, 70)
    sequence = engine.add(make_spec(prompt, 30), Purpose.GENERATE, 0.0)
    outputs = []
    while True:
        batch, _ = engine.schedule(0.0)
        if not batch:
            break
        once = engine.runner.execute(batch)
        assert engine.runner.execute(batch) == once
        outputs += engine.commit(batch, once, 0.0)
    assert generated(outputs, sequence) == expected_tokens(prompt, 30, with_state=True)


@pytest.mark.parametrize("num_tokens", range(1, 2 * BLOCK + 2))
def test_answers_that_stop_anywhere_leave_right_snapshots(num_tokens: int) -> None:
    """Steps are planned ahead, so one more step than needed has written a row of the sequence."""
    engine, prompt = make_engine(256, snapshot_tokens=BLOCK, with_state=True), numbers(1, 20)
    stop = expected_tokens(prompt, num_tokens, with_state=True)[-1]
    sequence = engine.add(make_spec(prompt, 60, stop_token_ids=(stop,)), Purpose.GENERATE, 0.0)
    outputs, num_ahead = [], 0
    batch, _ = engine.schedule(0.0)
    while batch:
        following = engine.schedule_ahead(batch, 0.0)
        ahead = StepInput(()) if following is None else following[0]
        num_ahead += bool(ahead)
        done = engine.runner.execute(batch)
        computed = engine.runner.execute(ahead) if ahead else None
        outputs += engine.commit(batch, done, 0.0)
        engine.check()
        batch = engine.schedule(0.0)[0] if computed is None else StepInput(())
        if computed is not None:
            outputs += engine.commit(ahead, computed, 0.0)
            engine.check()
            batch, _ = engine.schedule(0.0)
    answered = generated(outputs, sequence)
    assert answered == expected_tokens(prompt, num_tokens, with_state=True)
    assert num_ahead >= num_tokens // 2
    rows, state = engine.pool.rows, engine.runner.caches[0].states["token_sum"]
    assert rows is not None
    tokens = prompt + answered
    for index, key in enumerate(block_keys(b"tenant", tokens, BLOCK)):
        end = BLOCK * (1 + index)
        assert rows.holds(key) == (end < len(tokens))
        if end < len(tokens):
            (row,) = rows.match([key])
            assert state[row] == sum(tokens[:end])
    assert is_empty(engine)


def test_a_row_that_a_step_reads_is_not_given_away_while_it_runs() -> None:
    """Its sequence continues from a snapshot, and the step after is planned already."""
    engine, prompt = stateful(), numbers(1, 100)
    answer(engine, prompt, 1, "before")
    sequence = engine.add(make_spec([*prompt[:96], 5], 10), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    (part,) = batch.parts
    following = engine.schedule_ahead(batch, 0.0)
    assert following is not None
    rows = engine.pool.rows
    assert rows is not None
    taken = rows.allocate(rows.num_available)
    assert taken is not None
    assert part.block_ids[-1][0] not in taken
    rows.release(taken)
    outputs = [
        output for each in (batch, following[0]) for output in engine.commit(each, engine.runner.execute(each), 0.0)
    ]
    outputs += drain(engine)
    assert generated(outputs, sequence) == expected_tokens([*prompt[:96], 5], 10, with_state=True)


def test_a_state_within_a_block_is_no_snapshot() -> None:
    """A chunk ends in the second block; who comes then with the same prompt finds no state after the first one."""
    engine, prompt = stateful(max_num_batched_tokens=23), numbers(1, 60)
    first = engine.add(make_spec(prompt, 10, name="first"), Purpose.GENERATE, 0.0)
    outputs = step(engine)
    assert first.num_computed_tokens == 23
    second = engine.add(make_spec([*prompt, 5], 10, name="second"), Purpose.GENERATE, 0.0)
    outputs += drain(engine)
    assert generated(outputs, first) == expected_tokens(prompt, 10, with_state=True)
    assert generated(outputs, second) == expected_tokens([*prompt, 5], 10, with_state=True)


def test_full_pools_make_no_snapshots_and_preempt_nobody() -> None:
    """As many sequences run as there are rows for: none is left for snapshots, which are not worth a preemption."""
    engine = make_engine(256, max_num_seqs=8, with_state=True, snapshot_tokens=BLOCK)
    rows = engine.pool.rows
    assert rows is not None
    taken = rows.allocate(rows.num_available - 16)
    assert taken is not None
    prompts = [numbers(n, 20) for n in range(8)]
    running = [
        engine.add(make_spec(prompt, 40, name=str(n)), Purpose.GENERATE, 0.0) for n, prompt in enumerate(prompts)
    ]
    outputs = []
    while batch := engine.schedule(0.0)[0]:
        outputs += engine.commit(batch, engine.runner.execute(batch), 0.0)
    for prompt, sequence in zip(prompts, running, strict=True):
        assert generated(outputs, sequence) == expected_tokens(prompt, 40, with_state=True)
    assert engine.scheduler.num_preemptions == 0
    rows.release(taken)
    assert is_empty(engine)


def test_who_is_preempted_continues_from_its_last_snapshot() -> None:
    engine = make_engine(9, output_reservation=0, with_state=True)
    prompts = [numbers(n, 20) for n in range(2)]
    running = [
        engine.add(make_spec(prompt, 60, name=str(n)), Purpose.GENERATE, float(n)) for n, prompt in enumerate(prompts)
    ]
    outputs, computed = [], 0
    while batch := engine.schedule(0.0)[0]:
        computed += batch.num_scheduled_tokens
        outputs += engine.commit(batch, engine.runner.execute(batch), 0.0)
        engine.check()
    for prompt, sequence in zip(prompts, running, strict=True):
        assert generated(outputs, sequence) == expected_tokens(prompt, 60, with_state=True)
    assert engine.scheduler.num_preemptions
    assert computed <= 2 * 79 + engine.scheduler.num_preemptions * 2 * BLOCK


def test_a_prompt_that_must_be_whole_waits_for_a_step_of_its_own() -> None:
    engine = make_engine(max_num_batched_tokens=64, with_state=True, whole_prompts=True, max_model_len=57)
    prompts = [numbers(n, length) for n, length in enumerate([30, 40, 50, 20])]
    sequences = [
        engine.add(make_spec(prompt, 6, name=str(n)), Purpose.GENERATE, 0.0) for n, prompt in enumerate(prompts)
    ]
    outputs = []
    while batch := engine.schedule(0.0)[0]:
        assert all(len(part.token_ids) == 1 or part.num_computed_tokens == 0 for part in batch.parts)
        outputs += engine.commit(batch, engine.runner.execute(batch), 0.0)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert generated(outputs, sequence) == expected_tokens(prompt, 6, with_state=True)
    assert engine.pool.keys() == []
    assert engine.pin_prefix(block_keys(b"tenant", prompts[1])).num_tokens == 0


def test_a_prompt_that_ends_at_a_snapshot_leaves_the_rest_of_the_step_to_others() -> None:
    engine = stateful(max_num_batched_tokens=64)
    prompts = [numbers(n, 20) for n in range(3)]
    for n, prompt in enumerate(prompts):
        engine.add(make_spec(prompt, 3, name=str(n)), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    assert [len(part.token_ids) for part in batch.parts] == [16, 16, 16]


def test_choices_share_the_row_of_their_prompt() -> None:
    engine, prompt = stateful(max_num_seqs=8), numbers(1, 40)
    specs = [make_spec(prompt, 10, name="one", choice_index=choice) for choice in range(3)]
    choices = [engine.add(spec, Purpose.GENERATE, 0.0) for spec in specs]
    outputs = drain(engine)
    assert [generated(outputs, each) for each in choices] == [expected_tokens(prompt, 10, with_state=True)] * 3
    assert is_empty(engine)


def test_random_prompts_in_few_rows_are_exact() -> None:
    """Snapshots come and go: what is found of them is right."""
    draw, num_cached = random.Random(5), 0
    engine = make_engine(96, max_num_seqs=3, with_state=True, snapshot_tokens=32)
    for turn in range(60):
        prompt = [token for _ in range(draw.randint(1, 3)) for token in numbers(draw.randint(0, 2), 40)]
        prompt += numbers(100 + turn, draw.randint(1, 20))
        num_cached += answer(engine, prompt, draw.randint(1, 20), str(turn)).num_cached_tokens
    assert num_cached
    assert is_empty(engine)


@pytest.mark.parametrize("num_choices", [2, 3, 4])
def test_choices_that_share_a_row_are_not_planned_ahead_without_rows_for_all(num_choices: int) -> None:
    """A step gives up the row that they share, so each needs another one."""
    prompt = numbers(1, BLOCK + 1)
    specs = [make_spec(prompt, 8, choice_index=choice) for choice in range(num_choices)]
    for num_rows in range(3, 2 * num_choices + 3):
        engine = with_rows(num_rows)
        told, _ = run(engine, specs, ahead=random.Random(num_rows))
        assert [each.token_ids for each in told] == [expected_tokens(prompt, 8, with_state=True)] * num_choices
        assert is_empty(engine)


def with_rows(num_rows: int) -> Engine:
    """An engine with fewer rows than its sequences could use."""
    runner = ArithmeticRunner(64, BLOCK, with_state=True)
    runner.cache = KVCache(runner.spec, (64, num_rows), 8)
    runner.caches, runner.num_blocks = (runner.cache,), runner.cache.table_sizes
    return Engine(runner, SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, output_reservation=32))
