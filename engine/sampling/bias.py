"""Logit bias: values that a client adds to the logits of single tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.row import Row
from engine.uploads import uploaded


def apply(logits: torch.Tensor, rows: Mapping[int, Row]) -> None:
    """Change float32 logits `[rows, vocab_size]` in place.

    Args:
        rows: rows with a logit bias, by index.
    """
    entries = [_columns(row.sampling.logit_bias) for row in rows.values()]
    columns = (
        np.repeat(list(rows), [len(ids) for ids, _ in entries]),
        np.concatenate([ids for ids, _ in entries]),
        np.concatenate([biases for _, biases in entries]),
    )
    where, ids, biases = (uploaded(torch.from_numpy(column), logits.device) for column in columns)
    logits[where, ids] += biases


@functools.lru_cache(maxsize=256)
def _columns(logit_bias: tuple[tuple[int, float], ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return ids and biases as arrays; cached, because they are the same in every step of a sequence."""
    ids, biases = zip(*logit_bias, strict=True)
    return np.array(ids, np.int64), np.array(biases, np.float32)
