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
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from baton.blocks import extend_block_keys, num_blocks_for
from baton.costs import ITL_TARGET, LEAST_SHARE, PRIOR, StepCosts
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.sequence import Purpose, Sequence, Status

LEAST_STEP = 0.5
"""Share of the objective that a step may take whatever the sequences' tokens are due: who is behind stays so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    output_reservation: int
    num_state_slots: int
    """Rows of the KV cache's state tensors; 0 for models without per-sequence state."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of one sequence: `token_ids` at positions `start`, `start + 1`, ..."""

    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    """Blocks of positions 0 to the last computed one."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """One past the last computed position."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled(Part):
    """A part of a step, and whose it is."""

    sequence: Sequence
    sample: bool
    """The known tokens end here, so this step yields the next one."""


Batch = tuple[Scheduled, ...]


class Scheduler:
    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.costs: StepCosts = PRIOR
        """What steps take here, as far as is known."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.num_preemptions = 0
        self._full_since_s: float | None = None
        """The first that waits has had no room since."""
        self._state_slots = list(range(limits.num_state_slots - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def insert(self, sequence: Sequence) -> None:
        """A reserved sequence's KV has arrived: it decodes from the next step on."""
        assert sequence.status is Status.RESERVED, sequence.status
        self.reserved.remove(sequence)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def schedule(self, now: float) -> tuple[Batch, list[Sequence]]:
        """The next step, and the sequences that it admits, which now have their blocks.

        Sequences that decode come first. Prompts, computed in part or waiting, follow in order of `_urgency`, as far as
        blocks, batch size, the token budget and the objectives of who decodes go.
        """
        budget = self.limits.max_num_batched_tokens
        scheduled: list[Scheduled] = []
        for sequence in [s for s in self.running if s.num_tokens - s.num_computed_tokens == 1]:
            is_running = sequence.status is Status.RUNNING  # not preempted by one before it
            if budget > 0 and is_running and self._grow(sequence, sequence.num_tokens, scheduled):
                scheduled.append(self._part(sequence, 1))
                budget -= 1
        self._note_full(now)
        prompts = [s for s in self.running if s.num_tokens - s.num_computed_tokens > 1] + self.waiting
        if not prompts:
            return tuple(scheduled), []
        if len(prompts) > 1:
            prompts.sort(key=lambda sequence: self._urgency(sequence, now))
        room_s = self._computing_room_s(scheduled, now)
        least = budget // LEAST_SHARE
        admitted: list[Sequence] = []
        may_admit = True
        for sequence in prompts:
            is_waiting = sequence.status is Status.WAITING
            if is_waiting:
                is_tried = may_admit and (budget > 0 or sequence.awaits_kv)
                if not is_tried or not self._admit(sequence, now):
                    may_admit = False  # nobody overtakes the first that waits
                    if is_tried:
                        self._full_since_s = now
                    continue
                admitted.append(sequence)
            if sequence.status is not Status.RUNNING or budget <= 0:
                continue
            num_missing, context = sequence.num_tokens - sequence.num_computed_tokens, sequence.num_computed_tokens
            num_tokens = min(budget, num_missing)
            within = self.costs.tokens_within(room_s, context, num_tokens) if room_s < math.inf else num_tokens
            num_tokens = min(num_tokens, max(within, least))
            if num_tokens < 1 or not self._grow(sequence, context + num_tokens, scheduled):
                budget = 0 if num_tokens < 1 else budget
                continue
            scheduled.append(self._part(sequence, num_tokens))
            least = max(0, least - num_tokens)
            # Where the time is used up, what is left of the least share goes to the next.
            budget = budget - num_tokens if within >= num_missing else min(budget - num_tokens, least)
            room_s -= num_tokens * (self.costs.s_per_token + self.costs.s_per_pair * (context + num_tokens / 2))
        return tuple(scheduled), admitted

    def num_present_tokens(self, sequence: Sequence) -> int:
        """Leading tokens of a waiting or running sequence that need not be computed here any more: they are computed,
        cached as it waits, or come from elsewhere."""
        if sequence.status is not Status.WAITING:
            return sequence.num_computed_tokens
        if sequence.awaits_kv:
            return sequence.num_tokens
        return self.pool.num_matching(self._reusable_keys(sequence)) * self.limits.block_size

    def _note_full(self, now: float) -> None:
        if self._full_since_s is not None:
            for sequence in self.waiting:
                if not sequence.was_admitted:
                    sequence.full_s += now - max(self._full_since_s, sequence.arrival_s)
            self._full_since_s = None

    def _urgency(self, sequence: Sequence, now: float) -> tuple[int, bool, float, float]:
        """Least first: by priority; those that can still make their deadline; by deadline; by arrival.

        A sequence that has begun to answer and must be computed again comes before all others of its priority.
        """
        spec = sequence.spec
        if sequence.num_output_tokens:
            return -spec.priority, False, -math.inf, sequence.arrival_s
        return -spec.priority, self._must_be_late(sequence, now), sequence.deadline_s, sequence.arrival_s

    def _must_be_late(self, sequence: Sequence, now: float) -> bool:
        """Even if it were computed alone from now on, after what the cache holds of it."""
        spare_s = sequence.deadline_s - now
        if spare_s == math.inf:
            return False
        if spare_s < 0 or sequence.purpose is Purpose.RECEIVE:
            return spare_s < 0
        num_tokens, chunk = sequence.num_tokens, self.limits.max_num_batched_tokens
        if self.costs.prefill_s(num_tokens, sequence.num_computed_tokens, chunk) <= spare_s:
            return False
        return self.costs.prefill_s(num_tokens, self.num_present_tokens(sequence), chunk) > spare_s

    def _computing_room_s(self, decoding: list[Scheduled], now: float) -> float:
        """How long prompts may compute beside these sequences in the step that begins now.

        The next token of each is due when its mean interval so far would reach the objective, so an answer that went
        quickly has time to spare.
        """
        step_s, num_kv_tokens = math.inf, 0
        for part in decoding:
            sequence, num_kv_tokens = part.sequence, num_kv_tokens + part.end
            if (itl_s := sequence.spec.itl_s) < math.inf and sequence.num_generated_tokens:
                due_s = sequence.first_token_s + ITL_TARGET * itl_s * sequence.num_generated_tokens
                step_s = min(step_s, max(due_s - now, LEAST_STEP * itl_s))
        if step_s == math.inf:
            return math.inf
        return self.costs.computing_room_s(step_s, len(decoding), num_kv_tokens)

    def register_computed_blocks(self, sequence: Sequence) -> None:
        """Names the blocks that have become full, so that other sequences can share them."""
        if self.limits.num_state_slots:
            return  # a state cannot be cropped to a prefix: blocks alone restore nothing
        block_size = self.limits.block_size
        num_full = sequence.num_computed_tokens // block_size
        if num_full > len(sequence.block_keys):
            known = sequence.token_ids[: sequence.num_computed_tokens]
            sequence.block_keys += extend_block_keys(sequence.spec.cache_seed, sequence.block_keys, known, block_size)
        for index in range(sequence.num_registered_blocks, num_full):
            sequence.block_table[index] = self.pool.register(sequence.block_table[index], sequence.block_keys[index])
        sequence.num_registered_blocks = max(sequence.num_registered_blocks, num_full)

    def remove(self, sequence: Sequence, status: Status) -> None:
        """Takes a sequence out; its blocks go back unless it is HELD."""
        for queue in (self.waiting, self.running, self.reserved):
            if sequence in queue:
                queue.remove(sequence)
        sequence.status = status
        if status is not Status.HELD:
            self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Returns a sequence's blocks and state slot."""
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_registered_blocks = 0
        if sequence.state_slot >= 0:
            self._state_slots.append(sequence.state_slot)
            sequence.state_slot = -1

    def check(self, others: Iterable[Sequence] = (), pinned: Iterable[int] = ()) -> None:
        """Asserts that the pool is whole, and that every reference to a block has a holder.

        Args:
            others: sequences that hold blocks and are not here any more: the HELD ones.
            pinned: blocks that transfers hold, each as often as it is pinned.
        """
        self.pool.check()
        holders = [*self.running, *self.reserved, *others]
        held = Counter(block for sequence in holders for block in sequence.block_table)
        held.update(pinned)
        assert len(held) == self.pool.counts().in_use, f"{self.pool.counts().in_use} blocks in use, {len(held)} held"
        assert held == self.pool.references(), "a block has more or fewer references than holders"
        slots = sum(sequence.state_slot >= 0 for sequence in holders)
        assert slots + len(self._state_slots) == self.limits.num_state_slots, "a state slot is lost"

    def _part(self, sequence: Sequence, num_tokens: int) -> Scheduled:
        assert num_tokens > 0, f"{sequence.sequence_id} is scheduled with nothing to compute"
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        return Scheduled(
            token_ids=tuple(sequence.token_ids[start:end]),
            start=start,
            block_table=tuple(sequence.block_table[: num_blocks_for(end, self.limits.block_size)]),
            sequence=sequence,
            sample=end == sequence.num_tokens,
        )

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Gives a waiting sequence its cached prefix and all blocks it is expected to need; all or nothing."""
        if len(self.running) + len(self.reserved) >= self.limits.max_num_seqs:
            return False
        receives = sequence.awaits_kv
        cached = self.pool.match(self._reusable_keys(sequence))
        num_fresh = max(0, self._expected_blocks(sequence) - len(cached))
        has_slot = not self.limits.num_state_slots or self._state_slots
        blocks = self.pool.reuse(cached, num_fresh) if has_slot else None
        if blocks is None:
            return False
        sequence.block_table = blocks
        sequence.num_computed_tokens = len(cached) * self.limits.block_size
        sequence.num_registered_blocks = len(cached)
        if self.limits.num_state_slots:
            sequence.state_slot = self._state_slots.pop()
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.scheduled_s = now
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.spec.num_prompt_tokens)
        self.waiting.remove(sequence)
        sequence.status = Status.RESERVED if receives else Status.RUNNING
        (self.reserved if receives else self.running).append(sequence)
        return True

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Of the leading blocks that a sequence may have from the cache."""
        if self.limits.num_state_slots:
            return []  # a state cannot be cropped to a prefix
        block_size = self.limits.block_size
        # The last known token is computed here, so its block cannot come from the cache; unless the KV arrives anyway.
        num_blocks = (sequence.num_tokens - (not sequence.awaits_kv)) // block_size
        if len(sequence.block_keys) < num_blocks:
            known = sequence.token_ids[: num_blocks * block_size]
            sequence.block_keys += extend_block_keys(sequence.spec.cache_seed, sequence.block_keys, known, block_size)
        return sequence.block_keys[:num_blocks]

    def _expected_blocks(self, sequence: Sequence) -> int:
        """Blocks for the known tokens and the expected rest of the answer, never more than the pool has."""
        num_tokens = sequence.num_tokens
        if sequence.purpose is not Purpose.PREFILL:
            num_left = sequence.spec.max_tokens - sequence.num_output_tokens
            expected = sequence.spec.num_expected_tokens or self.limits.output_reservation
            num_tokens += min(num_left, max(0, expected - sequence.num_output_tokens))
        return min(num_blocks_for(num_tokens, self.limits.block_size), self.pool.num_blocks)

    def _grow(self, sequence: Sequence, num_tokens: int, scheduled: list[Scheduled]) -> bool:
        """Blocks for the first `num_tokens` tokens; preempts the youngest of least priority when none are left.

        A preempted sequence is the most urgent one that waits, and is computed again from what the cache still holds.
        PREFILL sequences are spared: a transfer may be reading their blocks. They got all they need when they were
        admitted, so it is never one of them that grows. Returns False when the sequence itself had to give way or must
        sit this step out.
        """
        num_missing = num_blocks_for(num_tokens, self.limits.block_size) - len(sequence.block_table)
        if num_missing <= 0:
            return True
        while (blocks := self.pool.allocate(num_missing)) is None:
            preemptible = [s for s in self.running if s.purpose is not Purpose.PREFILL]
            if preemptible == [sequence]:
                return False  # nobody else may give way: the other blocks are for transfers, which end
            taken = {part.sequence for part in scheduled}
            victim = max((s for s in preemptible if s not in taken), key=lambda s: (-s.spec.priority, s.arrival_s))
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += blocks
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(sequence)
        self.give_back(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = Status.WAITING
        self.waiting.insert(0, sequence)
