"""A draft model: its blocks and what it has computed, whom it proposes for, and when that is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.costs import StepSize
from baton.messages import SequenceSpec
from baton.sampling import FinishReason
from baton.structure import StructuredOutputs
from engine.core.draft_model import DraftModel
from engine.core.draft_runner import DraftedRunner
from engine.core.drafting import PRIOR, DraftPrice
from engine.core.engine import Engine
from engine.core.ngrams import NO_GUESS, Guess
from engine.core.runner import UNKNOWN_TOKEN, OnLayerDone, StepInput, StepOutput, StepPart, ignore_layer
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.testing import ArithmeticRunner
from tests.support.builders import sequence_spec
from tests.support.guessing import FREE, STEP_S, run
from tests.unit.engine.core.test_drafting import SAMPLING, VOCAB_SIZE, numbers_of, sampling_of
from tests.unit.engine.core.test_drafting import make_engine as make_plain_engine
from tests.unit.engine.core.test_engine import drain, generated, is_empty, kv_transfer, reserved_for


class Wrong(ArithmeticRunner):
    """Draws another token at every third position."""

    def _answer(self, part: StepPart, num_tokens: int) -> int:
        return (super()._answer(part, num_tokens) + 40 * (num_tokens % 3 == 0)) % 97


class Clock:
    """Runs while the draft model computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    most: int = 4,
    num_blocks: int = 64,
    num_draft_blocks: int = 64,
    *,
    draft: type[ArithmeticRunner] = ArithmeticRunner,
    max_num_batched_tokens: int = 64,
    round_s: float = 0.001,
    s_per_token: float = 0.0,
    **runner: Any,
) -> Engine:
    """An engine with a draft model.

    Args:
        draft: the model; without it one that draws what the target does.
        round_s: what each round takes, beside a step of 10 ms.
        s_per_token: what each of its tokens takes in addition.
    """
    runner = {"vocab_size": VOCAB_SIZE} | runner
    limits = SchedulerLimits(
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        output_reservation=8,
        max_draft_tokens=most,
    )
    target = ArithmeticRunner(num_blocks, **runner)
    proposing, clock = draft(num_draft_blocks, **runner), Clock()
    execute = proposing.execute

    def timed(step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        clock.now += round_s + s_per_token * step.num_scheduled_tokens
        return execute(step, on_layer_done)

    proposing.execute = timed  # type: ignore[method-assign]
    engine = Engine(DraftedRunner(target, proposing, clock), limits)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    return engine


def model_of(engine: Engine) -> DraftModel:
    assert engine.scheduler.drafter is not None
    assert engine.scheduler.drafter.model is not None
    return engine.scheduler.drafter.model


def look_nothing_up(engine: Engine) -> None:
    """Leaves guessing to the draft model."""
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter._looked_up = lambda sequence, most: NO_GUESS  # type: ignore[method-assign]


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
    assert [one.values for one in run(engine, specs)[0]] == [one.values for one in plain]
    assert model_of(engine).num_accepted > 60


def test_who_lacks_many_tokens_waits_for_a_step_with_room() -> None:
    """Six sequences that lack ten tokens each, of which a step computes 40."""
    engine = make_engine(4, max_num_batched_tokens=40, num_blocks=80)
    look_nothing_up(engine)
    for n in range(6):
        engine.add(sequence_spec(numbers_of(n, 30), f"{n}", max_tokens=60), Purpose.GENERATE, 0.0)
    model = model_of(engine)
    for _ in range(20):
        if len(model._shadows) < 6:
            batch, _ = engine.schedule(0.0)
            engine.commit(batch, engine.runner.execute(batch), 0.0)
    for shadow in model._shadows.values():
        shadow.sequence.num_computed_tokens = shadow.sequence.num_tokens - 10
    model.begin_step(STEP_S)
    found = [model.proposal(each, 4) for each in engine.scheduler.running]
    assert [proposal is not None for proposal in found] == [True] * 4 + [False] * 2


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
    """A prompt of 20 is caught up with, the last tokens in the first step that has drafts; each then gives five."""
    spec = sequence_spec(numbers_of(1, 20), max_tokens=17)
    engine = make_engine(4)
    assert drafts_of(engine, spec) == [(0, 0), (0, 16), (4, 0), (4, 0), (4, 0)]
    load, model = engine.load(), model_of(engine)
    assert (load.drafted_tokens, load.accepted_tokens) == (12, 12) == (model.num_drafted, model.num_accepted)
    assert nothing_is_held(engine)


@pytest.mark.parametrize("draft", [ArithmeticRunner, Wrong])
def test_it_computes_each_token_once(draft: type[ArithmeticRunner]) -> None:
    """Accepted drafts count as computed but for the last one; a rejected one is computed again."""
    engine = make_engine(4, draft=draft)
    look_nothing_up(engine)
    engine.add(sequence_spec(numbers_of(1, 20), max_tokens=31), Purpose.GENERATE, 0.0)
    end = num_rejected = 0
    while batch := engine.schedule(0.0)[0]:
        output = engine.runner.execute(batch)
        if (proposal := batch.parts[0].proposal) is not None:
            assert proposal.part.num_computed_tokens == end
            num_kept = len(output.sampled_token_ids[0]) - 1
            num_rejected += proposal.num_drafts - num_kept
            end = proposal.part.end + min(max(0, proposal.num_drafts - 1), num_kept)
        engine.commit(batch, output, 0.0)
    assert end > 40
    assert (num_rejected > 0) == (draft is Wrong)


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
    assert drafts_of(make_engine(), scored)[:3] == [(0, 0), (0, 0), (0, 16)], "its scores come first"
    stateful = make_plain_engine(4, with_state=True)
    assert stateful.scheduler.drafter is None


def test_a_long_prompt_is_caught_up_with_a_little_in_each_step() -> None:
    """At first a block, which shows what a token takes, then as much as a quarter of a step of 10 ms allows."""
    engine = make_engine(4, max_num_batched_tokens=400, round_s=0.0, s_per_token=2e-5)
    found = [number for _, number in drafts_of(engine, sequence_spec(numbers_of(1, 400), max_tokens=60))]
    assert [number for number in found if number] == [16, 124, 124, 124, 16]
    engine = make_engine(4, max_num_batched_tokens=400, round_s=0.0, s_per_token=6e-4)
    found = [number for _, number in drafts_of(engine, sequence_spec(numbers_of(1, 60), max_tokens=300))]
    assert [number for number in found if number][:3] == [16, 16, 16], "a block at the least"


def test_nothing_is_caught_up_with_where_look_up_has_drafts() -> None:
    """Nor soon after: each time it begins anew to wait for as long as catching up takes."""
    engine = make_engine(4, max_num_batched_tokens=400, round_s=0.0, s_per_token=6e-5)
    drafter = engine.scheduler.drafter
    assert drafter is not None
    engine.add(sequence_spec(numbers_of(1, 400), max_tokens=80), Purpose.GENERATE, 0.0)
    model_of(engine)._known_s = 6e-5
    kinds = []
    for number in range(14):
        looked_up = Guess((50,), (0.9,)) if number in (1, 2, 4) else NO_GUESS
        drafter._looked_up = lambda sequence, most, found=looked_up: found  # type: ignore[method-assign, misc]
        (part,) = (batch := engine.schedule(0.0)[0]).parts
        kinds.append("drafts" if part.num_drafts else "catches up" if part.proposal else "")
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert kinds[:5] == ["", "drafts", "drafts", "", "drafts"], "a step without drafts forgoes 18 ms of 24"
    assert kinds[5:8] == ["", "catches up", "catches up"]


def test_nothing_is_caught_up_with_for_a_short_rest_of_an_answer() -> None:
    for max_tokens, is_worth_it in ((4, False), (100, True)):
        engine = make_engine(4, max_num_batched_tokens=400, round_s=0.0)
        model_of(engine)._known_s = 2e-4
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
    assert [begun for begun, _ in lengths[0]] == [0, 16]
    assert lengths[1] == [(48, 49)], "of 49 tokens, 48 are in the cache"
    other = sequence_spec(prompt, "of somebody else", max_tokens=40, cache_seed=b"other")
    assert drafts_of(engine, other)[1] == (0, 16), "keys are seeded here, too"
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
    number, num_shadows = [], []
    while batch := engine.schedule(0.0)[0]:
        engine.check()
        number.append(tuple(part.num_drafts for part in batch.parts))
        num_shadows += [len(model_of(engine)._shadows)] * (len(batch.parts) == 2)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert number.index((4, 4)) < number.index((0, 4), 5) < number.index((4,))
    assert 1 in num_shadows[num_shadows.index(2) :], "while both run"
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


def test_a_sequence_beyond_the_draft_models_length_has_none() -> None:
    class Short(ArithmeticRunner):
        def __init__(self, num_blocks: int, **values: Any) -> None:
            super().__init__(num_blocks, **values | {"max_model_len": 40})

    engine = make_engine(4, draft=Short)
    found = drafts_of(engine, sequence_spec(numbers_of(1, 20), max_tokens=60))
    assert [number for number, _ in found[2:6]] == [4, 4, 4, 3]
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
    assert 0 < load.drafted_tokens == load.accepted_tokens < first
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


def test_proposals_are_drawn_for_all_sequences_at_once() -> None:
    """A round for each depth, in which all sequences are that still want a draft."""
    engine = make_engine(3, max_num_batched_tokens=128)
    look_nothing_up(engine)
    for n in range(4):
        engine.add(sequence_spec(numbers_of(n, 15), f"{n}", max_tokens=40 if n else 5), Purpose.GENERATE, 0.0)
    model_of(engine)._known_s = 1e-9
    for _ in range(2):
        batch, _ = engine.schedule(0.0)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    batch, _ = engine.schedule(0.0)
    assert [part.num_drafts for part in batch.parts] == [2, 3, 3, 3]
    assert [part.token_ids[1:] for part in batch.parts] == [(UNKNOWN_TOKEN,) * part.num_drafts for part in batch.parts]
    output = engine.runner.execute(batch)
    assert output.proposing_s == pytest.approx(0.003)


# -- how many ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("round_s", "number"), [(0.0001, 8), (0.003, 2), (0.03, 0)])
def test_what_a_round_takes_is_weighed_against_what_it_gains(round_s: float, number: int) -> None:
    """Beside a step of 10 ms, at a chance of 0.7. Nothing is known of the first one."""
    engine = make_engine(8, round_s=round_s)
    model = model_of(engine)
    model.begin_step(STEP_S)
    drafts_of(engine, sequence_spec(numbers_of(1, 20), max_tokens=30))
    model._rate = 0.7
    found = [number for number, _ in drafts_of(engine, sequence_spec(numbers_of(2, 20), "other", max_tokens=60))]
    assert next((each for each in found if each), 0) == number


def test_a_round_is_shared_by_all_that_are_ready() -> None:
    """A round takes 3 ms of a step of 10. Where four sequences share it, it pays as for one; for one of four it does
    not.
    """
    for most_shadows, has_drafts in ((4, True), (1, False)):
        engine = make_engine(4, round_s=0.003, num_draft_blocks=5 * most_shadows)
        look_nothing_up(engine)
        model = model_of(engine)
        model._round_s, model._known_s = 0.003, 1e-9
        for n in range(4):
            engine.add(sequence_spec(numbers_of(n, 14), f"{n}", max_tokens=40), Purpose.GENERATE, 0.0)
        while batch := engine.schedule(0.0)[0]:
            assert len(model._shadows) <= most_shadows
            engine.commit(batch, engine.runner.execute(batch), 0.0)
        assert (model.num_drafted > 20) == has_drafts


def test_rounds_are_timed_without_what_is_caught_up_with() -> None:
    """One sequence has drafts while another one's long prompt is caught up with."""
    engine = make_engine(4, round_s=0.0005, s_per_token=1e-5, max_num_batched_tokens=400)
    look_nothing_up(engine)
    for n in range(2):
        engine.add(sequence_spec(numbers_of(n, 20 + 300 * n), f"{n}", max_tokens=90), Purpose.GENERATE, 0.0)
    while batch := engine.schedule(0.0)[0]:
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        assert model_of(engine)._round_s < 0.0006


class Bad(ArithmeticRunner):
    """Is never right."""

    def _answer(self, part: StepPart, num_tokens: int) -> int:
        return (super()._answer(part, num_tokens) + 40) % 97


def test_a_model_that_is_never_right_is_asked_less_and_less() -> None:
    engine = make_engine(4, draft=Bad)
    found = [number for number, _ in drafts_of(engine, sequence_spec(numbers_of(1, 20), max_tokens=200))]
    assert sum(found[:20]) > 10
    assert sum(found[100:]) < 4
    later = [drafts_of(engine, sequence_spec(numbers_of(n, 20), f"{n}", max_tokens=90)) for n in range(5)]
    assert sum(number for number, _ in later[-1]) <= 4
    model = model_of(engine)
    for _ in range(8000):
        model.begin_step(STEP_S)
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
    likely, unlikely = (model_of(engine).rate(sequence) for sequence in sequences)
    assert likely > model_of(engine)._rate + 0.05 > unlikely + 0.15


def test_a_model_that_is_never_right_loses_little() -> None:
    """Sequence after sequence: beside steps of 10 ms, what it takes is a hundredth of their time in the end."""
    engine = make_engine(4, draft=Bad, round_s=0.002)
    look_nothing_up(engine)
    lost_s = []
    for n in range(60):
        engine.add(sequence_spec(numbers_of(n, 20), f"{n}", max_tokens=40), Purpose.GENERATE, 0.0)
        while batch := engine.schedule(0.0)[0]:
            output = engine.runner.execute(batch)
            engine.commit(batch, output, 0.0)
            lost_s.append(output.proposing_s)
    assert model_of(engine).num_accepted == 0
    half = len(lost_s) // 2
    assert sum(lost_s[half:]) < 0.01 * STEP_S * half
    assert 0 < sum(lost_s) < 0.02 * STEP_S * len(lost_s)


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


def test_the_draft_models_time_is_no_price_of_checking() -> None:
    engine = make_engine(4)
    assert engine.scheduler.drafter is not None
    price = engine.scheduler.drafter.price = DraftPrice()
    for _ in range(20):
        engine.learn(StepSize(num_new=1, num_decoding=1, num_kv_tokens=100), 0.01)
    engine.learn(StepSize(num_new=1, num_decoding=1, num_kv_tokens=100, num_drafts=4), 0.05, 0.04)
    assert price.of(1, 4) < PRIOR
