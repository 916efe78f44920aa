"""Growing pauses between attempts to open a connection."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0


@dataclass(slots=True)
class Pauses:
    """Pauses of one route to a peer: each is twice as long as the previous one. Times are on one clock."""

    pause_s: float = 0.0
    try_at_s: float = 0.0
    """Earliest time of the next attempt."""

    def are_over(self, now: float) -> bool:
        """Return whether another attempt may start."""
        return now >= self.try_at_s

    def put_off(self, now: float, *, for_long: bool = False) -> None:
        """Postpone the next attempt, because one has failed."""
        longer_s = min(2 * self.pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        self.pause_s = LONGEST_PAUSE_S if for_long else longer_s
        self.try_at_s = now + self.pause_s
