"""What the sampler needs to know of the parts of a step."""

from __future__ import annotations

from baton.engine.core.runner import StepPart
from baton.engine.sampling.row import Row


def row_of(part: StepPart) -> Row:
    """Returns the row of a part that samples."""
    return Row(part.sampling, part.choice_index, part.end, part.num_prompt_tokens, part.history, part.sequence_key)
