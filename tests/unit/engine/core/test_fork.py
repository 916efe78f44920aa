"""Sequences that go on from what another one has computed: shared full blocks, and a copy of the last one."""

from __future__ import annotations

import dataclasses
import random

import pytest

from baton.messages import SequenceSpec
from engine.core.block_pool import BlockPool
from engine.core.engine import Engine
from engine.core.runner import BlockCopy
from engine.core.sequence import Purpose, Sequence, Status
from engine.testing import expected_tokens
from tests.unit.engine.core.test_engine import (
    drain,
    generated,
    is_empty,
    make_engine,
    make_spec,
    numbers,
    step,
)


def sampled(prompt: list[int], choice_index: int, num_tokens: int = 12) -> SequenceSpec:
    """A choice that draws among several tokens, so that each takes a way of its own."""
    spec = make_spec(prompt, num_tokens, name="request")
    sampling = dataclasses.replace(spec.sampling, temperature=1.0, top_k=50, seed=9)
    return dataclasses.replace(spec, sampling=sampling, choice_index=choice_index)


def alone(spec: SequenceSpec, *, with_state: bool = False) -> list[int]:
    engine = make_engine(with_state=with_state)
    sequence = engine.add(spec, Purpose.GENERATE, 0.0)
    return generated(drain(engine), sequence)


def forked(engine: Engine, parent: Sequence, spec: SequenceSpec) -> Sequence:
    child = engine.fork(parent, spec, 0.0)
    assert child is not None
    engine.check()
    return child


def test_a_pool_shares_full_blocks_and_gives_fresh_ones_for_the_others() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    assert blocks is not None
    fresh = pool.fork(blocks[:2], blocks[2:])
    assert fresh is not None
    assert not set(fresh) & set(blocks)
    assert pool.references() == {blocks[0]: 2, blocks[1]: 2, blocks[2]: 2, fresh[0]: 1}
    pool.release(blocks[2:])  # copied
    pool.release(blocks)
    pool.release([*blocks[:2], *fresh])
    assert pool.counts().free == 6
    held = pool.allocate(5)
    assert held is not None
    assert pool.fork(held[:1], held[1:3]) is None, "all or nothing"
    assert set(pool.references().values()) == {1}
    pool.check()


@pytest.mark.parametrize("num_tokens", [16, 17, 40, 48, 63])
def test_choices_fork_once_the_prompt_is_computed_and_draw_as_if_alone(num_tokens: int) -> None:
    engine = make_engine(max_num_seqs=8)
    prompt = numbers(num_tokens, num_tokens)
    specs = [sampled(prompt, choice) for choice in range(4)]
    parent = engine.add(specs[0], Purpose.GENERATE, 0.0)
    outputs = step(engine)
    in_use = engine.pool.counts().in_use
    children = [forked(engine, parent, spec) for spec in specs[1:]]
    num_copied = bool((num_tokens - 1) % 16)
    assert engine.pool.counts().in_use == in_use + 3 * num_copied, "full blocks are shared"
    batch, _ = engine.schedule(0.0)
    assert batch.copies == tuple(c for child in children for c in child.copies)
    assert len(batch.copies) == 3 * num_copied
    outputs += engine.commit(batch, engine.runner.execute(batch), 0.0)
    engine.check()
    assert not any(child.copies for child in children)
    outputs += drain(engine)
    answers = [generated(outputs, sequence) for sequence in (parent, *children)]
    assert answers == [alone(spec) for spec in specs]
    assert len({tuple(answer) for answer in answers}) > 1
    assert is_empty(engine)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_tokens", [16, 17, 40, 48, 63])
