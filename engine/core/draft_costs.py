"""Measures the time that drafts add to the steps of a worker.

A straight line does not fit: a few more tokens are nearly free while a step waits for its weights, and a kernel
processes rows by the tile. So the cost is a curve. Its points are the extra time of steps with about 1, 2, 4, 8, ...
drafts over the same steps without drafts. Without measurements a draft costs as much as a prompt token.

The curve depends on how full a step already is, and so on the number of sequences that decode in it: there is one curve
for about 1, 2, 4, 8, ... sequences. The time of a step without drafts is also measured for each of these numbers,
because the single line that planning uses for all of them (`step_fit`) may err by as much as drafts gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FORGETTING = 0.9
"""Weight of a step with drafts after the next step with about as many drafts."""
PLAIN_FORGETTING = 0.95
"""Weight of a step without drafts after the next such step with about as many sequences."""
FADING = 0.998
"""Weight of either kind after any further step: drafts that looked too expensive are retried some hundred steps
later."""
FORGOTTEN = 0.01
"""Weight below which steps with drafts are ignored."""
PRIOR_WEIGHT = 0.5
"""Weight of a prompt token's cost as a prior, in steps."""
LEAST_ALIKE = 2.5
"""Total weight that steps without drafts must reach for a number of sequences before drafts are tried; about three
steps."""
LONGEST = 2.0
"""Factor over the predicted time beyond which a step counts as delayed by something else."""


@dataclass(frozen=True, slots=True)
class DraftCurve:
    """Time that drafts add to steps in which about the same number of sequences decode."""

    points: tuple[tuple[float, float], ...]
    """Numbers of drafts in a step, ascending, each with the seconds that they add."""
    s_per_token: float
    """Seconds that each draft adds beyond the last point."""
    plain: float = 1.0
    """Measured time of such steps without drafts, as a share of the predicted time."""

    def extra_s(self, num_drafts: int) -> float:
        """Return the seconds that `num_drafts` drafts add to a step."""
        last_number = last_s = 0.0
        for number, extra_s in self.points:
            if num_drafts <= number:
                return last_s + (extra_s - last_s) * (num_drafts - last_number) / (number - last_number)
            last_number, last_s = number, extra_s
        return last_s + (num_drafts - last_number) * self.s_per_token


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """The draft curves of a worker."""

    curves: Mapping[int, DraftCurve]
    """Curves by the bit length of the number of sequences that decode. A missing curve means too few measurements."""

    def curve(self, num_decoding: int) -> DraftCurve | None:
        """Return the curve for a number of decoding sequences; None: not known yet."""
        return self.curves.get(num_decoding.bit_length())


class _Sum(NamedTuple):
    """Decaying sums over steps."""

    weight: float = 0.0
    size: float = 0.0
    """Sum of the sizes of the steps."""
    seconds: float = 0.0

    def faded(self) -> _Sum:
        return _Sum(self.weight * FADING, self.size * FADING, self.seconds * FADING)

    def plus(self, size: float, seconds: float, forgetting: float) -> _Sum:
        return _Sum(self.weight * forgetting + 1.0, self.size * forgetting + size, self.seconds * forgetting + seconds)


_NOTHING = _Sum()


@dataclass(slots=True)
class _Seen:
    """Measurements of steps in which about the same number of sequences decode."""

    plain: _Sum = _NOTHING
    """Steps without drafts. The size of each is its predicted time in seconds."""
    drafted: dict[int, _Sum] = field(default_factory=dict)
    """Steps with drafts, by the bit length of the number of drafts. The size of each is that number; its seconds are
    the time that the drafts added."""

    def fade(self) -> None:
        self.plain = self.plain.faded()
        faded = {bits: of_number.faded() for bits, of_number in self.drafted.items()}
        self.drafted = {bits: of_number for bits, of_number in faded.items() if of_number.weight > FORGOTTEN}

    @property
    def plain_share(self) -> float:
        return self.plain.seconds / self.plain.size if self.plain.weight else 1.0

    def curve(self, s_per_token: float) -> DraftCurve:
        points = []
        for _, (weight, number, seconds) in sorted(self.drafted.items()):
            mean = number / weight
            extra_s = (seconds + PRIOR_WEIGHT * mean * s_per_token) / (weight + PRIOR_WEIGHT)
            points.append((mean, max(0.0, extra_s)))
        return DraftCurve(tuple(points), s_per_token, self.plain_share)


class DraftFit:
    """Learns the curves of a worker from steps in which all sequences decode."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        """Measurements by the bit length of the number of decoding sequences."""

    def fade(self) -> None:
        """Reduce the weight of all measurements by one step."""
        for seen in self._seen.values():
            seen.fade()

    def observe(self, num_decoding: int, num_drafts: int, predicted_s: float, took_s: float) -> None:
        """Learn from a step.

        Args:
            num_decoding: number of sequences that decode in the step.
            num_drafts: number of drafts of all sequences together.
            predicted_s: time that the general step costs predict for the step without drafts.
            took_s: measured time of the step.
        """
        seen = self._seen.setdefault(num_decoding.bit_length(), _Seen())
        if not num_drafts:
            longest_s = LONGEST * predicted_s * max(1.0, seen.plain_share)
            seen.plain = seen.plain.plus(predicted_s, min(took_s, longest_s), PLAIN_FORGETTING)
        elif seen.plain.weight:
            plain_s = predicted_s * seen.plain_share
            dearest_s = LONGEST * plain_s * max(1.0, num_drafts / num_decoding)
            extra_s, bits = min(took_s - plain_s, dearest_s), num_drafts.bit_length()
            seen.drafted[bits] = seen.drafted.get(bits, _NOTHING).plus(num_drafts, extra_s, FORGETTING)

    def costs(self, s_per_token: float) -> DraftCosts:
        """Return the curves as measured so far.

        Args:
            s_per_token: cost of a prompt token, in seconds.
        """
        known = {bits: seen for bits, seen in self._seen.items() if seen.plain.weight >= LEAST_ALIKE}
        return DraftCosts({bits: seen.curve(s_per_token) for bits, seen in known.items()})
