"""Speculative decoding (Leviathan et al., 2023): selects the drafts that a step checks, by look-up, draft model or
both.

A step that computes a sequence's next token can also compute drafts that follow it; accepted drafts are gained tokens.
Each draft makes the step longer for all sequences in it. So drafts of all sequences are ranked by chance, and as many
are taken as maximize the tokens per second:

    expected tokens of the step without drafts + chances of the drafts
    ---------------------------------------------------------------------------------------
       time of the step without drafts + time that the drafts add + time of proposing them

Step times and draft costs are measured per number of sequences (`draft_costs`), and so are the chances (`ngrams`,
`draft_model`). Look-up costs nothing; a draft model takes one step of its own for each round of drafts, which all
sequences share. For one sequence a step checks drafts of one kind, the one with the larger gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from baton.costs import StepCosts
from engine.core.draft_costs import DraftCosts, DraftCurve
from engine.core.draft_model import DraftModel
from engine.core.draft_runner import DraftedRunner
from engine.core.ngrams import Guess, NgramIndex
from engine.core.runner import UNKNOWN_TOKEN, Runner, StepInput, StepOutput, StepPart
from engine.core.sequence import Purpose, Sequence
from engine.core.step_fit import StepSize

LEAST_GAIN = 1.1
"""Factor by which drafts must be expected to increase a step's yield: predictions err, and all other sequences pay for
the gain of one."""
LEAST_CHANCE = 0.02
"""Drafts below this chance are not considered."""
CATCH_UP_SHARE = 0.25
"""Maximum share of a step's time in which a draft model may catch up with known tokens."""
LEAST_CATCH_UP = 16
"""Tokens that a draft model may always catch up in a step."""
EXPECTED_TOKENS = 256
"""Expected length of a response whose length is unknown, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlainStep:
    """Expected yield and time of a step without drafts."""

    curve: DraftCurve
    took_s: float
    num_parts: int
    """Tokens that it yields."""
    num_decoding: int

    @classmethod
    def of(cls, parts: SequenceOf[StepPart], costs: StepCosts, curve: DraftCurve) -> _PlainStep:
        size = StepSize.of(StepInput(tuple(parts)))
        num_prompt = size.num_new - size.num_decoding
        step_s = costs.step_s(num_prompt, size.num_pairs, size.num_decoding, size.num_kv_tokens)
        if not num_prompt:
            step_s *= curve.plain
        return cls(curve=curve, took_s=step_s, num_parts=len(parts), num_decoding=size.num_decoding)

    @property
    def s_per_token(self) -> float:
        """Seconds that a token is worth."""
        return self.took_s / self.num_parts


class Drafter:
    """Selects drafts for all decoding sequences except beams.

    Args:
        most: maximum number of drafts per sequence and step.
        eos_token_ids: tokens that end every response.
        max_model_len: maximum length of a sequence, in tokens.
        model: draft model that proposes too; None: there is none.
    """

    def __init__(
        self, most: int, eos_token_ids: Collection[int], max_model_len: int, model: DraftModel | None = None
    ) -> None:
        self.model = model
        self._most = most
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self.costs = DraftCosts({})
        """Time that drafts add to a step. Without a known cost there are no drafts."""

    @property
    def num_proposed(self) -> int:
        """Checked drafts of the draft model."""
        return 0 if self.model is None else self.model.num_drafted

    @property
    def num_accepted(self) -> int:
        """Accepted drafts of the draft model."""
        return 0 if self.model is None else self.model.num_accepted

    def drafts(
        self, sequences: SequenceOf[Sequence], parts: SequenceOf[StepPart], budget: int, costs: StepCosts
    ) -> dict[int, tuple[int, ...]]:
        """Return the drafts to check after the parts of a step, by part index, if they pay off.

        Drafts that the draft model must still propose stand as `UNKNOWN_TOKEN`; see `proposed`.

        Args:
            sequences: the sequences of the parts.
            budget: number of tokens that may be added.
            costs: step costs.
        """
        curve = self.costs.curve(sum(part.is_decoding for part in parts))
        if curve is None:
            return {}
        most = {place: self._most_for(*each) for place, each in enumerate(zip(sequences, parts, strict=True))}
        found = {place: self._looked_up(sequences[place], number) for place, number in most.items() if number > 0}
        guesses = {place: guess for place, guess in found.items() if guess is not None and guess.token_ids}
        wanted = [(place, sequences[place], number) for place, number in most.items() if number > 0]
        proposals = {} if self.model is None else self.model.guesses(wanted)
        if not guesses and not proposals:
            return {}
        step, rounds = _PlainStep.of(parts, costs, curve), None
        if self.model is not None and proposals:
            rounds = self.model.costs(costs)
            for place, guess in proposals.items():
                looked_up = guesses.get(place)
                if looked_up is None or _worth(guess, step, rounds) > _worth(looked_up, step):
                    guesses[place] = guess
        chances = [
            _Chance(chance, place, depth if guess.token_ids[0] == UNKNOWN_TOKEN else 0, sequences[place].num_tokens)
            for place, guess in guesses.items()
            for depth, chance in enumerate(guess.chances, start=1)
            if chance >= LEAST_CHANCE
        ]
        chances.sort(key=itemgetter(0), reverse=True)
        number = _best_number(chances[:budget], step, rounds)
        counts = Counter(each.place for each in chances[:number])
        return {place: guesses[place].token_ids[:count] for place, count in counts.items()}

    def proposed(
        self, sequences: SequenceOf[Sequence], parts: SequenceOf[StepPart], costs: StepCosts
    ) -> list[StepPart]:
        """Return the parts of a step with the proposals that the draft model computes before it, and take their blocks.

        Drafts come first. Sequences without drafts may get some later, once the model has computed their missing
        tokens: see `_catch_up`.

        Args:
            sequences: the sequences of the parts.
            parts: the parts as they are checked.
            costs: step costs.
        """
        found = list(parts)
        if self.model is None:
            return found
        self.model.tidy()
        for place, part in enumerate(parts):
            if part.num_drafts and part.token_ids[-1] == UNKNOWN_TOKEN:
                found[place] = part._replace(proposal=self.model.drafting(sequences[place], part))
            elif part.num_drafts:
                sequences[place].forgone_s = 0.0
        if self.model.budget.left_s > 0:
            self._catch_up(found, sequences, costs)
        return found

    def _catch_up(self, parts: list[StepPart], sequences: SequenceOf[Sequence], costs: StepCosts) -> None:
        """Let the draft model compute some missing tokens of sequences that have no drafts.

        It does so if look-up has found nothing for so long that drafts would already have gained the cost of catching
        up (the ski-rental rule: at most twice the cost of the best choice in hindsight), and if the expected rest of
        the response gains more than that.
        """
        assert self.model is not None
        lacking = [
            (place, sequence, lacks)
            for place, (sequence, part) in enumerate(zip(sequences, parts, strict=True))
            if not part.num_drafts and self._most_for(sequence, part) > 0 and (lacks := self.model.lacks(sequence)) > 0
        ]
        curve = self.costs.curve(sum(part.is_decoding for part in parts)) if lacking else None
        if curve is None:
            return
        step, rounds, left_s = _PlainStep.of(parts, costs, curve), self.model.costs(costs), self.model.budget.left_s
        within = rounds.tokens_within(CATCH_UP_SHARE * step.took_s, 0, self._max_model_len)
        num_new = sum(len(part.proposal.part.token_ids) for part in parts if part.proposal is not None)
        most = max(LEAST_CATCH_UP, within)
        left = min(most, self.model.most_tokens - num_new)
        gains: dict[float, float] = {}
        for place, sequence, lacks in lacking:
            if (chance := self.model.chance(sequence)) not in gains:
                gains[chance] = self._gain_s(step, rounds, chance)
            gain_s = gains[chance]
            sequence.forgone_s += gain_s
            took_s = rounds.prefill_s(sequence.num_tokens, sequence.num_tokens - lacks, most)
            if left < 1 or took_s > min(gain_s * _num_expected(sequence), sequence.forgone_s, left_s):
                continue
            if (proposal := self.model.catching_up(sequence, left)) is not None:
                left -= len(proposal.part.token_ids)
                left_s -= took_s
                parts[place] = parts[place]._replace(proposal=proposal)

    def commit(self, step: StepInput, output: StepOutput, costs: StepCosts) -> None:
        """Record what the draft model has done for a step, before the step's tokens are recorded.

        Args:
            costs: step costs.
        """
        if self.model is None or output.proposed is None:
            return
        self.model.commit(step, output)
        spent_s, gained_s, counts = output.proposing_s, 0.0, output.proposed.counts
        curve = self.costs.curve(sum(part.is_decoding for part in step.parts))
        if curve is not None and (num_drafts := sum(counts.values())):
            plain = _PlainStep.of(step.parts, costs, curve)
            num_all = sum(output.num_drafts(place, part) for place, part in enumerate(step.parts))
            spent_s += curve.extra_s(num_all) * num_drafts / num_all
            num_kept = sum(len(output.sampled_token_ids[place]) - 1 for place in counts if counts[place])
            gained_s = num_kept * plain.s_per_token
        self.model.budget.book(spent_s, gained_s)

    def learn(self, costs: DraftCosts, took_s: float) -> None:
        """Update the costs of drafts after each step.

        Args:
            took_s: time of the step, including the draft model's.
        """
        self.costs = costs
        if self.model is not None:
            self.model.fade()
            self.model.budget.add(took_s)

    def check(self) -> None:
        """Assert that the draft model's accounting is correct."""
        if self.model is not None:
            self.model.check()

    def _most_for(self, sequence: Sequence, part: StepPart) -> int:
        """Return how many drafts one sequence may have; 0: none."""
        if not part.is_decoding or part.scores_prompt or sequence.purpose is Purpose.PREFILL:
            return 0
        if sequence.search is not None:
            return 0
        return min(self._most, self._most_tokens(sequence) - sequence.num_tokens - 1)

    def _most_tokens(self, sequence: Sequence) -> int:
        spec = sequence.spec
        return min(spec.num_prompt_tokens + spec.max_tokens, self._max_model_len)

    def _looked_up(self, sequence: Sequence, most: int) -> Guess | None:
        """Return the guess by n-gram look-up for one sequence; None: not all of its tokens are indexed yet."""
        spec = sequence.spec
        if sequence.ngrams is None:
            stops = frozenset(spec.sampling.stop_token_ids)
            ends = stops if spec.sampling.ignore_eos else stops | self._eos_token_ids
            sequence.ngrams = NgramIndex(self._most_tokens(sequence), ends)
        is_read = sequence.ngrams.read(sequence.token_ids, spec.num_prompt_tokens)
        return sequence.ngrams.guess(sequence.token_ids, most) if is_read else None

    def _gain_s(self, step: _PlainStep, rounds: StepCosts, chance: float) -> float:
        """Return the seconds that the draft model is expected to gain per token of a sequence; 0: hardly any.

        Args:
            step: the step without drafts. All sequences that decode in it are assumed to be alike.
            rounds: costs of the draft model's steps.
            chance: chance of each draft, given that all drafts before it are accepted.
        """
        expected, took_s, best = float(step.num_parts), step.took_s, LEAST_GAIN
        round_s = rounds.step_s(0, 0, step.num_decoding, 0)
        for depth in range(1, self._most + 1):
            expected += step.num_decoding * chance**depth
            took_s += round_s
            added_s = step.curve.extra_s(depth * step.num_decoding)
            best = max(best, expected * step.took_s / (step.num_parts * (took_s + added_s)))
        return step.s_per_token * (1 - 1 / best) if best > LEAST_GAIN else 0.0


