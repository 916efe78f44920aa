"""Each sampling step, and all of them together, against references (`reference`)."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.sampling import SamplingParams
from baton.scores import NO_SCORES
from engine.sampling.pipeline import Sampler
from engine.sampling.scores import BLOCK, scores_of
from engine.sampling.steps import DRAW, MAX_KEPT, XTC, Histories, History, Row, repetitions, uniform
from tests.unit.engine.sampling import reference

VOCAB_SIZE = 24
EOS_IDS = (3, 7)
NUM_DRAWS, NUM_SEEDS = 400, 8_000
STEPS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "repetition": {"repetition_penalty": 1.3},
    "repetition, a reward": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.7},
    "rewards": {"presence_penalty": -0.5, "frequency_penalty": -0.3},
    "dry": {"dry_multiplier": 0.8, "dry_breaker_ids": (5,)},
    "dry of the last tokens": {"dry_multiplier": 1.5, "dry_base": 1.2, "dry_allowed_length": 1, "dry_range": 9},
    "bias": {"logit_bias": ((0, 1.5), (4, -100.0), (23, 0.25))},
    "bad words": {"bad_word_ids": ((4,), (5, 6), (1, 2, 3), (2, 2))},
    "allowed": {"allowed_token_ids": (1, 2, 3, 9, 14)},
    "minimum": {"min_tokens": 9, "stop_token_ids": (11,)},
    "minimum reached": {"min_tokens": 8, "stop_token_ids": (11,)},
    "top k": {"top_k": 5},
    "top p": {"top_p": 0.8},
    "min p": {"min_p": 0.15},
    "typical": {"typical_p": 0.6},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.08},
    "xtc without a line break": {"xtc_probability": 1.0, "xtc_threshold": 0.05, "xtc_exempt_token_ids": (8,)},
}
COMBINATIONS: list[dict[str, Any]] = [
    STEPS["repetition"] | STEPS["presence"] | STEPS["frequency"],
    STEPS["dry"] | STEPS["bias"] | STEPS["top p"],
    STEPS["bad words"] | STEPS["allowed"],
    STEPS["minimum"] | STEPS["min p"] | {"temperature": 1.5},
    STEPS["top k"] | STEPS["top p"] | STEPS["min p"],
    STEPS["typical"] | STEPS["top k"],
    STEPS["xtc"] | STEPS["top p"],
    STEPS["xtc without a line break"] | STEPS["typical"],
    STEPS["repetition"] | STEPS["dry"] | STEPS["bias"] | STEPS["bad words"] | {"temperature": 0.6},
    {name: value for asked in STEPS.values() for name, value in asked.items() if name != "allowed_token_ids"},
]
ASKED = {**STEPS, **{f"together {number}": asked for number, asked in enumerate(COMBINATIONS)}}


def row_of(asked: dict[str, Any], seed: int = 1, position: int = 0, **others: Any) -> Row:
    """A row in a text that repeats itself: 12 tokens of prompt and 8 of answer, unless told otherwise."""
    draw = random.Random(seed)
    prompt = [draw.randrange(8) for _ in range(12)]
    history = (*prompt, *prompt[3:9], draw.randrange(VOCAB_SIZE), prompt[8])
    params = SamplingParams(**({"seed": seed} | asked))
    return Row(params, 0, position or len(history), 12, history)._replace(**others)


def logits_of(seed: int, size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2


def taken_at(logits: torch.Tensor, row: Row, **asked: Any) -> list[int]:
    """What one row draws with 200 seeds."""
    rows = [row._replace(sampling=dataclasses.replace(row.sampling, seed=seed, **asked)) for seed in range(200)]
    return Sampler(EOS_IDS).sample(logits.expand(200, -1).clone(), rows)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_every_draw_is_that_of_the_reference(asked: dict[str, Any]) -> None:
    """The reference's probabilities, looked up at the same number. XTC's coin falls as the reference's."""
    for seed in range(40):
        logits, row = logits_of(seed), row_of(asked, seed)
        mass = reference.probabilities(logits, row, EOS_IDS).cumsum(0)
        number = uniform(seed, 0, row.position) * float(mass[-1])
        (token,) = Sampler(EOS_IDS).sample(logits[None].clone(), [row])
        index = int((mass > number).nonzero()[0])
        # Within rounding of an edge either side is right.
        if min(abs(float(mass[index]) - number), abs(float(mass[max(0, index - 1)]) - number)) > 1e-5:
            assert token == index


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_at_temperature_0_the_best_of_the_adjusted_logits_is_taken(asked: dict[str, Any]) -> None:
    for seed in range(20):
        logits, row = logits_of(seed), row_of(asked | {"temperature": 0.0}, seed)
        best = int(reference.adjusted(logits, row, EOS_IDS).argmax())
        assert Sampler(EOS_IDS).sample(logits[None].clone(), [row]) == [best]


