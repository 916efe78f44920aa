"""Scheduler: selects the tokens that the next step computes.

There is no prefill phase and no decode phase: a sequence has known tokens and computed tokens, and every step lets
computed catch up with known, within a budget of tokens (the idea of vLLM's v1 scheduler). That one rule covers chunked
prefill, continuous batching, prefix hits, sequences whose KV arrived from elsewhere, and sequences resumed after a
preemption.

Decoding sequences come first in every step. Prompts share the rest of the step: as many tokens as keep the decoding
sequences within their objectives, given to the prompt whose first token is due soonest (earliest deadline first). A
prompt that would miss its deadline even if it were computed alone comes after those that can meet theirs, because plain
EDF makes all prompts late under overload (Buttazzo, Spuri and Sensini, 1995).

Pure decisions: no tensors, no I/O, and time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from baton.costs import ITL_TARGET, LEAST_SHARE, PRIOR, StepCosts
from engine.core.drafting import Drafter
from engine.core.group_pool import GroupPool, SequenceBlocks
from engine.core.runner import BlockTables, StepInput, StepPart
from engine.core.sequence import Purpose, Sequence, Status

MAX_SCORED = 128
"""Maximum number of tokens that a step computes of a prompt with scores: each needs a row of logits."""
LEAST_STEP = 0.5
"""Minimum share of the ITL objective that a step may take, even if sequences are late: shorter steps could not catch
up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step, from the worker's settings."""

    max_num_seqs: int
    max_num_batched_tokens: int
    output_reservation: int
    """Output tokens for which blocks are reserved at admission."""
    max_draft_tokens: int = 0
    """Maximum number of drafts that a step checks per sequence, in addition to its next token."""
    snapshot_tokens: int = 1024
    """Tokens between two snapshots of states."""
    canvas_length: int = 0
    """See `Runner.canvas_length`. A step computes so many tokens beside those of each part that samples."""

    def with_canvases(self, length: int) -> SchedulerLimits:
        """Return the limits for canvases of this length: so many sequences that a step has room for all canvases."""
        if not length:
            return self
        # A canvas may begin while a token of the budget is left, and each sequence takes one token beside its canvas.
        most = min(self.max_num_batched_tokens // length, 1 + (self.max_num_batched_tokens - 1) // (length + 1))
        most = max(1, most)
        return replace(self, canvas_length=length, max_num_seqs=min(self.max_num_seqs, most), max_draft_tokens=0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Result of one call of `Scheduler.schedule`."""

    step: StepInput
    admitted: tuple[Sequence, ...] = ()
    """Sequences that have their blocks now."""
    preempted: tuple[Sequence, ...] = ()
    """Sequences that have lost their blocks and wait again."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """A step under construction."""

    budget: int
    """Tokens that may still be added."""
    canvas_length: int = 0
    """Tokens that the step computes beside those of each part that samples."""
    sequences: list[Sequence] = field(default_factory=list)
    parts: list[StepPart] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, part: StepPart) -> None:
        """Add one sequence's part to the step."""
        self.sequences.append(sequence)
        self.parts.append(part)
        self.budget -= len(part.token_ids) + self.canvas_length * part.sample


class Scheduler:
    """Selects the contents of each step and takes the blocks for it from the pool.

    Args:
        drafter: proposes drafts; None: there are none.
    """

    def __init__(self, pool: GroupPool, limits: SchedulerLimits, drafter: Drafter | None = None) -> None:
        self.pool = pool
        self.drafter = drafter
        self.blocks = SequenceBlocks(pool, limits.output_reservation, limits.snapshot_tokens)
        self.limits = limits
        self.costs: StepCosts = PRIOR
        """Step costs of this worker as measured so far."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.num_preemptions = 0
        self._preempted: list[Sequence] = []
        self._full_since_s: float | None = None
        """Time since which the head of the queue has lacked room."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def insert(self, sequence: Sequence) -> None:
        """Start to decode a reserved sequence, whose KV has arrived, from the next step on."""
        assert sequence.status is Status.RESERVED, sequence.status
        self.reserved.remove(sequence)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def schedule(self, now: float, *, may_draft: bool = True) -> Schedule:
        """Return the next step.

        Decoding sequences come first. Prompts, partly computed or waiting, follow in order of `urgency`, within the
        limits of blocks, batch size, token budget and the objectives of the decoding sequences.

        Args:
            may_draft: whether the last tokens of all sequences are known.
        """
        plan = StepPlan(budget=self.limits.max_num_batched_tokens, canvas_length=self.limits.canvas_length)
        self._preempted = []
        self._plan(plan, now)
        drafter = self.drafter
        if drafter is not None and may_draft and plan.budget > 0 and self._has_drafts(drafter, plan):
            self._draft(drafter, plan)
        # All copies, also those of sequences without a part in this step: the step may change the state that they read.
        copies = [copy for sequence in self.running if sequence.copies for copy in sequence.copies]
        step = StepInput(tuple(plan.parts), tuple(copies))
        return Schedule(step, tuple(plan.admitted), tuple(self._preempted))

    @staticmethod
    def _has_drafts(drafter: Drafter, plan: StepPlan) -> bool:
        """Return whether drafting has work in a step: a look-up only if the step decodes, a draft model always.

        A draft model also computes prompts and takes back blocks.
        """
        return drafter.model is not None or any(part.is_decoding for part in plan.parts)

    def _plan(self, plan: StepPlan, now: float) -> None:
        for sequence in [s for s in self.running if len(s.token_ids) - s.num_computed_tokens == 1 and not s.aborted]:
            if plan.budget <= 0 or (self._preempted and sequence.status is not Status.RUNNING):
                continue
            num_tokens = len(sequence.token_ids)
            if num_tokens <= sequence.num_block_tokens or self._grow(sequence, num_tokens, plan):
                plan.add(sequence, sequence.part(1))
        self._note_full(now)
        begun = [s for s in self.running if len(s.token_ids) - s.num_computed_tokens > 1 and not s.aborted]
        prompts = begun + self.waiting
        if prompts:
            if len(prompts) > 1:
                chunk = self.limits.max_num_batched_tokens
                prompts.sort(key=lambda sequence: urgency(sequence, now, self.costs, self.blocks, chunk))
            self._schedule_prompts(plan, prompts, now)

    def _schedule_prompts(self, plan: StepPlan, prompts: list[Sequence], now: float) -> None:
        """Add prompt tokens to the step, the most urgent prompt first."""
        room_s = computing_room_s(plan.sequences, now, self.costs)
        least = plan.budget // LEAST_SHARE
        may_admit = True
        for sequence in prompts:
            if sequence.status is Status.WAITING:
                is_tried = may_admit and (plan.budget > 0 or sequence.awaits_kv)
                if not is_tried or not (self._admit(sequence, now) or self._admit_instead(sequence, now)):
                    may_admit = False  # no other sequence overtakes the first that waits
                    if is_tried:
                        self._full_since_s = now
                    continue
                plan.admitted.append(sequence)
            if sequence.status is not Status.RUNNING or plan.budget <= 0:
                continue
            num_missing, context = sequence.num_tokens - sequence.num_computed_tokens, sequence.num_computed_tokens
            if sequence.scores_prompt and not self.pool.needs_whole_prompts:
                num_missing = min(num_missing, MAX_SCORED)
            wanted = int(min(plan.budget, num_missing, self.blocks.num_until_snapshot(sequence)))
            within = self.costs.tokens_within(room_s, context, wanted) if room_s < math.inf else wanted
            num_tokens = min(wanted, max(within, least))
            if self.pool.needs_whole_prompts:
                num_tokens = num_missing if num_missing <= plan.budget else 0
            if num_tokens < 1 or not self._grow(sequence, context + num_tokens, plan):
                plan.budget = 0 if num_tokens < 1 else plan.budget
                continue
            plan.add(sequence, sequence.part(num_tokens))
            least = max(0, least - num_tokens)
            # If the time is used up, the next prompt gets the rest of the least share.
            plan.budget = plan.budget if within >= wanted else min(plan.budget, least)
            room_s -= num_tokens * (self.costs.s_per_token + self.costs.s_per_pair * (context + num_tokens / 2))

    def _note_full(self, now: float) -> None:
        if self._full_since_s is not None:
            for sequence in self.waiting:
                if not sequence.was_admitted:
                    sequence.blocked_s += now - max(self._full_since_s, sequence.arrival_s)
            self._full_since_s = None

    def fork(self, parent: Sequence, child: Sequence, now: float, num_blocks: tuple[int, ...] = ()) -> bool:
        """Start a new sequence that continues from the computed tokens that it shares with a running one.

        It computes its last known token itself, so that it samples its own next one. Full blocks are shared; the next
        step copies the last one.

        Args:
            num_blocks: minimum length of each of its block tables; empty: as the shared tokens need.

        Returns:
            False, with nothing changed, if there is no room for it.
        """
        if not self._has_seat(child):
            return False
        num_shared = min(parent.num_computed_tokens, child.num_tokens - 1)
        forked = self.pool.fork(parent.block_ids, num_shared, num_blocks)
        if forked is None:
            return False
        tables, child.copies = forked
        num_keys = min(parent.num_registered_keys, num_shared // self.pool.key_tokens)
        child.block_keys = parent.block_keys[:num_keys]
        child.num_registered_keys = num_keys
        self._let_run(child, tables, num_shared, now)
        return True

    def remove(self, sequence: Sequence, status: Status) -> None:
        """Remove a sequence from all queues. Its blocks are freed unless its new status is HELD."""
        for queue in (self.waiting, self.running, self.reserved):
            if sequence in queue:
                queue.remove(sequence)
        sequence.status = status
        if status is Status.HELD:
            self.blocks.keep_state(sequence)
        else:
            self.blocks.give_back(sequence)

    def check(self, others: Iterable[Sequence] = (), pinned: Iterable[BlockTables] = ()) -> None:
        """Assert that the accounting is correct.

        Args:
            others: sequences that hold blocks and have left the scheduler: the HELD ones.
            pinned: block tables that transfers hold, each as often as it is pinned.
        """
        self.blocks.check([*self.running, *self.reserved, *others], pinned)
        if self.drafter is not None and self.drafter.model is not None:
            self.drafter.model.check()

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Give a waiting sequence its cached prefix and all blocks that it is expected to need; all or nothing."""
        if not self._has_seat(sequence):
            return False
        siblings = self.running if sequence.spec.choice_index else ()
        sibling = next(
            (each for each in siblings if sequence.may_fork(each, has_state=self.pool.rows is not None)), None
        )
        if sibling is not None and self.fork(sibling, sequence, now, self.blocks.num_expected(sequence)):
            self.waiting.remove(sequence)
            return True
        keys = self.blocks.reusable_keys(sequence)
        awaits = sequence.awaits_kv
        found = self.pool.match_to_receive(keys, sequence.num_tokens) if awaits else self.pool.match(keys)
        tables = self.pool.reuse(found.tables, self.blocks.num_expected(sequence))
        if tables is None:
            return False
        sequence.begins = found.begins
        sequence.num_registered_keys = min(found.num_tokens, *found.begins) // self.pool.key_tokens
        if self.pool.rows is not None and not awaits:
            sequence.snapshot_ends = self.blocks.snapshot_ends(sequence, keys)
        self.waiting.remove(sequence)
        self._let_run(sequence, tables, found.num_tokens, now)
        return True

    def _let_run(self, sequence: Sequence, tables: BlockTables, num_computed_tokens: int, now: float) -> None:
        """Record the blocks of a sequence that is admitted."""
        receives = sequence.awaits_kv
        self.blocks.take(sequence, tables)
        sequence.num_computed_tokens = num_computed_tokens
        sequence.num_kv_tokens = (num_computed_tokens,) * len(tables)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.scheduled_s = now
            sequence.num_cached_tokens = min(num_computed_tokens, sequence.spec.num_prompt_tokens)
        sequence.status = Status.RESERVED if receives else Status.RUNNING
        (self.reserved if receives else self.running).append(sequence)

    def _has_seat(self, sequence: Sequence) -> bool:
        """Return whether a sequence may run. A beam search takes the seats of all its beams while one of them runs."""
        admitted = (*self.running, *self.reserved, sequence)
        widths = {s.search: s.search.state.width for s in admitted if s.search is not None}
        return sum(s.search is None for s in admitted) + sum(widths.values()) <= self.limits.max_num_seqs

    def _admit_instead(self, sequence: Sequence, now: float) -> bool:
        """Admit a sequence instead of beams that wait for others of their search, which may be this one.

        Without this rule, beams could wait for each other forever. Their next tokens are already known, and most of
        their blocks stay in the cache.
        """
        while beams := [s for s in self.running if s.waits_for_beams and _rank(s) >= _rank(sequence)]:
            self._preempt(max(beams, key=_rank))
            if self._admit(sequence, now):
                return True
        return False

    def _grow(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Take blocks for the first `num_tokens` tokens of a sequence.

        If no blocks are left, the youngest sequence of the lowest priority is preempted. It then becomes the most
        urgent one that waits, and is recomputed from what the cache still holds. PREFILL sequences are not preempted,
        because a transfer may be reading their blocks; they got all their blocks at admission, so they never need to
        grow.
        """
        if num_tokens <= sequence.num_block_tokens:
            return True
        missing = self.blocks.missing(sequence, num_tokens)
        while not self.pool.has_room(missing):
            if not self._make_room(sequence, plan):
                return False
        self.blocks.add(sequence, missing)
        return True

    def _draft(self, drafter: Drafter, plan: StepPlan) -> None:
        """Add drafts to the decoding sequences.

        Blocks for drafts must not cause a preemption, now or in the next step: each running sequence must still be able
        to get one more block.
        """
        for place, (token_ids, proposal) in drafter.drafts(plan.sequences, plan.parts, plan.budget).items():
            sequence = plan.sequences[place]
            missing = self.blocks.missing(sequence, sequence.num_tokens + len(token_ids))
            if any(missing) and self.pool.has_room([number + len(self.running) for number in missing]):
                self.blocks.add(sequence, missing)
            if kept := token_ids[: sequence.num_block_tokens - sequence.num_tokens]:
                plan.parts[place] = sequence.part(1, kept)
            if proposal is not None:
                plan.parts[place] = plan.parts[place]._replace(proposal=replace(proposal, num_drafts=len(kept)))

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt a sequence for one that needs blocks. Return False if it cannot try again in this step."""
        preemptible = [s for s in self.running if s.purpose is not Purpose.PREFILL]
        if preemptible == [sequence]:
            return False  # the other blocks belong to transfers, which end
        taken = set(plan.sequences)
        victim = max((s for s in preemptible if s not in taken), key=_rank, default=None)
        if victim is None:
            return False
        self._preempt(victim)
        return victim is not sequence

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.in_flight, f"{sequence.sequence_id} is preempted while a step computes it"
        self.num_preemptions += 1
        self._preempted.append(sequence)
        self.remove(sequence, Status.WAITING)
        if not sequence.waits_for_beams:
            self.waiting.insert(0, sequence)
        sequence.num_computed_tokens = 0


def _rank(sequence: Sequence) -> tuple[int, float]:
    """Return the sort key of preemption: the greatest one is preempted first."""
    return -sequence.spec.priority, sequence.arrival_s


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


def can_plan_ahead(step: StepInput, sequences: SequenceOf[Sequence], scheduler: Scheduler) -> bool:
    """Return whether the step after `step`, which is running, can be planned before its sampled tokens are known.

        runner     | step n            | step n + 1        | step n + 2
        event loop       plan n + 1 |   commit n, plan n + 2 |

    The plan depends on three results of the running step. The number of tokens is known: one for each sequence that
    samples, since such a step has no drafts. The tokens themselves stand as `UNKNOWN_TOKEN` until the runner fills them
    in. A sequence may also stop with its token: it is planned as if it continued, and if it has stopped, its part of
    the step that was planned ahead is dropped. Its blocks are not freed until that step is committed, nor are the
    blocks that the step reads of a sequence whose table has changed. If a sequence stops by length, the plan already
    knows it.

    A step is planned ahead whole or not at all. If one sequence has to see the last tokens first, the whole step is
    planned when they are known. That is the case for draws that depend on earlier tokens (penalties, DRY, grammars,
    excluded words of several tokens), beam searches, scores of prompts, drafts, several choices that fork one prompt,
    and sequences whose next token would preempt another sequence. With a draft model, and for a diffusion model, no
    step is planned ahead.

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
