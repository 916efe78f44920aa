"""What drafts add to the steps of a worker.

A line would not do: some tokens more are nearly free while a step waits for its weights, and a kernel takes rows by the
tile. So the cost is a curve through what steps with about 1, 2, 4, 8, ... drafts took beyond what they would have taken
without. Where nothing was seen, a draft costs what a token of a prompt does.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGETTING = 0.9
"""Weight of a step with drafts after the next one with about as many."""
FADING = 0.998
"""Weight of it after the next step of any kind: what has looked too dear is tried again, after some hundred steps."""
PRIOR_WEIGHT = 0.5
"""Weight of a prompt's costs, in steps."""


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """A curve."""

    points: tuple[tuple[float, float], ...]
    """Numbers of drafts in a step, rising, and the seconds that they add."""
    s_per_token: float
    """What each draft adds beyond the last point."""

    def extra_s(self, num_drafts: int) -> float:
        """Returns what so many drafts add to a step, in seconds."""
        last_number = last_s = 0.0
        for number, extra_s in self.points:
            if num_drafts <= number:
                return last_s + (extra_s - last_s) * (num_drafts - last_number) / (number - last_number)
            last_number, last_s = number, extra_s
        return last_s + (num_drafts - last_number) * self.s_per_token


class DraftFit:
    """Learns the curve of a worker."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float, float]] = {}
        """Weight, drafts and seconds of steps, by the length of their number of drafts in bits."""

    def fade(self) -> None:
        """Notes that there was a step."""
        self._sums = {bits: (w * FADING, n * FADING, s * FADING) for bits, (w, n, s) in self._sums.items()}

    def observe(self, num_drafts: int, extra_s: float) -> None:
        """Learns from a step with drafts."""
        bits = num_drafts.bit_length()
        weight, number, seconds = self._sums.get(bits, (0.0, 0.0, 0.0))
        self._sums[bits] = (
            weight * FORGETTING + 1.0,
            number * FORGETTING + num_drafts,
            seconds * FORGETTING + extra_s,
        )

    def costs(self, s_per_token: float) -> DraftCosts:
        """Returns the curve so far.

        Args:
            s_per_token: what a token of a prompt costs.
        """
        points = []
        for _, (weight, number, seconds) in sorted(self._sums.items()):
            mean = number / weight
            extra_s = (seconds + PRIOR_WEIGHT * mean * s_per_token) / (weight + PRIOR_WEIGHT)
            points.append((mean, max(0.0, extra_s)))
        return DraftCosts(tuple(points), s_per_token)
