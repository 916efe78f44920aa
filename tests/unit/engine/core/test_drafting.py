"""Speculation: what is drafted changes how long an answer takes and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.messages import SequenceSpec
from baton.sampling import FinishReason, SamplingParams
from baton.structure import StructuredOutputs
from engine.core import ngrams
from engine.core.drafting import DraftPrice
from engine.core.engine import Engine
from engine.core.ngrams import NO_GUESS, Guess, NgramIndex
from engine.core.outputs import Generated, Preempted, Refused
from engine.core.runner import OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.testing import ArithmeticRunner, expected_tokens
from router.answer.writer import AnswerWriter, Piece
from router.prompt import Tokenizer
from tests.support.builders import sequence_spec
from tests.support.guessing import FREE, FixedPrice, Known, Told, run
from tests.unit.engine.core.test_engine import (
    drain,
    generated,
    is_empty,
    kv_transfer,
    numbers,
    reserved_for,
)

VOCAB_SIZE = 97
IDS = st.integers(0, VOCAB_SIZE - 1)
SAMPLING = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0])},
    optional={
        "top_k": st.integers(1, 20),
        "top_p": st.floats(0.3, 1),
        "min_p": st.floats(0, 0.3),
        "typical_p": st.floats(0.3, 1),
        "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
        "repetition_penalty": st.floats(0.5, 2),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "dry_multiplier": st.floats(0, 4),
        "dry_allowed_length": st.integers(1, 2),
        "logit_bias": st.just(((3, 20.0), (4, 18.0), (5, -5.0))),
        "bad_word_ids": st.lists(st.lists(IDS, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
        "allowed_token_ids": st.lists(IDS, min_size=4, max_size=9, unique=True).map(tuple),
        "min_tokens": st.integers(0, 9),
        "stop_token_ids": st.lists(IDS, max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 3),
        "logprob_token_ids": st.just((1, 2)),
        "reasoning_end_ids": st.just((7, 8)),
        "thinking_budget": st.integers(0, 6),
    },
)


def make_engine(
    most: int = 0,
    num_blocks: int = 64,
    *,
    vocab_size: int = VOCAB_SIZE,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    **runner: Any,
) -> Engine:
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        output_reservation=8,
        max_draft_tokens=most,
    )
    return Engine(ArithmeticRunner(num_blocks, vocab_size=vocab_size, **runner), limits)


def known_of(specs: Sequence[SequenceSpec], told: Sequence[Told], seed: int, **values: Any) -> dict[str, Known]:
    return {
        spec.sequence_id: Known([*spec.token_ids, *one.token_ids], seed + place, **values)
        for place, (spec, one) in enumerate(zip(specs, told, strict=True))
    }


def sampling_of(asked: dict[str, Any], seed: int, max_tokens: int) -> SamplingParams:
    values = {"ignore_eos": True} | asked
    banned = {word[0] for word in values.get("bad_word_ids", ()) if len(word) == 1}
    if banned.issuperset(values.get("allowed_token_ids", ()) or (-1,)):
        values.pop("bad_word_ids", None)
    values["min_tokens"] = min(values.get("min_tokens", 0), max_tokens)
    return SamplingParams(seed=seed, max_tokens=max_tokens, **values)


def numbers_of(seed: int, count: int) -> list[int]:
    return [number % VOCAB_SIZE for number in numbers(seed, count)]


def specs_of(asked: Sequence[dict[str, Any]], n: int, seed: int, num_answered: int) -> list[SequenceSpec]:
    """Returns `n` choices each of what is asked, the first one of which goes on after so many tokens."""
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


@settings(max_examples=75, deadline=None)
@given(
    asked=st.lists(SAMPLING, min_size=1, max_size=4),
    n=st.integers(1, 3),
    seed=st.integers(0, 2**20),
    most=st.integers(1, 9),
    budget=st.sampled_from([16, 20, 64]),
    num_blocks=st.sampled_from([9, 16, 64]),
    num_answered=st.integers(0, 5),
)
def test_answers_are_those_without_drafts(
    asked: list[dict[str, Any]], n: int, seed: int, most: int, budget: int, num_blocks: int, num_answered: int
) -> None:
    """At any parameters, of several choices, resumed, in small steps, preempted for want of blocks."""
    specs = specs_of(asked, n, seed, num_answered)
    plain, _ = run(make_engine(max_num_batched_tokens=budget), specs)
    engine = make_engine(most, num_blocks, max_num_batched_tokens=budget)
    drafted, _ = run(engine, specs, known_of(specs, plain, seed, vocab_size=VOCAB_SIZE))
    assert [one.values for one in drafted] == [one.values for one in plain]
    assert is_empty(engine)


def test_what_is_right_is_taken_at_once() -> None:
    """Twelve tokens of which one is sampled and eleven are right: three steps for 36."""
    spec = sequence_spec(numbers_of(1, 20), max_tokens=37)
    plain, _ = run(make_engine(), [spec])
    engine = make_engine(11)
    sequence = engine.add(spec, Purpose.GENERATE, 0.0)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    sequence.ngrams = Known([*spec.token_ids, *plain[0].token_ids], 0, wrong=0.0)
    sequence.ngrams._random.random = lambda: 0.5  # type: ignore[method-assign]
    sequence.ngrams._random.randint = lambda low, high: high  # type: ignore[method-assign, assignment]
    sizes = []
    while batch := engine.schedule(0.0)[0]:
        (part,) = batch.parts
        sizes.append((len(part.token_ids), part.num_drafts, part.known_end, part.end))
        (output,) = engine.commit(batch, engine.runner.execute(batch), 0.0)
        assert isinstance(output, Generated)
        assert len(output.token_ids) == part.num_drafts + 1
    assert sizes == [(20, 0, 20, 20), (12, 11, 21, 32), (12, 11, 33, 44), (12, 11, 45, 56)]
    load = engine.load()
    assert (load.drafted_tokens, load.accepted_tokens) == (33, 33)


def alone(spec: SequenceSpec) -> Told:
    return run(make_engine(), [spec])[0][0]


def test_what_is_wrong_is_counted_and_its_kv_is_nobodys() -> None:
    """A rejected draft's KV is behind the computed tokens: no block is known under a key that holds some."""
    spec = sequence_spec(numbers_of(2, 30), max_tokens=40)
    told = alone(spec)
    engine = make_engine(6)
    again, _ = run(engine, [spec], known_of([spec], [told], 5, wrong=0.5, vocab_size=VOCAB_SIZE))
    assert again[0].values == told.values
    load = engine.load()
    assert 0 < load.accepted_tokens < load.drafted_tokens
    assert load.computed_tokens == load.accepted_tokens, "of the others nothing was learned here"
    answered = sequence_spec([*spec.token_ids, *told.token_ids], "next turn", max_tokens=20)
    before = engine.load().computed_tokens
    (next_turn,), _ = run(engine, [answered])
    assert next_turn.values == alone(answered).values, "what the cache holds is right"
    assert engine.load().computed_tokens == before
    assert len(engine.pool.keys()) >= 4