@pytest.mark.parametrize("asked", COMBINATIONS, ids=lambda asked: "+".join(asked)[:60])
def test_draws_follow_the_reference(asked: dict[str, Any]) -> None:
    """The seeds are those whose numbers lie evenly, so that each token is drawn as often as its probability says, but
    for one draw at each edge of its interval.
    """
    logits, first = logits_of(4), row_of(asked, 4)
    seeds = seeds_with_even_numbers(first)
    rows = [first._replace(sampling=dataclasses.replace(first.sampling, seed=seed)) for seed in seeds]
    counts = Counter(Sampler(EOS_IDS).sample(logits.expand(NUM_DRAWS, -1).clone(), rows))
    expected = reference.probabilities(logits, rows[0], EOS_IDS)
    assert set(counts) <= {token for token in range(VOCAB_SIZE) if expected[token] > 0}
    for token in range(VOCAB_SIZE):
        assert abs(counts[token] - float(expected[token]) * NUM_DRAWS) < 2, token


def seeds_with_even_numbers(row: Row) -> list[int]:
    """Returns seeds by which a row draws near the middle of each of `NUM_DRAWS` equal parts of all numbers, and by
    which XTC excludes tokens where it is asked for.
    """
    share = row.sampling.xtc_probability
    seeds = [seed for seed in range(NUM_SEEDS) if not share or uniform(seed, 0, row.position, XTC) < share]
    by_part: dict[int, tuple[float, int]] = {}
    for seed in seeds:
        place = uniform(seed, 0, row.position, DRAW) * NUM_DRAWS
        off = abs(place % 1 - 0.5)
        by_part[int(place)] = min((off, seed), by_part.get(int(place), (1.0, -1)))
    assert len(by_part) == NUM_DRAWS, "some parts have no seed"
    return [seed for _, seed in by_part.values()]


