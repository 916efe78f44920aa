"""A draft model: its blocks and what it has computed, whom it proposes for, and when that is worth it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.messages import SequenceSpec
from baton.sampling import FinishReason
from baton.structure import StructuredOutputs
from engine.core import draft_model
from engine.core.draft_model import DraftModel
from engine.core.draft_runner import DraftedRunner
from engine.core.engine import Engine
from engine.core.ngrams import NO_GUESS, Guess
from engine.core.runner import UNKNOWN_TOKEN, OnLayerDone, StepInput, StepOutput, StepPart, ignore_layer
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.core.step_fit import StepSize
from engine.testing import ArithmeticRunner
from tests.support.builders import sequence_spec, step_costs
from tests.support.guessing import FREE, run
from tests.unit.engine.core.test_drafting import SAMPLING, VOCAB_SIZE, numbers_of, sampling_of
from tests.unit.engine.core.test_drafting import make_engine as make_plain_engine
from tests.unit.engine.core.test_engine import drain, generated, is_empty, kv_transfer, reserved_for

STEP_S = 0.01


class Wrong(ArithmeticRunner):
    """Draws another token at every third position."""

    def _answer(self, part: StepPart, num_tokens: int) -> int:
        return (super()._answer(part, num_tokens) + 40 * (num_tokens % 3 == 0)) % 97


class Clock:
    """Runs only when it is asked for the time."""

    def __init__(self, round_s: float) -> None:
        self.now = 0.0
        self.round_s = round_s

    def __call__(self) -> float:
        self.now += self.round_s
        return self.now


def make_engine(
    most: int = 4,
    num_blocks: int = 64,
    num_draft_blocks: int = 64,
    *,
    draft: type[ArithmeticRunner] = ArithmeticRunner,
    max_num_batched_tokens: int = 64,
    round_s: float = 0.001,
    **runner: Any,
) -> Engine:
    """An engine with a draft model.

    Args:
        draft: the model; without it one that draws what the target does.
        round_s: what each round takes.
    """
    runner = {"vocab_size": VOCAB_SIZE} | runner
    limits = SchedulerLimits(
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        output_reservation=8,
        max_draft_tokens=most,
    )
    target = ArithmeticRunner(num_blocks, **runner)
    engine = Engine(DraftedRunner(target, draft(num_draft_blocks, **runner), Clock(round_s)), limits)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.costs = FREE
    engine.scheduler.costs = step_costs(s_weights=STEP_S)
    model_of(engine).budget.left_s = math.inf
    return engine


def model_of(engine: Engine) -> DraftModel:
    assert engine.scheduler.drafter is not None
    assert engine.scheduler.drafter.model is not None
    return engine.scheduler.drafter.model


def look_nothing_up(engine: Engine) -> None:
    """Leaves guessing to the draft model."""
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter._looked_up = lambda sequence, most: None  # type: ignore[method-assign]


def rounds_of(engine: Engine) -> int:
    """How many rounds the draft model has computed; each reads the clock twice."""
    runner = engine.runner
    assert isinstance(runner, DraftedRunner)
    assert isinstance(runner._clock, Clock)
    return round(runner._clock.now / runner._clock.round_s) // 2


class Bounded(ArithmeticRunner):
    """Computes as many tokens in a step as a real one may."""

    most_tokens = 0

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        assert step.num_scheduled_tokens <= self.most_tokens
        return super().execute(step, on_layer_done)


def test_its_steps_are_no_longer_than_the_targets() -> None:
    specs = [sequence_spec(numbers_of(n, 40), f"{n}", max_tokens=60) for n in range(6)]
    engine = make_engine(4, max_num_batched_tokens=40, draft=Bounded, num_blocks=80)
    look_nothing_up(engine)
    Bounded.most_tokens = 40
    plain, _ = run(make_plain_engine(num_blocks=80), specs)
    engine.scheduler.costs = step_costs(s_weights=100.0)
    assert [one.values for one in run(engine, specs)[0]] == [one.values for one in plain]
    assert model_of(engine).num_accepted > 100


def test_who_lacks_many_tokens_waits_for_a_step_with_room() -> None:
    """Six sequences that lack ten tokens each, of which a step computes 40."""
    engine = make_engine(4, max_num_batched_tokens=40, num_blocks=80)
    look_nothing_up(engine)
    engine.scheduler.costs = step_costs(s_weights=100.0)
    for n in range(6):
        engine.add(sequence_spec(numbers_of(n, 30), f"{n}", max_tokens=60), Purpose.GENERATE, 0.0)
    model = model_of(engine)
    for _ in range(20):
        if len(model._shadows) < 6:
            batch, _ = engine.schedule(0.0)
            engine.commit(batch, engine.runner.execute(batch), 0.0)
    for shadow in model._shadows.values():
        shadow.sequence.num_computed_tokens = shadow.sequence.num_tokens - 10
    found = model.guesses([(place, each, 4) for place, each in enumerate(engine.scheduler.running)])
    assert sorted(found) == [0, 1, 2, 3]


def nothing_is_held(engine: Engine) -> bool:
    """Whether no block is held in either pool, once the engine has been asked for a step."""
    assert not engine.schedule(0.0)[0]
    engine.check()
    counts = model_of(engine).pool.counts()
    return is_empty(engine) and counts.in_use == 0 and counts.free + counts.cached == counts.total


def specs_of(asked: Sequence[dict[str, Any]], n: int, seed: int, num_answered: int = 0) -> list[SequenceSpec]:
    specs = []
    for place, values in enumerate(asked):
        prompt = numbers_of(seed + place, 5 + (seed + 11 * place) % 40)
        begun = numbers_of(seed + 7, num_answered if place == 0 else 0)
        sampling = sampling_of(values, seed, num_answered + 1 + (seed + place) % 40)
        specs += [
            sequence_spec(
                [*prompt, *begun], f"{place}", num_prompt_tokens=len(prompt), sampling=sampling, choice_index=choice
            )
            for choice in range(n)
        ]
    return specs


# -- the same tokens ---------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    asked=st.lists(SAMPLING, min_size=1, max_size=4),
    n=st.integers(1, 3),
    seed=st.integers(0, 2**20),
    most=st.integers(1, 9),
    budget=st.sampled_from([16, 20, 64]),
    num_blocks=st.sampled_from([9, 16, 64]),
    num_draft_blocks=st.sampled_from([2, 6, 16, 64]),
    draft=st.sampled_from([ArithmeticRunner, Wrong]),
    num_answered=st.integers(0, 5),
    looks_up=st.booleans(),
)
def test_answers_are_those_without_a_draft_model(
    asked: list[dict[str, Any]],
    n: int,
    seed: int,
    most: int,
    budget: int,
    num_blocks: int,
    num_draft_blocks: int,
    draft: type[ArithmeticRunner],
    num_answered: int,
    looks_up: bool,
) -> None:
    """At any parameters, of several choices, resumed, in small steps, preempted for want of blocks, with a draft model
    that is right or wrong and has room for all or for some.
    """
    specs = specs_of(asked, n, seed, num_answered)
    plain, _ = run(make_plain_engine(max_num_batched_tokens=budget), specs)
    engine = make_engine(most, num_blocks, num_draft_blocks, draft=draft, max_num_batched_tokens=budget)
    if not looks_up:
        look_nothing_up(engine)
    drafted, _ = run(engine, specs)
    assert [one.values for one in drafted] == [one.values for one in plain]
    assert nothing_is_held(engine)
    load = engine.load()
    assert load.drafted_tokens >= model_of(engine).num_drafted
    # With scores of named tokens the arithmetic model draws in another order.
    is_named = any("logprob_token_ids" in values for values in asked)
    if draft is ArithmeticRunner and not looks_up and not is_named:
        assert load.accepted_tokens == load.drafted_tokens, "all that it has computed is in its place"


# -- who has a shadow --------------------------------------------------------------------------------------------------


def drafts_of(engine: Engine, spec: SequenceSpec, purpose: Purpose = Purpose.GENERATE) -> list[tuple[int, int]]:
    """How many drafts each step has, and how many tokens the draft model catches up with."""
    look_nothing_up(engine)
    engine.add(spec, purpose, 0.0)
    found = []
    while batch := engine.schedule(1.0)[0]:
        (part,) = batch.parts
        proposal = part.proposal
        number = 0 if proposal is None or proposal.num_drafts else len(proposal.part.token_ids)
        assert part.num_drafts == (proposal.num_drafts if proposal else 0)
        found.append((part.num_drafts, number))
        engine.commit(batch, engine.runner.execute(batch), 1.0)
        engine.check()
    return found


def test_a_model_that_is_right_gives_all_tokens_but_one() -> None:
    """A prompt of 20 is caught up with in a step, and then a step gives five tokens. Of a model that is not known yet
    the fourth draft seems too unlikely."""
    spec = sequence_spec(numbers_of(1, 20), max_tokens=17)
    engine = make_engine(4)
    assert drafts_of(engine, spec) == [(0, 0), (0, 20), (3, 0), (4, 0), (4, 0), (0, 0)]
    load, model = engine.load(), model_of(engine)
    assert (load.drafted_tokens, load.accepted_tokens) == (11, 11) == (model.num_drafted, model.num_accepted)
    assert nothing_is_held(engine)


def test_it_computes_each_token_once() -> None:
    """Accepted drafts count as computed but for the last one; a rejected one is computed again."""
    for draft, again in ((ArithmeticRunner, 0), (Wrong, 1)):
        engine = make_engine(4, draft=draft)
        look_nothing_up(engine)
        engine.add(sequence_spec(numbers_of(1, 20), max_tokens=31), Purpose.GENERATE, 0.0)
        num_computed, ends, num_rejected = 0, [0], 0
        while batch := engine.schedule(0.0)[0]:
            output = engine.runner.execute(batch)
            if (proposal := batch.parts[0].proposal) is not None:
                assert output.proposed is not None
                assert proposal.part.num_computed_tokens <= ends[-1]
                num_computed += sum(step.num_scheduled_tokens for step, _ in output.proposed.rounds)
                ends.append(proposal.part.end + max(0, proposal.num_drafts - 1))
                num_rejected += proposal.num_drafts - len(output.sampled_token_ids[0]) + 1 if proposal.num_drafts else 0
            engine.commit(batch, output, 0.0)
        assert (num_rejected > 0) == again
        assert num_computed - ends[-1] == pytest.approx(num_rejected * again, abs=ends[-1] * again)


def test_beams_prompts_and_scores_have_no_drafts() -> None:
    prompt = numbers_of(1, 20)
    beams = sequence_spec(prompt, max_tokens=8, use_beam_search=True, n=2, seed=None, ignore_eos=False)
    engine = make_engine()
    engine.add(beams, Purpose.GENERATE, 0.0)
    while batch := engine.schedule(0.0)[0]:
        assert not any(part.proposal for part in batch.parts)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert drafts_of(make_engine(), sequence_spec(prompt, max_tokens=8), Purpose.PREFILL) == [(0, 0)]
    resumed = sequence_spec(numbers_of(2, 33), num_prompt_tokens=9, max_tokens=60)
    engine = make_engine()
    assert sum(number for number, _ in drafts_of(engine, resumed)) > 0
    assert drafts_of(engine, resumed, Purpose.PREFILL) == [(0, 0)]
    scored = sequence_spec(numbers_of(3, 65), num_prompt_tokens=60, max_tokens=30, prompt_logprobs=1)
    assert drafts_of(make_engine(), scored)[:3] == [(0, 0), (0, 0), (0, 64)], "its scores come first"
    stateful = make_plain_engine(4, with_state=True)
    assert stateful.scheduler.drafter is None


def test_a_long_prompt_is_caught_up_with_a_little_in_each_step() -> None:
    """As much as a quarter of a step allows: of a step of 10 ms, at 20 microseconds a token, 125 less attention's. It
    begins once drafts would have gained the 8 ms that it takes in all, at 4 ms a step."""
    engine = make_engine(4, max_num_batched_tokens=400)
    engine.scheduler.costs = step_costs(s_weights=STEP_S, s_per_token=1e-4)
    found = drafts_of(engine, sequence_spec(numbers_of(1, 400), max_tokens=60))
    assert found[:8] == [(0, 0)] * 3 + [(0, 124)] * 3 + [(0, 33), (3, 0)]
    engine = make_engine(4, max_num_batched_tokens=400)
    engine.scheduler.costs = step_costs(s_weights=STEP_S, s_per_token=3e-3)
    number = [number for _, number in drafts_of(engine, sequence_spec(numbers_of(1, 40), max_tokens=300))]
    assert number[8:12] == [16, 16, 16, 0], "a block at the least"
    assert sum(number) == 48


def test_nothing_is_caught_up_with_where_look_up_has_drafts() -> None:
    """Nor soon after: each time it begins anew to wait for as long as catching up takes."""
    engine = make_engine(4, max_num_batched_tokens=400)
    engine.scheduler.costs = step_costs(s_weights=STEP_S, s_per_token=1e-4)
    drafter = engine.scheduler.drafter
    assert drafter is not None
    sequence = engine.add(sequence_spec(numbers_of(1, 400), max_tokens=80), Purpose.GENERATE, 0.0)
    kinds = []
    for number in range(16):
        looked_up = Guess((50,), (0.9,)) if number in (2, 4, 7, 8) else NO_GUESS
        drafter._looked_up = lambda sequence, most, found=looked_up: found  # type: ignore[method-assign, misc]
        (part,) = (batch := engine.schedule(0.0)[0]).parts
        kinds.append("drafts" if part.num_drafts else "catches up" if part.proposal else "")
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert kinds[:9] == ["", "", "drafts", "", "drafts", "", "", "drafts", "drafts"]
    assert kinds[9:13] == ["", "", "catches up", "catches up"]
    assert sequence.forgone_s > 0.008


def test_nothing_is_caught_up_with_for_a_short_rest_of_an_answer() -> None:
    values: dict[str, Any] = {"s_weights": STEP_S, "s_per_token": 1e-3}
    for max_tokens, is_worth_it in ((4, False), (100, True)):
        engine = make_engine(4, max_num_batched_tokens=400)
        engine.scheduler.costs = step_costs(**values)
        found = drafts_of(engine, sequence_spec(numbers_of(1, 400), max_tokens=max_tokens))
        assert any(number for _, number in found) == is_worth_it


def test_a_received_prompt_is_computed_by_the_draft_model_itself() -> None:
    spec = sequence_spec(numbers_of(4, 37), max_tokens=30, temperature=1.0, seed=3)
    told = run(make_plain_engine(), [spec])[0][0]
    source, target = make_plain_engine(), make_engine(5)
    look_nothing_up(target)
    held = source.add(spec, Purpose.PREFILL, 0.0)
    first = generated(drain(source), held)
    sequence = target.add(spec, Purpose.RECEIVE, 0.0)
    _, said = target.schedule(0.0)
    reserved = reserved_for(sequence)
    assert said == [reserved]
    kv_transfer(source, held, target, reserved)
    source.end(held)
    target.insert(sequence, first[0], 0.0)
    assert [*first, *generated(drain(target), sequence)] == told.token_ids
    assert target.load().accepted_tokens == target.load().drafted_tokens > 15
    assert nothing_is_held(target)


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_choices_and_turns_find_what_others_have_computed() -> None:
    engine = make_engine(4, max_num_batched_tokens=64)
    look_nothing_up(engine)
    prompt = numbers_of(5, 49)
    specs = [sequence_spec(prompt, f"{n}", max_tokens=40) for n in range(2)]
    lengths = []
    for spec in specs:
        sequence = engine.add(spec, Purpose.GENERATE, 0.0)
        caught_up = []
        while batch := engine.schedule(0.0)[0]:
            proposal = batch.parts[0].proposal
            if proposal is not None and not proposal.num_drafts:
                caught_up.append((proposal.part.num_computed_tokens, proposal.part.end))
            engine.commit(batch, engine.runner.execute(batch), 0.0)
        lengths.append(caught_up)
        assert sequence.num_tokens == 89
    assert lengths == [[(0, 49)], [(48, 49)]]
    other = sequence_spec(prompt, "of somebody else", max_tokens=40, cache_seed=b"other")
    assert drafts_of(engine, other)[1] == (0, 49), "keys are seeded here, too"
    assert nothing_is_held(engine)


def test_who_has_no_room_has_no_drafts_and_holds_up_nobody() -> None:
    """A pool of 4 blocks: one sequence of 40 tokens at a time has drafts, and as long as it fits."""
    specs = [sequence_spec(numbers_of(n, 40), f"{n}", max_tokens=30) for n in range(2)]
    plain, _ = run(make_plain_engine(), specs)
    engine = make_engine(4, num_draft_blocks=4)
    look_nothing_up(engine)
    drafted, _ = run(engine, specs)
    assert [one.values for one in drafted] == [one.values for one in plain]
    model = model_of(engine)
    assert 0 < model.num_drafted == model.num_accepted < 50
    assert nothing_is_held(engine)
    tiny = make_engine(4, num_draft_blocks=2)
    assert run(tiny, specs)[0][0].values == plain[0].values
    assert model_of(tiny).num_drafted == 0


def test_a_sequence_that_cannot_grow_gives_its_blocks_to_others() -> None:
    """Two of 30 tokens fit into 14 blocks, and soon one alone: the other goes on without drafts until that one ends."""
    engine = make_engine(4, num_draft_blocks=14)
    look_nothing_up(engine)
    for n in range(2):
        engine.add(sequence_spec(numbers_of(n, 30), f"{n}", max_tokens=170 - 20 * n), Purpose.GENERATE, 0.0)
    number = []
    while batch := engine.schedule(0.0)[0]:
        engine.check()
        number.append(tuple(part.num_drafts for part in batch.parts))
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert number.index((4, 4)) < number.index((0, 0), 5) < number.index((0, 4)) < number.index((4,))
    assert nothing_is_held(engine)


def test_blocks_for_what_comes_soon_are_taken_at_once() -> None:
    """Of 5 blocks each of two sequences would need 4 in the end; the first has them, and not both have 2."""
    engine = make_engine(4, num_draft_blocks=5)
    look_nothing_up(engine)
    for n in range(2):
        engine.add(sequence_spec(numbers_of(n, 20), f"{n}", max_tokens=36), Purpose.GENERATE, 0.0)
    model, numbers = model_of(engine), set()
    while batch := engine.schedule(0.0)[0]:
        numbers.add(len(model._shadows))
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert numbers == {0, 1}


def test_nobody_counts_on_a_block_that_another_one_takes() -> None:
    engine = make_engine(4, num_draft_blocks=13)
    look_nothing_up(engine)
    for n in range(2):
        engine.add(sequence_spec(numbers_of(n, 30), f"{n}", max_tokens=120), Purpose.GENERATE, 0.0)
    model, numbers = model_of(engine), set()
    while batch := engine.schedule(0.0)[0]:
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        model.tidy()
        running = engine.scheduler.running
        found = model.guesses([(place, each, 4) for place, each in enumerate(running)])
        shadows = [(running[place], model._shadows[running[place].key].sequence) for place in found]
        missing = [model._blocks.missing(shadow, each.num_tokens + 3)[0] for each, shadow in shadows]
        assert sum(missing) <= model.pool.pools[0].num_available
        numbers.add(len(found))
    assert numbers == {0, 1, 2}


def test_a_sequence_beyond_the_draft_models_length_has_none() -> None:
    class Short(ArithmeticRunner):
        def __init__(self, num_blocks: int, **values: Any) -> None:
            super().__init__(num_blocks, **values | {"max_model_len": 40})

    engine = make_engine(4, draft=Short)
    found = drafts_of(engine, sequence_spec(numbers_of(1, 20), max_tokens=60))
    assert [number for number, _ in found[2:6]] == [3, 4, 4, 4]
    assert found[6:] == [(0, 0)] * len(found[6:])
    assert model_of(engine).pool.counts().in_use == 0
    assert drafts_of(engine, sequence_spec(numbers_of(2, 50), max_tokens=20)) == [(0, 0)] * 20
    sequence = engine.add(sequence_spec(numbers_of(1, 20), max_tokens=60), Purpose.GENERATE, 0.0)
    while batch := engine.schedule(0.0)[0]:
        if sequence.num_computed_tokens >= 20:
            assert (model_of(engine).pool.counts().in_use > 0) == (sequence.num_tokens < 40)
        engine.commit(batch, engine.runner.execute(batch), 0.0)


@pytest.mark.parametrize("how", ["end", "preempt", "abandon"])
def test_blocks_come_back_however_a_sequence_ends(how: str) -> None:
    """Also of one that a step computes."""
    engine = make_engine(4)
    look_nothing_up(engine)
    sequences = [
        engine.add(sequence_spec(numbers_of(n, 30), f"{n}", max_tokens=60), Purpose.GENERATE, 0.0) for n in range(3)
    ]
    for _ in range(5):
        batch, _ = engine.schedule(0.0)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    model = model_of(engine)
    assert model.pool.counts().in_use >= 6
    batch, _ = engine.schedule(0.0)
    assert sum(part.num_drafts for part in batch.parts) > 3
    if how == "abandon":
        engine.abandon(batch)
    else:
        if how == "end":
            for sequence in sequences[:2]:
                engine.end(sequence)
        engine.check()
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        if how == "preempt":
            for sequence in sequences[:2]:
                engine.scheduler._preempt(sequence)
                assert sequence.num_computed_tokens == 0
        in_use = model.pool.counts().in_use
        engine.scheduler.limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64, output_reservation=8)
        batch, _ = engine.schedule(0.0)
        engine.check()
        assert model.pool.counts().in_use <= in_use // 3 + 2
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        while batch := engine.schedule(0.0)[0]:
            engine.commit(batch, engine.runner.execute(batch), 0.0)
        assert engine.load().accepted_tokens == engine.load().drafted_tokens
    assert nothing_is_held(engine)


# -- what is proposed --------------------------------------------------------------------------------------------------


def test_what_would_end_the_answer_is_not_proposed() -> None:
    """Fewer drafts than were wanted stand in the step then, and are counted."""
    spec = sequence_spec(numbers_of(1, 20), max_tokens=40)
    told = run(make_plain_engine(), [spec])[0][0]
    stop = told.token_ids[8]
    first = told.token_ids.index(stop)
    stopped = sequence_spec(numbers_of(1, 20), max_tokens=40, stop_token_ids=(stop,))
    engine = make_engine(12)
    look_nothing_up(engine)
    (found,), _ = run(engine, [stopped])
    assert found.token_ids == told.token_ids[: first + 1]
    assert found.finish_reason is FinishReason.STOP
    load = engine.load()
    assert load.drafted_tokens == load.accepted_tokens == first - 3
    assert nothing_is_held(engine)


def test_a_structure_holds_for_drafts_too(model_dir: Any) -> None:
    """The draft model draws by the grammar as well: what it proposes is what comes."""
    sizes: dict[str, Any] = {
        "vocab_size": 49152,
        "tokenizer": model_dir / "tokenizer.json",
        "eos_token_ids": frozenset({2}),
    }
    structure = StructuredOutputs(regex="(ab|cd){12,40}")
    specs = [
        sequence_spec(
            numbers_of(n, 20),
            f"{n}",
            max_tokens=30,
            ignore_eos=False,
            temperature=float(n),
            structured_outputs=structure,
        )
        for n in range(3)
    ]
    plain, _ = run(make_plain_engine(**sizes), specs)
    engine = make_engine(6, **sizes)
    look_nothing_up(engine)
    engine.runner.prepare(specs[0].sampling)
    drafted, _ = run(engine, specs)
    assert [one.values for one in drafted] == [one.values for one in plain]
    load = engine.load()
    assert 30 < load.accepted_tokens == load.drafted_tokens


def test_proposals_are_drawn_for_all_sequences_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round for each depth, in which all sequences are that still want a draft."""
    engine = make_engine(3, max_num_batched_tokens=128)
    look_nothing_up(engine)
    for n in range(4):
        engine.add(sequence_spec(numbers_of(n, 20), f"{n}", max_tokens=40 if n else 5), Purpose.GENERATE, 0.0)
    monkeypatch.setattr(draft_model, "UNKNOWN_SHARE", 0.02)
    for _ in range(2):
        batch, _ = engine.schedule(0.0)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    batch, _ = engine.schedule(0.0)
    assert [part.token_ids[1:] for part in batch.parts] == [(UNKNOWN_TOKEN,) * part.num_drafts for part in batch.parts]
    output = engine.runner.execute(batch)
    assert output.proposed is not None
    assert [len(step.parts) for step, _ in output.proposed.rounds] == [4, 4, 3]
    assert output.proposing_s == pytest.approx(0.003)


