"""The part of a step that every rank computes, and the packed order of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from engine.core.runner import BlockCopy, StepPart


class RankStep(NamedTuple):
    """The computation of every rank.

    `parts` are in packed order. Those in `sampling` need the logits of their last known token and of their drafts; each
    part needs those of its first `num_scored` tokens.
    """

    parts: Sequence[StepPart]
    sampling: Sequence[int]
    copies: Sequence[BlockCopy] = ()
    num_scored: Sequence[int] = ()
    """Number of scored tokens of each part; empty: none are scored."""
    is_ready: bool = False
    """True if the blocks that it starts are zeroed already."""

    @property
    def logit_rows(self) -> list[int]:
        """Indices of the packed tokens whose logits are needed: first those of `sampling`, then the scored ones."""
        ends = list(itertools.accumulate([len(part.token_ids) for part in self.parts]))
        drafts = [part.num_drafts for part in self.parts]
        if any(drafts):
            rows = [row for index in self.sampling for row in range(ends[index] - 1 - drafts[index], ends[index])]
        else:
            rows = [ends[index] - 1 for index in self.sampling]
        for part, end, number in zip(self.parts, ends, self.num_scored, strict=False):
            begin = end - len(part.token_ids)
            rows += range(begin, begin + number)
        return rows


def order_for_packing(parts: Sequence[StepPart]) -> list[int]:
    """Return the parts' indices in packed order: segments first, then decodes with their drafts.

    Decodes of equal length are adjacent, and among them those with the same adapter.
    """
    lengths = [length if (length := len(p.token_ids)) == p.num_drafts + 1 else 0 for p in parts]
    adapters = [part.adapter for part in parts]
    if any(adapters):
        return sorted(range(len(parts)), key=list(zip(lengths, adapters, strict=True)).__getitem__)
    return sorted(range(len(parts)), key=lengths.__getitem__)
