"""Which tokens the next step computes.

There is no prefill phase and no decode phase: a sequence has known tokens and computed tokens, and every step lets
computed catch up with known, within a budget of tokens (the idea of vLLM's v1 scheduler). That one rule covers chunked
prefill, continuous batching, prefix hits, sequences whose KV arrived from elsewhere, and sequences resumed after a
preemption.

Who decodes comes first, every step. Prompts share what a step has left: as many tokens as keep the sequences that
decode within their objectives, given to the prompt whose first token is due soonest (earliest deadline first). A
prompt that cannot make its deadline any more, even alone, gives way to those that can: under overload plain deadlines
would make everybody late (Buttazzo, Spuri and Sensini, 1995, on what overload does to EDF).

Pure decisions: no tensors, no I/O, and time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.blocks import extend_block_keys
from baton.costs import ITL_TARGET, LEAST_SHARE, PRIOR, StepCosts
from baton.engine.core.group_pool import GroupPool
from baton.engine.core.kv_spec import BlockTables
from baton.engine.core.runner import StepInput, StepPart
from baton.engine.core.sequence import Purpose, Sequence, Status

MAX_SCORED = 128
"""Most tokens of a prompt with scores that a step computes: each has a row of logits."""

LEAST_STEP = 0.5
"""A step may always take this share of the ITL objective, even if sequences are late: shorter steps could not catch up.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step, from the worker's settings."""

    max_num_seqs: int
    max_num_batched_tokens: int
    output_reservation: int
    """Answer tokens for which blocks are reserved at admission."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a call of `Scheduler.schedule` has decided."""

    step: StepInput
    admitted: tuple[Sequence, ...] = ()
    """Sequences that have their blocks now."""
    preempted: tuple[Sequence, ...] = ()
    """Sequences that gave their blocks up, and wait again."""


@dataclass(slots=True)
class _Plan:
    """A step while it is put together."""

    budget: int
    """Tokens that may still be added."""
    sequences: list[Sequence] = field(default_factory=list)
    parts: list[StepPart] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, part: StepPart) -> None:
        self.sequences.append(sequence)
        self.parts.append(part)
        self.budget -= len(part.token_ids)


