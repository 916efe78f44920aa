"""Steps that are planned while the one before runs."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from baton.sampling import FinishReason
from baton.structure import StructuredOutputs
from engine.core.engine import Engine
from engine.core.ngrams import NO_GUESS, Guess
from engine.core.outputs import Generated, Output, Reserved
from engine.core.runner import UNKNOWN_TOKEN, OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose, Status
from engine.testing import ArithmeticRunner, expected_tokens
from tests.support.guessing import FREE, Known, run
from tests.unit.engine.core import test_drafting as drafting
from tests.unit.engine.core.test_engine import (
    BLOCK,
    EngineMachine,
    is_empty,
    make_engine,
    make_spec,
    numbers,
    step,
)

GARBAGE = -7


class AheadMachine(EngineMachine):
    """The same with two steps at a time, which are executed and committed at any moments, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.output: StepOutput | None = None
        self.following: StepInput | None = None
        self.following_output: StepOutput | None = None
        self.was_tried = False
        self.num_ahead = 0

    @rule()
    @precondition(lambda self: self.batch is not None and not self.was_tried)
    def plan_ahead(self) -> None:
        assert self.batch is not None
        self.was_tried = True
        if (scheduled := self.engine.schedule_ahead(self.batch, self.now)) is not None:
            step, outputs = scheduled
            self.take(outputs)
            self.following = step or None
            self.num_ahead += bool(step)

    @rule()
    @precondition(lambda self: self.batch is not None)
    def execute(self) -> None:
        if self.output is None:
            assert self.batch is not None
            self.output = self.engine.runner.execute(self.batch)
        elif self.following is not None and self.following_output is None:
            self.following_output = self.engine.runner.execute(self.following)

    @rule()
    @precondition(lambda self: self.batch is not None)
    def commit(self) -> None:
        assert self.batch is not None
        if self.output is None:
            self.output = self.engine.runner.execute(self.batch)
        self.take(self.engine.commit(self.batch, self.output, self.now))
        self.batch, self.output = self.following, self.following_output
        self.following = self.following_output = None
        self.was_tried = False

    @rule(choices=st.lists(st.sampled_from(["plan_ahead", "execute", "commit"]), min_size=1, max_size=40))
    def run_for_a_while(self, choices: list[str]) -> None:
        for choice in choices:
            if self.batch is None:
                self.schedule()
            if self.batch is not None and not (choice == "plan_ahead" and self.was_tried):
                getattr(self, choice)()
            self.engine.check()

    @rule(num_steps=st.integers(1, 20))
    def run_ahead_for_a_while(self, num_steps: int) -> None:
        self.run_for_a_while(["plan_ahead", "execute", "execute", "commit"] * num_steps)

    @rule()
    @precondition(lambda self: self.batch is not None and self.output is None)
    def fail(self) -> None:
        assert self.batch is not None
        steps = [step for step in (self.batch, self.following) if step is not None]
        for sequence in self.engine.abandon(*steps):
            del self.alive[sequence]
        self.batch = self.following = None
        self.was_tried = False

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def pin(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.alive)))
        pin = self.engine.pin(sequence)
        self.pins.append((pin, sequence.token_ids[: sequence.num_written_tokens] if any(pin.block_ids) else []))

    def take(self, outputs: list[Output]) -> None:
        """A transfer may write at once what is reserved for it."""
        super().take(outputs)
        for output in outputs:
            if isinstance(output, Reserved):
                pages = self.engine.runner.caches[0].groups[0].view(2, -1, 2, BLOCK)
                pages[:, list(output.block_ids[0][output.num_cached_tokens // BLOCK :])] = GARBAGE


def test_a_prompt_that_is_transferred_is_computed_once() -> None:
    engine = make_engine()
    engine.add(make_spec(numbers(1, 20)), Purpose.PREFILL, 0.0)
    batch, _ = engine.schedule(0.0)
    scheduled = engine.schedule_ahead(batch, 0.0)
    assert scheduled is not None
    assert not scheduled[0]


@pytest.mark.parametrize("num_left", [1, 30])
def test_who_is_aborted_takes_part_in_no_further_step(num_left: int) -> None:
    """Its blocks are free when the step is committed in which it was."""
    engine = make_engine(max_num_batched_tokens=64)
    other = engine.add(make_spec(numbers(1, 20), name="other"), Purpose.GENERATE, 0.0)
    step(engine)
    aborted = engine.add(make_spec(numbers(2, 63 + num_left), name="aborted"), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    engine.end(aborted)
    scheduled = engine.schedule_ahead(batch, 0.0)
    assert scheduled is not None
    assert [part.sequence_key for part in scheduled[0].parts] == [other.key]
    engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert aborted.status is Status.FINISHED
    engine.check()


@pytest.mark.parametrize("values", [{"choice_index": 1}, {"use_beam_search": True, "beam_width": 2}])
def test_beams_and_choices_of_one_prompt_are_planned_when_all_is_known(values: dict[str, Any]) -> None:
    engine = make_engine()
    engine.add(make_spec(numbers(1, 20)), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    engine.add(make_spec(numbers(1, 20), **values), Purpose.GENERATE, 0.0)
    assert engine.schedule_ahead(batch, 0.0) is None
    engine.commit(batch, engine.runner.execute(batch), 0.0)
    batch, _ = engine.schedule(0.0)
    assert len(batch.parts) == 2
    assert engine.schedule_ahead(batch, 0.0) is None, "copies would be made twice, and beams planned alone"
    engine.commit(batch, engine.runner.execute(batch), 0.0)


class Seldom(Known):
    def guess(self, token_ids: SequenceOf[int], most: int) -> Guess:
        return NO_GUESS if self._random.random() < 0.6 else super().guess(token_ids, most)


def test_drafts_are_behind_known_tokens_alone() -> None:
    """A guess is worth more than a plan ahead; where there is none, the step is planned ahead and has no drafts."""
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, output_reservation=8, max_draft_tokens=4)
    engine = Engine(ArithmeticRunner(64), limits)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    prompt = numbers(1, 20)
    expected = expected_tokens(prompt, 200)
    sequence = engine.add(make_spec(prompt, 200), Purpose.GENERATE, 0.0)
    sequence.ngrams = Seldom([*prompt, *expected], 1)
    tokens, num_ahead = list[int](), 0
    batch, _ = engine.schedule(0.0)
    while batch:
        scheduled = engine.schedule_ahead(batch, 0.0)
        outputs = engine.commit(batch, engine.runner.execute(batch), 0.0)
        tokens += [token for output in outputs if isinstance(output, Generated) for token in output.token_ids]
        num_ahead += scheduled is not None
        batch = scheduled[0] if scheduled is not None else StepInput(())
        batch = batch or engine.schedule(0.0)[0]
    assert tokens == expected
    assert num_ahead > 10
    assert engine.load().accepted_tokens > 20


def test_blocks_that_a_step_reads_are_kept_for_it_when_a_table_changes() -> None:
    """Two sequences compute one prompt at the same time, and share what they have computed from then on."""
    engine = make_engine()
    same = [engine.add(make_spec(numbers(1, 40), name=name), Purpose.GENERATE, 0.0) for name in "ab"]
    first, _ = engine.schedule(0.0)
    engine.commit(first, engine.runner.execute(first), 0.0)
    second, _ = engine.schedule(0.0)
    scheduled = engine.schedule_ahead(second, 0.0)
    assert scheduled is not None
    third, _ = scheduled
    tables = [part.block_ids[0] for part in third.parts]
    engine.commit(second, engine.runner.execute(second), 0.0)
    assert same[1].block_ids[0][1] == same[0].block_ids[0][1] != tables[1][1], "its table has changed"
    engine.add(make_spec(numbers(3, 300), name="receiver"), Purpose.RECEIVE, 0.0)
    scheduled = engine.schedule_ahead(third, 0.0)
    assert scheduled is not None
    (reserved,) = scheduled[1]
    assert isinstance(reserved, Reserved)
    assert not set(reserved.block_ids[0]) & {*tables[0], *tables[1]}, "a transfer would write what the step reads"
    engine.check()
    engine.commit(third, engine.runner.execute(third), 0.0)
    expected = expected_tokens(numbers(1, 40), 4)
    assert [each.token_ids[40 : each.num_tokens - each.has_unknown] for each in same] == [expected[:3], expected[:2]]
    engine.check()
    engine.abandon(scheduled[0])
    engine.check()
    assert not engine._pins


def test_scores_of_a_prompt_are_planned_when_all_is_known() -> None:
    engine = make_engine()
    engine.add(make_spec(numbers(1, 200), prompt_logprobs=1), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    assert engine.schedule_ahead(batch, 0.0) is None


PLAIN = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1.0])},
    optional={"top_p": st.floats(0.3, 1), "stop_token_ids": st.lists(drafting.IDS, max_size=3).map(tuple)},
)


@settings(max_examples=75, deadline=None)
@given(
    asked=st.lists(PLAIN | drafting.SAMPLING, min_size=1, max_size=4),
    n=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 2**20),
    most=st.integers(0, 6),
    budget=st.sampled_from([16, 20, 64]),
    num_blocks=st.sampled_from([9, 16, 64]),
    num_answered=st.integers(0, 5),
)
def test_answers_are_those_of_steps_planned_one_by_one(
    asked: list[dict[str, Any]], n: int, seed: int, most: int, budget: int, num_blocks: int, num_answered: int
) -> None:
    """At any parameters, of several choices, resumed, in small steps, with drafts, preempted for want of blocks."""
    specs = drafting.specs_of(asked, n, seed, num_answered)
    plain, _ = run(drafting.make_engine(max_num_batched_tokens=budget), specs)
    known = drafting.known_of(specs, plain, seed, vocab_size=drafting.VOCAB_SIZE)
    engine = drafting.make_engine(most, num_blocks, max_num_batched_tokens=budget)
    ahead, _ = run(engine, specs, known, random.Random(seed))
    assert [one.values for one in ahead] == [one.values for one in plain]
    assert is_empty(engine)


