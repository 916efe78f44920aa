"""Which sequences go to vLLM, and the KV blocks that are reserved for them. Pure: no clock, no process.

vLLM has a queue and a pool of its own, and preempts sequences when the pool is full. The worker adds a sequence to vLLM
only after it has reserved blocks for it, so vLLM always finds free blocks. Sequences wait in the worker, not in vLLM.
Their order is `urgency`, so a later sequence with an earlier deadline overtakes.

A reservation covers the prompt and the start of the answer (`engine.output_reservation`), and grows before the
answer uses it up. If it cannot grow, the least urgent sequence leaves vLLM, waits here again, and continues from its
tokens; vLLM's prefix cache may still have its KV.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.blocks import num_blocks_for
from baton.costs import ITL_TARGET, LEAST_SHARE, PRIOR, StepCosts
from baton.messages import SequenceSpec
from engine.core.sequence import Purpose
from engine.vllm.messages import Group

LEAST_STEP = 0.5
"""Minimum share of the ITL objective that a step may take; see `engine.core.scheduler`."""
MARGIN = 16
"""Tokens before the end of a reservation at which it grows. vLLM may be some steps ahead of its host's last report."""
STEPS_AHEAD = 2
"""Steps whose prompt tokens vLLM may have in its queue: the running one, and the next."""
_KEYS = itertools.count()


@dataclass(slots=True, eq=False, kw_only=True)
class Hosted:
    """A sequence of the engine, from its arrival until its context is left."""

    spec: SequenceSpec
    purpose: Purpose
    """GENERATE also for a RECEIVE sequence, once its KV has arrived."""
    arrival_s: float
    most_tokens: int
    """Tokens of its prompt and its whole answer, limited by the model's maximum length."""
    token_ids: list[int] = field(init=False)
    """All known tokens."""
    key: int = field(default_factory=_KEYS.__next__)
    """The engine's key for it. vLLM gets a new name each time the sequence is added to it."""
    name: int = -1
    """The present name of the sequence in vLLM; -1: vLLM does not have it."""
    num_reserved_tokens: int = 0
    """Tokens for which blocks are reserved; 0: vLLM does not have it."""
    was_admitted: bool = False
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    """Time of the first token that was generated here; 0: there is none."""
    blocked_s: float = 0.0
    """Time before the admission during which there were too few free blocks for the head of the queue."""
    num_cached_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    """Blocks of the sequence that other workers read or write."""
    num_computed_tokens: int = 0
    """Tokens whose KV is complete in all layers; counted for sequences that are computed for another worker."""
    num_inserted_tokens: int = 0
    """Tokens whose KV has arrived from another worker."""
    num_skipped_tokens: int = 0
    """Tokens that vLLM will report although they are known: 1 if another worker has drawn the first token."""
    num_pins: int = 0
    has_left: bool = False
    """True if its context was left; pins may still hold its blocks."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens that were generated on this worker."""
        return len(self.token_ids) - len(self.spec.token_ids)

    @property
    def scores_prompt(self) -> bool:
        """True if its prompt is computed here with log probabilities."""
        is_asked = self.spec.sampling.prompt_logprobs is not None
        return is_asked and not self.first_token_s and self.purpose is not Purpose.RECEIVE

    @property
    def awaits_step(self) -> bool:
        """True if vLLM must still compute something for it."""
        return self.purpose is Purpose.GENERATE or (self.purpose is Purpose.PREFILL and not self.first_token_s)

    @property
    def is_held(self) -> bool:
        """True if other workers read or write its blocks, so that it cannot leave vLLM."""
        return self.purpose is not Purpose.GENERATE or self.num_pins > 0

    @property
    def deadline_s(self) -> float:
        """Time at which the first token is due, on the clock of `arrival_s`."""
        return self.arrival_s + self.spec.ttft_s


class Change(NamedTuple):
    """Result of `Admission.advance`."""

    left: list[tuple[Hosted, int]]
    """Sequences that must leave vLLM, with their names there."""
    admitted: list[Hosted]
    """Sequences that vLLM gets."""
    num_prompt_tokens: int
    """Prompt tokens that a step may compute from now on."""


