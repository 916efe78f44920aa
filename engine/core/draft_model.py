"""A smaller model that proposes drafts: what it computes, in its own block pool, and how often it is right.

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

from dataclasses import dataclass, replace

from engine.core.group_pool import GroupPool, SequenceBlocks
from engine.core.runner import Proposal, Runner, StepInput, StepOutput
from engine.core.sequence import Purpose, Sequence, Status

READY = 16
"""Maximum number of uncomputed tokens with which a sequence may still have drafts in the same step."""
RESERVED = 64
"""Tokens beyond the known ones for which a new shadow gets blocks."""
CATCH_UP_SHARE = 0.25
"""Share of a step's time in which the model may catch up with known tokens."""
LEAST_CATCH_UP = 16
"""Tokens that the model may always catch up in a step."""
LIKELY = 0.7
"""Acceptance rate before any observation."""
RATE_DRAFTS, ALL_RATE_DRAFTS = 8.0, 16.0
"""Weight of the earlier drafts in the acceptance rate of a sequence, and of all sequences, in drafts."""
FADING = 0.0005
"""Share that a step takes away of what was measured: a sequence's rate tends to that of all sequences, and that to
LIKELY. So a model that does not pay is retried some thousand steps later."""
LATEST = 0.2
"""Weight of the latest measurement of a time."""


