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
from dataclasses import dataclass, replace

from baton.costs import LEAST_SHARE, PRIOR, StepCosts
from baton.hypotheses import Beam
from engine.core.beams import BeamSearch
from engine.core.drafting import Drafter
from engine.core.group_pool import GroupPool
from engine.core.kv_spec import BlockTables
from engine.core.plan import Schedule, StepPlan
from engine.core.runner import StepInput
from engine.core.sequence import Purpose, Sequence, Status
from engine.core.sequence_blocks import SequenceBlocks
from engine.core.urgency import computing_room_s, urgency

MAX_SCORED = 128
"""Maximum number of tokens that a step computes of a prompt with scores: each needs a row of logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step, from the worker's settings."""

    max_num_seqs: int
    max_num_batched_tokens: int
    output_reservation: int
    """Output tokens for which blocks are reserved at admission."""
    max_draft_tokens: int = 0
    """Maximum number of drafts that a step checks per sequence, in addition to its next token."""

    @property
    def max_num_beams(self) -> int:
        """Maximum number of beams that a step can compute together."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Scheduler:
    """Selects the contents of each step and takes the blocks for it from the pool.

    Args:
        drafter: proposes drafts; None: there are none.
    """

    def __init__(self, pool: GroupPool, limits: SchedulerLimits, drafter: Drafter | None = None) -> None:
        self.pool = pool
        self.drafter = drafter
        self.blocks = SequenceBlocks(pool, limits.output_reservation)
        self.limits = limits
        self.costs: StepCosts = PRIOR
        """Step costs of this worker as measured so far."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.branched: list[Sequence] = []
        """Parents whose beams run."""
        self.beams: dict[int, Sequence] = {}
        """Beams of all parents, by key."""
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
        plan = StepPlan(budget=self.limits.max_num_batched_tokens)
        self._preempted = []
        self._plan(plan, now)
        if not plan.parts and self._due_parents():  # a parent was admitted with its whole prompt in the cache
            self._plan(plan, now)
        if self.drafter is not None and may_draft and plan.budget > 0:
            self._draft(self.drafter, plan)
        copies = [copy for sequence in plan.sequences if sequence.copies for copy in sequence.copies]
        step = StepInput(tuple(plan.parts), tuple(copies))
        return Schedule(step, tuple(plan.admitted), tuple(self._preempted), tuple(plan.too_large))

    def _plan(self, plan: StepPlan, now: float) -> None:
        for parent in self._due_parents():
            if parent.is_due:  # not preempted by one before it
                self._branch(parent, plan, now)
        for sequence in [s for s in self.running if len(s.token_ids) - s.num_computed_tokens == 1 and not s.aborted]:
            if plan.budget <= 0 or (self._preempted and sequence.status is not Status.RUNNING):
                continue
            is_alone, num_tokens = sequence.search is None and sequence.parent is None, len(sequence.token_ids)
            if is_alone and num_tokens <= sequence.num_block_tokens:
                plan.add(sequence, sequence.part(1))
                continue
            group = [sequence] if is_alone else self._ready_group(sequence)
            if group and len(group) <= plan.budget and self._grow(group, num_tokens, plan):
                for each in group:
                    plan.add(each, each.part(1))
        self._note_full(now)
        begun = [s for s in self.running if len(s.token_ids) - s.num_computed_tokens > 1 and not s.aborted]
        prompts = begun + self.waiting
        if prompts:
            if len(prompts) > 1:
                chunk = self.limits.max_num_batched_tokens
                prompts.sort(key=lambda sequence: urgency(sequence, now, self.costs, self.blocks, chunk))
            self._schedule_prompts(plan, prompts, now)

    def _due_parents(self) -> list[Sequence]:
        return [s for s in (*self.branched, *self.running) if s.search is not None and s.is_due]

    def _schedule_prompts(self, plan: StepPlan, prompts: list[Sequence], now: float) -> None:
        """Add prompt tokens to the step, the most urgent prompt first."""
        room_s = computing_room_s(plan.sequences, now, self.costs)
        least = plan.budget // LEAST_SHARE
        may_admit = True
        for sequence in prompts:
            if sequence.status is Status.WAITING:
                is_tried = may_admit and (plan.budget > 0 or sequence.awaits_kv)
                if not is_tried or not self._admit(sequence, now):
                    may_admit = False  # no other sequence overtakes the first that waits
                    if is_tried:
                        self._full_since_s = now
                    continue
                plan.admitted.append(sequence)
            if sequence.status is not Status.RUNNING or plan.budget <= 0:
                continue
            num_missing, context = sequence.num_tokens - sequence.num_computed_tokens, sequence.num_computed_tokens
            num_missing -= sequence.waits_for_others
            if num_missing < 1:
                continue
            if sequence.scores_prompt:
                num_missing = min(num_missing, MAX_SCORED)
            num_tokens = min(plan.budget, num_missing)
            within = self.costs.tokens_within(room_s, context, num_tokens) if room_s < math.inf else num_tokens
            num_tokens = min(num_tokens, max(within, least))
            if num_tokens < 1 or not self._grow([sequence], context + num_tokens, plan):
                plan.budget = 0 if num_tokens < 1 else plan.budget
                continue
            plan.add(sequence, sequence.part(num_tokens))
            least = max(0, least - num_tokens)
            # If the time is used up, the next prompt gets the rest of the least share.
            plan.budget = plan.budget if within >= num_missing else min(plan.budget, least)
            room_s -= num_tokens * (self.costs.s_per_token + self.costs.s_per_pair * (context + num_tokens / 2))

    def _note_full(self, now: float) -> None:
        if self._full_since_s is not None:
            for sequence in self.waiting:
                if not sequence.was_admitted:
                    sequence.blocked_s += now - max(self._full_since_s, sequence.arrival_s)
            self._full_since_s = None

    def fork(self, parent: Sequence, child: Sequence, now: float, num_blocks: tuple[int, ...] = ()) -> bool:
        """Start a new sequence that continues from the computed tokens that it shares with a running one.

        It computes its last known token itself, so that it samples its own next one. Full blocks are shared; the
        child's first step copies the last one.

        Args:
            num_blocks: minimum length of each of its block tables; empty: as the shared tokens need.

        Returns:
            False, with nothing changed, if there is no room for it.
        """
        return self._num_seats_left() > 0 and self._fork(parent, child, now, num_blocks)

    def _fork(self, parent: Sequence, child: Sequence, now: float, num_blocks: tuple[int, ...] = ()) -> bool:
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
        for queue in (self.waiting, self.running, self.reserved, self.branched):
            if sequence in queue:
                queue.remove(sequence)
        sequence.status = status
        if status is not Status.HELD:
            self.blocks.give_back(sequence)

    def drop(self, beams: Iterable[Sequence]) -> None:
        """Remove beams for good."""
        for beam in beams:
            self.remove(beam, Status.FINISHED)
            self.beams.pop(beam.key, None)

    def advance(self, parent: Sequence, search: BeamSearch, places: tuple[int, ...]) -> None:
        """Record the result of a step of a search. Beams without a continuation are dropped."""
        parent.search, kept = search, sorted(set(places))
        if parent.beams:
            self.drop([beam for place, beam in enumerate(parent.beams) if place not in kept])
            parent.beams = [parent.beams[place] for place in kept]
            places = tuple(kept.index(place) for place in places)
        parent.places = places

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
        if self._num_seats_left() < sequence.num_seats:
            return False
        siblings = self.running if sequence.spec.choice_index else ()
        sibling = next((each for each in siblings if sequence.may_fork(each, has_state=self.pool.has_states)), None)
        if sibling is not None and self.fork(sibling, sequence, now, self.blocks.num_expected(sequence)):
            self.waiting.remove(sequence)
            return True
        found = self.pool.match(self.blocks.reusable_keys(sequence))
        tables = self.pool.reuse(found, self.blocks.num_expected(sequence))
        if tables is None:
            return False
        num_found = len(found[0]) * self.pool.block_sizes[0]
        sequence.num_registered_keys = num_found // self.pool.key_tokens
        self.waiting.remove(sequence)
        self._let_run(sequence, tables, num_found, now)
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

    def _num_seats_left(self) -> int:
        """Return how many more sequences may run. A parent takes the seats of all its beams."""
        admitted = (*self.running, *self.reserved, *self.branched)
        return self.limits.max_num_seqs - sum(s.num_seats for s in admitted if s.parent is None)

    def _ready_group(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that must decode together, if this is their first one and all are ready; else
        nothing.
        """
        if sequence.is_due:
            return []
        group = sequence.group
        is_ready = group[0] is sequence and not sequence.owner.is_due
        return group if is_ready and all(each.num_missing_tokens == 1 for each in group) else []

    def _branch(self, parent: Sequence, plan: StepPlan, now: float) -> None:
        """Fork a parent, or its beams, so that each beam of the search has a sequence; all or none.

        The first beam that continues a sequence takes its place.
        """
        assert parent.search is not None
        begun = parent.beams or [parent]
        places = parent.places or (0,) * len(parent.search.running)
        if not parent.beams:
            self.blocks.crop(parent)
        kept = set(places)
        missing = [(len(places) - len(kept)) * each for each in self.pool.num_copied(begun[0].num_computed_tokens)]
        while not self.pool.has_room(missing):
            if not self._make_room(begun, plan):
                return
        beams = []
        for beam, place in zip(parent.search.running, places, strict=True):
            if place in kept:
                kept.remove(place)
                begun[place] = sequence = self._continued(begun[place], beam)
            else:
                sequence = parent.beam(beam.token_ids)
                forked = self._fork(begun[place], sequence, now)
                assert forked, "there was room for all beams"
            self.beams[sequence.key] = sequence
            beams.append(sequence)
        parent.beams, parent.places = beams, None

    def _continued(self, begun: Sequence, beam: Beam) -> Sequence:
        """Return the sequence of a beam that continues another: the same one, or a new one that takes over a parent's
        KV.
        """
        if begun.parent is not None:
            begun.token_ids.append(beam.token_ids[-1])
            return begun
        sequence = begun.beam(beam.token_ids)
        begun.give_to(sequence)
        self.remove(begun, Status.BRANCHED)
        self.branched.append(begun)
        self.running.append(sequence)
        return sequence

    def _grow(self, group: list[Sequence], num_tokens: int, plan: StepPlan) -> bool:
        """Take blocks for the first `num_tokens` tokens of sequences that decode together, all or none.

        If no blocks are left, the youngest sequence of the lowest priority is preempted. It then becomes the most
        urgent one that waits, and is recomputed from what the cache still holds. PREFILL sequences are not preempted,
        because a transfer may be reading their blocks; they got all their blocks at admission, so they never need to
        grow.
        """
        if all(num_tokens <= sequence.num_block_tokens for sequence in group):
            return True
        missing = [self.blocks.missing(sequence, num_tokens) for sequence in group]
        while not self.pool.has_room([sum(numbers) for numbers in zip(*missing, strict=True)]):
            if not self._make_room(group, plan):
                return False
        for sequence, numbers in zip(group, missing, strict=True):
            self.blocks.add(sequence, numbers)
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

    def _make_room(self, group: list[Sequence], plan: StepPlan) -> bool:
        """Preempt a sequence for sequences that need blocks. Return False if they cannot try again in this step."""
        owner, taken = group[0].owner, {sequence.owner for sequence in plan.sequences}
        preemptible = [s for s in self.running if s.purpose is not Purpose.PREFILL]
        if all(sequence.owner is owner for sequence in preemptible):
            # No other sequence can be preempted: the other blocks belong to transfers, which end.
            if owner.search and owner not in (*taken, *plan.too_large) and self.blocks.holds_all(preemptible):
                plan.too_large.append(owner)
            return False
        candidates = (s for s in preemptible if s.owner not in taken)
        victim = max(candidates, key=lambda s: (-s.spec.priority, s.arrival_s), default=None)
        if victim is None:
            return False
        self._preempt(victim.owner)
        return victim.owner is not owner

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.in_flight, f"{sequence.sequence_id} is preempted while a step computes it"
        self.num_preemptions += 1
        self._preempted.append(sequence)
        self.drop(sequence.beams)
        self.remove(sequence, Status.WAITING)
        sequence.num_computed_tokens = 0
        if sequence.search is not None:
            sequence.fold()
        self.waiting.insert(0, sequence)
