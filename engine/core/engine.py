"""Engine of one worker: takes token ids and returns token ids.

A step is three calls in a row: `schedule` (pure decisions) -> `runner.execute` (tensors, in a thread) -> `commit`
(accounting, outputs, events). Everything except `execute` runs on one thread, so there are no locks. While a step
executes, sequences may be added, aborted or inserted: blocks that the step uses are freed only at its commit. The next
step may also be scheduled (`schedule_ahead`) and queued in the runner.

The verbs are JetStream's: a PREFILL sequence is admitted with all its blocks and ends HELD with them, a RECEIVE
sequence is reserved and later `insert`ed (or its KV `adopt`ed by the cache), and the running batch generates.

Transfers read blocks independently of the engine, so they `pin` them: a block table may change while it is read (a
block is replaced by a registered one with the same content), and its sequence may end first. Pinned blocks keep their
content.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from baton.blocks import HASH_BLOCK
from baton.cluster import BlockCounts
from baton.costs import StepCosts, StepFit, StepSize
from baton.errors import BatonError, InvalidRequest, TransferRefused, Unsupported
from baton.hypotheses import NO_HYPOTHESES, Beam, Hypotheses
from baton.messages import PrefillReport, SequenceSpec
from baton.sampling import FinishReason, SamplingParams
from baton.scores import NO_SCORES, Candidates
from engine.core.adapters import AdapterSlots, needs_adapter
from engine.core.beams import BeamSearch
from engine.core.block_pool import BlockChange
from engine.core.drafting import drafter_of
from engine.core.group_pool import GroupPool
from engine.core.image_store import ImageStore
from engine.core.outputs import Admitted, EngineLoad, Generated, Output, Pin, Preempted, Refused, Reserved
from engine.core.runner import EMPTY_PLACE, BlockTables, Runner, StepInput, StepOutput
from engine.core.scheduler import Schedule, Scheduler, SchedulerLimits, can_plan_ahead
from engine.core.sequence import Purpose, Search, Sequence, Status


class Engine:
    """Scheduler, block pools and accounting of one runner. It neither waits nor computes."""

    def __init__(self, runner: Runner, limits: SchedulerLimits) -> None:
        self.runner = runner
        self.pool = GroupPool(runner.spec, runner.num_blocks)
        limits = limits.with_canvases(runner.canvas_length)
        drafter = drafter_of(runner, limits.max_draft_tokens, limits.max_num_batched_tokens)
        self.scheduler = Scheduler(self.pool, limits, drafter)
        self._draft_model = None if drafter is None else drafter.model
        self.sequences: dict[int, Sequence] = {}
        """Sequences that are not finished, by key."""
        self._fit = StepFit()
        self._busy_s = 0.0
        self._num_computed_tokens = self._num_drafted_tokens = self._num_accepted_tokens = 0
        self._pins = Pins(self.pool)
        self.adapters = AdapterSlots(runner.max_adapters)
        self._read_by_next: list[Pin] = []
        """Blocks kept until the commit of the step that was planned before the last commit."""

    def add(self, spec: SequenceSpec, purpose: Purpose, now: float, adapter: int = 0) -> Sequence:
        """Queue a sequence.

        Args:
            adapter: slot of its adapter, pinned for it; 0: it is computed without one. The engine unpins the slot when
                the sequence ends, but not if this method raises.

        Raises:
            InvalidRequest: it cannot fit, or has a token id outside the model's vocabulary.
            TransferRefused: its beams cannot continue from KV that another worker computed.
        """
        require_computable(spec, self.runner)
        needs = spec.adapter is not None and needs_adapter(spec, purpose)
        assert bool(adapter) == needs, "a sequence has no slot for its adapter"
        sequence = Sequence(spec=spec, purpose=purpose, arrival_s=now, adapter=adapter)
        sequence.only_computes = purpose is Purpose.PREFILL and self.runner.canvas_length > 0
        if spec.sampling.use_beam_search and purpose is not Purpose.PREFILL and spec.max_tokens:
            require_searchable(spec, purpose, self.runner, self.scheduler.limits.max_num_seqs)
            state = BeamSearch.of(spec, self.runner.eos_token_ids, self.runner.max_model_len)
            sequence.search = Search(state, sequence, [sequence])
        self.sequences[sequence.key] = sequence
        self.scheduler.add(sequence)
        return sequence

    def fork(self, parent: Sequence, spec: SequenceSpec, now: float) -> Sequence | None:
        """Add a sequence that continues from another one's computed tokens, between two steps.

        It shares the parent's full blocks. The next step copies the last, partial block. Its own first step computes
        the last token of `spec` again, so that it samples its own next token.

        Args:
            spec: its tokens start with the tokens that the parent has computed, or are a prefix of them.

        Returns:
            None if there is no room for it now; it can then be added like any other sequence.

        Raises:
            ValueError: the tokens differ, or the parent's state, which cannot be cropped, is ahead of them.
        """
        assert parent.status in (Status.RUNNING, Status.HELD), parent.status
        assert not parent.in_flight, "a sequence is forked while a step computes it"
        if spec.adapter != parent.spec.adapter:
            raise ValueError(f"{spec.sequence_id} has another adapter than {parent.sequence_id}")
        child = Sequence(spec=spec, purpose=Purpose.GENERATE, arrival_s=now, adapter=parent.adapter)
        num_shared = min(parent.num_computed_tokens, child.num_tokens - 1)
        if child.token_ids[:num_shared] != parent.token_ids[:num_shared]:
            raise ValueError(f"{child.sequence_id} does not start with the tokens of {parent.sequence_id}")
        if self.runner.spec.states and num_shared != parent.num_computed_tokens:
            raise ValueError(f"the state of {parent.sequence_id} is ahead of {num_shared} tokens")
        if not self.scheduler.fork(parent, child, now):
            return None
        self._pin_adapter(child)
        self.sequences[child.key] = child
        return child

    def insert(
        self, sequence: Sequence, first_token: int | None, now: float, num_tokens: int | None = None
    ) -> FinishReason | None:
        """Start to decode a RESERVED sequence whose KV has arrived.

        Args:
            first_token: the next token, sampled by the worker that computed the KV; None: it is sampled here.
            num_tokens: number of leading tokens whose KV arrived, if not all; the others are computed here.

        Returns:
            The finish reason if the first token already ends the sequence, and no further output follows.
        """
        if sequence.search is not None:
            first_token = None  # a search takes several
        known = sequence.num_tokens
        num_tokens = known if num_tokens is None else num_tokens
        if first_token is None:
            num_tokens = min(num_tokens, known - 1)  # the last one's logits are needed
        self._book_computed(sequence, num_tokens)
        finish_reason = None
        if first_token is not None:
            sequence.first_token_s = now
            finish_reason = sequence.append(first_token, self.runner.eos_token_ids, self.runner.max_model_len)
        if finish_reason is None:
            self.scheduler.insert(sequence)
        else:
            self._finish(sequence)
        return finish_reason

    def adopt(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the full blocks of a RESERVED sequence, of which the first `num_tokens` tokens have arrived, to the
        prefix cache.

        The sequence stays RESERVED; when it ends, these blocks stay in the cache. No transfer may write them any more.
        A sequence that only fills the cache has `max_tokens` 0, and so reserves no room for output.
        """
        assert sequence.status is Status.RESERVED, sequence.status
        assert num_tokens <= sequence.num_tokens, f"{num_tokens} of {sequence.num_tokens} tokens have arrived"
        is_behind = num_tokens < sequence.num_computed_tokens
        assert not (self.pool.rows and is_behind), f"the state of {num_tokens} tokens came, and more are there already"
        self._book_computed(sequence, max(sequence.num_computed_tokens, num_tokens))

    def pin(self, sequence: Sequence) -> Pin:
        """Take a reference on each block of a sequence that a reader of its known tokens needs, until `unpin`.

        Blocks before the windows at its end are not pinned. Neither is the state: its row is known only after the last
        token is computed.
        """
        begins = (group.first_block(sequence.num_tokens) for group in self.pool.groups)
        tables = zip(sequence.block_ids, begins, strict=False)
        states: BlockTables = ((),) if self.pool.rows is not None and sequence.block_ids else ()
        return self._pins.take((*((EMPTY_PLACE,) * begin + table[begin:] for table, begin in tables), *states))

    def pin_prefix(self, keys: SequenceOf[bytes]) -> Pin:
        """Pin the longest cached prefix of a chain of keys, one per hash block of 16 tokens (see `baton.blocks`)."""
        num_parts = self.pool.key_tokens // HASH_BLOCK
        return self.pin_cached(keys[num_parts - 1 :: num_parts])

    def pin_cached(self, keys: SequenceOf[bytes]) -> Pin:
        """Pin the prefix that `num_cached_tokens` counts."""
        found = self.pool.match(keys)
        return self._pins.take(tuple(tuple(blocks) for blocks in found.tables), found.num_tokens)

    def unpin(self, pin: Pin) -> None:
        """Drop the references of one pin."""
        self._pins.give_back(pin)

    def schedule(self, now: float) -> tuple[StepInput, list[Output]]:
        """Return the next step to execute (empty: nothing can run now), and which sequences got or lost blocks."""
        return self._scheduled(self.scheduler.schedule(now))

    def schedule_ahead(self, step: StepInput, begins_s: float) -> tuple[StepInput, list[Output]] | None:
        """Return the step after one that is executing, as `schedule` does.

        None, with nothing changed, if the executing step must be committed first; see `can_plan_ahead`.

        Args:
            step: the executing step, which must be the last one scheduled.
            begins_s: time at which it is expected to end.
        """
        if self.runner.canvas_length:
            return None  # the number of new tokens is not known before
        sequences = [self.sequences[part.sequence_key] for part in step.parts]
        if not can_plan_ahead(step, sequences, self.scheduler):
            return None
        for part, sequence in zip(step.parts, sequences, strict=True):
            sequence.run_ahead(part, self.runner.max_model_len)
            if self.pool.rows is not None:
                left = self.scheduler.blocks.advance(sequence)
                self._read_by_next.append(self._pins.take(left))
                self.pool.release(left)
        return self._scheduled(self.scheduler.schedule(begins_s, may_draft=False))

    def _scheduled(self, schedule: Schedule) -> tuple[StepInput, list[Output]]:
        for part in schedule.step.parts:
            self.sequences[part.sequence_key].in_flight += 1
        outputs: list[Output] = [Preempted(sequence.key) for sequence in schedule.preempted]
        for sequence in schedule.admitted:
            num_cached_tokens = sequence.num_computed_tokens
            if sequence.status is Status.RESERVED:
                begins = sequence.begins if self.pool.has_windows else ()
                tables, num_tokens = sequence.block_ids, sequence.num_tokens
                outputs.append(
                    Reserved(
                        sequence_key=sequence.key,
                        block_ids=tables,
                        num_tokens=num_tokens,
                        num_cached_tokens=num_cached_tokens,
                        begins=begins,
                    )
                )
            elif sequence.purpose is Purpose.PREFILL:
                outputs.append(Admitted(sequence.key, sequence.block_ids, num_cached_tokens))
        return schedule.step, outputs

    def commit(self, step: StepInput, output: StepOutput, now: float) -> list[Output]:
        """Record an executed step. Kept lean, because the loop runs once per sequence and step."""
        outputs: list[Output] = []
        read_before, self._read_by_next = self._read_by_next, []
        eos_token_ids, max_model_len = self.runner.eos_token_ids, self.runner.max_model_len
        key_tokens, known, prefill = self.pool.key_tokens, self.sequences, Purpose.PREFILL
        generated = Generated.__new__  # see `Sequence.part`
        if output.proposed is not None and self._draft_model is not None:
            self._draft_model.commit(step, output)
        if step.copies:
            for sequence in self.scheduler.running:
                self.scheduler.blocks.copied(sequence)
        of_parts = zip(step.parts, output.sampled_token_ids, output.num_computed_tokens, strict=True)
        for index, (part, token_ids, num_computed_tokens) in enumerate(of_parts):
            sequence = known[part.sequence_key]
            sequence.in_flight -= 1
            if sequence.num_ahead_tokens:
                sequence.catch_up()
            elif self.pool.rows is not None:
                self.pool.release(self.scheduler.blocks.advance(sequence))
            if sequence.aborted:
                self.end(sequence)
                continue
            if (refusal := output.refusal(index)) is not None:
                outputs.append(self._refuse(sequence.owner, refusal))
                continue
            num_known, finish_reason = len(sequence.token_ids), None
            for token_id in token_ids:
                finish_reason = sequence.append(token_id, eos_token_ids, max_model_len)
                if finish_reason is not None or sequence.purpose is prefill:  # the decode worker samples the others
                    token_ids = token_ids[: len(sequence.token_ids) - num_known]
                    break
            if output.prompt_scores is not None and output.prompt_scores[index]:
                if part.num_computed_tokens == 0:
                    sequence.prompt_scores.clear()  # left from before a preemption
                sequence.prompt_scores.append(output.prompt_scores[index])
            if part.num_drafts:
                self._num_drafted_tokens += output.num_drafts(index, part)
                self._num_accepted_tokens += max(0, len(token_ids) - 1)
            num_computed_tokens = min(num_computed_tokens, len(sequence.token_ids))
            sequence.num_kv_tokens = (num_computed_tokens,) * len(part.block_ids)
            sequence.num_computed_tokens = num_computed_tokens
            if num_computed_tokens // key_tokens > sequence.num_registered_keys:
                if sequence.in_flight:  # its table may change, but the step planned ahead reads the old one's blocks
                    self._read_by_next.append(self._pins.take(self.scheduler.blocks.unregistered(sequence)))
                self.scheduler.blocks.register_computed(sequence)
            if not token_ids and not (sequence.only_computes and num_computed_tokens == num_known):
                continue
            report = None
            if not sequence.first_token_s:
                sequence.first_token_s = now
                report = sequence.report()
            if sequence.purpose is prefill:
                self.scheduler.remove(sequence, Status.HELD)
            elif finish_reason is not None:
                self.end(sequence)
            scores = output.scores[index].part(0, len(token_ids)) if output.scores else NO_SCORES
            outputs.append(generated(Generated, sequence.key, token_ids, finish_reason, scores, report))
        self._pins.give_back(*read_before)
        return outputs + self._search(step, output.candidates, now) if output.candidates else outputs

    def _search(self, step: StepInput, candidates: Mapping[int, Candidates], now: float) -> list[Output]:
        """Record the next tokens of beams. A search advances when all its beams are computed, in whatever steps."""
        outputs = list[Output]()
        for index, found in candidates.items():
            if (sequence := self.sequences.get(step.parts[index].sequence_key)) is None:
                continue  # it has just ended
            report = None
            if not sequence.first_token_s:
                sequence.first_token_s = now
                report = sequence.report()
            search = sequence.search
            if search is None:  # only its prompt is computed here
                outputs.append(Generated(sequence.key, (), report=report))
                self.scheduler.remove(sequence, Status.HELD)
                continue
            search.found[sequence] = found
            if len(search.found) == len(search.beams):
                outputs += self._advance(search, report, now)
        return outputs

    def _advance(self, search: Search, report: PrefillReport | None, now: float) -> list[Output]:
        """Continue a search whose beams are all computed."""
        begun, state, num_searched = search.beams, search.state, 0
        found, search.found = [search.found[beam] for beam in begun], {}
        places: tuple[int, ...] = (0,) * len(state.running)
        if len(begun) == len(places):  # else the search continues another worker's, and its common start is computed
            num_searched = len(begun)
            state, places = state.advance(found)
        outputs: list[Output] = [Generated(search.owner.key, (), report=report, num_searched=num_searched)]
        if state.is_over:
            self.end(search.owner)
            reason = state.finished[0].finish_reason if state.finished else FinishReason.STOP
            return [*outputs, Generated(search.owner.key, (), reason, beams=state.finished)]
        for place in set(range(len(begun))).difference(places):
            self._finish(begun[place])
        search.state, search.beams = state, []
        for beam, place in zip(state.running, places, strict=True):
            self._continue(begun[place], beam, now)
        return outputs

    def _continue(self, parent: Sequence, beam: Beam, now: float) -> None:
        """Give a beam a sequence: the one that it continues, or a fork of it if another beam has taken that."""
        search, sequence, spec = parent.search, parent, parent.spec
        assert search is not None
        if parent in search.beams:
            sequence = Sequence(
                spec=spec,
                purpose=Purpose.GENERATE,
                arrival_s=parent.arrival_s,
                adapter=parent.adapter,
                search=search,
            )
            self._pin_adapter(sequence)
            sequence.first_token_s = parent.first_token_s
            self.sequences[sequence.key] = sequence
        sequence.token_ids[spec.num_prompt_tokens :] = beam.token_ids
        search.beams.append(sequence)
        if sequence is not parent and parent.status is Status.RUNNING:
            self.scheduler.fork(parent, sequence, now)
        if sequence.status is Status.WAITING:  # it was preempted, or there is no room for the fork
            self.scheduler.add(sequence)

    def _refuse(self, sequence: Sequence, reason: BatonError) -> Refused:
        self.end(sequence)  # a step that was planned ahead may still write its blocks
        return Refused(sequence.key, reason)

    def learn(self, size: StepSize, took_s: float, proposing_s: float = 0.0) -> None:
        """Update the step costs and the price of drafts with the time of a step of this size."""
        self._busy_s += took_s
        self._num_computed_tokens += size.num_new
        self._fit.observe(size, took_s - proposing_s)
        self.scheduler.costs = self.costs
        if self.scheduler.drafter is not None:
            self.scheduler.drafter.price.observe(size, self.costs, took_s - proposing_s)

    def abandon(self, *steps: StepInput) -> list[Sequence]:
        """Remove the sequences of steps that cannot be executed. Return those that were not aborted already."""
        found = (self.sequences.get(part.sequence_key) for step in steps for part in step.parts)
        sequences = dict.fromkeys(sequence for sequence in found if sequence is not None)  # None: refused meanwhile
        owners = dict.fromkeys(sequence.owner for sequence in sequences if not sequence.aborted)
        for each in dict.fromkeys(beam for sequence in sequences for beam in sequence.group):
            each.in_flight = 0
            self._finish(each)
        self._pins.give_back(*self._read_by_next)
        self._read_by_next = []
        return list(owners)

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence, whatever its status, and free what it holds; idempotent.

        The blocks of a sequence in the executing step are freed at its commit. The caller must ensure that no transfer
        still writes the blocks of a RESERVED sequence; a transfer that reads has pinned them.
        """
        for each in sequence.group:
            if each.in_flight:
                each.aborted = True
            elif each.status is not Status.FINISHED:
                self._finish(each)

    def hypotheses(self, spec: SequenceSpec) -> Hypotheses:
        """Return the state of this spec object's beam search; empty: there is none, or it cannot migrate."""
        if self.runner.spec.states:
            return NO_HYPOTHESES  # a transferred state is ahead of the beams' first tokens
        searches = (s.search for s in self.sequences.values() if s.search is not None and s.spec is spec)
        return next((search.state.hypotheses for search in searches), NO_HYPOTHESES)

    def num_cached_tokens(self, keys: SequenceOf[bytes]) -> int:
        """Return the length of the longest cached prefix of a chain of keys, one per `pool.key_tokens`."""
        return self.pool.num_matching_tokens(keys)

    @property
    def num_running(self) -> int:
        """Number of sequences that take part in steps."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have no blocks yet."""
        return len(self.scheduler.waiting)

    @property
    def blocks(self) -> BlockCounts:
        """Block counts of the fullest group."""
        return self.pool.counts()

    @property
    def costs(self) -> StepCosts:
        """Step costs as measured so far."""
        return self._fit.costs

    @property
    def is_idle(self) -> bool:
        """True if no sequence is known and nothing is pinned: nothing waits, runs or holds blocks or a slot."""
        return not self.sequences and not self._pins and not self.adapters.is_pinned

    def load(self) -> EngineLoad:
        """Return the engine's current load."""
        to_compute = (s for s in self.sequences.values() if s.status in (Status.WAITING, Status.RUNNING))
        return EngineLoad(
            running=self.num_running,
            waiting=self.num_waiting + len(self.scheduler.reserved),
            queued_tokens=sum(s.num_tokens - self.scheduler.blocks.num_present_tokens(s) for s in to_compute),
            blocks=self.blocks,
            state_rows=BlockCounts() if self.pool.rows is None else self.pool.rows.counts(),
            preemptions=self.scheduler.num_preemptions,
            costs=self.costs,
            busy_s=self._busy_s,
            computed_tokens=self._num_computed_tokens + self._num_accepted_tokens,
            drafted_tokens=self._num_drafted_tokens,
            accepted_tokens=self._num_accepted_tokens,
            model_drafted_tokens=0 if self._draft_model is None else self._draft_model.num_drafted,
            model_accepted_tokens=0 if self._draft_model is None else self._draft_model.num_accepted,
            expert_tokens=tuple(self.runner.expert_tokens),
            adapters=self.adapters.resident,
        )

    def take_block_events(self) -> list[BlockChange]:
        """Return the keys that were cached or evicted since the last call, in order."""
        return self.pool.take_events()

    def check(self) -> None:
        """Assert that nothing is leaked: every used block is pinned or held by a known sequence."""
        held = (s for s in self.sequences.values() if s.status is Status.HELD)
        self.scheduler.check(held, self._pins.tables)
        self.adapters.check(s.adapter for s in self.sequences.values() if s.adapter)
        assert all(s.status is not Status.FINISHED for s in self.sequences.values()), "a finished sequence is kept"

    def _book_computed(self, sequence: Sequence, num_tokens: int) -> None:
        assert num_tokens <= sequence.num_tokens, f"{num_tokens} of {sequence.num_tokens} known tokens are computed"
        sequence.num_computed_tokens = num_tokens
        sequence.num_kv_tokens = (num_tokens,) * len(sequence.block_ids)
        self.scheduler.blocks.register_computed(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence, Status.FINISHED)
        self.sequences.pop(sequence.key, None)
        if sequence.adapter:
            self.adapters.unpin(sequence.adapter)
            sequence.adapter = 0

    def _pin_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter:
            self.adapters.pin_again(sequence.adapter)


