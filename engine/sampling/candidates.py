"""Candidates for the next tokens of a beam search."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from baton.sampling import SamplingParams
from baton.scores import Candidates
from engine.sampling.ranking import falling
from engine.sampling.row import Row
from engine.sampling.scores import RawLogits

LEAST_POSSIBLE = torch.finfo(torch.float32).min
"""Log probability below which a token counts as excluded."""


def candidates_of(
    logits: torch.Tensor, rows: Mapping[int, Row], eos_token_ids: Collection[int], raw: RawLogits | None
) -> dict[int, Candidates]:
    """Return the likeliest tokens of each row, by index: as many as a search may need, or as are possible.

    A search needs as many tokens that do not end a hypothesis as it has beams, and all tokens likelier than the last of
    those.

    Args:
        logits: `[rows, vocab_size]`, any floating dtype, of all rows of the step, after all adjustments.
        rows: rows of beam searches, by index.
        eos_token_ids: tokens that end every response.
        raw: the model's own logits; None: no scores are requested.
    """
    logprobs = logits[list(rows)].float().log_softmax(-1)
    ends = [_ends(row.sampling, eos_token_ids) for row in rows.values()]
    most = max(row.sampling.num_beams + len(of_row) for row, of_row in zip(rows.values(), ends, strict=True))
    least = logprobs.topk(min(most, logits.shape[-1]), dim=-1).values[:, -1].clamp(min=LEAST_POSSIBLE)
    found = {}
    for place, ((index, row), of_row) in enumerate(zip(rows.items(), ends, strict=True)):
        ids, values = (each.tolist() for each in falling(logprobs[place], least[place]))
        num_needed = num_going_on = 0
        while num_going_on < row.sampling.num_beams and num_needed < len(ids):
            num_going_on += ids[num_needed] not in of_row
            num_needed += 1
        token_ids = tuple(ids[:num_needed])
        scores = raw.of_candidates(index, token_ids) if raw and token_ids else ()
        found[index] = Candidates(token_ids, tuple(values[:num_needed]), scores)
    return found


def _ends(params: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    return frozenset(params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids))