class Admission:
    """Queue and reservations of one engine.

    Args:
        groups: groups of vLLM's layers, whose blocks come from one pool.
        num_blocks: blocks of the pool.
        max_num_seqs: maximum number of sequences that vLLM has.
        max_step_tokens: maximum number of tokens of a step.
        output_reservation: tokens of an answer that are reserved at a time; at least `MARGIN` are.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: int,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        output_reservation: int,
    ) -> None:
        self.waiting: list[Hosted] = []
        self.running: list[Hosted] = []
        self.num_preemptions = 0
        self._groups = groups
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._output_reservation = max(output_reservation, MARGIN)
        self._names = itertools.count()
        self._num_reserved = 0
        self._num_pinned = 0
        """Pinned blocks that no reservation may cover."""
        self._num_in_pins = 0
        """Blocks of all pins."""
        self._full_since_s: float | None = None

    @property
    def num_free(self) -> int:
        """Blocks that are reserved for no sequence, and not pinned."""
        return self._num_blocks - self._num_reserved - self._num_pinned

    def pin(self, num_taken: int, num_blocks: int) -> None:
        """Count the blocks of a pin, or with negative numbers give them back.

        Sequences may share pinned blocks, and their reservations then cover these blocks. Which ones they share is not
        known. So when a sequence gives its reservation back, as many more blocks count as pinned, at most those of all
        pins.

        Args:
            num_taken: blocks of the pin that nothing else uses.
            num_blocks: all blocks of the pin.
        """
        self._num_in_pins += num_blocks
        self._num_pinned = min(self._num_pinned + num_taken, self._num_in_pins)

    def longest(self, max_model_len: int) -> int:
        """Return the longest sequence that fits into the pool, at most `max_model_len` tokens."""
        least, most = 0, max_model_len
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self._blocks_of(middle) <= self._num_blocks else (least, middle - 1)
        return least

    def add(self, sequence: Hosted) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Hosted) -> int:
        """Forget a sequence. Return its name in vLLM, which the caller must abort there; -1: vLLM does not have it."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.name < 0:
            return -1
        return self._take_back(sequence)

    def advance(self, now: float, costs: StepCosts = PRIOR, num_uncomputed: int = 0) -> Change:
        """Grow the reservations and admit what fits.

        Args:
            costs: step costs as measured so far.
            num_uncomputed: tokens that vLLM has not computed yet.
        """
        left: list[tuple[Hosted, int]] = []
        for sequence in sorted(self.running, key=_rank):
            if sequence.name >= 0:
                left += self._grow(sequence)
        if self._full_since_s is not None:
            for sequence in self.waiting:
                if not sequence.was_admitted:
                    sequence.blocked_s += now - max(self._full_since_s, sequence.arrival_s)
            self._full_since_s = None
        admitted = [] if left else self._admit(now, costs, num_uncomputed)
        return Change(left, admitted, self._prompt_tokens(now, costs))

    def _grow(self, sequence: Hosted) -> list[tuple[Hosted, int]]:
        """Extend a reservation that is nearly used up. Return the sequences that were preempted for it."""
        left: list[tuple[Hosted, int]] = []
        reserved = sequence.num_reserved_tokens
        if sequence.is_held or reserved >= sequence.most_tokens or sequence.num_tokens + MARGIN <= reserved:
            return left
        while True:
            for wanted in (sequence.num_tokens + self._output_reservation, sequence.num_tokens + 2 * MARGIN):
                wanted = min(sequence.most_tokens, max(wanted, reserved + MARGIN))
                more = self._blocks_of(wanted) - self._blocks_of(reserved)
                if more <= self.num_free:
                    self._num_reserved += more
                    sequence.num_reserved_tokens = wanted
                    return left
            last = max((each for each in self.running if not each.is_held), key=_rank)
            left.append((last, self._take_back(last)))
            self.waiting.append(last)
            self.num_preemptions += 1
            if last is sequence:
                return left

    def _admit(self, now: float, costs: StepCosts, num_uncomputed: int) -> list[Hosted]:
        admitted: list[Hosted] = []
        if not self.waiting:
            return admitted
        self.waiting.sort(key=lambda sequence: urgency(sequence, now, costs, self._max_step_tokens))
        room = STEPS_AHEAD * self._max_step_tokens - num_uncomputed
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            if room <= 0 and sequence.purpose is not Purpose.RECEIVE:
                break
            wanted = min(sequence.most_tokens, sequence.num_tokens + self._output_reservation)
            needed = self._blocks_of(wanted)
            if needed > self.num_free:
                self._full_since_s = now
                break  # no other sequence overtakes the first that waits
            del self.waiting[0]
            self.running.append(sequence)
            self._num_reserved += needed
            sequence.num_reserved_tokens = wanted
            sequence.name = next(self._names)
            if not sequence.was_admitted:
                sequence.was_admitted, sequence.scheduled_s = True, now
            room -= sequence.num_tokens if sequence.purpose is not Purpose.RECEIVE else 0
            admitted.append(sequence)
        return admitted

    def _take_back(self, sequence: Hosted) -> int:
        self.running.remove(sequence)
        num_blocks = self._blocks_of(sequence.num_reserved_tokens)
        self._num_reserved -= num_blocks
        self._num_pinned = min(self._num_pinned + num_blocks, self._num_in_pins)
        name, sequence.name, sequence.num_reserved_tokens, sequence.block_ids = sequence.name, -1, 0, ()
        sequence.num_skipped_tokens = 0  # it is known: vLLM would get it with the prompt, and not report it
        return name

    def _blocks_of(self, num_tokens: int) -> int:
        return blocks_of(self._groups, num_tokens, self._max_step_tokens)

    def _prompt_tokens(self, now: float, costs: StepCosts) -> int:
        """Return how many prompt tokens a step may compute if the decoding sequences must keep their ITL objectives."""
        decoding = [sequence for sequence in self.running if sequence.first_token_s and not sequence.is_held]
        step_s, context = math.inf, 0
        for sequence in decoding:
            context += sequence.num_tokens
            if (itl_s := sequence.spec.itl_s) < math.inf:
                due_s = sequence.first_token_s + ITL_TARGET * itl_s * sequence.num_generated_tokens
                step_s = min(step_s, max(due_s - now, LEAST_STEP * itl_s))
        if step_s == math.inf:
            return self._max_step_tokens
        room_s = costs.computing_room_s(step_s, len(decoding), context)
        prompts = [sequence.num_tokens for sequence in self.running if not sequence.first_token_s]
        context_tokens = max(prompts, default=0) // 2
        within = costs.tokens_within(room_s, context_tokens, self._max_step_tokens)
        return max(within, self._max_step_tokens // LEAST_SHARE, 1)

    def check(self) -> None:
        """Assert that the reservations are those of the sequences that vLLM has."""
        reserved = sum(self._blocks_of(sequence.num_reserved_tokens) for sequence in self.running)
        assert reserved == self._num_reserved, f"{self._num_reserved} blocks of {reserved} are reserved"
        assert self.num_free >= 0, f"{-self.num_free} blocks too many are reserved"
        assert all(sequence.name >= 0 for sequence in self.running), "a running sequence has no name"
        assert all(sequence.name < 0 for sequence in self.waiting), "a waiting sequence has a name"


def blocks_of(groups: Iterable[Group], num_tokens: int, max_step_tokens: int) -> int:
    """Return the maximum number of blocks that a sequence of this length holds, of all groups together.

    A group of layers with a window keeps the blocks of the window and of the tokens that a step adds. A group with a
    state keeps one block, and a second one while a step writes it. Any other group keeps all blocks.
    """
    if not num_tokens:
        return 0
    total = 0
    for group in groups:
        whole = num_blocks_for(num_tokens, group.block_size)
        match group.kind:
            case "window":
                total += min(whole, num_blocks_for(group.window + max_step_tokens, group.block_size) + 1)
            case "state":
                total += 2
            case _:
                total += whole
    return total


def urgency(sequence: Hosted, now: float, costs: StepCosts, chunk: int) -> tuple[int, bool, float, float]:
    """Return the sort key, least first, as `engine.core.scheduler.urgency` does for Baton's own engine.

    Args:
        chunk: prompt tokens in a step.
    """
    spec = sequence.spec
    if sequence.num_tokens > spec.num_prompt_tokens:
        return -spec.priority, False, -math.inf, sequence.arrival_s
    spare_s = sequence.deadline_s - now
    needed_s = 0.0 if sequence.purpose is Purpose.RECEIVE else costs.prefill_s(sequence.num_tokens, 0, chunk)
    is_late = spare_s < math.inf and needed_s > spare_s
    return -spec.priority, is_late, sequence.deadline_s, sequence.arrival_s


def _rank(sequence: Hosted) -> tuple[int, float]:
    """Return the sort key of running sequences; the sequence with the highest key is preempted first."""
    return -sequence.spec.priority, sequence.arrival_s
