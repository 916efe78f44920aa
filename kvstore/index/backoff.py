"""The pause before the store is tried again."""

from __future__ import annotations

import random

FIRST_S = 0.05
LONGEST_S = 2.0


def backoff_s(num_failures: int) -> float:
    """Returns the pause after a number of failures in a row.

    It doubles each time, up to 2 s; half of it is random, so that clients do not all return at once with Redis.
    """
    longest = min(FIRST_S * 2.0 ** min(num_failures - 1, 10), LONGEST_S)
    return longest * random.uniform(0.5, 1.0)