def test_a_choice_is_admitted_beside_the_one_that_has_computed_the_prompt(num_tokens: int, with_state: bool) -> None:
    """It computes one token, shares the full blocks, and has room for its answer."""
    engine = make_engine(max_num_seqs=8, with_state=with_state)
    prompt = numbers(num_tokens, num_tokens)
    specs = [sampled(prompt, choice) for choice in range(4)]
    parent = engine.add(specs[0], Purpose.GENERATE, 0.0)
    outputs = step(engine)
    children = [engine.add(spec, Purpose.GENERATE, 0.0) for spec in specs[1:]]
    batch, _ = engine.schedule(0.0)
    outputs += engine.commit(batch, engine.runner.execute(batch), 0.0)
    engine.check()
    if with_state:  # that of the first one is ahead
        assert not batch.copies
    else:
        assert [part.num_scheduled_tokens for part in batch.parts] == [1] * 4
        assert [child.num_cached_tokens for child in children] == [num_tokens - 1] * 3
        assert len(batch.copies) == 3 * bool((num_tokens - 1) % 16)
        num_full = (num_tokens - 1) // 16
        for child in children:
            assert len(child.block_ids[0]) == -(-(num_tokens + 12) // 16), "for all of the answer"
            assert child.block_ids[0][:num_full] == parent.block_ids[0][:num_full]
    outputs += drain(engine)
    answers = [generated(outputs, sequence) for sequence in (parent, *children)]
    assert answers == [alone(spec, with_state=with_state) for spec in specs]
    assert is_empty(engine)


def test_only_choices_of_one_request_and_tenant_are_admitted_beside_each_other() -> None:
    prompt = numbers(3, 40)
    for other in (
        dataclasses.replace(sampled(prompt, 1), request_id="another"),
        dataclasses.replace(sampled(prompt, 1), cache_seed=b"another tenant"),
        sampled([*prompt[:-2], 7, 8], 1),
        dataclasses.replace(sampled(prompt, 1), token_ids=(*prompt, 9)),
    ):
        engine = make_engine(max_num_seqs=8)
        parent = engine.add(sampled(prompt, 0), Purpose.GENERATE, 0.0)
        step(engine)
        child = engine.add(other, Purpose.GENERATE, 0.0)
        batch, _ = engine.schedule(0.0)
        assert not batch.copies
        assert child.num_cached_tokens in (0, 32)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        for sequence in (parent, child):
            engine.end(sequence)
        assert is_empty(engine)


def test_a_choice_without_room_waits_and_forks_later() -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=8)
    prompt = numbers(5, 40)
    parent = engine.add(sampled(prompt, 0), Purpose.GENERATE, 0.0)
    outputs = step(engine)
    children = [engine.add(sampled(prompt, choice), Purpose.GENERATE, 0.0) for choice in range(1, 5)]
    outputs += drain(engine)
    answers = [generated(outputs, sequence) for sequence in (parent, *children)]
    assert answers == [alone(sampled(prompt, choice)) for choice in range(5)]
    assert is_empty(engine)


def test_beams_fork_in_the_middle_of_an_answer_and_again() -> None:
    engine = make_engine(max_num_seqs=8)
    prompt = numbers(7, 30)
    parent = engine.add(make_spec(prompt, 30), Purpose.GENERATE, 0.0)
    outputs = [output for _ in range(9) for output in step(engine)]
    one = forked(engine, parent, make_spec([*parent.token_ids[:-1], 4711], 30, name="one", num_prompt_tokens=30))
    outputs += step(engine)
    two = forked(engine, one, make_spec([*one.token_ids[:-1], 815], 30, name="two", num_prompt_tokens=30))
    outputs += drain(engine)
    assert generated(outputs, parent) == expected_tokens(prompt, 30)
    for beam in (one, two):
        known = list(beam.spec.token_ids)
        assert generated(outputs, beam) == expected_tokens(known, 60 - len(known))
    assert is_empty(engine)


def test_a_state_is_shared_and_the_last_block_copied() -> None:
    engine = make_engine(with_state=True)
    prompt = numbers(1, 20)
    parent = engine.add(make_spec(prompt, 10), Purpose.GENERATE, 0.0)
    outputs = step(engine) + step(engine)  # up to the last full block, and the rest
    with pytest.raises(ValueError, match=r"the state of [0-9a-f]{8}/r/0/0 is ahead of 19 tokens"):
        engine.fork(parent, make_spec(prompt, 10, name="again"), 0.0)
    child = forked(engine, parent, make_spec([*prompt, 5], 10, name="child", num_prompt_tokens=20))
    assert [copy.group for copy in child.copies] == [0]
    assert child.block_ids[1][0] == parent.block_ids[1][0]
    outputs += drain(engine)
    assert generated(outputs, parent) == expected_tokens(prompt, 10, with_state=True)
    assert generated(outputs, child) == expected_tokens([*prompt, 5], 9, with_state=True)
    assert is_empty(engine)


