"""The books of a draft model: which tokens of which sequences it has computed, in which blocks of its own pool.

A sequence has a *shadow* there: the same tokens, other blocks. It begins when the sequence decodes, whatever computed
its prompt, and catches up some tokens a step. Full blocks are known by the same keys as the target's, so that choices,
turns and preempted sequences find what others have computed; nobody outside hears of them, and nothing is transferred.

    tokens   [ prompt | answer | last one ]                              of the sequence, and of its shadow
    target   [ computed ..... ]                                          waits for the last one
    draft    [ computed .. ]                                             catches up: prompt, accepted tokens
    drafts                                 [ draft | draft | draft ]     their KV counts once they are accepted

A shadow gives its blocks back before the first step after its sequence has given up its own. A sequence for which there
is no room has none, and one that cannot grow loses its; then it has no drafts of the model, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from baton.costs import StepCosts
from engine.core.draft_budget import DraftBudget
from engine.core.group_pool import GroupPool
from engine.core.ngrams import Guess
from engine.core.runner import UNKNOWN_TOKEN, Proposal, Runner, StepInput, StepOutput, StepPart
from engine.core.sequence import Purpose, Sequence, Status
from engine.core.sequence_blocks import SequenceBlocks
from engine.core.step_fit import StepFit, StepSize

READY = 16
"""Tokens that a shadow may lack for its sequence to have drafts in the same step."""
RESERVED = 64
"""Tokens beyond the known ones for which a shadow has blocks when it begins."""
LEAST_ROUNDS = 3
"""Rounds in which all sequences decode, before what they cost is known."""
UNKNOWN_SHARE = 0.2
"""A step of the draft model as a share of the target's, before it is known."""
LIKELY = 0.7
"""Chance of a draft of which nothing is known."""
LIKELY_WEIGHT = 8.0
"""Drafts of which that counts as much."""
FORGETTING = 0.95
"""Weight of a step's drafts after the next ones of the same sequence."""
FORGETTING_ALL = 0.99
"""Weight of a step's drafts of a sequence after the next ones of any."""
FADING = 0.998
"""Weight of a sequence's drafts after the next step of any kind: what looked unlikely is tried again some hundred steps
later."""
FADING_ALL = 0.9995
"""Weight of all sequences' drafts after the next step: to try it again with a new one costs its prompt."""


@dataclass(slots=True)
class _Acceptance:
    """How often a draft proved right of which all before it had."""

    tried: float = 0.0
    kept: float = 0.0

    def observe(self, tried: int, kept: int, forgetting: float) -> None:
        self.tried = forgetting * self.tried + tried
        self.kept = forgetting * self.kept + kept

    def fade(self, fading: float) -> None:
        self.tried *= fading
        self.kept *= fading

    def chance(self, before: float) -> float:
        """Returns the chance of a draft, if it was thought to be `before` when nothing had been seen."""
        return (LIKELY_WEIGHT * before + self.kept) / (LIKELY_WEIGHT + self.tried)


@dataclass(slots=True)
class _Shadow:
    """What the draft model has of a sequence."""

    original: Sequence
    sequence: Sequence
    """Another one of the same tokens, with blocks of the draft model's pool."""
    acceptance: _Acceptance = field(default_factory=_Acceptance)