def test_a_rejected_draft_is_not_computed() -> None:
    engine = make_engine(4)
    spec = sequence_spec(numbers_of(3, 14), max_tokens=9)
    wrong = [*spec.token_ids, *alone(spec).token_ids]
    sequence = engine.add(spec, Purpose.GENERATE, 0.0)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    batch, _ = engine.schedule(0.0)
    engine.commit(batch, engine.runner.execute(batch), 0.0)
    sequence.ngrams = Known(wrong, 3, wrong=1.0, vocab_size=1)
    assert 0 not in wrong
    for num_computed in (15, 16, 17):
        batch, _ = engine.schedule(0.0)
        (part,) = batch.parts
        output = engine.runner.execute(batch)
        assert part.num_drafts == 0 or output.num_computed_tokens == (num_computed,)
        engine.commit(batch, output, 0.0)
        assert sequence.num_computed_tokens == num_computed
        assert sequence.num_kv_tokens == (num_computed,)
        assert sequence.num_registered_keys == num_computed // 16
    assert engine.load().drafted_tokens > 0
    assert engine.load().accepted_tokens == 0


# -- what may not have drafts ------------------------------------------------------------------------------------------


def drafts_of(engine: Engine, spec: SequenceSpec, purpose: Purpose = Purpose.GENERATE) -> list[int]:
    """How many drafts each step has."""
    if engine.scheduler.drafter is not None:
        engine.scheduler.drafter.price = FREE
    engine.add(spec, purpose, 0.0)
    number = []
    while batch := engine.schedule(0.0)[0]:
        number += [part.num_drafts for part in batch.parts]
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    return number


