"""When a step can be planned while the one before it runs, whose tokens are not known yet.

    runner     | step n            | step n + 1        | step n + 2
    event loop       plan n + 1 |   commit n, plan n + 2 |

What a plan needs of the running step's outcome is known but for two things. How many tokens it gives: one for each
sequence that samples, since such a step has no drafts. Which ones: they stand as `UNKNOWN_TOKEN`, and the runner fills
them in. Whether a sequence stops with one: it is planned as if it went on, and where it has stopped after all, what the
step planned ahead gives of it is dropped. Its blocks stay its own until that step is committed, and so do those that
the step reads of a sequence whose table has changed. An answer that ends by its length is known to.

A step is planned ahead whole or not at all. Whatever needs to see the last tokens first has its step planned when they
are there, and all others in it wait with it: draws that depend on the tokens before (penalties, DRY, grammars, excluded
words of several tokens), beam searches, scores of prompts, drafts, several choices that fork one prompt, and sequences
for whose next token another one would have to be preempted. Beside a draft model no step is planned ahead.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.core.runner import StepInput
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence


def is_possible(step: StepInput, sequences: SequenceOf[Sequence], scheduler: Scheduler) -> bool:
    """Returns whether the step after `step`, which runs, can be planned now.

    Args:
        sequences: those of the parts.
    """
    if step.copies or scheduler.branched or any(part.num_drafts for part in step.parts):
        return False
    if any(part.sample and each.needs_history for part, each in zip(step.parts, sequences, strict=True)):
        return False
    if any(each.search is not None or each.scores_prompt for each in scheduler.running):
        return False
    if any(each.spec.choice_index or each.search is not None for each in scheduler.waiting):
        return False
    return _has_room(scheduler) and not _may_draft(step, sequences, scheduler)


def _has_room(scheduler: Scheduler) -> bool:
    """Returns whether every sequence that runs can have one token more without another one's blocks."""
    needing = [each for each in scheduler.running if each.num_tokens >= each.num_block_tokens]
    missing = [scheduler.blocks.missing(each, each.num_tokens + 1) for each in needing]
    return not missing or scheduler.pool.has_room([sum(numbers) for numbers in zip(*missing, strict=True)])


def _may_draft(step: StepInput, sequences: SequenceOf[Sequence], scheduler: Scheduler) -> bool:
    """Returns whether drafts behind the tokens known so far would be worth it: then they may be behind the next."""
    if scheduler.drafter is None:
        return False
    if scheduler.drafter.model is not None:  # it proposes behind the last tokens
        return True
    budget = scheduler.limits.max_num_batched_tokens - step.num_scheduled_tokens
    return budget > 0 and bool(scheduler.drafter.drafts(sequences, step.parts, budget, scheduler.costs))