NEUTRAL = SamplingParams()
ONE_BY_ONE = (
    "top_k", "top_p", "min_p", "typical_p", "logprobs", "logprob_token_ids", "prompt_logprobs", "min_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_word_ids", "allowed_token_ids",
    "dry_multiplier", "xtc_probability", "structured_outputs", "thinking_budget", "use_beam_search",
)  # fmt: skip
"""Sampling parameters without a meaning for a canvas, whose tokens are drawn together."""
ASKED_BY = {
    "logprobs": "best_of above n asks for them",
    "structured_outputs": "response_format, and tool_choice other than auto and none, ask for them",
}
"""Other fields of a request that set such a parameter, as the end of a sentence, by the parameter's name."""


def require_computable(spec: SequenceSpec, runner: Runner) -> None:
    """Require that a sequence fits, and that all its token ids are in the vocabulary.

    In a step the same fault would fail the whole batch, and on a GPU the whole process.

    Raises:
        InvalidRequest: it does not fit, has an id that is not in the vocabulary, or images in the wrong places.
        Unsupported: it has images, and the runner takes none.
    """
    if not 0 < len(spec.token_ids) < runner.max_model_len:
        raise InvalidRequest(
            f"{len(spec.token_ids)} tokens do not fit; this worker takes 1 to {runner.max_model_len - 1}"
        )
    if runner.num_start_tokens:
        if spec.sampling.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs needs a model that continues its prompt; this one encodes it")
        if spec.num_prompt_tokens <= runner.num_start_tokens:
            raise InvalidRequest("the prompt is empty; send at least one token")
    if runner.canvas_length:
        _require_drawn_together(spec.sampling, runner.canvas_length)
    begun = (beam.token_ids for beam in (*spec.hypotheses.running, *spec.hypotheses.finished))
    for ids in (spec.token_ids, *spec.sampling.named_token_ids.values(), *begun):
        if ids and not (min(ids) >= 0 and max(ids) < runner.vocab_size):
            bad = next(token for token in ids if not 0 <= token < runner.vocab_size)
            raise InvalidRequest(
                f"token id {bad} is outside the model's vocabulary, whose ids are 0 to {runner.vocab_size - 1}"
            )
    if spec.images:
        images_of(runner).require_placed(spec)