class _Chance(NamedTuple):
    """One draft as a candidate for a step."""

    chance: float
    """Chance that it and all drafts before it are accepted."""
    place: int
    """Index of the part that it follows."""
    depth: int
    """Round in which the draft model proposes it, starting at 1; 0: it was looked up."""
    num_tokens: int
    """Known tokens before it."""


def drafter_of(runner: Runner, most: int, most_tokens: int) -> Drafter | None:
    """Return the drafter for the sequences of a runner; None: there is none.

    Args:
        runner: a `DraftedRunner` brings a draft model.
        most: maximum number of drafts per sequence and step.
        most_tokens: maximum number of tokens of a step, also of the draft model's.
    """
    if not most or runner.spec.states:  # a state cannot be rolled back to before a draft
        return None
    model = None
    if isinstance(runner, DraftedRunner):
        model = DraftModel(runner.draft, runner.spec.block_size, most_tokens)
    return Drafter(most, runner.eos_token_ids, runner.max_model_len, model)


def _best_number(chances: SequenceOf[_Chance], step: _PlainStep, rounds: StepCosts | None) -> int:
    """Return the number of drafts with the most tokens per second; 0 if that hardly exceeds a step without drafts.

    Args:
        chances: chances of the drafts, descending.
        step: the step without drafts.
        rounds: costs of the draft model's steps.
    """
    best, number = LEAST_GAIN * step.num_parts / step.took_s, 0
    expected, proposing_s, num_rounds = float(step.num_parts), 0.0, 0
    for count, each in enumerate(chances, start=1):
        expected += each.chance
        if each.depth and rounds is not None:
            proposing_s += rounds.decoding_s(1, each.num_tokens)
            if each.depth > num_rounds:
                num_rounds = each.depth
                proposing_s += rounds.s_overhead + rounds.s_weights
        if (rate := expected / (step.took_s + step.curve.extra_s(count) + proposing_s)) > best:
            best, number = rate, count
    return number


def _worth(guess: Guess, step: _PlainStep, rounds: StepCosts | None = None) -> float:
    """Return the net gain of one sequence's drafts at best: tokens gained less the tokens that their time would yield.

    Args:
        rounds: costs of the proposing model's steps, of which the sequence bears its share.
    """
    round_s = 0.0 if rounds is None else rounds.step_s(0, 0, step.num_decoding, 0) / step.num_decoding
    best = gained = 0.0
    for depth, chance in enumerate(guess.chances, start=1):
        gained += chance
        best = max(best, gained - (step.curve.extra_s(depth) + depth * round_s) / step.s_per_token)
    return best


def _num_expected(sequence: Sequence) -> int:
    """Return how many tokens a sequence is still expected to generate."""
    spec = sequence.spec
    expected = (spec.num_expected_tokens or EXPECTED_TOKENS) - sequence.num_output_tokens
    return min(spec.max_tokens - sequence.num_output_tokens, max(LEAST_CATCH_UP, expected))
