"""DRY ("don't repeat yourself"): a token that would continue a repetition is penalized, the more the longer that is.

The definition is the author's (p-e-w, text-generation-webui, pull request 5677). Where the last tokens have occurred
before, the token that followed then loses `multiplier * base ** (length - allowed_length)`, by the longest such
occurrence. No repetition goes beyond a breaker, and none is counted beyond MAX_DRY_LENGTH tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.sampling.history import History
from baton.engine.sampling.row import Row
from baton.sampling import MAX_DRY_LENGTH, SamplingParams


def apply(logits: torch.Tensor, rows: Mapping[int, Row], histories: Mapping[int, History]) -> None:
    """Changes float32 logits `[rows, vocab_size]` in place.

    Args:
        rows: those that ask, by their index.
        histories: of the same rows.
    """
    for index, row in rows.items():
        ids, lengths = repetitions(histories[index].tokens, row.sampling)
        penalties = row.sampling.dry_multiplier * row.sampling.dry_base ** (lengths - row.sampling.dry_allowed_length)
        where = torch.from_numpy(ids).to(logits.device)
        logits[index, where] -= torch.from_numpy(penalties.astype(np.float32)).to(logits.device)


def repetitions(
    tokens: npt.NDArray[np.int64], params: SamplingParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Returns the tokens that would continue a repetition of `dry_allowed_length` tokens or more, and its length."""
    nothing = np.empty(0, np.int64), np.empty(0)
    if params.dry_range:
        tokens = tokens[-params.dry_range :]
    breakers = params.dry_breaker_ids
    if not len(tokens) or tokens[-1] in breakers:
        return nothing
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    ends = ends[~np.isin(tokens[ends + 1], breakers)]
    lengths = np.ones(len(ends))
    growing = np.arange(len(ends))
    for length in range(1, min(MAX_DRY_LENGTH, len(tokens))):
        previous = tokens[-(length + 1)]
        if previous in breakers:
            break
        begins = ends[growing] - length
        growing = growing[(begins >= 0) & (tokens[begins] == previous)]
        if not len(growing):
            break
        lengths[growing] = length + 1
    is_long = lengths >= params.dry_allowed_length
    if not is_long.any():
        return nothing
    ids, places = np.unique(tokens[ends[is_long] + 1], return_inverse=True)
    longest = np.zeros(len(ids))
    np.maximum.at(longest, places, lengths[is_long])
    return ids, longest
