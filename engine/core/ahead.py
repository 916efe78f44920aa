"""Planning a step while the step before it still runs and its sampled tokens are not known yet.

    runner     | step n            | step n + 1        | step n + 2
    event loop       plan n + 1 |   commit n, plan n + 2 |

The plan depends on three results of the running step. The number of tokens is known: one for each sequence that
samples, since such a step has no drafts. The tokens themselves stand as `UNKNOWN_TOKEN` until the runner fills them in.
A sequence may also stop with its token: it is planned as if it continued, and if it has stopped, its part of the step
that was planned ahead is dropped. Its blocks are not freed until that step is committed, nor are the blocks that the
step reads of a sequence whose table has changed. If a sequence stops by length, the plan already knows it.

A step is planned ahead whole or not at all. If one sequence has to see the last tokens first, the whole step is planned
when they are known. That is the case for draws that depend on earlier tokens (penalties, DRY, grammars, excluded words
of several tokens), beam searches, scores of prompts, drafts, several choices that fork one prompt, and sequences whose
next token would preempt another sequence. With a draft model, and for a diffusion model, no step is planned ahead.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.core.runner import StepInput
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence


def is_possible(step: StepInput, sequences: SequenceOf[Sequence], scheduler: Scheduler) -> bool:
    """Return whether the step after `step`, which is running, can be planned now.

    Args:
        sequences: the sequences of the step's parts, in order.
    """
    if step.copies or any(part.num_drafts for part in step.parts):
        return False
    if any(part.sample and each.needs_history for part, each in zip(step.parts, sequences, strict=True)):
        return False
    if any(each.search is not None or each.scores_prompt for each in scheduler.running):
        return False
    if any(each.spec.choice_index or each.search is not None for each in scheduler.waiting):
        return False
    return _has_room(sequences, scheduler) and not _may_draft(step, sequences, scheduler)


def _has_room(sequences: SequenceOf[Sequence], scheduler: Scheduler) -> bool:
    """Return whether every running sequence can grow by one token without taking another sequence's blocks.

    Args:
        sequences: sequences of the running step. After it, each releases the row that it reads if the row is shared or
            a snapshot, and then needs another one.
    """
    pool, blocks = scheduler.pool, scheduler.blocks
    needing = [each for each in scheduler.running if each.num_tokens >= each.num_block_tokens]
    missing = [blocks.missing(each, each.num_tokens + 1) for each in needing]
    if pool.rows is not None:
        without_rows = [0] * len(pool.groups)
        missing += [[*without_rows, pool.num_missing_after_step(each.block_ids[-1])] for each in sequences]
    return not missing or pool.has_room([sum(numbers) for numbers in zip(*missing, strict=True)])


def _may_draft(step: StepInput, sequences: SequenceOf[Sequence], scheduler: Scheduler) -> bool:
    """Return whether drafts after the known tokens would pay: then they may also pay after the next token."""
    if scheduler.drafter is None:
        return False
    if scheduler.drafter.model is not None:  # it proposes after the last tokens
        return True
    budget = scheduler.limits.max_num_batched_tokens - step.num_scheduled_tokens
    return budget > 0 and bool(scheduler.drafter.drafts(sequences, step.parts, budget))
