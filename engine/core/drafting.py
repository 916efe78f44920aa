"""Speculative decoding (Leviathan et al., 2023): selects the drafts that a step checks.

A step that computes a sequence's next token can also compute drafts that follow it; accepted drafts are gained tokens.
They come from look-up (`ngrams`) or a draft model (`draft_model`), and one rule says how many of either a sequence has:

    a draft is proposed while its chance is at least MARGIN times its price

Its chance is how often such drafts were accepted lately, together with all drafts before them. Its price is the time
that it has lately added to a step, proposing included, in units of the time that a token takes without drafts. So the
number of drafts follows the acceptance rate, and there are none while they do not pay. In a step a sequence has drafts
of one kind, the kind that is expected to gain more.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.costs import StepCosts, StepSize
from engine.core.draft_model import DraftModel
from engine.core.draft_runner import DraftedRunner
from engine.core.ngrams import NO_GUESS, Guess, NgramIndex
from engine.core.runner import UNKNOWN_TOKEN, Proposal, Runner, StepPart
from engine.core.sequence import Purpose, Sequence

MARGIN = 1.25
"""Factor by which a draft's chance must exceed its price, because both are estimates."""
LEAST_CHANCE = 0.05
"""Drafts below this chance are not proposed, even if they cost nothing."""
PRIOR = 0.2
"""Price before any measurement."""
PRICE_DRAFTS = 8.0
"""Weight of the earlier drafts in the price, in drafts."""
LEAST_PLAIN, MOST_PLAIN = 5.0, 20.0
"""Least number of measured steps without drafts before there are drafts, and their largest weight, in steps."""
LEAST_DRAFTS = 16
"""Drafts that a step may have even if the steps before had fewer."""
FADING = 0.002
"""Share of a measurement that a step of the other kind takes away: drafts that looked too expensive are retried some
hundred steps later, and steps without drafts are measured again from time to time."""
LONGEST = 2.0
"""Factor over the expected time beyond which a step counts as delayed by something else; also the highest price."""


@dataclass(slots=True, kw_only=True)
class _Steps:
    """Running means over the steps in which about the same number of sequences decode."""

    num_plain: float = 0.0
    """Weight of the steps without drafts."""
    plain_share: float = 1.0
    """Time of a step without drafts, as a share of the time that the step costs predict."""
    prices: dict[int, float] = field(default_factory=dict)
    """Prices by the bit length of the number of drafts."""
    num_drafts: int = 0
    """Drafts in the last step that had some."""
    token_s: float = 0.0
    """Time of a token in the last step, had it no drafts."""