# -- how many ----------------------------------------------------------------------------------------------------------


def first_drafts(engine: Engine, spec: SequenceSpec) -> int:
    """How many drafts a sequence gets when it has some for the first time; 0: it never has."""
    return next((number for number, _ in drafts_of(engine, spec) if number), 0)


def test_what_a_round_takes_is_weighed_against_what_it_gains() -> None:
    """Once three rounds have been seen. Before, a round is thought to take a fifth of a step."""
    number = {}
    for round_s in (0.0001, 0.004, 0.03):
        engine = make_engine(8, draft=Wrong, round_s=round_s)
        drafts_of(engine, sequence_spec(numbers_of(1, 20), max_tokens=60))
        number[round_s] = first_drafts(engine, sequence_spec(numbers_of(2, 20), "other", max_tokens=60))
    assert number[0.0001] == 8
    assert 0 < number[0.004] < 8
    assert number[0.03] == 0


def test_a_model_that_is_never_right_is_asked_less_and_less() -> None:
    class Bad(ArithmeticRunner):
        def _answer(self, part: StepPart, num_tokens: int) -> int:
            return (super()._answer(part, num_tokens) + 40) % 97

    engine = make_engine(4, draft=Bad, round_s=0.001)
    found = [number for number, _ in drafts_of(engine, sequence_spec(numbers_of(1, 20), max_tokens=200))]
    assert sum(found[:20]) > 10
    assert sum(found[100:]) == 0
    assert found[2] > max(found[20:])
    later = [drafts_of(engine, sequence_spec(numbers_of(n, 20), f"{n}", max_tokens=90)) for n in range(5)]
    assert sum(number for number, _ in later[-1]) <= 2
    assert sum(number for _, number in later[-1]) <= 20, "nor is it caught up with once more"
    drafter = engine.scheduler.drafter
    assert drafter is not None
    for _ in range(8000):
        drafter.learn(FREE, STEP_S)
    again = drafts_of(engine, sequence_spec(numbers_of(2, 20), "later", max_tokens=90))
    assert sum(number for number, _ in again) > 5


