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

from baton.sampling import MAX_DRY_LENGTH, SamplingParams
from engine.sampling.history import History
from engine.sampling.row import Row
from engine.uploads import uploaded


def apply(logits: torch.Tensor, rows: Mapping[int, Row], histories: Mapping[int, History]) -> None:
    """Changes float32 logits `[rows, vocab_size]` in place.

    Args:
        rows: those that ask, by their index.
        histories: of the same rows.
    """
    for index, row in rows.items():
        ids, lengths = repetitions(histories[index], row.sampling)
        penalties = row.sampling.dry_multiplier * row.sampling.dry_base ** (lengths - row.sampling.dry_allowed_length)
        columns = ids, penalties.astype(np.float32)
        where, lost = (uploaded(torch.from_numpy(column), logits.device) for column in columns)
        logits[index, where] -= lost


def repetitions(history: History, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Returns the tokens that would continue a repetition of `dry_allowed_length` tokens or more, and its length."""
    tokens, breakers = history.tokens, params.dry_breaker_ids
    begin = max(0, len(tokens) - params.dry_range) if params.dry_range else 0
    lengths = _lengths(history, breakers)[begin:]
    places = np.flatnonzero(lengths >= params.dry_allowed_length)
    # What lies before the range is no part of a repetition.
    lengths = np.minimum(lengths[places], places + 1)
    following = tokens[begin + places + 1]
    kept = (lengths >= params.dry_allowed_length) & ~np.isin(following, breakers)
    ids, of = np.unique(following[kept], return_inverse=True)
    longest = np.zeros(len(ids))
    np.maximum.at(longest, of, lengths[kept])
    return ids, longest


def _lengths(history: History, breakers: tuple[int, ...]) -> npt.NDArray[np.int16]:
    """Returns, for each token but the last, how many tokens up to it are those up to the last one, without a breaker.

    One pass over the tokens for each new one; what is not known of the last ones is worked out again.
    """
    tokens = history.tokens
    begin, lengths = history.repeated
    if begin < len(tokens) - MAX_DRY_LENGTH:
        begin = len(tokens) - MAX_DRY_LENGTH
        lengths = np.zeros(begin - 1, np.int16)
    for end in range(begin, len(tokens)):
        longer = np.zeros(end, np.int16)
        if tokens[end] not in breakers:
            longer[1:] = lengths[: max(0, end - 1)]
            np.minimum(longer + 1, MAX_DRY_LENGTH, out=longer)
            longer *= tokens[:end] == tokens[end]
        lengths = longer
    history.repeated = len(tokens), lengths
    return lengths
