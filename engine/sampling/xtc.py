"""XTC ("exclude top choices"): with some probability, excludes the likeliest tokens.

The definition is the author's (p-e-w, text-generation-webui, pull request 6335). With probability `xtc_probability`,
all tokens that are at least as likely as `xtc_threshold` are excluded, except the least likely of them. If a line break
or an end token is among them, no token is excluded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from engine.sampling.random import XTC, uniform
from engine.sampling.row import Row
from engine.uploads import uploaded


def is_asked(row: Row) -> bool:
    """Return whether tokens are excluded from this draw, decided by seed, choice and position."""
    params = row.sampling
    if not params.xtc_probability:
        return False
    assert params.seed is not None
    return uniform(params.seed, row.choice_index, row.position, XTC) < params.xtc_probability


def xtc(weights: torch.Tensor, rows: Mapping[int, Row], eos_token_ids: Collection[int]) -> torch.Tensor:
    """Return the greatest weight that remains in each of the rows; infinite: all remain.

    Args:
        weights: `[all rows, vocab_size]`.
        rows: rows that exclude tokens, by index.
        eos_token_ids: tokens that end every response.
    """
    chosen = weights.index_select(0, uploaded(torch.tensor(list(rows)), weights.device))
    thresholds = uploaded(torch.tensor([row.sampling.xtc_threshold for row in rows.values()]), weights.device)
    is_top = (chosen >= (thresholds * chosen.sum(-1, dtype=torch.float64)).float()[:, None]) & (chosen > 0)
    most = torch.where(is_top, chosen, torch.inf).amin(-1)
    for place, row in enumerate(rows.values()):
        exempt = [*eos_token_ids, *row.sampling.stop_token_ids, *row.sampling.xtc_exempt_token_ids]
        if exempt:  # decided on the device of the weights, so that the host need not wait for them
            heaviest = chosen[place].index_select(0, uploaded(torch.tensor(exempt), weights.device)).amax()
            most[place].masked_fill_(heaviest > most[place], torch.inf)
    return most
