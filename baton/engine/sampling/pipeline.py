"""Turns logits into token ids.

Every random decision is one number from `random.uniform(seed, choice, position)` looked up in the cumulative
distribution, so a token depends on nothing but its request: not on the batch, the worker or what ran before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.sampling.random import uniform
from baton.sampling import SamplingParams

SAMPLER = "inverse-transform-blake2b/1"
"""Name of the contract: the same seed, choice, position and logits give the same token in every release with it."""
NUCLEUS_CANDIDATES = 256
"""Tokens in which a nucleus is looked for before all of them are sorted."""


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], choices: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """Returns one token for each row.

    Args:
        logits: `[rows, vocab_size]`, any floating dtype.
        params: each with the seed set, unless it is greedy.
        choices: index of each row's choice within its request.
        positions: of the tokens to sample, counted from the first prompt token.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (sampling, choice_index, position) in enumerate(zip(params, choices, positions, strict=True)):
        if sampling.temperature > 0:
            assert sampling.seed is not None
            number = uniform(sampling.seed, choice_index, position)
            tokens[row] = _sample_row(logits[row].float(), sampling, number)
    return tokens


def _sample_row(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """Temperature, then top-k, top-p and min-p, in transformers' order; then inverse transform sampling."""
    probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
    top_k = params.top_k if params.top_k < probabilities.numel() else 0  # all tokens
    if top_k == 0 and params.top_p >= 1 and params.min_p == 0:
        return _draw(probabilities, number)
    top, token_ids = _descending(probabilities, top_k, params.top_p)
    if params.top_p < 1:
        mass = top.cumsum(0)
        # Keep every token before which less than top_p of the (top-k) mass lies: at least the first.
        top = top[(mass - top) < params.top_p * (mass[-1] if top_k > 0 else 1.0)]
    if params.min_p > 0:
        top = top[top >= params.min_p * top[0]]
    return int(token_ids[_draw(top, number)])


def _descending(probabilities: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens first: as many as the filters can keep. A full sort is the last resort."""
    if top_k > 0:
        return _pair(probabilities.topk(top_k))
    if top_p < 1 and probabilities.numel() > NUCLEUS_CANDIDATES:
        top = probabilities.topk(NUCLEUS_CANDIDATES)
        if float(top.values.sum()) >= top_p:
            return _pair(top)
    return _pair(probabilities.sort(descending=True))


def _pair(result: torch.return_types.topk | torch.return_types.sort) -> tuple[torch.Tensor, torch.Tensor]:
    return result.values, result.indices


def _draw(weights: torch.Tensor, number: float) -> int:
    mass = weights.cumsum(0)
    index = int(torch.searchsorted(mass, number * float(mass[-1]), right=True))
    return min(index, weights.numel() - 1)
