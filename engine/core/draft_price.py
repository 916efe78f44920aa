"""Measures what a draft costs: the time that it adds to a step, in units of the time that a token takes without drafts.

A step of 10 ms in which 4 sequences decode yields a token every 2.5 ms. If it takes 11 ms with 8 drafts, each of them
has the price 0.05. It depends on how full a step is: a few more tokens are nearly free while a step waits for its
weights, and further ones are not. So it is measured for about 1, 2, 4, 8, ... sequences and as many drafts each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.costs import StepCosts
from engine.core.step_fit import StepSize

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
    """Price of checking a draft, learned from steps in which all sequences decode."""

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