def test_a_structure_is_followed_beside_answers_without(model_dir: Path) -> None:
    """While one answer follows a grammar, all wait for its last token; before and after that they do not."""
    structure = StructuredOutputs(regex="(ab|cd){5,9}")
    sizes: dict[str, Any] = {
        "vocab_size": 49152,
        "tokenizer": model_dir / "tokenizer.json",
        "eos_token_ids": frozenset({2}),
    }
    specs = [make_spec(numbers(n, 20), 40, name=f"{n}", temperature=float(n)) for n in range(2)]
    specs.append(make_spec(numbers(3, 120), 30, name="structured", ignore_eos=False, structured_outputs=structure))
    plain, _ = run(drafting.make_engine(max_num_batched_tokens=24, **sizes), specs)
    runner = Counting(64, **sizes)
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=24, output_reservation=8)
    found, _ = run(Engine(runner, limits), specs, ahead=random.Random(1))
    assert [one.values for one in found] == [one.values for one in plain]
    assert runner.num_ahead > 5
    assert plain[2].finish_reason is FinishReason.STOP


class Counting(ArithmeticRunner):
    """Counts the steps that have unknown tokens."""

    num_ahead = 0

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        self.num_ahead += any(UNKNOWN_TOKEN in part.token_ids for part in step.parts)
        return super().execute(step, on_layer_done)


class AheadWithStateMachine(AheadMachine):
    with_state = True


class AheadWithBothMachine(AheadMachine):
    with_state, window = True, 20


TestAnythingAhead = AheadMachine.TestCase
TestAnythingAhead.settings = settings(max_examples=60, stateful_step_count=40)
TestAnythingAheadWithState = AheadWithStateMachine.TestCase
TestAnythingAheadWithState.settings = settings(max_examples=30, stateful_step_count=40)
TestAnythingAheadWithBoth = AheadWithBothMachine.TestCase
TestAnythingAheadWithBoth.settings = settings(max_examples=30, stateful_step_count=40)