def test_a_row_is_the_same_whoever_else_is_in_the_batch() -> None:
    rows = [row_of(asked, seed, sequence_key=seed) for seed, asked in enumerate(ASKED.values())]
    rows += [row_of({"temperature": 0.0}, 99), row_of({"temperature": 0.0, "repetition_penalty": 1.5}, 98)]
    logits = torch.stack([logits_of(seed, 300) for seed in range(len(rows))])
    alone = [Sampler(EOS_IDS).sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    sampler, order = Sampler(EOS_IDS), list(range(len(rows)))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        assert sampler.sample(logits[order].clone(), [rows[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_logits_of_a_model_are_taken_as_they_come(asked: dict[str, Any], dtype: torch.dtype) -> None:
    """They come from torch's inference mode, in which alone they may be changed."""
    plain = logits_of(3).to(dtype)[None]
    with torch.inference_mode():
        logits = plain.clone()
    tokens, *_ = Sampler(EOS_IDS).sample_and_score(logits, [row_of(asked)])
    assert tokens == Sampler(EOS_IDS).sample(plain, [row_of(asked)])


def test_batches_may_grow_and_shrink() -> None:
    sampler, row = Sampler(EOS_IDS), row_of(STEPS["typical"] | STEPS["top p"])
    alone = Sampler(EOS_IDS).sample(logits_of(1)[None].clone(), [row])
    for size in (1, 5, 2, 9, 1):
        assert sampler.sample(logits_of(1).expand(size, -1).clone(), [row] * size) == alone * size


def test_where_ties_are_all_of_them_stay() -> None:
    """What stays depends on no order of the vocabulary."""
    logits = torch.tensor([0.0, 2.0, 2.0, -1.0, 2.0, 0.0])
    for asked in ({"top_k": 2}, {"top_p": 0.5}, {"typical_p": 0.4}):
        assert set(taken_at(logits, row_of(asked))) == {1, 2, 4}


def test_repetitions_are_those_of_the_authors_code() -> None:
    draw = random.Random(1)
    for _ in range(400):
        tokens = draw.choices(range(draw.choice((2, 3, 5))), k=draw.randrange(1, 70))
        if draw.random() < 0.1:
            tokens = [1, 2] * draw.randrange(30, 70)  # longer than what is counted
        allowed, breakers = draw.randrange(1, 5), draw.choice(((), (0,), (1, 4)))
        params = SamplingParams(
            dry_multiplier=1.0,
            dry_base=2.0,
            dry_allowed_length=allowed,
            dry_range=draw.choice((0, 0, 7, 40)),
            dry_breaker_ids=breakers,
        )
        history = History()
        for end in sorted({*draw.choices(range(1, len(tokens) + 1), k=4), len(tokens)}):  # as it grows
            history.take(Row(params, 0, end, 0, tuple(tokens[:end])))
            ids, lengths = repetitions(history, params)
            penalties = torch.zeros(5, dtype=torch.float64)
            penalties[torch.from_numpy(ids)] = -torch.from_numpy(2.0 ** (lengths - allowed))
            expected = reference.without_repetition(torch.zeros(5, dtype=torch.float64), tokens[:end], params)
            assert penalties.tolist() == expected.tolist(), (tokens[:end], params)


# -- histories ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 30), st.lists(st.integers(0, 30), max_size=4))
def test_a_history_is_a_function_of_its_tokens(tokens: list[int], num_prompt: int, stops: list[int]) -> None:
    """However it has grown, and with a prompt of any length."""
    grown = History()
    for end in [*sorted(stops), len(tokens)]:
        grown.take(Row(SamplingParams(), 0, end, num_prompt, tuple(tokens[:end])))
    assert grown.tokens.tolist() == tokens
    counts = Counter(tokens[num_prompt:])
    assert dict(zip(grown.ids.tolist(), grown.counts.tolist(), strict=True)) == {t: counts[t] for t in tokens}


def test_a_history_outgrows_its_first_room() -> None:
    tokens = tuple(random.Random(1).choices(range(5000), k=9000))
    history = Histories().of(Row(SamplingParams(), 0, 9000, 0, tokens))
    assert history.tokens.tolist() == list(tokens)
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == Counter(tokens)


def test_histories_are_kept_by_sequence_and_not_for_ever() -> None:
    histories = Histories()

    def of(key: int, *tokens: int) -> History:
        return histories.of(Row(SamplingParams(), 0, len(tokens), 0, tokens, key))

    first = of(1, 4)
    assert of(1, 4, 5) is first
    assert first.tokens.tolist() == [4, 5]
    assert of(2, 6) is not first
    assert of(-1, 6) is not of(-1, 6), "a row that tells no sequence"
    for key in range(10, 10 + MAX_KEPT):
        of(key, 1)
    assert of(1, 4, 5, 6) is not first, "read again"


# -- what no reference tells -------------------------------------------------------------------------------------------


def test_a_row_that_excludes_everything_keeps_something() -> None:
    logits = logits_of(1)
    asked = {"allowed_token_ids": EOS_IDS, "min_tokens": 9}
    assert set(taken_at(logits, row_of(asked))) == set(EOS_IDS), "nothing else is allowed"
    every = tuple((token,) for token in range(VOCAB_SIZE))
    assert taken_at(logits, row_of({"bad_word_ids": every})) == taken_at(logits, row_of({}))


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 0.01, "temperature": 1e-38},
        {"dry_multiplier": 100.0, "dry_base": 4.0, "dry_allowed_length": 1, "temperature": 1e-38},
        {"logit_bias": tuple((token, -100.0) for token in range(VOCAB_SIZE)), "temperature": 1e-38},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_no_value_within_its_range_makes_a_row_of_nothing(asked: dict[str, Any]) -> None:
    """One row without a finite weight would draw whatever token comes first."""
    row = row_of(asked | {"allowed_token_ids": (1, 2, 9)})
    for repeated in ((1, 2) * 60, (9,) * 120):
        assert set(taken_at(logits_of(1) * 20, row._replace(history=repeated, position=120))) <= {1, 2, 9}


def test_the_coin_of_xtc_is_a_number_of_its_own() -> None:
    coins = [uniform(5, 0, position, XTC) for position in range(4000)]
    draws = [uniform(5, 0, position, DRAW) for position in range(4000)]
    assert coins != draws
    assert abs(sum((a - 0.5) * (b - 0.5) for a, b in zip(coins, draws, strict=True)) / 4000) < 5 / 12 / 4000**0.5
    logits = torch.tensor([5.0, 4.0, 3.0, *[-20.0] * 5])
    tokens = taken_at(logits, row_of({}), xtc_probability=0.25, xtc_threshold=0.05)
    assert 0.10 < tokens.count(2) / 200 - 0.09 * 0.75 < 0.40, "what is left where the two likelier ones are excluded"


def test_an_end_that_xtc_would_exclude_saves_all() -> None:
    logits, row = torch.tensor([5.0, 4.0, 3.0, 4.5, *[-20.0] * 4]), row_of({})  # 3 ends an answer
    assert set(taken_at(logits, row, xtc_probability=1.0, xtc_threshold=0.05)) == {0, 1, 2, 3}
    logits[3] = -20.0
    assert set(taken_at(logits, row, xtc_probability=1.0, xtc_threshold=0.05)) == {2}


def test_penalties_do_not_touch_a_token_that_is_not_there() -> None:
    logits, row = logits_of(2), row_of({"temperature": 0.0, "repetition_penalty": 2.0, "frequency_penalty": 2.0})
    changed = Sampler(EOS_IDS)._adjusted(logits[None].clone(), [row])[0]
    assert {token for token in range(VOCAB_SIZE) if changed[token] != logits[token]} == set(row.history)


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, COMBINATIONS[-1], STEPS["xtc"]], ids=["greedy", "all", "xtc"])
def test_scores_are_of_the_models_own_distribution(asked: dict[str, Any]) -> None:
    """Whatever the sampling makes of it, and whoever else is in the batch."""
    tops = (None, 0, 3, 20, None, 5)
    rows = [row_of(asked | {"logprobs": num_top}, seed) for seed, num_top in enumerate(tops)]
    logits = torch.stack([logits_of(seed, 130) for seed in range(len(rows))])
    tokens, scores, *_ = Sampler(EOS_IDS).sample_and_score(logits.clone(), rows)
    assert tokens == Sampler(EOS_IDS).sample(logits.clone(), rows)
    assert scores is not None
    expected = logits.double().log_softmax(-1)
    for index, (num_top, found) in enumerate(zip(tops, scores, strict=True)):
        if num_top is None:
            assert found == NO_SCORES
            continue
        assert found.logprobs == pytest.approx([float(expected[index, tokens[index]])], abs=1e-5)
        best = expected[index].topk(num_top)
        assert list(found.top_ids) == best.indices.tolist()
        assert list(found.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-5)
        alone = Sampler(EOS_IDS).sample_and_score(logits[index : index + 1].clone(), [rows[index]])
        assert (alone.token_ids, alone.scores) == ([tokens[index]], [found])


@pytest.mark.parametrize("size", [BLOCK * 40, BLOCK * 40 + 1, BLOCK * 3])
def test_the_likeliest_tokens_are_those_of_the_whole_row_wherever_they_lie(size: int) -> None:
    logits = torch.randn(8, size, generator=torch.Generator().manual_seed(size)).double().float()
    logits[1, 5:25] += 20  # all in one block
    logits[2, ::BLOCK] += 20  # one in each
    logits[3, BLOCK - 1 : BLOCK + 1] += 20
    logits[4] = logits[4].round()  # many are equal
    for count in (1, 5, 20):
        found = scores_of(logits, [0] * 8, count)
        ids = torch.tensor(found.top_ids).view(8, count)
        assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :count])


