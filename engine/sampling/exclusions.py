"""Excluded tokens: bad words, all but the allowed tokens, and tokens that would end a response too early.

If bad words and early ends would exclude all allowed tokens, the allowed tokens stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from engine.sampling.row import Row
from engine.uploads import uploaded

EXCLUDED = float("-inf")


def is_asked(row: Row) -> bool:
    """Return whether a row excludes tokens."""
    params = row.sampling
    return bool(params.bad_word_ids or params.allowed_token_ids) or _is_too_short(row)


def apply(logits: torch.Tensor, rows: Mapping[int, Row], eos_token_ids: Collection[int]) -> None:
    """Change float32 logits `[rows, vocab_size]` in place.

    Args:
        rows: rows with exclusions, by index.
        eos_token_ids: tokens that end every response.
    """
    for index, row in rows.items():
        banned = _bad_words(row)
        if _is_too_short(row):
            banned.update(eos_token_ids, row.sampling.stop_token_ids)
        if allowed := row.sampling.allowed_token_ids:
            left = [token_id for token_id in allowed if token_id not in banned] or list(allowed)
            places = uploaded(torch.tensor(left), logits.device)
            kept = logits[index].index_select(0, places)
            logits[index] = EXCLUDED
            logits[index].index_copy_(0, places, kept)
        elif 0 < len(banned) < logits.shape[-1]:
            places = uploaded(torch.tensor(list(banned)), logits.device)
            logits[index].index_fill_(0, places, EXCLUDED)


def _is_too_short(row: Row) -> bool:
    return row.position - row.num_prompt_tokens < row.sampling.min_tokens


def _bad_words(row: Row) -> set[int]:
    """Return the tokens that would complete a bad word."""
    banned = set()
    for *begin, last in row.sampling.bad_word_ids:
        if not begin or row.history[-len(begin) :] == tuple(begin):
            banned.add(last)
    return banned
