"""Steps that are planned while the one before runs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from baton.engine.core.engine import Engine
from baton.engine.core.ngrams import NO_GUESS, Guess
from baton.engine.core.outputs import Generated, Output, Reserved
from baton.engine.core.runner import StepInput, StepOutput
from baton.engine.core.scheduler import SchedulerLimits
from baton.engine.core.sequence import Purpose, Status
from baton.engine.model.arithmetic import ArithmeticRunner, expected_tokens
from tests.support.guessing import FREE, Known
from tests.unit.baton.engine.core.test_engine import BLOCK, EngineMachine, make_engine, make_spec, numbers, step

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


def test_a_prompt_that_is_handed_over_is_computed_once() -> None:
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
    engine.scheduler.drafter.costs = FREE
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


class AheadWithStateMachine(AheadMachine):
    with_state = True


TestAnythingAhead = AheadMachine.TestCase
TestAnythingAhead.settings = settings(max_examples=60, stateful_step_count=40)
TestAnythingAheadWithState = AheadWithStateMachine.TestCase
TestAnythingAheadWithState.settings = settings(max_examples=30, stateful_step_count=40)