def test_scores_of_tokens_that_a_client_names() -> None:
    asked: list[dict[str, Any]] = [
        {"logprob_token_ids": (7, 2, 7)},
        {"logprobs": 2},
        {"logprob_token_ids": (1,), "logprobs": 5},
    ]
    logits = torch.stack([logits_of(seed) for seed in range(3)])
    tokens, scores, *_ = Sampler(EOS_IDS).sample_and_score(logits.clone(), [row_of(each) for each in asked])
    assert scores is not None
    expected = logits.double().log_softmax(-1)
    assert [tuple(found.top_ids) for found in scores] == [(7, 2, 7), tuple(expected[1].topk(2).indices.tolist()), (1,)]
    for index, found in enumerate(scores):
        own = [float(expected[index, token_id]) for token_id in (tokens[index], *found.top_ids)]
        assert [*found.logprobs, *found.top_logprobs] == pytest.approx(own, abs=1e-5)


def test_who_asks_for_no_scores_gets_none() -> None:
    assert Sampler(EOS_IDS).sample_and_score(logits_of(1)[None], [row_of({})])[1] is None


@pytest.mark.parametrize("num_top", [1, 3, 5])
def test_equally_likely_tokens_have_one_order_whoever_is_in_the_batch(num_top: int) -> None:
    """As in bfloat16, where many logits are equal."""
    logits = torch.zeros(3, 3000)
    logits[0, [2000, 7]] = 1.0
    logits[2] = torch.randperm(3000, generator=torch.Generator().manual_seed(1)).float()
    rows = [row_of({"temperature": 0.0, "logprobs": most}) for most in (num_top, 2, 20)]
    scores = Sampler().sample_and_score(logits.clone(), rows).scores
    assert scores is not None
    assert tuple(scores[0].top_ids) == (7, 2000, 0, 1, 2)[:num_top]
    assert tuple(scores[1].top_ids) == (0, 1)
    assert tuple(scores[2].top_ids) == tuple(logits[2].topk(20).indices.tolist())
    of_prompt = scores_of(logits, [5, 5, 5], num_top)
    assert tuple(of_prompt.top_ids[:num_top]) == (7, 2000, 0, 1, 2)[:num_top]
    assert tuple(of_prompt.top_ids[num_top : 2 * num_top]) == tuple(range(num_top))
