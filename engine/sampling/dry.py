"""DRY ("don't repeat yourself"): penalizes tokens that would continue a repetition, increasingly with its length.

The definition is the author's (p-e-w, text-generation-webui, pull request 5677). If the last tokens have occurred
before, the token that followed them then loses `multiplier * base ** (length - allowed_length)`, where `length` is that
of the longest such occurrence. A repetition ends at a sequence breaker, and its length is counted up to MAX_DRY_LENGTH
tokens.
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
    """Change float32 logits `[rows, vocab_size]` in place.

    Args:
        rows: rows with DRY, by index.
        histories: histories of the same rows.
    """
    for index, row in rows.items():
        ids, lengths = repetitions(histories[index], row.sampling)
        penalties = row.sampling.dry_multiplier * row.sampling.dry_base ** (lengths - row.sampling.dry_allowed_length)
        columns = ids, penalties.astype(np.float32)
        where, lost = (uploaded(torch.from_numpy(column), logits.device) for column in columns)
        logits[index, where] -= lost


def repetitions(history: History, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the tokens that would continue a repetition of at least `dry_allowed_length` tokens, and its length."""
    tokens, breakers = history.tokens, params.dry_breaker_ids
    begin = max(0, len(tokens) - params.dry_range) if params.dry_range else 0
    lengths = _lengths(history, breakers)[begin:]
    places = np.flatnonzero(lengths >= params.dry_allowed_length)
    # Tokens before the range do not belong to a repetition.
    lengths = np.minimum(lengths[places], places + 1)
    following = tokens[begin + places + 1]
    kept = (lengths >= params.dry_allowed_length) & ~np.isin(following, breakers)
    ids, of = np.unique(following[kept], return_inverse=True)
    longest = np.zeros(len(ids))
    np.maximum.at(longest, of, lengths[kept])
    return ids, longest


def _lengths(history: History, breakers: tuple[int, ...]) -> npt.NDArray[np.int16]:
    """Return, for each token but the last, the length of the repetition of the text's end that ends at it.

    A repetition contains no breaker. Each new token costs one pass over the tokens; if many are new, only the last
    MAX_DRY_LENGTH tokens are processed again.
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
