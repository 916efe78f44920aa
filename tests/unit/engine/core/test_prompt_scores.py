"""Log probabilities of a prompt's tokens: the same however the prompt is computed, and once."""

from __future__ import annotations

import dataclasses

import pytest

from baton.messages import SequenceSpec
from baton.scores import TokenScores
from engine.core.engine import Engine
from engine.core.outputs import Generated, Output
from engine.core.scheduler import MAX_SCORED
from engine.core.sequence import Purpose
from engine.testing import expected_tokens, logits_of
from tests.unit.engine.core.test_engine import drain, is_empty, make_engine, make_spec, numbers, step

VOCAB_SIZE = 49152


def scoring(prompt: list[int], num_top: int = 2, num_tokens: int = 4, name: str = "scored") -> SequenceSpec:
    spec = make_spec(prompt, num_tokens, name=name)
    return dataclasses.replace(spec, sampling=dataclasses.replace(spec.sampling, prompt_logprobs=num_top))


def scores_in(engine: Engine, spec: SequenceSpec, purpose: Purpose = Purpose.GENERATE) -> TokenScores:
    """Runs a sequence to its end."""
    sequence = engine.add(spec, purpose, 0.0)
    outputs = [output for output in rest_of(engine) if isinstance(output, Generated)]
    engine.end(sequence)
    reports = [output.report for output in outputs if output.report is not None]
    assert len(reports) == 1
    assert outputs[0].report is reports[0], "they come with the first token"
    assert reports[0].num_cached_tokens == 0
    return reports[0].prompt_scores


def rest_of(engine: Engine) -> list[Output]:
    """Steps until nothing can run, at a time that is not 0, which is none."""
    outputs: list[Output] = []
    while True:
        batch, more = engine.schedule(1.0)
        outputs += more
        if not batch:
            return outputs
        outputs += engine.commit(batch, engine.runner.execute(batch), 1.0)
        engine.check()


def expected_scores(prompt: list[int], num_top: int) -> TokenScores:
    logprobs, top_ids, top_logprobs = list[float](), list[int](), list[float]()
    for count, token_id in enumerate(prompt[1:], 1):
        (best,) = expected_tokens(prompt[:count], 1)
        row = logits_of([best], VOCAB_SIZE)[0].double().log_softmax(-1).clamp(min=-9999.0)
        logprobs.append(float(row[token_id]))
        top = row.topk(num_top)
        top_ids += top.indices.tolist()
        top_logprobs += top.values.tolist()
    return TokenScores(tuple(logprobs), tuple(top_ids), tuple(top_logprobs))


def same(found: TokenScores, expected: TokenScores) -> None:
    assert found.top_ids == expected.top_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("purpose", [Purpose.GENERATE, Purpose.PREFILL])
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 150])
def test_they_are_those_of_the_logits_in_each_tokens_place(num_tokens: int, purpose: Purpose, num_top: int) -> None:
    """In chunks of any length, from a cold cache and from one that has the prompt."""
    prompt = numbers(num_tokens, num_tokens)
    for chunk in (16, 64):
        engine = make_engine(max_num_batched_tokens=chunk)
        cold = scores_in(engine, scoring(prompt, num_top), purpose)
        assert len(cold) == num_tokens - 1
        same(cold, expected_scores(prompt, num_top))
        assert scores_in(engine, scoring(prompt, num_top, name="again"), purpose) == cold
        assert is_empty(engine)


def test_a_step_has_few_rows_of_logits() -> None:
    engine = make_engine(max_num_batched_tokens=1024)
    prompt = numbers(4, 300)
    sequence = engine.add(scoring(prompt), Purpose.GENERATE, 0.0)
    sizes = []
    while sequence.num_output_tokens == 0:
        batch, _ = engine.schedule(0.0)
        sizes.append(batch.num_scheduled_tokens)
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert sizes == [MAX_SCORED, MAX_SCORED, 300 - 2 * MAX_SCORED]


def test_others_are_computed_beside_it_and_find_its_blocks() -> None:
    engine = make_engine(max_num_batched_tokens=1024, max_num_seqs=8)
    prompt = numbers(5, 200)
    scored = engine.add(scoring(prompt), Purpose.GENERATE, 0.0)
    other = engine.add(make_spec(numbers(6, 90), 6, name="other"), Purpose.GENERATE, 0.0)
    outputs = [output for output in drain(engine) if isinstance(output, Generated)]
    tokens = [token for o in outputs if o.sequence_key == other.key for token in o.token_ids]
    assert tokens == expected_tokens(numbers(6, 90), 6)
    (report,) = [o.report for o in outputs if o.sequence_key == scored.key and o.report is not None]
    same(report.prompt_scores, expected_scores(prompt, 2))
    plain = engine.add(make_spec(prompt, 2, name="plain"), Purpose.GENERATE, 0.0)
    drain(engine)
    assert plain.num_cached_tokens == 192


def test_a_prompt_that_is_preempted_is_scored_anew() -> None:
    """The blocks suffice for both until the older one has a dozen tokens, in the middle of the other's prompt."""
    engine = make_engine(num_blocks=17, max_num_batched_tokens=16, output_reservation=2)
    older = engine.add(make_spec(numbers(7, 100), 40, name="older"), Purpose.GENERATE, 0.0)
    while older.num_output_tokens < 4:
        step(engine)
    prompt = numbers(8, 150)
    scored = engine.add(scoring(prompt), Purpose.GENERATE, 0.5)
    outputs = [output for output in rest_of(engine) if output.sequence_key == scored.key]
    assert engine.scheduler.num_preemptions == 1
    (report,) = [output.report for output in outputs if isinstance(output, Generated) and output.report is not None]
    same(report.prompt_scores, expected_scores(prompt, 2))
