"""The next tokens that a beam search chooses among."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.sampling import SamplingParams
from engine.sampling.pipeline import Sampler
from engine.sampling.steps import Row

VOCAB_SIZE = 40
EOS_IDS = frozenset({3})


def row_of(**asked: Any) -> Row:
    search = {"use_beam_search": True, "temperature": 0.0, "seed": 0, "max_tokens": 9, **asked}
    return Row(SamplingParams(**search), 0, position=5, num_prompt_tokens=5, history=(1, 2, 9, 9, 4))


def logits_of(*best: int) -> torch.Tensor:
    """Falls from the tokens that are named, in their order, to the others."""
    order = [*best, *(token for token in range(VOCAB_SIZE) if token not in best)]
    logits = torch.empty(VOCAB_SIZE)
    logits[order] = torch.linspace(4, 0, VOCAB_SIZE)
    return logits


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"beam_width": 2}, (7, 3, 5)),  # two that go on, and what is likelier
        ({"beam_width": 1}, (7,)),
        ({"beam_width": 2, "ignore_eos": True}, (7, 3)),
        ({"beam_width": 2, "stop_token_ids": (5, 9)}, (7, 3, 5, 0)),
        ({"beam_width": 3, "allowed_token_ids": (3, 5)}, (3, 5)),  # no more are possible
        ({"beam_width": 2, "min_tokens": 1}, (7, 5)),  # it must not end yet
        ({"beam_width": 2, "logit_bias": ((9, 50.0), (3, -50.0))}, (9, 7)),
    ],
)
def test_a_search_gets_what_it_may_need(asked: dict[str, Any], expected: tuple[int, ...]) -> None:
    found = Sampler(EOS_IDS).sample_and_score(logits_of(7, 3, 5)[None], [row_of(**asked)])
    assert found.candidates[0].token_ids == expected
    assert found.candidates[0].scores == ()


def test_their_probabilities_are_those_that_are_drawn_from_and_their_scores_the_models() -> None:
    """The other rows of the batch change nothing."""
    row = row_of(beam_width=2, logprobs=3, repetition_penalty=1.5, allowed_token_ids=(2, 9, 11))
    others = [Row(SamplingParams(temperature=1.0, seed=4, logprobs=1), 0, 5), row_of(beam_width=4, ignore_eos=True)]
    logits = torch.stack([logits_of(4), logits_of(9, 2, 11), logits_of(30, 20)])
    found = Sampler(EOS_IDS).sample_and_score(logits.clone(), [others[0], row, others[1]])
    assert set(found.candidates) == {1, 2}
    raw, adjusted = logits[1].double().log_softmax(-1), torch.full((VOCAB_SIZE,), -torch.inf, dtype=torch.float64)
    for token in (2, 9, 11):
        adjusted[token] = logits[1, token] / (1.5 if token in row.history else 1.0)
    expected = adjusted.log_softmax(-1)
    candidates = found.candidates[1]
    assert candidates.token_ids == tuple(expected.topk(2).indices.tolist())
    assert candidates.logprobs == pytest.approx(expected.topk(2).values.tolist(), abs=1e-5)
    for token, scores in zip(candidates.token_ids, candidates.scores, strict=True):
        assert scores.logprobs == pytest.approx([float(raw[token])], abs=1e-5)
        assert tuple(scores.top_ids) == tuple(raw.topk(3).indices.tolist())
    assert found.candidates[2].scores == ()
    assert len(found.candidates[2].token_ids) == 4


def test_a_row_of_which_nothing_is_possible_has_none() -> None:
    found = Sampler(EOS_IDS).sample_and_score(
        torch.full((1, VOCAB_SIZE), -torch.inf), [row_of(beam_width=2, logprobs=1)]
    )
    assert found.candidates[0] == ((), (), ())


@pytest.mark.parametrize("num_others", [0, 1, 5])
def test_of_equally_likely_tokens_the_first_ones_are_taken_whoever_is_in_the_batch(num_others: int) -> None:
    """A structure leaves thousands of them where other steps have excluded all that it allows."""
    logits = torch.zeros(1 + num_others, 3000)
    logits[:, 2000] = 1.0
    others = [row_of(beam_width=width, ignore_eos=True) for width in (16, 3, 2, 7, 1)[:num_others]]
    found = Sampler(EOS_IDS).sample_and_score(logits, [row_of(beam_width=4), *others])
    assert found.candidates[0].token_ids == (2000, 0, 1, 2), "in their order"
    assert sorted(found.candidates[0].logprobs, reverse=True) == list(found.candidates[0].logprobs)
