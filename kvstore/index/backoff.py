"""How long to wait before trying the store again."""

from __future__ import annotations

import random

FIRST_S = 0.05
LONGEST_S = 2.0


def backoff_s(num_failures: int) -> float:
    """Doubles with each failure in a row, up to 2 s, half of it at random: when Redis returns, not all come at once."""
    longest = min(FIRST_S * 2.0 ** min(num_failures - 1, 10), LONGEST_S)
    return longest * random.uniform(0.5, 1.0)
