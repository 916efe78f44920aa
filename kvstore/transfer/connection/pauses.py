"""Longer and longer pauses between the tries to open a connection."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0


@dataclass(slots=True)
class Pauses:
    """The pauses of one way to a peer: each is twice as long as the one before. Times are on one clock."""

    pause_s: float = 0.0
    try_at_s: float = 0.0
    """When the next try may begin."""

    def are_over(self, now: float) -> bool:
        """Returns whether it may be tried again."""
        return now >= self.try_at_s

    def put_off(self, now: float, *, for_long: bool = False) -> None:
        """Puts the next try off, because one has failed."""
        longer_s = min(2 * self.pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        self.pause_s = LONGEST_PAUSE_S if for_long else longer_s
        self.try_at_s = now + self.pause_s