REPEATING: dict[str, Any] = {"allowed_token_ids": (5,)}


def test_a_text_that_repeats_itself_is_drafted_by_the_engine_itself() -> None:
    spec = sequence_spec([5] * 20, max_tokens=30, **REPEATING)
    number = drafts_of(make_engine(4), spec)
    assert sum(number) > 15
    assert len(number) < 15
    assert drafts_of(make_engine(0), spec) == [0] * 30


def test_beams_prompts_and_states_have_no_drafts() -> None:
    prompt = [5] * 20
    beams = sequence_spec(prompt, max_tokens=8, use_beam_search=True, n=2, seed=None, ignore_eos=False, **REPEATING)
    assert sum(drafts_of(make_engine(4), beams)) == 0
    assert sum(drafts_of(make_engine(4), sequence_spec(prompt, max_tokens=8, **REPEATING), Purpose.PREFILL)) == 0
    resumed = sequence_spec([5] * 33, num_prompt_tokens=9, max_tokens=60, **REPEATING)
    engine = make_engine(4)
    assert sum(drafts_of(engine, resumed)) > 0
    assert sum(drafts_of(engine, resumed, Purpose.PREFILL)) == 0, "all but one are cached; one token is drawn here"
    assert make_engine(4, with_state=True).scheduler.drafter is None, "a state cannot go back"


def test_scores_of_a_prompt_come_before_drafts() -> None:
    spec = sequence_spec([5] * 65, num_prompt_tokens=60, max_tokens=30, prompt_logprobs=1, **REPEATING)
    engine = make_engine(4)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    engine.add(spec, Purpose.GENERATE, 0.0)
    for size in (64, 1):
        batch, _ = engine.schedule(0.0)
        assert [(part.num_scheduled_tokens, part.num_drafts) for part in batch.parts] == [(size, 0)]
        outputs = engine.commit(batch, engine.runner.execute(batch), 0.0)
    (output,) = outputs
    assert isinstance(output, Generated)
    assert output.report is not None
    assert len(output.report.prompt_scores) == 59


def test_no_draft_reaches_beyond_the_answer() -> None:
    """The last token is not drafted: the step yields one more than its drafts."""
    spec = sequence_spec([5] * 20, max_tokens=7, **REPEATING)
    assert drafts_of(make_engine(12), spec) == [0, 5]
    longest = sequence_spec([5] * 20, max_tokens=1000, **REPEATING)
    engine = make_engine(12, max_model_len=40)
    assert drafts_of(engine, longest) == [0, 12, 5], "the 40th is sampled, and is the last"
    assert engine.pool.counts().in_use == 0


