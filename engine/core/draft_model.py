"""Block accounting of a draft model: the tokens of each sequence that it has computed, in its own block pool.

Each sequence has a *shadow* there: the same tokens, other blocks. A shadow is created when the sequence decodes,
wherever its prompt was computed, and catches up by some tokens per step. Full blocks have the same keys as the target
model's, so choices, conversation turns and preempted sequences find earlier work. These blocks are not published or
transferred.

    tokens   [ prompt | answer | last one ]                              of the sequence, and of its shadow
    target   [ computed ..... ]                                          waits for the last one
    draft    [ computed .. ]                                             catches up: prompt, accepted tokens
    drafts                                 [ draft | draft | draft ]     their KV counts once they are accepted

A shadow returns its blocks before the first step after its sequence has given up its own. If there is no room for a
sequence, it has no shadow; if a shadow cannot grow, it is dropped. Such a sequence gets no drafts of the model, and no
other sequence waits for it.
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
"""Maximum number of uncomputed tokens with which a sequence may still have drafts in the same step."""
RESERVED = 64
"""Tokens beyond the known ones for which a new shadow gets blocks."""
LEAST_ROUNDS = 3
"""Rounds in which all sequences decode, before their cost counts as known."""
UNKNOWN_SHARE = 0.2
"""Assumed time of a draft model's step as a share of the target's, until it is measured."""
LIKELY = 0.7
"""Prior for the chance of a draft."""
LIKELY_WEIGHT = 8.0
"""Weight of that prior, in drafts."""
FORGETTING = 0.95
"""Weight of a step's drafts after the next drafts of the same sequence."""
FORGETTING_ALL = 0.99
"""Weight of a step's drafts over all sequences after the next drafts of any sequence."""
FADING = 0.998
"""Weight of a sequence's drafts after any further step: drafts that looked unlikely are retried some hundred steps
later."""
FADING_ALL = 0.9995
"""Weight of all sequences' drafts after any further step. It fades slowly: a retry with a new sequence costs its
prompt."""


@dataclass(slots=True)
class _Acceptance:
    """Acceptance rate of drafts whose preceding drafts were all accepted."""

    tried: float = 0.0
    kept: float = 0.0

    def observe(self, tried: int, kept: int, forgetting: float) -> None:
        self.tried = forgetting * self.tried + tried
        self.kept = forgetting * self.kept + kept

    def fade(self, fading: float) -> None:
        self.tried *= fading
        self.kept *= fading

    def chance(self, before: float) -> float:
        """Return the chance of a draft.

        Args:
            before: the chance assumed without observations.
        """
        return (LIKELY_WEIGHT * before + self.kept) / (LIKELY_WEIGHT + self.tried)


@dataclass(slots=True)
class _Shadow:
    """State of one sequence in the draft model."""

    original: Sequence
    sequence: Sequence
    """Counterpart of the target's sequence: the same tokens, with blocks of the draft model's pool."""
    acceptance: _Acceptance = field(default_factory=_Acceptance)


class DraftModel:
    """Decides what the draft model computes and takes the blocks for it. It neither waits nor computes.

    Args:
        runner: the draft model's runner.
        key_tokens: tokens per block key of the target, which are used here too.
        most_tokens: maximum number of tokens in one of its steps.
    """

    def __init__(self, runner: Runner, key_tokens: int, most_tokens: int) -> None:
        self.pool = GroupPool(runner.spec, runner.num_blocks)
        assert self.pool.key_tokens == key_tokens, "the draft model's blocks are of another size"
        self.most_tokens = most_tokens
        self.num_drafted = self.num_accepted = 0
        self.budget = DraftBudget()
        """Time that it may lose; at zero the draft model is not run."""
        self._blocks = SequenceBlocks(self.pool, 0)
        self._max_model_len = runner.max_model_len
        self._shadows: dict[int, _Shadow] = {}
        self._acceptance = _Acceptance()
        self._fit = StepFit()
        self._num_rounds = 0

    def costs(self, target: StepCosts) -> StepCosts:
        """Return the costs of the draft model's steps.

        Args:
            target: costs of the target's steps.
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
        """Return the chances of drafts, by index, for the sequences that may have some now. Changes nothing.

        Args:
            wanted: index, sequence and maximum number of drafts of each.
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
        """Return how many tokens the model must compute before a sequence can have drafts; 0: none, or it never can."""
        if sequence.num_tokens >= self._max_model_len:
            return 0
        shadow = self._shadows.get(sequence.key)
        if shadow is None:
            return sequence.num_tokens - 1
        return shadow.sequence.num_missing_tokens - 1 if shadow.sequence.num_missing_tokens > READY else 0

    def chance(self, sequence: Sequence) -> float:
        """Return the chance of a draft of a sequence, given that all drafts before it are accepted."""
        before = self._acceptance.chance(LIKELY)
        shadow = self._shadows.get(sequence.key)
        return before if shadow is None else shadow.acceptance.chance(before)

    def drafting(self, sequence: Sequence, part: StepPart) -> Proposal:
        """Return what the model computes for the drafts of a part for which `guesses` has returned an entry."""
        shadow = self._shadows[sequence.key].sequence
        self._blocks.add(shadow, self._blocks.missing(shadow, part.known_end + part.num_drafts - 1))
        return Proposal(shadow.part(shadow.num_missing_tokens), part.num_drafts)

    def catching_up(self, sequence: Sequence, most: int) -> Proposal | None:
        """Return what the model computes next of the known tokens that it lacks.

        Args:
            most: maximum number of tokens. For a new sequence some may already be in the draft model's cache.

        Returns:
            None if there is nothing to compute, or no room.
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
        """Record the result of a step's proposals, before the step's tokens are appended to the sequences."""
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
            # The last draft has no KV, and the KV of drafts that were not accepted is overwritten.
            end = part.proposal.part.end + min(max(0, num_drafts - 1), kept)
            shadow.sequence.num_computed_tokens = end
            shadow.sequence.num_kv_tokens = (end,) * len(shadow.sequence.block_ids)
        for size, took_s in ((StepSize.of(of_round), took_s) for of_round, took_s in proposed.rounds):
            self._fit.observe(size, took_s)
            self._num_rounds += size.num_new == size.num_decoding

    def tidy(self) -> None:
        """Register blocks that have become full, and release the blocks of sequences that no longer run."""
        for key, shadow in list(self._shadows.items()):
            if shadow.original.status is not Status.RUNNING or shadow.original.num_tokens >= self._max_model_len:
                self._drop(key)
            else:
                self._blocks.register_computed(shadow.sequence)
        self.pool.take_events()  # its cache is not published

    def fade(self) -> None:
        """Reduce the weight of all measurements by one step."""
        self._acceptance.fade(FADING_ALL)
        for shadow in self._shadows.values():
            shadow.acceptance.fade(FADING)

    def check(self) -> None:
        """Assert that the accounting is correct."""
        self._blocks.check([shadow.sequence for shadow in self._shadows.values()])

    def _drop(self, key: int) -> None:
        self._blocks.give_back(self._shadows.pop(key).sequence)

    def _begin(self, sequence: Sequence) -> _Shadow | None:
        """Create the shadow of a sequence, with its prefix from the draft model's cache; None: there is no room.

        The shadow takes the blocks that the sequence will need soon, so that the computed tokens are not lost for lack
        of room.
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