class DraftPrice:
    """Price of checking a draft: the time that it adds to a step, in units of the time of a token without drafts.

    A step of 10 ms in which 4 sequences decode yields a token every 2.5 ms. If it takes 11 ms with 8 drafts, each of
    them has the price 0.05. It depends on how full a step is: a few more tokens are nearly free while a step waits for
    its weights, and further ones are not. So it is measured for about 1, 2, 4, 8, ... sequences and as many drafts
    each, in steps in which all sequences decode.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}
        """Measurements by the bit length of the number of decoding sequences."""

    def token_s(self, num_decoding: int) -> float | None:
        """Return the seconds that a token takes without drafts if so many sequences decode; None: not known yet."""
        steps = self._steps.get(num_decoding.bit_length())
        return None if steps is None or steps.num_plain < LEAST_PLAIN else steps.token_s

    def of(self, num_decoding: int, num_drafts: int) -> float:
        """Return the price of each of `num_drafts` drafts in such a step."""
        steps = self._steps[num_decoding.bit_length()]
        return max(0.0, steps.prices.get(num_drafts.bit_length(), PRIOR))

    def most(self, num_decoding: int) -> int:
        """Return how many drafts such a step may have: at most twice as many as the last one, so that no step is much
        longer than expected.
        """
        return max(LEAST_DRAFTS, 2 * self._steps[num_decoding.bit_length()].num_drafts)

    def observe(self, size: StepSize, costs: StepCosts, took_s: float) -> None:
        """Learn from a step.

        Args:
            costs: step costs, which do not include drafts.
            took_s: time of the step without that of a draft model.
        """
        if not size.num_decoding or size.num_new != size.num_decoding:
            return
        steps, expected_s = self._steps.setdefault(size.num_decoding.bit_length(), _Steps()), size.expected_s(costs)
        steps.prices = {bits: price + FADING * (PRIOR - price) for bits, price in steps.prices.items()}
        if not size.num_drafts:
            share = min(took_s / expected_s, LONGEST * max(1.0, steps.plain_share))
            steps.num_plain = min(steps.num_plain + 1, MOST_PLAIN)
            steps.plain_share += (share - steps.plain_share) / steps.num_plain
        else:
            bits = size.num_drafts.bit_length()
            added_tokens = (took_s / (expected_s * steps.plain_share) - 1) * size.num_decoding
            added_tokens = min(added_tokens, LONGEST * size.num_drafts)
            price = steps.prices.get(bits, PRIOR)
            steps.prices[bits] = (PRICE_DRAFTS * price + added_tokens) / (PRICE_DRAFTS + size.num_drafts)
            steps.num_plain *= 1 - FADING
            steps.num_drafts = size.num_drafts
        steps.token_s = expected_s * steps.plain_share / size.num_decoding


class Drafts(NamedTuple):
    """Drafts of one sequence in a step."""

    token_ids: tuple[int, ...]
    """The drafts; `UNKNOWN_TOKEN` for those that the draft model proposes before the step."""
    proposal: Proposal | None = None
    """Work of the draft model before the step; None: nothing."""


class Drafter:
    """Selects drafts for all decoding sequences except beams.

    Args:
        most: maximum number of drafts per sequence and step.
        eos_token_ids: tokens that end every response.
        max_model_len: maximum length of a sequence, in tokens.
        never: tokens that are no drafts: placeholders of images, which repeat in a prompt and not in a response.
        model: draft model, which proposes drafts in addition to the n-gram look-up; None: only the look-up does.
    """

    def __init__(
        self,
        most: int,
        eos_token_ids: Collection[int],
        max_model_len: int,
        model: DraftModel | None = None,
        *,
        never: Collection[int] = (),
    ) -> None:
        self.model = model
        self._most = most
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._never = frozenset(never)
        self.price = DraftPrice()
        """Price of checking a draft. While it is unknown there are no drafts."""

    def drafts(self, sequences: SequenceOf[Sequence], parts: SequenceOf[StepPart], budget: int) -> dict[int, Drafts]:
        """Return the drafts to check after the parts of a step, and the draft model's work, by part index.

        A draft model takes blocks for its work, so the step must be the next one.

        Args:
            sequences: the sequences of the parts.
            budget: number of tokens that may be added.
        """
        num_decoding = sum(part.is_decoding for part in parts)
        token_s, num_drafts = self.price.token_s(num_decoding), 0
        if self.model is not None:
            self.model.begin_step((token_s or 0.0) * num_decoding)
        found: dict[int, Drafts] = {}
        if token_s is None:
            return found
        budget = min(budget, self.price.most(num_decoding))
        for place, (sequence, part) in enumerate(zip(sequences, parts, strict=True)):
            if (most := min(budget - num_drafts, self._most_for(sequence, part))) > 0:
                prices = [self.price.of(num_decoding, num_drafts + number) for number in range(1, most + 1)]
                drafts = self._drafts_of(sequence, prices, token_s, num_decoding)
                num_drafts += len(drafts.token_ids)
                if drafts.token_ids or drafts.proposal is not None:
                    found[place] = drafts
        return found

    def _drafts_of(self, sequence: Sequence, prices: SequenceOf[float], token_s: float, num_decoding: int) -> Drafts:
        guess = self._looked_up(sequence, len(prices))
        number, gain = _paying(guess.chances, prices)
        if self.model is not None:
            rate, proposing = self.model.rate(sequence), self.model.draft_s(sequence, num_decoding) / token_s
            chances = [rate**depth for depth in range(1, len(prices) + 1)]
            num_proposed, gain_proposed = _paying(chances, [price + proposing for price in prices])
            if gain_proposed > gain and self.model.is_ready(sequence):
                proposal = self.model.proposal(sequence, num_proposed)
                if proposal is not None:
                    return Drafts((UNKNOWN_TOKEN,) * proposal.num_drafts, proposal)
            elif not number:
                gain_s = gain_proposed * token_s
                sequence.forgone_s += gain_s
                if self.model.catching_up_s(sequence) < min(sequence.forgone_s, gain_s * self._num_left(sequence)):
                    return Drafts((), self.model.proposal(sequence, 0))
        if number:
            sequence.forgone_s = 0.0
        return Drafts(guess.token_ids[:number])

    def _most_for(self, sequence: Sequence, part: StepPart) -> int:
        """Return how many drafts one sequence may have; 0: none."""
        if not part.is_decoding or part.scores_prompt or sequence.purpose is Purpose.PREFILL:
            return 0
        if sequence.search is not None:
            return 0
        return min(self._most, self._num_left(sequence) - 1)

    def _num_left(self, sequence: Sequence) -> int:
        """Return how many more tokens a sequence may have."""
        return min(sequence.most_tokens, self._max_model_len) - sequence.num_tokens

    def _looked_up(self, sequence: Sequence, most: int) -> Guess:
        """Return the guess by n-gram look-up for one sequence; none until all of its tokens are indexed."""
        spec = sequence.spec
        if sequence.ngrams is None:
            stops = frozenset(spec.sampling.stop_token_ids)
            ends = stops if spec.sampling.ignore_eos else stops | self._eos_token_ids
            sequence.ngrams = NgramIndex(min(sequence.most_tokens, self._max_model_len), ends | self._never)
        is_read = sequence.ngrams.read(sequence.token_ids, spec.num_prompt_tokens)
        return sequence.ngrams.guess(sequence.token_ids, most) if is_read else NO_GUESS


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
    never = () if isinstance(runner.images, str) else (runner.images.placeholder,)
    return Drafter(most, runner.eos_token_ids, runner.max_model_len, model, never=never)


def _paying(chances: SequenceOf[float], prices: SequenceOf[float]) -> tuple[int, float]:
    """Return how many of a sequence's drafts pay, and how many tokens they are expected to gain beyond their price.

    Args:
        chances: chance of each draft that it and all drafts before it are accepted.
        prices: price of each draft; there may be more of them.
    """
    number, gain = 0, 0.0
    for chance, price in zip(chances, prices, strict=False):
        if chance < max(LEAST_CHANCE, MARGIN * price):
            break
        number, gain = number + 1, gain + chance - price
    return number, gain