def test_the_source_of_a_copy_is_kept_until_the_copy_is_made() -> None:
    """The parent ends before the child's first step, and others want its blocks."""
    engine = make_engine(4, output_reservation=0)
    prompt = numbers(2, 24)
    parent = engine.add(make_spec(prompt, 10), Purpose.GENERATE, 0.0)
    step(engine)
    child = forked(engine, parent, make_spec(prompt, 4, name="child"))
    engine.end(parent)
    engine.check()
    other = engine.add(make_spec(numbers(3, 10), 4, name="other"), Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert generated(outputs, child) == expected_tokens(prompt, 4)
    assert generated(outputs, other) == expected_tokens(numbers(3, 10), 4)
    assert is_empty(engine)


@pytest.mark.parametrize("when", ["before its step", "while its step executes", "after its step"])
def test_a_child_that_leaves_gives_everything_back(when: str) -> None:
    engine = make_engine()
    prompt = numbers(2, 24)
    parent = engine.add(make_spec(prompt, 10), Purpose.GENERATE, 0.0)
    outputs = step(engine)
    child = forked(engine, parent, make_spec(prompt, 10, name="child"))
    if when == "before its step":
        engine.end(child)
    batch, _ = engine.schedule(0.0)
    if when == "while its step executes":
        engine.end(child)
    outputs += engine.commit(batch, engine.runner.execute(batch), 0.0)
    engine.end(child)
    engine.check()
    outputs += drain(engine)
    assert generated(outputs, parent) == expected_tokens(prompt, 10)
    assert is_empty(engine)


def test_forks_are_preempted_and_computed_again_like_any_other() -> None:
    engine = make_engine(7, output_reservation=0, max_num_seqs=8)
    prompt = numbers(2, 40)
    parent = engine.add(make_spec(prompt, 40), Purpose.GENERATE, 0.0)
    outputs = step(engine)
    children = [forked(engine, parent, make_spec(prompt, 40, name=f"child{number}")) for number in range(3)]
    outputs += drain(engine)
    assert engine.scheduler.num_preemptions > 0
    for sequence in (parent, *children):
        assert generated(outputs, sequence) == expected_tokens(prompt, 40)
    assert is_empty(engine)


def test_without_room_nothing_is_forked() -> None:
    engine = make_engine(3, max_num_seqs=2, output_reservation=0)
    prompt = numbers(2, 40)
    parent = engine.add(make_spec(prompt, 4), Purpose.GENERATE, 0.0)
    step(engine)
    assert engine.fork(parent, make_spec(prompt, 4, name="child"), 0.0) is None, "no block is left"
    engine.check()
    with pytest.raises(ValueError, match="does not start with the tokens of"):
        engine.fork(parent, make_spec([1, *prompt[1:]], 4, name="other"), 0.0)
    assert engine.fork(parent, make_spec(prompt[:33], 4, name="shorter"), 0.0) is not None, "two full blocks, no copy"
    assert engine.fork(parent, make_spec(prompt[:33], 4, name="third"), 0.0) is None, "as many run as may"


def test_copies_are_made_before_anything_is_written() -> None:
    """Parent and child write the same place of their last block in one step, and each finds its own there."""
    engine = make_engine()
    prompt = numbers(2, 20)
    parent = engine.add(make_spec(prompt, 3), Purpose.GENERATE, 0.0)
    step(engine)
    child = forked(engine, parent, make_spec([*prompt, 123], 3, name="child", num_prompt_tokens=20))
    (copy,) = child.copies
    assert copy == BlockCopy(0, parent.block_ids[0][1], child.block_ids[0][1])
    step(engine)
    pages = engine.runner.caches[0].layer(0).view(-1, 2, 16)
    assert pages[copy.target, 0, :5].tolist() == [*prompt[16:], 123]
    assert pages[copy.source, 0, :5].tolist() == [*prompt[16:], *expected_tokens(prompt, 1)]


@pytest.mark.parametrize("num_cancels", [1_000, pytest.param(10_000, marks=pytest.mark.chaos)])
def test_random_cancels_of_choices_leave_every_block_with_its_references(num_cancels: int) -> None:
    """In a pool that is too small for all of them, so that some are preempted."""
    engine, dice = make_engine(num_blocks=24, max_num_seqs=8), random.Random(num_cancels)
    alive: list[Sequence] = []
    later: list[SequenceSpec] = []
    num_cancelled = num_forked = number = 0
    while num_cancelled < num_cancels:
        if len(alive) + len(later) < 10:
            number += 1
            prompt = numbers(number, dice.randrange(1, 60))
            specs = [sampled(prompt, choice, dice.randrange(1, 30)) for choice in range(dice.randrange(1, 6))]
            alive.append(engine.add(dataclasses.replace(specs[0], request_id=str(number)), Purpose.GENERATE, 0.0))
            later += [dataclasses.replace(spec, request_id=str(number)) for spec in specs[1:]]
        if later and dice.random() < 0.7:
            alive.append(engine.add(later.pop(0), Purpose.GENERATE, 0.0))
        batch, _ = engine.schedule(0.0)
        num_forked += len({copy.target for copy in batch.copies})
        for sequence in [sequence for sequence in alive if dice.random() < 0.15]:
            engine.end(sequence)  # some while the step that computes them runs
            alive.remove(sequence)
            num_cancelled += 1
        if batch:
            engine.commit(batch, engine.runner.execute(batch), 0.0)
        engine.check()
        alive = [sequence for sequence in alive if sequence.status is not Status.FINISHED]
    for sequence in alive:
        engine.end(sequence)
    drain(engine)
    assert is_empty(engine)
    assert num_forked > num_cancels / 20