@dataclass(slots=True)
class _Shadow:
    """State of one sequence in the draft model."""

    original: Sequence
    sequence: Sequence
    """Counterpart of the target's sequence: the same tokens, with blocks of the draft model's pool."""
    rate: float
    """Share of its drafts that were accepted, of those whose preceding drafts were all accepted."""


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
        self.num_drafted = self.num_accepted = 0
        self._round_s = 0.0
        """Time that proposing one draft of each sequence takes; 0: not measured yet."""
        self._known_s = 0.0
        """Time that it takes for a token that it catches up with; 0: not measured yet."""
        self._rate = LIKELY
        """Acceptance rate of all sequences, with which a new one begins."""
        self._blocks = SequenceBlocks(self.pool, 0, 1)
        self._max_model_len = runner.max_model_len
        self._shadows: dict[int, _Shadow] = {}
        self._most_tokens = most_tokens
        self._tokens_left = self._catch_up_left = self._num_ready = 0

    def begin_step(self, step_s: float) -> None:
        """Prepare for the proposals of a step.

        Blocks that have become full are registered, the blocks of sequences that no longer run are released, and
        measurements fade by one step.

        Args:
            step_s: time of the step without drafts.
        """
        for key, shadow in list(self._shadows.items()):
            if shadow.original.status is not Status.RUNNING or shadow.original.num_tokens >= self._max_model_len:
                self._drop(key)
            else:
                self._blocks.register_computed(shadow.sequence)
                shadow.rate += FADING * (self._rate - shadow.rate)
        self.pool.take_events()  # its cache is not published
        self._rate += FADING * (LIKELY - self._rate)
        self._round_s *= 1 - FADING
        self._num_ready = sum(shadow.sequence.num_missing_tokens <= READY for shadow in self._shadows.values())
        within = int(CATCH_UP_SHARE * step_s / self._known_s) if self._known_s else 0
        self._tokens_left, self._catch_up_left = self._most_tokens, max(LEAST_CATCH_UP, within)

    def rate(self, sequence: Sequence) -> float:
        """Return the chance of a draft of a sequence, given that all drafts before it are accepted."""
        if sequence.num_tokens >= self._max_model_len:
            return 0.0
        shadow = self._shadows.get(sequence.key)
        return self._rate if shadow is None else shadow.rate

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether a sequence can have drafts in the next step: it lacks few tokens."""
        shadow = self._shadows.get(sequence.key)
        return shadow is not None and shadow.sequence.num_missing_tokens <= READY

    def draft_s(self, sequence: Sequence, num_decoding: int) -> float:
        """Return how long proposing one draft will take.

        All sequences that are ready share a round. Before a sequence is ready, all that decode are assumed to share it.
        """
        return self._round_s / (self._num_ready if self.is_ready(sequence) else num_decoding)

    def catching_up_s(self, sequence: Sequence) -> float:
        """Return how long the model will take for the known tokens that it lacks of a sequence."""
        shadow = self._shadows.get(sequence.key)
        return self._known_s * (sequence.num_tokens if shadow is None else shadow.sequence.num_missing_tokens)

    def proposal(self, sequence: Sequence, num_drafts: int) -> Proposal | None:
        """Return the model's next work for a sequence, and take the blocks for it.

        Args:
            num_drafts: number of drafts, if the sequence is ready; 0: it catches up.

        Returns:
            None if there is no room, or nothing left to compute.
        """
        shadow = self._shadows.get(sequence.key) or self._begin(sequence)
        if shadow is None:
            return None
        own, num_drafts = shadow.sequence, min(num_drafts, self._max_model_len - sequence.num_tokens)
        number = own.num_missing_tokens if num_drafts else min(own.num_missing_tokens - 1, self._catch_up_left)
        if not 0 < number <= self._tokens_left:
            return None
        missing = self._blocks.missing(own, own.num_computed_tokens + number + max(0, num_drafts - 1))
        if not self.pool.has_room(missing):
            self._drop(sequence.key)
            return None
        self._blocks.add(own, missing)
        self._tokens_left -= number
        self._catch_up_left -= 0 if num_drafts else number
        return Proposal(own.part(number), num_drafts)

    def commit(self, step: StepInput, output: StepOutput) -> None:
        """Record the result of a step's proposals, before the step's tokens are appended to the sequences."""
        assert output.proposed is not None
        num_drafts = num_kept = num_known = num_rounds = 0
        for place, part in enumerate(step.parts):
            if part.proposal is None or (shadow := self._shadows.get(part.sequence_key)) is None:
                continue
            tried, kept = output.proposed.counts.get(place, 0), max(0, len(output.sampled_token_ids[place]) - 1)
            num_rounds = max(num_rounds, part.proposal.num_drafts)
            num_known += 0 if part.proposal.num_drafts else len(part.proposal.part.token_ids)
            if tried:
                shadow.rate = _rate(shadow.rate, RATE_DRAFTS, kept, min(tried, kept + 1))
                self._rate = _rate(self._rate, ALL_RATE_DRAFTS, kept, min(tried, kept + 1))
                num_drafts, num_kept = num_drafts + tried, num_kept + kept
            # The last draft has no KV, and the KV of drafts that were not accepted is overwritten.
            end = part.proposal.part.end + min(max(0, tried - 1), kept)
            shadow.sequence.num_computed_tokens = end
            shadow.sequence.num_kv_tokens = (end,) * len(shadow.sequence.block_ids)
        self.num_drafted, self.num_accepted = self.num_drafted + num_drafts, self.num_accepted + num_kept
        took_s = output.proposing_s
        if num_rounds and not num_known:  # catching up prolongs the first round
            self._round_s = _latest(self._round_s, took_s / num_rounds)
        elif num_known and not num_rounds:
            self._known_s = _latest(self._known_s, took_s / num_known)

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
        tables = self.pool.reuse(found.tables, self.pool.num_blocks_for(num_tokens))
        if tables is None:
            return None
        shadow.status = Status.RUNNING
        self._blocks.take(shadow, tables)
        shadow.num_computed_tokens = found.num_tokens
        shadow.num_registered_keys = shadow.num_computed_tokens // self.pool.key_tokens
        shadow.num_kv_tokens = (shadow.num_computed_tokens,) * len(tables)
        made = self._shadows[sequence.key] = _Shadow(sequence, shadow, self._rate)
        return made


def _rate(before: float, weight: float, num_kept: int, num_tried: int) -> float:
    """Return an acceptance rate after more drafts.

    Args:
        weight: weight of the rate before, in drafts.
    """
    return (weight * before + num_kept) / (weight + num_tried)


def _latest(before_s: float, took_s: float) -> float:
    """Return a running mean after one more measurement; 0: there was none before."""
    return before_s + LATEST * (took_s - before_s) if before_s else took_s
