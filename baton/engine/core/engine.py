"""One worker's engine: token ids in, token ids out.

A step is three calls, straight down: `schedule` (pure decisions) -> `runner.execute` (tensors, in a thread) ->
`commit` (bookkeeping, outputs, events). Everything but `execute` happens on one thread, so there are no locks. While a
batch executes, sequences may be added, aborted or inserted: what the batch uses is only given away at its commit.

The verbs are JetStream's: a PREFILL sequence is admitted with all its blocks and ends HELD with them, a RECEIVE
sequence is reserved and later `insert`ed (or its KV `adopt`ed by the cache), and generation is what the running batch
does.

Transfers read blocks beside the engine. They `pin` them: a block table may change while it is read (a block moves to
the known one of the same content), and its sequence may end first. Pinned blocks keep what was in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from baton.blocks import GRANULE
from baton.cluster import BlockCounts
from baton.costs import StepCosts
from baton.engine.core.block_pool import BlockPool, Removed, Stored
from baton.engine.core.runner import Runner
from baton.engine.core.scheduler import Batch, Scheduler, SchedulerLimits
from baton.engine.core.sequence import Purpose, Sequence, Status
from baton.engine.core.step_fit import StepFit, StepSize
from baton.errors import InvalidRequest
from baton.messages import SequenceSpec
from baton.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class Reserved:
    """A RECEIVE sequence has its blocks; the leading `skip_tokens` tokens are already in them."""

    sequence: Sequence
    skip_tokens: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A PREFILL sequence has the blocks of all its tokens; the first `num_computed_tokens` are already in them."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Generated:
    """A sequence's next token."""

    sequence: Sequence
    token_id: int
    finish_reason: FinishReason | None


Output = Reserved | Admitted | Generated


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    running: int
    waiting: int
    queued_tokens: int
    blocks: BlockCounts
    preemptions: int
    """Since the start."""
    costs: StepCosts
    """As the steps so far have shown."""
    busy_s: float
    """Spent in steps, since the start."""
    computed_tokens: int
    """In those steps."""


