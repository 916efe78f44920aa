"""What drafts add to the steps of a worker.

A line would not do: some tokens more are nearly free while a step waits for its weights, and a kernel takes rows by the
tile. So the cost is a curve through what steps with about 1, 2, 4, 8, ... drafts took beyond what they would have taken
without. Where nothing was seen, a draft costs what a token of a prompt does.

How far a step is from being full depends on how many sequences decode in it, and so does the curve: there is one for
about 1, 2, 4, 8, ... of them. What a step without drafts takes is seen for each of these numbers, too: of the one line
that planning has for all (`step_fit`) it may be as far off as what drafts gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FORGETTING = 0.9
"""Weight of a step with drafts after the next one with about as many."""
PLAIN_FORGETTING = 0.95
"""Weight of a step without, after the next one with about as many sequences."""
FADING = 0.998
"""Weight of either after the next step of any kind: what looked too dear is tried again some hundred steps later."""
FORGOTTEN = 0.01
"""Steps with drafts of less weight are as good as none."""
PRIOR_WEIGHT = 0.5
"""Weight of a prompt's costs, in steps."""
LEAST_ALIKE = 2.5
"""Weight of the steps without drafts in which about as many sequences decode, before there are drafts: of three."""
LONGEST = 2.0
"""A step that took longer than this many times what was predicted was delayed by something else."""


@dataclass(frozen=True, slots=True)
class DraftCurve:
    """What drafts add to steps in which about as many sequences decode."""

    points: tuple[tuple[float, float], ...]
    """Numbers of drafts in a step, rising, and the seconds that they add."""
    s_per_token: float
    """What each draft adds beyond the last point."""
    plain: float = 1.0
    """What such steps take without drafts, as a share of what is predicted for them."""

    def extra_s(self, num_drafts: int) -> float:
        """Returns what so many drafts add to a step, in seconds."""
        last_number = last_s = 0.0
        for number, extra_s in self.points:
            if num_drafts <= number:
                return last_s + (extra_s - last_s) * (num_drafts - last_number) / (number - last_number)
            last_number, last_s = number, extra_s
        return last_s + (num_drafts - last_number) * self.s_per_token


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """The curves of a worker."""

    curves: Mapping[int, DraftCurve]
    """Each stands under the length in bits of a number of sequences that decode. Of numbers whose curve is missing, too
    little is known."""

    def curve(self, num_decoding: int) -> DraftCurve | None:
        """Returns what drafts add where so many sequences decode; None: that is not known."""
        return self.curves.get(num_decoding.bit_length())


class _Sum(NamedTuple):
    """Steps, the older the less of them."""

    weight: float = 0.0
    size: float = 0.0
    """The sum of what says how large each is."""
    seconds: float = 0.0

    def faded(self) -> _Sum:
        return _Sum(self.weight * FADING, self.size * FADING, self.seconds * FADING)

    def plus(self, size: float, seconds: float, forgetting: float) -> _Sum:
        return _Sum(self.weight * forgetting + 1.0, self.size * forgetting + size, self.seconds * forgetting + seconds)


_NOTHING = _Sum()


@dataclass(slots=True)
class _Seen:
    """Steps in which about as many sequences decode."""

    plain: _Sum = _NOTHING
    """Steps without drafts; the size of each is the seconds that were predicted."""
    drafted: dict[int, _Sum] = field(default_factory=dict)
    """Steps with drafts, under the length in bits of their number. The size of each is that number, its seconds are
    what they added."""

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
    """Learns the curves of a worker, from steps in which all sequences decode."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        """Steps are kept apart by the length in bits of the number of sequences that decode."""

    def fade(self) -> None:
        """Notes that there was a step."""
        for seen in self._seen.values():
            seen.fade()

    def observe(self, num_decoding: int, num_drafts: int, predicted_s: float, took_s: float) -> None:
        """Learns from a step.

        Args:
            num_decoding: sequences that decode in it.
            num_drafts: of all of them.
            predicted_s: what it takes without drafts, as is thought of all steps together.
            took_s: what it took.
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
        """Returns the curves so far.

        Args:
            s_per_token: what a token of a prompt costs.
        """
        known = {bits: seen for bits, seen in self._seen.items() if seen.plain.weight >= LEAST_ALIKE}
        return DraftCosts({bits: seen.curve(s_per_token) for bits, seen in known.items()})
