"""Sampling of a step's parts, row by row.

A part with drafts has a row of logits after its last known token and one after each draft. The first is always valid;
the row after a draft is valid if all drafts up to it match the sampled tokens. So rows are sampled in order: first rows
of all parts together, then the second rows of the parts whose first draft matched, and so on. Each draw depends only on
the tokens before it and its own random number, so the result is that of single-token steps, for all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from baton.scores import Drawn, Sampled, TokenScores
from engine.core.runner import StepPart
from engine.sampling.row import Row

SampleRows = Callable[[Sequence[int], Sequence[Row]], Sampled]
"""Samples from the rows of logits with these indices; each row is used at most once."""


def rows_of(parts: Sequence[StepPart]) -> list[Row]:
    """Return the first row of each part, all of which sample."""
    row = Row.__new__  # see `Sequence.part`
    return [
        row(
            Row,
            p.sampling,
            p.choice_index,
            p.num_computed_tokens + len(p.token_ids) - p.num_drafts,
            p.num_prompt_tokens,
            p.history,
            p.sequence_key,
        )
        for p in parts
    ]


def drawn(parts: Sequence[StepPart], first: Sequence[Row], sample: SampleRows) -> Drawn:
    """Return the sampled tokens of parts, in their order.

    Args:
        first: the parts' first rows.
        sample: samples rows; its indices count the rows of each part, one part after the other.
    """
    if not any(part.num_drafts for part in parts):
        return Drawn.one_each(sample(range(len(parts)), first))
    begins = list(accumulate((1 + part.num_drafts for part in parts), initial=0))
    found = Drawn.one_each(sample(begins[:-1], first))
    token_ids = [list(of_part) for of_part in found.token_ids]
    scores = [[of_part] for of_part in found.scores] if found.scores else [list[TokenScores]() for _ in parts]
    going_on = [index for index in range(len(parts)) if index not in found.failures]
    count = 1
    while going_on := [index for index in going_on if _has_come(parts[index], token_ids[index], count)]:
        rows = [_after_drafts(first[index], parts[index], count) for index in going_on]
        more = sample([begins[index] + count for index in going_on], rows)
        for place, index in enumerate(going_on):
            if place in more.failures:  # its next step reports it, after the tokens that it has
                continue
            token_ids[index].append(more.token_ids[place])
            if more.scores:
                scores[index].append(more.scores[place])
        count += 1
    joined = [TokenScores.joined(of_part) for of_part in scores] if found.scores else None
    return found._replace(token_ids=[tuple(of_part) for of_part in token_ids], scores=joined)


def _has_come(part: StepPart, token_ids: Sequence[int], count: int) -> bool:
    """Return whether a part's first `count` drafts match the sampled tokens."""
    is_drafted = len(token_ids) == count <= part.num_drafts
    return is_drafted and token_ids[-1] == part.token_ids[len(part.token_ids) - part.num_drafts + count - 1]


def _after_drafts(first: Row, part: StepPart, num_drafts: int) -> Row:
    """Return the row after a part's first `num_drafts` drafts, given the part's first row."""
    history = first.history
    if history:
        begin = len(part.token_ids) - part.num_drafts
        history += part.token_ids[begin : begin + num_drafts]
    return first._replace(position=first.position + num_drafts, history=history)
