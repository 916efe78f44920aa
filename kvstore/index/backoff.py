"""Pause before the store is tried again."""

from __future__ import annotations

import random

FIRST_S = 0.05
LONGEST_S = 2.0


def backoff_s(num_failures: int) -> float:
    """Return the pause after a number of consecutive failures.

    It doubles each time, up to 2 s. Half of it is random, so that clients do not all return to Redis at the same
    moment.
    """
    longest = min(FIRST_S * 2.0 ** min(num_failures - 1, 10), LONGEST_S)
    return longest * random.uniform(0.5, 1.0)
