from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from engine import testing
from engine.sampling.pipeline import Sampler
from engine.sampling.steps import Row, uniform
from engine.sampling.weights import first_beyond
from engine.testing import sampled_of
from tests.unit.engine.core.test_engine import make_spec

NUM_DRAWS = 4000


def sample(logits: torch.Tensor, specs: Sequence[SequenceSpec], positions: Sequence[int]) -> list[int]:
    """What the sequences of these specs draw."""
    rows = [Row(spec.sampling, spec.choice_index, at) for spec, at in zip(specs, positions, strict=True)]
    return Sampler().sample(logits, rows)


def spec_of(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 1,
    choice_index: int = 0,
) -> SequenceSpec:
    spec = make_spec([1])
    sampling = dataclasses.replace(
        spec.sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    return dataclasses.replace(spec, sampling=sampling, choice_index=choice_index)


def with_seed(spec: SequenceSpec, seed: int) -> SequenceSpec:
    return dataclasses.replace(spec, sampling=dataclasses.replace(spec.sampling, seed=seed))


def logits_of(size: int, seed: int = 0, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits: torch.Tensor, spec: SequenceSpec, count: int = NUM_DRAWS) -> list[int]:
    return sample(logits.expand(count, -1), [spec] * count, range(count))


def filtered(logits: torch.Tensor, spec: SequenceSpec) -> torch.Tensor:
    """What transformers' own processors leave over, as probabilities in float64."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores: Any = logits.double()[None]
    ids: Any = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(spec.sampling.temperature)(ids, scores)
    if spec.sampling.top_k:
        scores = TopKLogitsWarper(spec.sampling.top_k)(ids, scores)
    if spec.sampling.top_p < 1:
        scores = TopPLogitsWarper(spec.sampling.top_p)(ids, scores)
    if spec.sampling.min_p:
        scores = MinPLogitsWarper(spec.sampling.min_p)(ids, scores)
    probabilities: torch.Tensor = scores.softmax(-1)[0]
    return probabilities


FILTERS = [
    spec_of(),
    spec_of(0.7),
    spec_of(1.6),
    spec_of(top_k=1),
    spec_of(top_k=5),
    spec_of(top_k=100),
    spec_of(top_p=0.9),
    spec_of(top_p=0.3),
    spec_of(top_p=1e-6),
    spec_of(min_p=0.2),
    spec_of(min_p=1.0),
    spec_of(0.8, top_k=8, top_p=0.9),
    spec_of(1.4, top_k=10, top_p=0.95, min_p=0.1),
    spec_of(0.5, top_p=0.8, min_p=0.05),
]


def name_of(spec: SequenceSpec) -> str:
    return f"t{spec.sampling.temperature}-k{spec.sampling.top_k}-p{spec.sampling.top_p}-m{spec.sampling.min_p}"


def test_greedy_is_the_most_likely_token() -> None:
    logits = torch.stack([logits_of(500, seed) for seed in range(50)])
    assert sample(logits, [spec_of(0.0)] * 50, range(50)) == logits.argmax(-1).tolist()
    filters = spec_of(0.0, top_k=3, top_p=0.1, min_p=0.5)
    assert sample(logits, [filters] * 50, range(50)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("spec", FILTERS, ids=name_of)
def test_draws_follow_the_filtered_distribution(spec: SequenceSpec) -> None:
    logits = logits_of(20, FILTERS.index(spec) % 2)
    expected = filtered(logits, spec)
    counts = Counter(draws(logits, spec))
    kept = {token for token in range(20) if expected[token] > 0}
    assert set(counts) <= kept
    assert set(counts) >= {token for token in kept if expected[token] > 0.005}
    # Pearson's chi-square over the cells with enough draws; mean df, variance 2 df: five standard deviations.
    cells = [token for token in kept if expected[token] * NUM_DRAWS >= 5]
    chi_square = sum(
        (counts[t] - float(expected[t]) * NUM_DRAWS) ** 2 / (float(expected[t]) * NUM_DRAWS) for t in cells
    )
    df = max(1, len(cells) - 1)
    assert chi_square < df + 5 * (2 * df) ** 0.5


@pytest.mark.parametrize("spec", [s for s in FILTERS if name_of(s) != name_of(spec_of())], ids=name_of)
def test_the_filters_keep_what_transformers_keeps(spec: SequenceSpec) -> None:
    """Every single draw, over many rows: transformers' probabilities, looked up at the same number."""
    draw = random.Random(1)
    for row in range(30):
        logits = logits_of(draw.choice([12, 50, 300, 2000]), row, draw.choice([0.5, 2.0, 5.0]))
        probabilities = filtered(logits, spec)
        mass = probabilities.cumsum(0)
        positions = range(40 * row, 40 * row + 40)
        for position, token in zip(positions, sample(logits.expand(40, -1), [spec] * 40, positions), strict=True):
            number = uniform(spec.seed, spec.choice_index, position) * float(mass[-1])
            index = int((mass > number).nonzero()[0])
            # Within rounding of an edge either side is right.
            if min(abs(float(mass[index]) - number), abs(float(mass[max(0, index - 1)]) - number)) > 1e-6:
                assert token == index


def test_a_flat_nucleus_is_not_cut_short() -> None:
    assert len(set(draws(torch.zeros(2560), spec_of(top_p=0.9), 2000))) > 1000


def test_a_token_depends_on_seed_choice_and_position_and_on_nothing_else() -> None:
    logits = logits_of(1000, 1, 0.3)
    base = draws(logits, spec_of(seed=5), 100)
    assert draws(logits, spec_of(seed=5), 100) == base
    assert draws(logits, spec_of(seed=6), 100) != base
    assert draws(logits, spec_of(seed=5, choice_index=1), 100) != base
    assert len(set(base)) > 50, "positions draw different numbers"


def test_the_batch_around_it_does_not_matter() -> None:
    rows = torch.stack([logits_of(400, seed) for seed in range(30)])
    specs = [with_seed(FILTERS[i % len(FILTERS)], i) for i in range(30)]
    positions = list(range(100, 130))
    together = sample(rows, specs, positions)
    assert together == [sample(rows[i : i + 1], [specs[i]], [positions[i]])[0] for i in range(30)]
    order = list(range(30))
    random.Random(0).shuffle(order)
    shuffled = sample(rows[order], [specs[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_narrow_logits_are_drawn_from_alike_beside_a_row_whose_are_adjusted() -> None:
    logits = logits_of(2000, scale=1.0).bfloat16().expand(301, -1)
    rows = [Row(SamplingParams(temperature=1.0, seed=1), 0, place) for place in range(300)]
    adjusted = Row(SamplingParams(temperature=0.0, logit_bias=((3, -1.0),)), 0, 0)
    assert Sampler().sample(logits.clone(), [*rows, adjusted])[:300] == Sampler().sample(logits[:300].clone(), rows)


def test_greedy_and_sampled_rows_mix() -> None:
    logits = logits_of(100, 2, 0.1)
    specs = [spec_of(0.0), spec_of(1.0), spec_of(0.0)]
    tokens = sample(logits.expand(3, -1), specs, [1, 2, 3])
    assert tokens[0] == tokens[2] == int(logits.argmax())
    assert tokens[1] == sample(logits[None], [specs[1]], [2])[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_floating_dtype(dtype: torch.dtype) -> None:
    logits = logits_of(50).to(dtype)
    assert draws(logits, spec_of(top_p=0.9), 200) == draws(logits.float(), spec_of(top_p=0.9), 200)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((64,), -torch.inf)
    logits[[0, 63]] = torch.tensor([-40.0, -torch.inf])
    logits[[10, 20]] = 0.0
    for spec in (spec_of(), spec_of(top_p=0.999999), spec_of(top_k=64), spec_of(min_p=0.5), spec_of(2.0, top_k=3)):
        assert set(draws(logits, spec, 500)) <= {10, 20, 0}
        assert set(draws(logits, spec, 500)) >= {10, 20}


def test_a_low_temperature_is_nearly_greedy() -> None:
    logits = logits_of(100)
    assert set(draws(logits, spec_of(1e-4), 200)) == {int(logits.argmax())}
    assert set(draws(logits, spec_of(1e-38), 200)) == {int(logits.argmax())}
    assert set(draws(logits, spec_of(5e-324), 200)) == {int(logits.argmax())}, "a float32 has no such number"


def test_the_edges_of_the_distribution() -> None:
    """Numbers that fall exactly on a boundary: never a token without probability, never beyond the last."""
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).expand(3, -1)
    edges = torch.tensor([0.0, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert first_beyond(weights, edges).tolist() == [1, 3, 3]


@pytest.mark.parametrize("top_k", [1000, 5000])
def test_a_top_k_of_the_whole_vocabulary_is_no_top_k(top_k: int) -> None:
    logits = logits_of(1000, scale=4.0)
    assert draws(logits, spec_of(top_k=top_k, top_p=0.9)) == draws(logits, spec_of(top_p=0.9))


def test_the_arithmetic_engines_draws_heed_what_changes_logits() -> None:
    """A row that only draws does so near its answer; one with a bias has to see the token that is far from it."""
    rows = [Row(SamplingParams(seed=seed, logit_bias=((5, 100.0),)), 0, 3) for seed in range(8)]
    assert list(sampled_of([30] * 8, rows, Sampler(), 97).token_ids) == [5] * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_change_nothing_of_what_the_arithmetic_engine_draws_and_are_those_of_all_its_tokens(
    temperature: float,
) -> None:
    """Also beside rows that are drawn from the whole vocabulary, and around its end."""
    vocab_size, answers = 8192, [30, 8190, 5000, 8188, 0]
    plain = [SamplingParams(temperature=temperature, seed=seed) for seed in range(len(answers))]
    asked = [dataclasses.replace(params, logprobs=number) for number, params in enumerate(plain)]
    asked[2] = dataclasses.replace(plain[2], logprob_token_ids=(4999, 17))
    tokens = sampled_of(answers, [Row(params, 0, 3) for params in plain], Sampler(), vocab_size)
    found = sampled_of(answers, [Row(params, 0, 3) for params in asked], Sampler(), vocab_size)
    assert tokens.scores is None
    assert found.scores is not None
    for place, params in enumerate(asked):
        if not params.logprob_token_ids:
            assert found.token_ids[place] == tokens.token_ids[place]
        whole = testing.logits_of([answers[place]], vocab_size)
        (exact,) = whole.double().log_softmax(-1)
        named = params.logprob_token_ids or tuple(exact.argsort(descending=True)[: params.logprobs].tolist())
        assert tuple(found.scores[place].top_ids) == named
        assert found.scores[place].logprobs == pytest.approx([exact[found.token_ids[place]].item()], abs=1e-4)
        assert found.scores[place].top_logprobs == pytest.approx(exact[list(named)].tolist(), abs=1e-3)