class DraftModel:
    """Decides what the draft model computes, and takes the blocks for it. It neither waits nor computes.

    Args:
        runner: the draft model's.
        key_tokens: tokens of the target's block keys, which are used here too.
        most_tokens: tokens of one of its steps at most.
    """

    def __init__(self, runner: Runner, key_tokens: int, most_tokens: int) -> None:
        self.pool = GroupPool(runner.spec, runner.num_blocks)
        assert self.pool.key_tokens == key_tokens, "the draft model's blocks are of another size"
        self.most_tokens = most_tokens
        self.num_drafted = self.num_accepted = 0
        self.budget = DraftBudget()
        """What it may lose; without anything left it does nothing."""
        self._blocks = SequenceBlocks(self.pool, 0)
        self._max_model_len = runner.max_model_len
        self._shadows: dict[int, _Shadow] = {}
        self._acceptance = _Acceptance()
        self._fit = StepFit()
        self._num_rounds = 0

    def costs(self, target: StepCosts) -> StepCosts:
        """Returns what its steps take.

        Args:
            target: what the target's steps take.
        """
        if self._num_rounds >= LEAST_ROUNDS:
            return self._fit.costs
        return StepCosts(
            s_overhead=UNKNOWN_SHARE * target.s_overhead,
            s_per_token=UNKNOWN_SHARE * target.s_per_token,
            s_per_pair=UNKNOWN_SHARE * target.s_per_pair,
            s_weights=UNKNOWN_SHARE * target.s_weights,
            s_per_sequence=UNKNOWN_SHARE * target.s_per_sequence,
            s_per_kv_token=UNKNOWN_SHARE * target.s_per_kv_token,
        )

    def guesses(self, wanted: Iterable[tuple[int, Sequence, int]]) -> dict[int, Guess]:
        """Returns how likely drafts are of the sequences that may have some now, by place. Nothing changes.

        Args:
            wanted: place, sequence, and drafts that it may have at most.
        """
        found: dict[int, Guess] = {}
        if not self._shadows or self.budget.left_s <= 0:
            return found
        left, tokens_left = [pool.num_available for pool in self.pool.pools], self.most_tokens
        for place, sequence, most in wanted:
            shadow = self._shadows.get(sequence.key)
            if shadow is None or (number_new := shadow.sequence.num_missing_tokens) > min(READY, tokens_left):
                continue
            most = min(most, self._max_model_len - sequence.num_tokens)
            missing = self._blocks.missing(shadow.sequence, sequence.num_tokens + most - 1)
            if most < 1 or any(number > number_left for number, number_left in zip(missing, left, strict=True)):
                continue
            left = [number_left - number for number, number_left in zip(missing, left, strict=True)]
            tokens_left -= number_new
            chance = self.chance(sequence)
            chances = tuple(chance**depth for depth in range(1, most + 1))
            found[place] = Guess((UNKNOWN_TOKEN,) * most, chances)
        return found

    def lacks(self, sequence: Sequence) -> int:
        """Returns how many tokens it has to compute before a sequence can have drafts; 0: none, or it never will."""
        if sequence.num_tokens >= self._max_model_len:
            return 0
        shadow = self._shadows.get(sequence.key)
        if shadow is None:
            return sequence.num_tokens - 1
        return shadow.sequence.num_missing_tokens - 1 if shadow.sequence.num_missing_tokens > READY else 0

    def chance(self, sequence: Sequence) -> float:
        """Returns the chance of a draft of a sequence, if all before it are right."""
        before = self._acceptance.chance(LIKELY)
        shadow = self._shadows.get(sequence.key)
        return before if shadow is None else shadow.acceptance.chance(before)

    def drafting(self, sequence: Sequence, part: StepPart) -> Proposal:
        """Returns what it computes for the drafts that a part wants, of which `guesses` has said that there may be."""
        shadow = self._shadows[sequence.key].sequence
        self._blocks.add(shadow, self._blocks.missing(shadow, part.known_end + part.num_drafts - 1))
        return Proposal(shadow.part(shadow.num_missing_tokens), part.num_drafts)

    def catching_up(self, sequence: Sequence, most: int) -> Proposal | None:
        """Returns what it computes of the known tokens that it lacks.

        Args:
            most: tokens at most; of a sequence that is new here, some may be in its cache.

        Returns:
            None when there is nothing to compute, or no room.
        """
        shadow = self._shadows.get(sequence.key) or self._begin(sequence)
        if shadow is None:
            return None
        number = min(most, shadow.sequence.num_missing_tokens - 1)
        if number < 1:
            return None
        missing = self._blocks.missing(shadow.sequence, shadow.sequence.num_computed_tokens + number)
        if not self.pool.has_room(missing):
            self._drop(sequence.key)
            return None
        self._blocks.add(shadow.sequence, missing)
        return Proposal(shadow.sequence.part(number), 0)

    def commit(self, step: StepInput, output: StepOutput) -> None:
        """Records what came of the proposals of a step, before the sequences have got its tokens."""
        proposed = output.proposed
        assert proposed is not None
        for place, part in enumerate(step.parts):
            if part.proposal is None or (shadow := self._shadows.get(part.sequence_key)) is None:
                continue
            num_drafts, num_sampled = proposed.counts.get(place, 0), len(output.sampled_token_ids[place])
            kept = max(0, num_sampled - 1)
            if num_drafts:
                tried = min(num_drafts, kept + 1)
                shadow.acceptance.observe(tried, kept, FORGETTING)
                self._acceptance.observe(tried, kept, FORGETTING_ALL)
                self.num_drafted += num_drafts
                self.num_accepted += kept
            # The last draft has no KV, and that of drafts which were not accepted is overwritten.
            end = part.proposal.part.end + min(max(0, num_drafts - 1), kept)
            shadow.sequence.num_computed_tokens = end
            shadow.sequence.num_kv_tokens = (end,) * len(shadow.sequence.block_ids)
        for size, took_s in ((StepSize.of(of_round), took_s) for of_round, took_s in proposed.rounds):
            self._fit.observe(size, took_s)
            self._num_rounds += size.num_new == size.num_decoding

    def tidy(self) -> None:
        """Registers what has become full, and takes the blocks back of sequences that do not run any more."""
        for key, shadow in list(self._shadows.items()):
            if shadow.original.status is not Status.RUNNING or shadow.original.num_tokens >= self._max_model_len:
                self._drop(key)
            else:
                self._blocks.register_computed(shadow.sequence)
        self.pool.take_events()  # nobody outside uses its cache

    def fade(self) -> None:
        """Notes that there was a step."""
        self._acceptance.fade(FADING_ALL)
        for shadow in self._shadows.values():
            shadow.acceptance.fade(FADING)

    def check(self) -> None:
        """Asserts that its books are right."""
        self._blocks.check([shadow.sequence for shadow in self._shadows.values()])

    def _drop(self, key: int) -> None:
        self._blocks.give_back(self._shadows.pop(key).sequence)

    def _begin(self, sequence: Sequence) -> _Shadow | None:
        """Gives a sequence a shadow, with what the cache has of it; None: there is no room.

        It takes what the sequence will need soon, so that what is computed of it now is not in vain.
        """
        sampling = replace(sequence.spec.sampling, logprobs=None, logprob_token_ids=(), prompt_logprobs=None)
        spec = replace(sequence.spec, sampling=sampling)
        shadow = Sequence(spec=spec, purpose=Purpose.GENERATE, arrival_s=sequence.arrival_s)
        shadow.token_ids, shadow.block_keys = sequence.token_ids, sequence.block_keys  # these grow, and are shared
        found = self.pool.match(self._blocks.reusable_keys(shadow))
        num_tokens = min(sequence.num_tokens + RESERVED, spec.num_prompt_tokens + spec.max_tokens, self.pool.capacity)
        tables = self.pool.reuse(found, self.pool.num_blocks_for(num_tokens))
        if tables is None:
            return None
        shadow.status = Status.RUNNING
        self._blocks.take(shadow, tables)
        shadow.num_computed_tokens = len(found[0]) * self.pool.block_sizes[0]
        shadow.num_registered_keys = shadow.num_computed_tokens // self.pool.key_tokens
        shadow.num_kv_tokens = (shadow.num_computed_tokens,) * len(tables)
        made = self._shadows[sequence.key] = _Shadow(sequence, shadow)
        return made
