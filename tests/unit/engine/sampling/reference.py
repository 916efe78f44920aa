"""What the sampling pipeline should make of a row of logits, from other people's code and authors' definitions.

transformers' processors and warpers where it has the step; slow Python where it has not.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from baton.sampling import SamplingParams
from engine.sampling.steps import XTC, Row, uniform

MAX_DRY_LENGTH = 50


def probabilities(logits: torch.Tensor, row: Row, eos_ids: Collection[int] = ()) -> torch.Tensor:
    """The probability of every token, in float64; at temperature 0 the best one has all of it."""
    params, scores = row.sampling, adjusted(logits, row, eos_ids)
    if params.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if 0 < params.top_k < len(scores):
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    found = through(warpers, [0], scores).softmax(-1)
    if params.xtc_probability:
        assert params.seed is not None
        if uniform(params.seed, row.choice_index, row.position, XTC) < params.xtc_probability:
            exempt = {*eos_ids, *params.stop_token_ids, *params.xtc_exempt_token_ids}
            found = without_top_choices(found, params.xtc_threshold, exempt)
    return found


def adjusted(logits: torch.Tensor, row: Row, eos_ids: Collection[int] = ()) -> torch.Tensor:
    """The logits before the temperature, in float64."""
    params, ends = row.sampling, [*eos_ids, *row.sampling.stop_token_ids]
    scores, ids = logits.double(), list(row.history) or [0]
    if params.repetition_penalty != 1:
        scores = through([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)], ids, scores)
    answer = row.history[row.num_prompt_tokens :]
    for token in set(answer):
        scores[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    if params.dry_multiplier:
        scores = without_repetition(scores, row.history, params)
    processors: list[Any] = []
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias or 1e-300 for token, bias in params.logit_bias}))
    if params.bad_word_ids:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_word_ids]))
    if params.min_tokens and ends:
        processors.append(MinNewTokensLengthLogitsProcessor(row.num_prompt_tokens, params.min_tokens, list(ends)))
    scores = through(processors, ids, scores)
    if params.allowed_token_ids:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[list(params.allowed_token_ids)] = 0.0
        scores = scores + allowed
    return scores


def through(processors: Sequence[Any], ids: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
    """The scores after transformers' processors."""
    rows: Any = scores[None].clone()
    for processor in processors:
        rows = processor(torch.tensor([ids]), rows)
    found: torch.Tensor = rows[0]
    return found


def without_repetition(scores: torch.Tensor, tokens: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """DRY, after the author's code (text-generation-webui, pull request 5677)."""
    tokens, breakers = list(tokens[-params.dry_range :] if params.dry_range else tokens), params.dry_breaker_ids
    if not tokens or tokens[-1] in breakers:
        return scores
    lengths: dict[int, int] = {}
    for i in range(len(tokens) - 1):
        following = tokens[i + 1]
        if tokens[i] != tokens[-1] or following in breakers:
            continue
        length = 1
        while length < MAX_DRY_LENGTH and i - length >= 0:
            if tokens[i - length] != tokens[-(length + 1)] or tokens[i - length] in breakers:
                break
            length += 1
        lengths[following] = max(length, lengths.get(following, 0))
    scores = scores.clone()
    for token, length in lengths.items():
        if length >= params.dry_allowed_length:
            scores[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return scores


def without_top_choices(found: torch.Tensor, threshold: float, exempt: Collection[int]) -> torch.Tensor:
    """XTC, after the author's code (text-generation-webui, pull request 6335), on probabilities."""
    falling = found.argsort(descending=True).tolist()
    removed = [token for token, after in itertools.pairwise(falling) if found[after] >= threshold]
    if set(removed) & set(exempt):
        return found
    found = found.clone()
    found[removed] = 0.0
    return found / found.sum()
