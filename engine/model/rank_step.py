"""The part of a step that every rank computes, and the order in which its parts lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from engine.core.runner import BlockCopy, StepPart


class RankStep(NamedTuple):
    """What every rank computes. `parts` are in packed order; those in `sampling` want the logits of their last known
    token and of their drafts, and of each as many first tokens' as `num_scored` says.
    """

    parts: Sequence[StepPart]
    sampling: Sequence[int]
    copies: Sequence[BlockCopy] = ()
    num_scored: Sequence[int] = ()
    """The number of scored tokens of each part; empty: none are."""
    is_ready: bool = False
    """Whether the blocks that it begins are zeroed already."""

    @property
    def logit_rows(self) -> list[int]:
        """Places of the packed tokens whose logits are wanted: first those of `sampling`, then the scored ones."""
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
    """Returns the parts' indices in packed order: segments first, then single tokens with the drafts behind them, those
    that are equally long together.
    """
    lengths = [length if (length := len(p.token_ids)) == p.num_drafts + 1 else 0 for p in parts]
    return sorted(range(len(parts)), key=lengths.__getitem__)
