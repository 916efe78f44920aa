"""Which guesses a step checks: speculative decoding without a second model (Leviathan et al., 2023).

A step that computes a sequence's next token can compute more behind it that were guessed; those that prove right are
gained. Each of them makes the step longer, for everybody in it. So of all sequences' guesses, the likeliest first, as
many are taken as give the most tokens a second:

    expected tokens of the step without drafts + chances of the drafts
    ------------------------------------------------------------------
       time of the step without drafts + time that the drafts add

What steps take and what drafts add to them was measured for as many sequences (`draft_costs`), and so were the chances
(`ngrams`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from operator import itemgetter

from baton.costs import StepCosts
from baton.engine.core.draft_costs import DraftCosts, DraftCurve
from baton.engine.core.ngrams import Guess, NgramIndex
from baton.engine.core.runner import StepInput, StepPart
from baton.engine.core.sequence import Purpose, Sequence
from baton.engine.core.step_fit import StepSize

LEAST_GAIN = 1.1
"""Drafts must be expected to make a step yield more by this factor: predictions err, and what one sequence gains all
others pay for."""
LEAST_CHANCE = 0.02
"""Guesses that are less likely are not considered."""


class Drafter:
    """Guesses for the sequences that decode, all but beams.

    Args:
        most: guesses for each sequence and step.
        eos_token_ids: tokens that end every answer.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(self, most: int, eos_token_ids: Collection[int], max_model_len: int) -> None:
        self._most = most
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self.costs = DraftCosts({})
        """What drafts add to a step. Where that is not known, there are none."""

    def drafts(
        self, sequences: SequenceOf[Sequence], parts: SequenceOf[StepPart], budget: int, costs: StepCosts
    ) -> dict[int, tuple[int, ...]]:
        """Returns what to check behind the parts of a step, by their index, where it is worth it.

        Args:
            sequences: those of the parts.
            budget: tokens that may be added.
            costs: what steps take.
        """
        curve = self.costs.curve(sum(part.is_decoding for part in parts))
        if curve is None:
            return {}
        found = ((place, self._guess(*each)) for place, each in enumerate(zip(sequences, parts, strict=True)))
        guesses = {place: guess for place, guess in found if guess is not None and guess.token_ids}
        chances = [(chance, place) for place, guess in guesses.items() for chance in guess.chances]
        chances = sorted((each for each in chances if each[0] >= LEAST_CHANCE), key=itemgetter(0), reverse=True)
        if not chances:
            return {}
        size = StepSize.of(StepInput(tuple(parts)))
        num_prompt = size.num_new - size.num_decoding
        step_s = costs.step_s(num_prompt, size.num_pairs, size.num_decoding, size.num_kv_tokens)
        if not num_prompt:
            step_s *= curve.plain
        number = _best_number([chance for chance, _ in chances[:budget]], len(parts), step_s, curve)
        counts = Counter(place for _, place in chances[:number])
        return {place: guesses[place].token_ids[:count] for place, count in counts.items()}

    def _guess(self, sequence: Sequence, part: StepPart) -> Guess | None:
        """Returns what may follow one sequence; None: it takes no drafts."""
        if not part.is_decoding or part.scores_prompt or sequence.purpose is Purpose.PREFILL:
            return None
        if sequence.search is not None or sequence.trunk is not None:
            return None
        spec = sequence.spec
        most_tokens = min(spec.num_prompt_tokens + spec.max_tokens, self._max_model_len)
        most = min(self._most, most_tokens - sequence.num_tokens - 1)
        if sequence.ngrams is None:
            stops = frozenset(spec.sampling.stop_token_ids)
            ends = stops if spec.sampling.ignore_eos else stops | self._eos_token_ids
            sequence.ngrams = NgramIndex(most_tokens, ends)
        is_read = sequence.ngrams.read(sequence.token_ids, spec.num_prompt_tokens)
        return sequence.ngrams.guess(sequence.token_ids, most) if is_read and most > 0 else None


def _best_number(chances: SequenceOf[float], num_parts: int, step_s: float, curve: DraftCurve) -> int:
    """Returns how many drafts give the most tokens a second; 0 where that is hardly more than without.

    Args:
        chances: of the drafts, falling.
        num_parts: tokens that the step yields without.
        step_s: what it takes without.
        curve: what they add.
    """
    best, number = LEAST_GAIN * num_parts / step_s, 0
    expected = float(num_parts)
    for count, chance in enumerate(chances, start=1):
        expected += chance
        if (rate := expected / (step_s + curve.extra_s(count))) > best:
            best, number = rate, count
    return number
