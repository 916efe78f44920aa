"""Statistics of recurring prefixes: the upper bound of any cache's hit rate, and the most common prompt starts."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

KEPT_KEYS = 2**18
"""Block keys of a generation.

There are two generations, so that this many to twice as many are known: 4 to 8 million tokens in blocks of 16, in up to
50 MB.
"""
RECENT = 1024
"""Number of recent prompts whose starts are compared."""
HOTTEST = 5


class PrefixBook:
    """Prefixes that one router has seen. Blocks older than `kept_keys` others may be forgotten.

    A generation holds, with each key, all keys before it in its chain; the known part of a chain is found by bisection.
    """

    def __init__(self, kept_keys: int = KEPT_KEYS) -> None:
        self._kept_keys = kept_keys
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._recent: deque[bytes] = deque()
        self._beginnings: Counter[bytes] = Counter()

    def see_prompt(self, keys: Sequence[bytes]) -> int:
        """Return the number of a prompt's leading blocks that were in a prompt or a response before.

        Args:
            keys: the chained keys of its blocks; empty: it is shorter than a block.
        """
        self._count_beginning(keys[0] if keys else b"")
        return self.see(keys)

    def see(self, keys: Sequence[bytes]) -> int:
        """Record a prompt with its response like `see_prompt`, without counting it as another prompt."""
        num_young = _num_leading(keys, self._young)
        num_known = max(num_young, _num_leading(keys, self._old))
        self._young.update(keys[num_young:])
        if len(self._young) >= self._kept_keys:
            self._young, self._old = set(), self._young
        return num_known

    def hottest(self) -> list[tuple[str, float]]:
        """Return the most common starts of recent prompts that more than one of them has.

        Each is the first 8 hexadecimal digits of the first block's key, with the share of the prompts.
        """
        most = [(key, count) for key, count in self._beginnings.most_common(HOTTEST + 1) if key and count > 1]
        return [(key.hex()[:8], count / len(self._recent)) for key, count in most[:HOTTEST]]

    def _count_beginning(self, key: bytes) -> None:
        if len(self._recent) == RECENT:
            oldest = self._recent.popleft()
            self._beginnings[oldest] -= 1
            if not self._beginnings[oldest]:
                del self._beginnings[oldest]
        self._recent.append(key)
        self._beginnings[key] += 1


def _num_leading(keys: Sequence[bytes], known: set[bytes]) -> int:
    return bisect_left(keys, True, key=lambda key: key not in known)
