"""Quick draws: the definition's tokens, whatever the row, and on ordinary rows without its help."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.sampling import SamplingParams
from engine.sampling.pipeline import QuickDraws, Sampler, best, token_of
from engine.sampling.steps import Row

SIZES = [1, 2, 63, 64, 65, 640, 5000]
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 1.0, 0.5, 1.7, 1e-3, 1e-38]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 4999, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.9, 0.75, 0.5, 0.25, 1e-9, 1 - 1e-12]) | st.floats(1e-12, 1),
    min_p=st.sampled_from([0.0, 0.0, 1e-7, 0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.9]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([(), (), ((0, 5.0),), ((0, -100.0),)]),
    seed=st.integers(0, 2**40),
)
KINDS = ["normal", "flat", "peaked", "ties", "impossible", "one", "tails", "steps"]


def logits_of(kind: str, size: int, seed: int) -> torch.Tensor:
    """One row, ordinary or not."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(size, generator=generator) * 2.5
    last = int(torch.randint(size, (), generator=generator))
    if kind == "flat":
        row.zero_()
    elif kind == "peaked":
        row[last] = 30.0
    elif kind == "ties":
        row.round_()
    elif kind == "impossible":
        row[torch.rand(size, generator=generator) < 0.7] = -torch.inf
        row[last] = 0.0
    elif kind == "one":
        row[torch.arange(size) != last] = -torch.inf
    elif kind == "tails":  # weights of all exponents, so that sums round
        row = torch.rand(size, generator=generator) * -100
    elif kind == "steps":  # weights of powers of two: shares of the whole fall on edges
        row = torch.randint(-4, 1, (size,), generator=generator) * torch.tensor(2.0).log()
    return row


def defined(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    """What rows draw where nothing is drawn quickly."""

    class Definition(QuickDraws):
        def tokens(self, logits: torch.Tensor, rows: Any) -> list[int | None]:
            return [None] * len(rows)

    sampler = Sampler(eos_token_ids=[0])
    sampler._quick = Definition()
    return sampler.sample(logits.clone(), rows)


@given(st.data())
def test_every_token_is_the_definitions(data: st.DataObject) -> None:
    """Rows of all kinds together, in any order, and each alone."""
    size = data.draw(st.sampled_from(SIZES))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    logits = torch.stack([logits_of(kind, size, data.draw(st.integers(0, 10**6))) for kind in kinds])
    rows = []
    for place in range(len(kinds)):
        params = data.draw(PARAMS)
        biases = tuple((token_id, bias) for token_id, bias in params.logit_bias if token_id < size)
        history = tuple(range(min(size, 3)))
        rows.append(Row(dataclasses.replace(params, logit_bias=biases), place, 7, 1, history))
    expected = defined(logits, rows)
    sampler = Sampler(eos_token_ids=[0])
    assert sampler.sample(logits.clone(), rows) == expected
    assert [sampler.sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)] == expected
    assert sampler.sample(logits.flip(0).clone(), rows[::-1]) == expected[::-1]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_vocabulary_of_usual_size(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits = torch.stack([logits_of(kind, 49_152, seed) for seed, kind in enumerate(KINDS * 2)])
        for params in (
            SamplingParams(seed=1),
            SamplingParams(seed=1, top_p=0.95),
            SamplingParams(seed=1, top_p=0.5, temperature=0.8),
            SamplingParams(seed=1, top_k=50, top_p=0.9, min_p=0.01),
            SamplingParams(seed=1, min_p=0.02, temperature=1.5),
        ):
            for position in range(5):
                rows = [Row(params, choice, position) for choice in range(len(logits))]
                assert Sampler().sample(logits.clone(), rows) == defined(logits, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.95}, {"top_p": 0.5}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}],
    ids=str,
)
def test_the_definition_is_hardly_ever_asked(params: dict[str, Any]) -> None:
    """Else a step would sort the vocabulary after all."""
    logits = torch.stack([logits_of("normal", 20_000, seed) * (0.5 + seed % 3) for seed in range(100)])
    rows = [Row(SamplingParams(seed=seed, **params), 0, seed) for seed in range(100)]
    assert QuickDraws().tokens(logits, rows).count(None) <= 2


def test_an_edge_is_left_to_the_definition() -> None:
    """Two tokens of half the mass each: the nucleus of a half, and the number a half, are between them."""
    weights = torch.tensor([0.5, 0.5, 0.0, 0.0]).numpy()
    assert token_of(weights, SamplingParams(), 0.5) is None
    assert token_of(weights, SamplingParams(), 0.5 - 1e-12) is None
    assert token_of(weights, SamplingParams(), 0.4999) == 0
    assert token_of(weights, SamplingParams(top_p=0.9), 0.5) is None
    weights = torch.tensor([0.5, 0.25, 0.25]).numpy()
    assert token_of(weights, SamplingParams(top_p=0.5), 0.1) is None, "the others go, or stay"
    assert token_of(weights, SamplingParams(top_p=0.499), 0.9) == 0
    assert token_of(weights, SamplingParams(top_p=0.501), 0.9) == 2


def test_weights_that_are_no_numbers_are_left_to_the_definition() -> None:
    weights = torch.full((100,), torch.nan).numpy()
    for params in (
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=3),
        SamplingParams(min_p=0.1),
    ):
        assert token_of(weights, params, 0.3) is None


@given(st.data())
def test_the_best_is_torchs(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES))
    values = st.lists(
        st.sampled_from([0.0, -0.0, 1.0, 1.0, -torch.inf, torch.inf, torch.nan]), min_size=size, max_size=size
    )
    row = torch.tensor(data.draw(values))
    wide = torch.stack([row, row.flip(0)])
    assert best(wide) == wide.argmax(-1).tolist()
    assert best(wide.repeat(1, 2)[:, :size]) == wide.argmax(-1).tolist()


def test_narrow_logits_are_left_to_the_definition() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, -9.0, 50.0]], dtype=torch.bfloat16)
    rows = [Row(SamplingParams(temperature=0.0), 0, 1), Row(SamplingParams(seed=3), 0, 1)]
    assert QuickDraws().tokens(logits, rows) == [None, None]
    assert Sampler().sample(logits, rows) == [1, 2]
