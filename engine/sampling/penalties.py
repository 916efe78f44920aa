"""Repetition, presence and frequency penalty: reduce the logits of tokens that the text already contains.

The repetition penalty is that of Keskar et al., "CTRL" (2019), as transformers applies it: over prompt and output. The
others are OpenAI's, over the output alone. Only the logits of tokens that occur are changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from engine.sampling.history import History
from engine.sampling.row import Row
from engine.uploads import uploaded


def apply(logits: torch.Tensor, rows: Mapping[int, Row], histories: Mapping[int, History]) -> None:
    """Change float32 logits `[rows, vocab_size]` in place.

    Args:
        rows: rows with penalties, by index.
        histories: histories of the same rows.
    """
    sizes = [histories[index].num_seen for index in rows]
    params = [row.sampling for row in rows.values()]
    penalties = np.array([[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params], np.float32)
    columns = (
        np.repeat(list(rows), sizes),
        np.concatenate([histories[index].ids for index in rows]),
        np.concatenate([histories[index].counts for index in rows]),
        penalties.repeat(sizes, axis=0),
    )
    where, ids, counts, each = (uploaded(torch.from_numpy(column), logits.device) for column in columns)
    repetition, presence, frequency = each.unbind(-1)
    values = logits[where, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[where, ids] = values - presence * (counts > 0) - frequency * counts