def _require_drawn_together(params: SamplingParams, canvas_length: int) -> None:
    """Raise InvalidRequest for parameters that need tokens to be drawn one after another."""
    for name in ONE_BY_ONE:
        if getattr(params, name) != getattr(NEUTRAL, name):
            also = f" ({ASKED_BY[name]})" if name in ASKED_BY else ""
            raise InvalidRequest(
                f"{name} needs a model that draws one token after another; this one draws {canvas_length} together, "
                f"and takes temperature, seed, stop and lengths{also}"
            )


def images_of(runner: Runner) -> ImageStore:
    """Return the images of a runner. Raise Unsupported if it takes none."""
    if isinstance(runner.images, str):
        raise Unsupported(f"this model takes no images here: {runner.images}")
    return runner.images


def require_searchable(spec: SequenceSpec, purpose: Purpose, runner: Runner, most: int) -> None:
    """Require that a beam search can be computed here; at most `most` beams run.

    Raises:
        InvalidRequest: it has more beams.
        TransferRefused: it would continue from a state that was computed by another worker.
    """
    if most < (width := spec.sampling.num_beams):
        raise InvalidRequest(f"num_beams {width} is too large; this worker computes at most {most} beams at a time")
    if purpose is Purpose.RECEIVE and runner.spec.states:
        raise TransferRefused("a beam search cannot continue from a transferred state: it is ahead of the first tokens")


class Pins:
    """The pins of one pool, until they are given back."""

    def __init__(self, pool: GroupPool) -> None:
        self._pool = pool
        self._ids = itertools.count()
        self._tables: dict[int, BlockTables] = {}

    def __bool__(self) -> bool:
        return bool(self._tables)

    @property
    def tables(self) -> Iterable[BlockTables]:
        """The pinned block tables, each as often as it is pinned."""
        return self._tables.values()

    def take(self, tables: BlockTables, num_tokens: int = 0) -> Pin:
        """Take a reference on each block of some tables.

        Args:
            num_tokens: length of the cached prefix that the tables hold; 0: they hold none.
        """
        pin = Pin(next(self._ids), tables, num_tokens)
        if any(tables):
            self._pool.acquire(tables)
            self._tables[pin.pin_id] = tables
        return pin

    def give_back(self, *pins: Pin) -> None:
        """Drop the references that one `take` each has taken."""
        for pin in pins:
            if any(pin.block_ids):
                assert pin.pin_id in self._tables, f"pin {pin.pin_id} is unpinned more often than pinned"
                self._pool.release(self._tables.pop(pin.pin_id))