def test_nothing_is_guessed_before_all_of_a_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text is read over several steps."""
    monkeypatch.setattr(ngrams, "MAX_READ", 20)
    number = drafts_of(make_engine(4), sequence_spec([5] * 60, num_prompt_tokens=5, max_tokens=90, **REPEATING))
    assert number[:4] == [0] * 4
    assert number[4] > 0


def test_what_ends_an_answer_is_never_drafted() -> None:
    prompt = [5, 6, 0, 9] * 5 + [5, 6]
    ends: dict[str, Any] = {
        "logit_bias": ((0, 100.0),),
        "ignore_eos": False,
        "min_tokens": 1,
        "allowed_token_ids": (0, 9, 5, 6),
    }
    engine = make_engine(4)
    spec = sequence_spec(prompt, max_tokens=20, **ends)
    told = alone(spec)
    assert told.finish_reason is FinishReason.STOP
    assert run(engine, [spec])[0][0].values == told.values
    repeated = [5, 6, 7, 0, 9] * 4 + [5, 6]
    for ignore_eos, drafts in ((True, (0, 9, 5, 6)), (False, ())):
        engine = make_engine(4)
        assert engine.scheduler.drafter is not None
        engine.scheduler.drafter.price = FREE
        spec = sequence_spec(repeated, max_tokens=20, ignore_eos=ignore_eos, allowed_token_ids=(7,))
        engine.add(spec, Purpose.GENERATE, 0.0)
        batch, _ = engine.schedule(0.0)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        assert engine.schedule(0.0)[0].parts[0].token_ids == (7, *drafts)
    index = NgramIndex(100, {0})
    assert index.read(prompt, 0)
    assert index.guess(prompt, 4) == NO_GUESS
    index = NgramIndex(100)
    assert index.read(prompt, 0)
    assert index.guess(prompt, 4).token_ids == (0, 9, 5, 6)


def test_nothing_is_drafted_before_steps_have_shown_what_they_cost() -> None:
    engine = make_engine(4)
    sequence = engine.add(sequence_spec([5] * 20, max_tokens=50, **REPEATING), Purpose.GENERATE, 0.0)
    number = []
    while batch := engine.schedule(0.0)[0]:
        number.append(batch.parts[0].num_drafts)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        engine.learn(batch.size(), 0.01 + 1e-4 * batch.num_scheduled_tokens)
    assert number[:6] == [0] * 6, "its prompt, and five steps"
    assert number[6] > 0
    assert sequence.num_output_tokens == 50


# -- budgets and blocks ------------------------------------------------------------------------------------------------


def test_drafts_count_as_tokens_of_a_step_and_prompts_come_first() -> None:
    spec = [sequence_spec([5 + n] * 20, f"{n}", max_tokens=200, allowed_token_ids=(5 + n,)) for n in range(3)]
    engine = make_engine(12, max_num_batched_tokens=24)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    for each in spec[:2]:
        engine.add(each, Purpose.GENERATE, 0.0)
    for _ in range(6):
        batch, _ = engine.schedule(0.0)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    batch, _ = engine.schedule(0.0)
    assert batch.num_scheduled_tokens == 24
    assert sum(part.num_drafts for part in batch.parts) == 22
    engine.commit(batch, engine.runner.execute(batch), 0.0)
    engine.add(spec[2], Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    assert [part.num_scheduled_tokens - part.num_drafts for part in batch.parts] == [1, 1, 20]
    assert sum(part.num_drafts for part in batch.parts) == 2, "what the prompt has left"
    engine.commit(batch, engine.runner.execute(batch), 0.0)


@pytest.mark.parametrize("num_blocks", [3, 4, 5, 6])
def test_nobody_is_preempted_for_a_draft(num_blocks: int) -> None:
    """Where there are as few blocks as it takes, drafts stay within those that the sequence has."""
    specs = [sequence_spec([5] * 20, f"{n}", max_tokens=40, **REPEATING) for n in range(2)]
    plain, said = run(make_engine(0, num_blocks), specs)
    num_preempted = sum(isinstance(each, Preempted) for each in said)
    engine = make_engine(12, num_blocks)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    drafted, said = run(engine, specs)
    assert [one.values for one in drafted] == [one.values for one in plain]
    assert sum(isinstance(each, Preempted) for each in said) <= num_preempted
    assert engine.load().drafted_tokens > 0


def test_blocks_for_drafts_are_taken_while_each_sequence_could_still_have_one() -> None:
    engine = make_engine(12, 4)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    sequence = engine.add(sequence_spec([5] * 20, max_tokens=40, **REPEATING), Purpose.GENERATE, 0.0)
    ends = []
    while batch := engine.schedule(0.0)[0]:
        ends.append((batch.parts[0].end, len(sequence.block_ids[0])))
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert ends[0] == (20, 2)
    assert all(end <= 16 * number for end, number in ends)
    assert (48, 3) in ends, "the last block is left alone"
    assert ends[-1] == (59, 4), "until the sequence itself needs it"


# -- what goes on elsewhere --------------------------------------------------------------------------------------------


def test_a_received_prompt_is_answered_with_drafts() -> None:
    spec = sequence_spec(numbers_of(4, 37), max_tokens=30, temperature=1.0, seed=3)
    told = alone(spec)
    source, target = make_engine(4), make_engine(5)
    held = source.add(spec, Purpose.PREFILL, 0.0)
    first = generated(drain(source), held)
    sequence = target.add(spec, Purpose.RECEIVE, 0.0)
    _, said = target.schedule(0.0)
    reserved = reserved_for(sequence)
    assert said == [reserved]
    kv_transfer(source, held, target, reserved)
    source.end(held)
    target.insert(sequence, first[0], 0.0)
    assert target.scheduler.drafter is not None
    target.scheduler.drafter.price = FREE
    sequence.ngrams = Known([*spec.token_ids, *told.token_ids], 1, vocab_size=VOCAB_SIZE)
    assert [*first, *generated(drain(target), sequence)] == told.token_ids
    assert target.load().accepted_tokens > 0
    assert is_empty(source)
    assert is_empty(target)


def test_progress_ends_with_the_known_tokens() -> None:
    """A watcher reads what a report says for as long as the blocks are held: no draft is in it."""
    engine = make_engine(4)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    engine.add(sequence_spec([5] * 20, max_tokens=20, **REPEATING), Purpose.GENERATE, 0.0)
    while batch := engine.schedule(0.0)[0]:
        (part,) = batch.parts
        assert part.known_end == part.end - part.num_drafts == engine.sequences[part.sequence_key].num_tokens
        engine.commit(batch, engine.runner.execute(batch), 0.0)


def test_a_stop_string_in_the_midst_of_accepted_drafts_ends_the_answer_there(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    prompt = tokenizer.encode_fragment("one two three four one two three four one two three four one two")
    spec = sequence_spec(
        prompt, max_tokens=12, allowed_token_ids=tuple(tokenizer.encode_fragment(" three four one two"))
    )
    sizes: dict[str, Any] = {"vocab_size": 49152}
    (told,), _ = run(make_engine(**sizes), [spec])
    words = [tokenizer.decode([token_id]) for token_id in told.token_ids]
    stop = words[3] + words[4][:2]
    params = SamplingParams(stop=(stop,))
    pieces = []
    for most in (0, 6):
        engine = make_engine(most, **sizes)
        sequence = engine.add(spec, Purpose.GENERATE, 0.0)
        if engine.scheduler.drafter is not None:
            engine.scheduler.drafter.price = FREE
            sequence.ngrams = Known([*prompt, *told.token_ids], 4, wrong=0.0)
        writer, said = AnswerWriter(tokenizer, prompt, params), list[Piece]()
        largest = 0
        for output in drain(engine):
            assert isinstance(output, Generated)
            largest = max(largest, len(output.token_ids))
            if not said or said[-1].finish_reason is None:
                said.append(writer.push(output.token_ids, output.finish_reason))
        assert (largest > 3) == bool(most)
        pieces.append(("".join(each.text for each in said), said[-1].finish_reason, writer.num_taken))
    assert pieces[0] == pieces[1]
    assert pieces[0][1] is FinishReason.STOP
    assert pieces[0][2] <= 5


# -- structure ---------------------------------------------------------------------------------------------------------


def test_a_structure_is_followed_token_by_token(model_dir: Path) -> None:
    """Drafts that it excludes are rejected, and none of them is taken by its grammar."""
    structure = StructuredOutputs(regex="(ab|cd){12,40}")
    sizes: dict[str, Any] = {
        "vocab_size": 49152,
        "tokenizer": model_dir / "tokenizer.json",
        "eos_token_ids": frozenset({2}),
    }
    specs = [
        sequence_spec(
            numbers(n, 20), f"{n}", max_tokens=30, ignore_eos=False, temperature=float(n), structured_outputs=structure
        )
        for n in range(3)
    ]
    plain, _ = run(make_engine(**sizes), specs)
    engine = make_engine(6, **sizes)
    drafted, _ = run(engine, specs, known_of(specs, plain, 1, wrong=0.3, vocab_size=49152))
    assert [one.values for one in drafted] == [one.values for one in plain]
    assert engine.load().accepted_tokens > 10


class Complex(ArithmeticRunner):
    """A structure becomes too complex at a position."""

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        sample_and_score = self._sampler.sample_and_score

        def failing(logits: Any, rows: Any) -> Any:
            found = sample_and_score(logits, rows)
            return found._replace(failures={n: "too complex" for n, row in enumerate(rows) if row.position == 30})

        self._sampler.sample_and_score = failing  # type: ignore[method-assign]
        try:
            return super().execute(step, on_layer_done)
        finally:
            self._sampler.sample_and_score = sample_and_score  # type: ignore[method-assign]


def test_a_failure_comes_after_the_tokens_before_it() -> None:
    spec = sequence_spec(numbers_of(6, 20), max_tokens=20, presence_penalty=0.5)
    told = alone(spec)
    answers = []
    for most in (0, 7):
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, output_reservation=8, max_draft_tokens=most)
        engine = Engine(Complex(64, vocab_size=VOCAB_SIZE), limits)
        (found,), said = run(engine, [spec], known_of([spec], [told], 2, wrong=0.0))
        assert [type(each) for each in said] == [Refused]
        answers.append(found.token_ids)
        assert is_empty(engine)
    assert answers[0] == answers[1] == told.token_ids[:10]


# -- how many ----------------------------------------------------------------------------------------------------------


def chosen(chance: float, most: int, price: float | DraftPrice, num_decoding: int = 1) -> list[int]:
    """How many drafts each of several sequences gets whose guesses are right with this chance, one after the other."""
    engine = make_engine(most)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FixedPrice(price) if isinstance(price, float) else price

    class Likely(Known):
        def guess(self, token_ids: Sequence[int], most: int) -> Any:
            return Guess((1,) * most, tuple(chance**place for place in range(1, most + 1)))

    for number in range(num_decoding):
        engine.add(sequence_spec(numbers_of(number, 4), f"{number}", max_tokens=90), Purpose.GENERATE, 0.0)
    for _ in range(2):
        batch, _ = engine.schedule(0.0)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        for sequence in engine.sequences.values():
            sequence.ngrams = Likely(sequence.token_ids, 0)
    return [part.num_drafts for part in engine.schedule(0.0)[0].parts]


def test_a_draft_is_proposed_while_its_chance_exceeds_its_price() -> None:
    assert chosen(1.0, 8, 0.1) == [8]
    assert chosen(0.5, 8, 0.09) == [3], "the fourth has the chance 0.06"
    assert chosen(0.5, 8, 0.11) == [2], "the third one's, 0.125, is less than a quarter above the price"
    assert chosen(0.1, 8, 0.1) == [0]
    assert chosen(0.9, 8, 1.0) == [0], "a draft costs as much as a token"
    assert chosen(0.5, 8, 0.2, num_decoding=3) == [2] * 3
    assert chosen(0.5, 8, 0.0) == [4], "what is next to impossible is not proposed, though it costs nothing"


def test_a_price_that_rises_with_the_number_of_drafts_bounds_it() -> None:
    """Two sequences, whose drafts pay up to the fifth of a step: the second has what the first leaves."""

    class Rising(FixedPrice):
        def of(self, num_decoding: int, num_drafts: int) -> float:
            return 0.1 if num_drafts <= 5 else 0.9

    assert chosen(0.9, 3, Rising(0.0), num_decoding=2) == [3, 2]
    assert chosen(0.9, 8, Rising(0.0), num_decoding=2) == [5, 0]


@pytest.mark.parametrize("s_per_draft", [1e-5, 1e-3])
def test_drafts_of_many_sequences_are_taken_where_they_pay(s_per_draft: float) -> None:
    """The guesses of 64 sequences are right. A step of 0.7 ms a token is worth that much a draft, and no more."""
    engine = make_engine(12, 600, max_num_batched_tokens=512, max_num_seqs=64)
    sequences = [
        engine.add(
            sequence_spec([5 + n % 60] * 9, f"{n}", max_tokens=90, allowed_token_ids=(5 + n % 60,)),
            Purpose.GENERATE,
            0.0,
        )
        for n in range(64)
    ]
    spent_s = num_tokens = 0.0
    while len(engine.sequences) == 64 or not num_tokens:
        batch, _ = engine.schedule(0.0)
        size = batch.size()
        took_s = 0.045 + s_per_draft * size.num_drafts
        before = sum(len(sequence.token_ids) for sequence in sequences)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
        engine.learn(size, took_s)
        if size.num_new == size.num_decoding == 64:
            spent_s += took_s
            num_tokens += sum(len(sequence.token_ids) for sequence in sequences) - before
    ratio = num_tokens / spent_s / (64 / 0.045)
    assert ratio > (2.0 if s_per_draft < 1e-4 else 0.85)


def test_the_last_block_key_is_of_known_tokens() -> None:
    """A run of drafts that fills a block is registered up to the token that was kept."""
    prompt = numbers_of(8, 14)
    spec = sequence_spec(prompt, max_tokens=12)
    told = alone(spec)
    stopped = sequence_spec(prompt, "stopped", max_tokens=12, stop_token_ids=(told.token_ids[1],))
    engine = make_engine(8)
    (found,), _ = run(engine, [stopped], {stopped.sequence_id: Known([*prompt, *told.token_ids], 0, wrong=0.0)})
    assert found.finish_reason is FinishReason.STOP
    assert found.token_ids == told.token_ids[: told.token_ids.index(told.token_ids[1]) + 1]
    assert len(engine.pool.keys()) == (len(prompt) + len(found.token_ids)) // 16
    assert expected_tokens(prompt, 12, VOCAB_SIZE) == told.token_ids
