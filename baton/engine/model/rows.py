"""The parts of a step: the order in which they are computed, and what the sampler needs to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.core.runner import BlockCopy, StepPart
from baton.engine.sampling.row import Row


@dataclass(frozen=True, slots=True)
class RankStep:
    """What every rank computes. `parts` are in packed order; those in `sampling` want their last token's logits, and of
    each as many first tokens' as `num_scored` says.
    """

    parts: Sequence[StepPart]
    sampling: Sequence[int]
    copies: Sequence[BlockCopy] = ()
    num_scored: Sequence[int] = ()
    """The number of scored tokens of each part; empty: none are."""


def order_for_packing(parts: Sequence[StepPart]) -> list[int]:
    """Returns the parts' indices in packed order: segments first, then single tokens."""
    return sorted(range(len(parts)), key=lambda index: len(parts[index].token_ids) == 1)


def row_of(part: StepPart) -> Row:
    """Returns the row of a part that samples."""
    return Row(part.sampling, part.choice_index, part.end, part.num_prompt_tokens, part.history, part.sequence_key)