class Scheduler:
    """Decides what each step computes, and takes the blocks for it from the pool."""

    def __init__(self, pool: GroupPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.costs: StepCosts = PRIOR
        """What steps take here, as far as is known."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.num_preemptions = 0
        self._preempted: list[Sequence] = []
        self._full_since_s: float | None = None
        """Time since which the head of the queue has lacked room."""

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def insert(self, sequence: Sequence) -> None:
        """A reserved sequence's KV has arrived: it decodes from the next step on."""
        assert sequence.status is Status.RESERVED, sequence.status
        self.reserved.remove(sequence)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def schedule(self, now: float) -> Schedule:
        """Returns the next step.

        Sequences that decode come first. Prompts, computed in part or waiting, follow in order of `_urgency`, as far as
        blocks, batch size, the token budget and the objectives of the decoding sequences allow.
        """
        plan = _Plan(self.limits.max_num_batched_tokens)
        self._preempted = []
        for sequence in [s for s in self.running if len(s.token_ids) - s.num_computed_tokens == 1]:
            is_running = sequence.status is Status.RUNNING  # not preempted by one before it
            if plan.budget > 0 and is_running and self._grow(sequence, len(sequence.token_ids), plan):
                plan.add(sequence, self._part(sequence, 1))
        self._note_full(now)
        prompts = [s for s in self.running if len(s.token_ids) - s.num_computed_tokens > 1] + self.waiting
        if prompts:
            if len(prompts) > 1:
                prompts.sort(key=lambda sequence: self._urgency(sequence, now))
            self._schedule_prompts(plan, prompts, now)
        copies = [copy for sequence in plan.sequences if sequence.copies for copy in sequence.copies]
        return Schedule(StepInput(tuple(plan.parts), tuple(copies)), tuple(plan.admitted), tuple(self._preempted))

    def _schedule_prompts(self, plan: _Plan, prompts: list[Sequence], now: float) -> None:
        """Adds what the step computes of prompts, the most urgent first."""
        room_s = self._computing_room_s(plan.sequences, now)
        least = plan.budget // LEAST_SHARE
        may_admit = True
        for sequence in prompts:
            if sequence.status is Status.WAITING:
                is_tried = may_admit and (plan.budget > 0 or sequence.awaits_kv)
                if not is_tried or not self._admit(sequence, now):
                    may_admit = False  # nobody overtakes the first that waits
                    if is_tried:
                        self._full_since_s = now
                    continue
                plan.admitted.append(sequence)
            if sequence.status is not Status.RUNNING or plan.budget <= 0:
                continue
            num_missing, context = sequence.num_tokens - sequence.num_computed_tokens, sequence.num_computed_tokens
            if sequence.scores_prompt:
                num_missing = min(num_missing, MAX_SCORED)
            num_tokens = min(plan.budget, num_missing)
            within = self.costs.tokens_within(room_s, context, num_tokens) if room_s < math.inf else num_tokens
            num_tokens = min(num_tokens, max(within, least))
            if num_tokens < 1 or not self._grow(sequence, context + num_tokens, plan):
                plan.budget = 0 if num_tokens < 1 else plan.budget
                continue
            plan.add(sequence, self._part(sequence, num_tokens))
            least = max(0, least - num_tokens)
            # Where the time is used up, what is left of the least share goes to the next.
            plan.budget = plan.budget if within >= num_missing else min(plan.budget, least)
            room_s -= num_tokens * (self.costs.s_per_token + self.costs.s_per_pair * (context + num_tokens / 2))

    def num_present_tokens(self, sequence: Sequence) -> int:
        """Returns how many leading tokens of a waiting or running sequence need not be computed here any more: they are
        computed, cached while it waits, or received.
        """
        if sequence.status is not Status.WAITING:
            return sequence.num_computed_tokens
        if sequence.awaits_kv:
            return sequence.num_tokens
        return self.pool.num_matching_tokens(self._reusable_keys(sequence))

    def _note_full(self, now: float) -> None:
        if self._full_since_s is not None:
            for sequence in self.waiting:
                if not sequence.was_admitted:
                    sequence.blocked_s += now - max(self._full_since_s, sequence.arrival_s)
            self._full_since_s = None

    def _urgency(self, sequence: Sequence, now: float) -> tuple[int, bool, float, float]:
        """Returns the sort key, least first: priority, whether it must miss its deadline, deadline, arrival.

        A sequence that has begun to answer and must be computed again comes before all others of its priority.
        """
        spec = sequence.spec
        if sequence.num_output_tokens:
            return -spec.priority, False, -math.inf, sequence.arrival_s
        return -spec.priority, self._must_be_late(sequence, now), sequence.deadline_s, sequence.arrival_s

    def _must_be_late(self, sequence: Sequence, now: float) -> bool:
        """Returns whether its first token would be late even if it were computed alone from now on."""
        spare_s = sequence.deadline_s - now
        if spare_s == math.inf:
            return False
        if spare_s < 0 or sequence.purpose is Purpose.RECEIVE:
            return spare_s < 0
        num_tokens, chunk = sequence.num_tokens, self.limits.max_num_batched_tokens
        if self.costs.prefill_s(num_tokens, sequence.num_computed_tokens, chunk) <= spare_s:
            return False
        return self.costs.prefill_s(num_tokens, self.num_present_tokens(sequence), chunk) > spare_s

    def _computing_room_s(self, decoding: list[Sequence], now: float) -> float:
        """Returns how long prompts may compute beside these sequences in the step that begins now.

        The next token of each is due when its mean interval so far would reach the objective, so an answer that went
        quickly has time to spare.
        """
        step_s, num_kv_tokens = math.inf, 0
        for sequence in decoding:
            num_kv_tokens += len(sequence.token_ids)
            if (itl_s := sequence.spec.itl_s) < math.inf and sequence.num_generated_tokens:
                due_s = sequence.first_token_s + ITL_TARGET * itl_s * sequence.num_generated_tokens
                step_s = min(step_s, max(due_s - now, LEAST_STEP * itl_s))
        if step_s == math.inf:
            return math.inf
        return self.costs.computing_room_s(step_s, len(decoding), num_kv_tokens)

    def register_computed_blocks(self, sequence: Sequence) -> None:
        """Names the blocks that have become full, so that other sequences can share them."""
        pool = self.pool
        num_full = sequence.num_computed_tokens // pool.key_tokens
        if num_full <= sequence.num_registered_keys or not pool.caches_prefixes:
            return
        keys = self._keys(sequence, num_full)[:num_full]
        tables = list(sequence.block_ids)
        for group, size in enumerate(pool.block_sizes):
            first = sequence.num_registered_keys * pool.key_tokens // size
            group_keys = pool.keys_of(keys, group)
            if first < len(group_keys):
                tables[group] = tuple(pool.register(tables[group], group, first, group_keys))
        sequence.block_ids = tuple(tables)
        sequence.num_registered_keys = num_full

    def fork(self, parent: Sequence, child: Sequence, now: float, num_blocks: tuple[int, ...] = ()) -> bool:
        """Lets a new sequence run that goes on from what a running one has computed of the tokens they share.

        Its last known token is computed for itself, so that it draws its own next one. Full blocks are shared, the last
        one is copied by the child's first step.

        Args:
            num_blocks: least length of each of its block tables; empty: what the shared tokens need.

        Returns:
            False, and nothing has changed, when there is no room for it.
        """
        if len(self.running) + len(self.reserved) >= self.limits.max_num_seqs:
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
        """Takes a sequence out; its blocks go back unless it is HELD."""
        for queue in (self.waiting, self.running, self.reserved):
            if sequence in queue:
                queue.remove(sequence)
        sequence.status = status
        if status is not Status.HELD:
            self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Returns a sequence's blocks."""
        self.pool.release(sequence.block_ids)
        self.copied(sequence)
        sequence.block_ids = ()
        sequence.num_block_tokens = 0
        sequence.num_kv_tokens = ()
        sequence.num_registered_keys = 0

    def copied(self, sequence: Sequence) -> None:
        """Notes that a forked sequence's copies are performed, or not wanted any more."""
        if sequence.copies:
            self.pool.release_sources(sequence.copies)
            sequence.copies = ()

    def check(self, others: Iterable[Sequence] = (), pinned: Iterable[BlockTables] = ()) -> None:
        """Asserts that the books are right.

        Args:
            others: sequences that hold blocks and are not here any more: the HELD ones.
            pinned: block tables that transfers hold, each as often as it is pinned.
        """
        holders = [*self.running, *self.reserved, *others]
        copies = (copy for sequence in holders for copy in sequence.copies)
        self.pool.check([*(sequence.block_ids for sequence in holders), *pinned], copies)
        for sequence in holders:
            sizes = (*self.pool.block_sizes, math.inf)
            for table, size, number in zip(sequence.block_ids, sizes, sequence.num_kv_tokens, strict=False):
                assert len(table) * size >= number, f"{number} tokens are in {len(table)} blocks"

    def _part(self, sequence: Sequence, num_tokens: int) -> StepPart:
        assert num_tokens > 0, f"{sequence.sequence_id} is scheduled with nothing to compute"
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        samples = end == len(sequence.token_ids)
        return StepPart(
            sequence.key,
            tuple(sequence.token_ids[start:end]),
            start,
            sequence.block_ids,
            (end,) * len(sequence.block_ids),
            samples,
            num_tokens == 1 and len(sequence.token_ids) > sequence.spec.num_prompt_tokens,
            sequence.spec.sampling,
            sequence.spec.choice_index,
            sequence.spec.num_prompt_tokens,
            tuple(sequence.token_ids) if (samples and sequence.needs_history) or sequence.scores_prompt else (),
            sequence.scores_prompt,
        )

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Gives a waiting sequence its cached prefix and all blocks it is expected to need; all or nothing."""
        if len(self.running) + len(self.reserved) >= self.limits.max_num_seqs:
            return False
        siblings = self.running if sequence.spec.choice_index else ()
        sibling = next((each for each in siblings if sequence.may_fork(each, has_state=self.pool.has_states)), None)
        if sibling is not None and self.fork(sibling, sequence, now, self._expected_blocks(sequence)):
            self.waiting.remove(sequence)
            return True
        found = self.pool.match(self._reusable_keys(sequence))
        tables = self.pool.reuse(found, self._expected_blocks(sequence))
        if tables is None:
            return False
        num_found = len(found[0]) * self.pool.block_sizes[0]
        sequence.num_registered_keys = num_found // self.pool.key_tokens
        self.waiting.remove(sequence)
        self._let_run(sequence, tables, num_found, now)
        return True

    def _let_run(self, sequence: Sequence, tables: BlockTables, num_computed_tokens: int, now: float) -> None:
        """Books the blocks of a sequence that is admitted."""
        receives = sequence.awaits_kv
        self._take(sequence, tables)
        sequence.num_computed_tokens = num_computed_tokens
        sequence.num_kv_tokens = (num_computed_tokens,) * len(tables)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.scheduled_s = now
            sequence.num_cached_tokens = min(num_computed_tokens, sequence.spec.num_prompt_tokens)
        sequence.status = Status.RESERVED if receives else Status.RUNNING
        (self.reserved if receives else self.running).append(sequence)

    def _take(self, sequence: Sequence, tables: BlockTables) -> None:
        sequence.block_ids = tables
        sequence.num_block_tokens = self.pool.num_tokens_in(tables)

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Returns the keys of the leading blocks that a sequence may have from the cache."""
        if not self.pool.caches_prefixes or sequence.scores_prompt:
            return []
        # The last known token is computed here, so its block cannot come from the cache; unless the KV arrives anyway.
        num_keys = (sequence.num_tokens - (not sequence.awaits_kv)) // self.pool.key_tokens
        return self._keys(sequence, num_keys)[:num_keys]

    def _keys(self, sequence: Sequence, num_keys: int) -> list[bytes]:
        """Works out at least the first `num_keys` block keys of a sequence."""
        if len(sequence.block_keys) < num_keys:
            unit = self.pool.key_tokens
            known = sequence.token_ids[: num_keys * unit]
            sequence.block_keys += extend_block_keys(sequence.spec.cache_seed, sequence.block_keys, known, unit)
        return sequence.block_keys

    def _expected_blocks(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns the blocks for the known tokens and the expected rest of the answer, never more than the pool has."""
        num_tokens = sequence.num_tokens
        if sequence.purpose is not Purpose.PREFILL:
            num_left = sequence.spec.max_tokens - sequence.num_output_tokens
            expected = sequence.spec.num_expected_tokens or self.limits.output_reservation
            num_tokens += min(num_left, max(0, expected - sequence.num_output_tokens))
        return self.pool.num_blocks_for(min(num_tokens, self.pool.capacity))

    def _grow(self, sequence: Sequence, num_tokens: int, plan: _Plan) -> bool:
        """Takes blocks for the first `num_tokens` tokens; preempts the youngest of least priority when none are left.

        A preempted sequence is the most urgent one that waits, and is computed again from what the cache still holds.
        PREFILL sequences are spared: a transfer may be reading their blocks. They got all they need when they were
        admitted, so it is never one of them that grows. Returns False when the sequence itself had to give way or must
        sit this step out.
        """
        if num_tokens <= sequence.num_block_tokens:
            return True
        wanted = self.pool.num_blocks_for(num_tokens)
        missing = [max(0, number - len(table)) for number, table in zip(wanted, sequence.block_ids, strict=True)]
        while (blocks := self.pool.allocate(missing)) is None:
            preemptible = [s for s in self.running if s.purpose is not Purpose.PREFILL]
            if preemptible == [sequence]:
                return False  # nobody else may give way: the other blocks are for transfers, which end
            taken = set(plan.sequences)
            victim = max((s for s in preemptible if s not in taken), key=lambda s: (-s.spec.priority, s.arrival_s))
            self._preempt(victim)
            if victim is sequence:
                return False
        self._take(sequence, tuple(table + new for table, new in zip(sequence.block_ids, blocks, strict=True)))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._preempted.append(sequence)
        self.running.remove(sequence)
        self.give_back(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = Status.WAITING
        self.waiting.insert(0, sequence)