def test_how_likely_a_draft_is_differs_from_sequence_to_sequence() -> None:
    class Selective(ArithmeticRunner):
        def _answer(self, part: StepPart, num_tokens: int) -> int:
            return (super()._answer(part, num_tokens) + 40 * bool(part.sampling.stop_token_ids)) % 97

    engine = make_engine(4, draft=Selective)
    look_nothing_up(engine)
    sequences = [
        engine.add(sequence_spec(numbers_of(n, 20), f"{n}", max_tokens=90, **values), Purpose.GENERATE, 0.0)
        for n, values in enumerate(({}, {"stop_token_ids": (VOCAB_SIZE - 1,)}))
    ]
    for _ in range(10):
        batch, _ = engine.schedule(0.0)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        assert len(engine.sequences) == 2
    likely, unlikely = (model_of(engine).chance(sequence) for sequence in sequences)
    assert likely > model_of(engine)._acceptance.chance(draft_model.LIKELY) + 0.05 > unlikely + 0.15


def test_what_a_model_loses_is_bounded_whatever_is_thought_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never right, and forgets so at once: each new sequence seems worth catching up with, and drafts."""

    class Bad(ArithmeticRunner):
        def _answer(self, part: StepPart, num_tokens: int) -> int:
            return (super()._answer(part, num_tokens) + 40) % 97

    monkeypatch.setattr(draft_model, "FADING", 0.0)
    monkeypatch.setattr(draft_model, "FADING_ALL", 0.0)
    engine = make_engine(4, draft=Bad, round_s=0.002)
    look_nothing_up(engine)
    model = model_of(engine)
    model.budget.left_s = 0.0
    lost_s, busy_s = [], []
    for n in range(60):
        engine.add(sequence_spec(numbers_of(n, 20), f"{n}", max_tokens=40), Purpose.GENERATE, 0.0)
        while batch := engine.schedule(0.0)[0]:
            output = engine.runner.execute(batch)
            engine.commit(batch, output, 0.0)
            lost_s.append(output.proposing_s)
            busy_s.append(STEP_S + output.proposing_s)
            engine.learn(StepSize.of(batch), busy_s[-1], output.proposing_s)
    assert model.num_accepted == 0
    num_steps = len(busy_s)
    assert 0 < sum(lost_s[num_steps // 2 :]) < 0.015 * sum(busy_s[num_steps // 2 :])
    assert sum(lost_s) < 0.1 * sum(busy_s[:100]) + 0.01 * sum(busy_s) + STEP_S


def test_a_model_that_gains_is_asked_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its drafts spare is there to be spent, too."""
    engine = make_engine(4, round_s=0.001)
    look_nothing_up(engine)
    model = model_of(engine)
    model.budget.left_s = 0.0015
    engine.scheduler.costs = step_costs(s_weights=STEP_S)
    left_s = []
    engine.add(sequence_spec(numbers_of(1, 20), max_tokens=60), Purpose.GENERATE, 0.0)
    monkeypatch.setattr(draft_model, "UNKNOWN_SHARE", 0.02)
    while batch := engine.schedule(0.0)[0]:
        output = engine.runner.execute(batch)
        engine.commit(batch, output, 0.0)
        if batch.parts[0].num_drafts:
            left_s.append(model.budget.left_s)
    assert left_s == sorted(left_s)
    assert left_s[-1] == pytest.approx(0.0015 + STEP_S * model.num_accepted - 0.001 * rounds_of(engine), rel=0.01)


