"""Order in which prompts are computed, and the time that they may take from decoding sequences.

Pure: time is an argument.
"""

from __future__ import annotations

import math

from baton.costs import ITL_TARGET, StepCosts
from engine.core.sequence import Purpose, Sequence
from engine.core.sequence_blocks import SequenceBlocks

LEAST_STEP = 0.5
"""Minimum share of the ITL objective that a step may take, even if sequences are late: shorter steps could not catch
up."""


def urgency(
    sequence: Sequence, now: float, costs: StepCosts, blocks: SequenceBlocks, chunk: int
) -> tuple[int, bool, float, float]:
    """Return the sort key, least first: priority, whether it cannot meet its deadline, deadline, arrival.

    A sequence that has already generated tokens and must be recomputed comes before all others of its priority.

    Args:
        costs: step costs.
        blocks: block accounting, which includes the cache.
        chunk: prompt tokens in a step.
    """
    spec = sequence.spec
    if sequence.num_output_tokens:
        return -spec.priority, False, -math.inf, sequence.arrival_s
    return -spec.priority, _must_be_late(sequence, now, costs, blocks, chunk), sequence.deadline_s, sequence.arrival_s


def _must_be_late(sequence: Sequence, now: float, costs: StepCosts, blocks: SequenceBlocks, chunk: int) -> bool:
    """Return whether its first token would be late even if it were computed alone from now on."""
    spare_s = sequence.deadline_s - now
    if spare_s == math.inf:
        return False
    if spare_s < 0 or sequence.purpose is Purpose.RECEIVE:
        return spare_s < 0
    num_tokens = sequence.num_tokens
    if costs.prefill_s(num_tokens, sequence.num_computed_tokens, chunk) <= spare_s:
        return False
    return costs.prefill_s(num_tokens, blocks.num_present_tokens(sequence), chunk) > spare_s


def computing_room_s(decoding: list[Sequence], now: float, costs: StepCosts) -> float:
    """Return how long prompts may compute in the step that starts now, given its decoding sequences.

    Each sequence's next token is due when its mean interval so far reaches the objective, so a sequence that was fast
    has time to spare.
    """
    step_s, num_kv_tokens = math.inf, 0
    for sequence in decoding:
        num_kv_tokens += len(sequence.token_ids)
        if (itl_s := sequence.spec.itl_s) < math.inf and sequence.num_generated_tokens > sequence.has_unknown:
            due_s = sequence.first_token_s + ITL_TARGET * itl_s * sequence.num_generated_tokens
            step_s = min(step_s, max(due_s - now, LEAST_STEP * itl_s))
    if step_s == math.inf:
        return math.inf
    return costs.computing_room_s(step_s, len(decoding), num_kv_tokens)