class Engine:
    def __init__(self, runner: Runner, limits: SchedulerLimits) -> None:
        self.runner = runner
        self.pool = BlockPool(runner.cache.num_blocks)
        self.scheduler = Scheduler(self.pool, limits)
        self._fit = StepFit()
        self._busy_s = 0.0
        self._num_computed_tokens = 0
        self._sequences: set[Sequence] = set()
        self._pins: Counter[int] = Counter()

    def add(self, spec: SequenceSpec, purpose: Purpose, now: float) -> Sequence:
        """Queues a sequence.

        Raises:
            InvalidRequest: it cannot fit, or has a token id that the model has no embedding for.
        """
        if not 0 < len(spec.token_ids) < self.runner.max_model_len:
            raise InvalidRequest(
                f"{len(spec.token_ids)} tokens do not fit; this worker takes 1 to {self.runner.max_model_len - 1}"
            )
        # In the step it would be an error of the whole batch, on a GPU of the whole process.
        if max(spec.token_ids) >= self.runner.vocab_size or min(spec.token_ids) < 0:
            bad = next(token for token in spec.token_ids if not 0 <= token < self.runner.vocab_size)
            raise InvalidRequest(
                f"token id {bad} is none of the model's, whose embedding has rows 0 to {self.runner.vocab_size - 1}"
            )
        sequence = Sequence(spec=spec, purpose=purpose, arrival_s=now)
        self._sequences.add(sequence)
        self.scheduler.add(sequence)
        return sequence

    def insert(self, sequence: Sequence, first_token: int, now: float) -> FinishReason | None:
        """The KV of a RESERVED sequence has arrived, with the token sampled from it.

        Returns:
            Set if that token already ends the sequence; then nothing more comes.
        """
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.first_token_s = now
        finish_reason = sequence.append(first_token, self.runner.eos_token_ids, self.runner.max_model_len)
        self.scheduler.register_computed_blocks(sequence)
        if finish_reason is None:
            self.scheduler.insert(sequence)
        else:
            self._finish(sequence)
        return finish_reason

    def adopt(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens of a RESERVED sequence has arrived: its full blocks become findable.

        The sequence stays RESERVED; ended, it leaves these blocks in the cache. No transfer may write them any more.
        A sequence that is only to fill the cache has `max_tokens` 0, and so reserves no room for an answer.
        """
        assert sequence.status is Status.RESERVED, sequence.status
        assert num_tokens <= sequence.num_tokens, f"{num_tokens} of {sequence.num_tokens} tokens have arrived"
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_tokens)
        self.scheduler.register_computed_blocks(sequence)

    def pin(self, sequence: Sequence) -> tuple[int, ...]:
        """Takes a reference on each block of a sequence, for a reader: nobody else gets them until `unpin`.

        Returns:
            The block table as it is now: what to read, and what to unpin.
        """
        return self._pin(sequence.block_table)

    def pin_prefix(self, keys: SequenceOf[bytes]) -> tuple[int, ...]:
        """Pins the longest cached prefix of a chain of keys, one a granule of 16 tokens (see `baton.blocks`).

        Returns:
            Its blocks, in order; none for a model with per-sequence states, whose blocks are never cached.
        """
        granules = self.scheduler.limits.block_size // GRANULE
        return self._pin(self.pool.match(keys[granules - 1 :: granules]))

    def unpin(self, blocks: SequenceOf[int]) -> None:
        """Drops what one `pin` or `pin_prefix` took; `blocks` as it returned them."""
        for block in blocks:
            assert self._pins[block] > 0, f"block {block} is unpinned more often than pinned"
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
        self.pool.release(blocks)

    def schedule(self, now: float) -> tuple[Batch, list[Output]]:
        """The next step to execute (empty: nothing can run now), and who got blocks to transfer from or to."""
        batch, admitted = self.scheduler.schedule(now)
        for part in batch:
            part.sequence.in_flight = True
        if self.runner.cache.states:
            self.runner.cache.clear_state([p.sequence.state_slot for p in batch if p.start == 0])
        outputs: list[Output] = []
        for sequence in admitted:
            if sequence.status is Status.RESERVED:
                outputs.append(Reserved(sequence, sequence.num_computed_tokens))
            elif sequence.purpose is Purpose.PREFILL:
                outputs.append(Admitted(sequence))
        return batch, outputs

    def commit(self, batch: Batch, sampled: list[int], now: float) -> list[Output]:
        """Books an executed batch."""
        outputs: list[Output] = []
        tokens = iter(sampled)
        for part in batch:
            sequence = part.sequence
            token_id = next(tokens) if part.sample else None
            sequence.in_flight = False
            if sequence.aborted:
                self._finish(sequence)
                continue
            sequence.num_computed_tokens += part.num_tokens
            self.scheduler.register_computed_blocks(sequence)
            if token_id is None:
                continue
            sequence.first_token_s = sequence.first_token_s or now
            finish_reason = sequence.append(token_id, self.runner.eos_token_ids, self.runner.max_model_len)
            if sequence.purpose is Purpose.PREFILL:
                self.scheduler.remove(sequence, Status.HELD)
            elif finish_reason is not None:
                self._finish(sequence)
            outputs.append(Generated(sequence, token_id, finish_reason))
        return outputs

    def learn(self, size: StepSize, took_s: float) -> None:
        """A step of this size has taken so long."""
        self._busy_s += took_s
        self._num_computed_tokens += size.num_new
        self._fit.observe(size, took_s)
        self.scheduler.costs = self._fit.costs

    def abandon(self, batch: Batch) -> list[Sequence]:
        """A batch could not be executed: takes its sequences out and returns those that were not aborted already."""
        for part in batch:
            part.sequence.in_flight = False
            self._finish(part.sequence)
        return [part.sequence for part in batch if not part.sequence.aborted]

    def end(self, sequence: Sequence) -> None:
        """Takes a sequence out in whatever status it is, and frees what it holds; idempotent.

        The blocks of a sequence in the executing batch are freed at its commit. The caller sees to it that no transfer
        still writes the blocks of a RESERVED one; who reads has pinned.
        """
        if sequence.in_flight:
            sequence.aborted = True
        elif sequence.status is not Status.FINISHED:
            self._finish(sequence)

    @property
    def is_idle(self) -> bool:
        """No sequence is known and nothing is pinned: nothing waits, runs, or holds blocks."""
        return not self._sequences and not self._pins

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.reserved),
            queued_tokens=sum(
                s.num_tokens - self.scheduler.num_present_tokens(s)
                for s in self._sequences
                if s.status in (Status.WAITING, Status.RUNNING)
            ),
            blocks=self.pool.counts(),
            preemptions=self.scheduler.num_preemptions,
            costs=self._fit.costs,
            busy_s=self._busy_s,
            computed_tokens=self._num_computed_tokens,
        )

    def take_block_events(self) -> list[Stored | Removed]:
        return self.pool.take_events()

    def check(self) -> None:
        """Asserts that nothing is leaked: every used block is pinned or held by a sequence that is still known."""
        self.scheduler.check((s for s in self._sequences if s.status is Status.HELD), self._pins.elements())
        assert all(s.status is not Status.FINISHED for s in self._sequences), "a finished sequence is kept"

    def _pin(self, blocks: SequenceOf[int]) -> tuple[int, ...]:
        self.pool.acquire(blocks)
        self._pins.update(blocks)
        return tuple(blocks)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence, Status.FINISHED)
        self._sequences.discard(sequence)