def test_nothing_is_caught_up_with_that_costs_more_than_may_be_lost() -> None:
    """Of 400 tokens it takes 8 ms and more."""
    for left_s, is_caught_up in ((0.004, False), (0.02, True)):
        engine = make_engine(4, max_num_batched_tokens=400)
        engine.scheduler.costs = step_costs(s_weights=STEP_S, s_per_token=1e-4)
        model_of(engine).budget.left_s = left_s
        found = drafts_of(engine, sequence_spec(numbers_of(1, 400), max_tokens=60))
        assert any(number for _, number in found) == is_caught_up


def test_without_a_budget_nothing_is_proposed() -> None:
    engine = make_engine(4)
    look_nothing_up(engine)
    engine.add(sequence_spec(numbers_of(1, 20), max_tokens=60), Purpose.GENERATE, 0.0)
    is_asked = []
    for number in range(12):
        model_of(engine).budget.left_s = 0.0 if number in (0, 1, 2, 3, 6, 7) else math.inf
        batch, _ = engine.schedule(0.0)
        is_asked.append(batch.parts[0].proposal is not None)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert is_asked == [number in (4, 5, 8, 9, 10, 11) for number in range(12)]


def test_look_up_goes_first_where_it_is_worth_more() -> None:
    """It costs no round; where its guesses are unlikely, the model's are checked."""
    prompt = [5, 6, 7, 8, 9] * 8
    values: dict[str, Any] = {"allowed_token_ids": (5, 6, 7, 8, 9), "max_tokens": 60}
    kinds = set()
    engine = make_engine(4, draft=Wrong)
    engine.add(sequence_spec([5] * 20, max_tokens=40, allowed_token_ids=(5,)), Purpose.GENERATE, 0.0)
    while batch := engine.schedule(0.0)[0]:
        for part in batch.parts:
            kinds.add((bool(part.num_drafts), bool(part.proposal and part.proposal.num_drafts)))
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert (True, False) in kinds
    assert (True, True) not in kinds
    engine = make_engine(4)
    kinds.clear()
    engine.add(sequence_spec(prompt, **values), Purpose.GENERATE, 0.0)
    while batch := engine.schedule(0.0)[0]:
        for part in batch.parts:
            kinds.add((bool(part.num_drafts), bool(part.proposal and part.proposal.num_drafts)))
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert (True, True) in kinds


def test_a_sure_guess_by_look_up_is_worth_more_than_a_sure_proposal() -> None:
    engine = make_engine(4)
    drafter = engine.scheduler.drafter
    assert drafter is not None
    look_nothing_up(engine)
    spec = sequence_spec([5] * 20, max_tokens=60, allowed_token_ids=(5,))
    engine.add(spec, Purpose.GENERATE, 0.0)
    kinds = []
    for number in range(6):
        if number == 4:
            del drafter._looked_up
        (part,) = (batch := engine.schedule(0.0)[0]).parts
        kinds.append((part.num_drafts > 0, part.proposal is not None))
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert kinds == [(False, False), (False, True), (True, True), (True, True), (True, False), (True, False)]


def test_an_unlikely_guess_by_look_up_gives_way_to_a_proposal() -> None:
    """And a likely one does not."""
    engine = make_engine(4)
    drafter = engine.scheduler.drafter
    assert drafter is not None
    look_nothing_up(engine)
    engine.add(sequence_spec(numbers_of(1, 20), max_tokens=60), Purpose.GENERATE, 0.0)
    is_proposed = []
    for number in range(7):
        if number > 3:
            found = Guess((50,) * 4, ((0.99, 0.98, 0.97, 0.96) if number == 5 else (0.1, 0.05, 0.03, 0.02)))
            drafter._looked_up = lambda sequence, most, found=found: found  # type: ignore[method-assign, misc]
        (part,) = (batch := engine.schedule(0.0)[0]).parts
        is_proposed.append(part.proposal is not None and part.num_drafts > 0)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert is_proposed == [False, False, True, True, True, False, True]


def test_the_draft_models_time_is_none_of_the_targets_steps() -> None:
    engine = make_engine(4)
    engine.learn(StepSize(num_new=1, num_decoding=1, num_kv_tokens=100), 0.05, 0.04)
    assert engine.load().costs.decode_step_s(1, 100) == pytest.approx(0.01)
    assert engine.load().busy_s == pytest.approx(0.05)
