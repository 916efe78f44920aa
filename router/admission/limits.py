"""A tenant's limits, and patterns that select models by name."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

MAX_PATTERNS = 64
"""Maximum number of patterns in a list."""
MAX_PATTERN = 256
"""Maximum length of a pattern in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on a tenant's requests, over all models or for one model. None: no limit."""

    requests_per_minute: int | None = None
    """Maximum number of requests in any 60 seconds, over all routers."""
    tokens_per_minute: int | None = None
    """Maximum number of prompt and answer tokens in any 60 seconds. A prompt counts when it is admitted, an answer when
    it has ended."""
    tokens_per_day: int | None = None
    """Maximum number of prompt and answer tokens in any 24 hours."""
    max_in_flight: int | None = None
    """Maximum number of concurrent answers, over all routers."""
    max_answer_tokens: int | None = None
    """Longest answer, in tokens. It is the default of requests without `max_tokens`; a higher one is refused."""

    @property
    def windows(self) -> tuple[int | None, int | None, int | None]:
        """Limits on requests per minute, tokens per minute and tokens per day."""
        return self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day

    @property
    def need_an_account(self) -> bool:
        """True if a ledger must count usage to enforce them: the length of an answer alone needs no count."""
        return self.max_in_flight is not None or self.windows != (None, None, None)


LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_in_flight", "max_answer_tokens")
"""Names of the limits. A ledger counts all but the last, and refers to them by their index."""


def tighter(one: Limits, other: Limits) -> Limits:
    """Return each limit as the lower one of the two."""
    return Limits(**{name: _least((getattr(one, name), getattr(other, name))) for name in LIMITS})


def _least(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def match_any(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether a name matches one of the patterns. Fast for names and for patterns such as `llama-*`."""
    names, starts, others = _sorted(patterns)
    return name in names or name.startswith(starts) or any(matches(pattern, name) for pattern in others)


@functools.lru_cache(maxsize=1024)
def _sorted(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...], tuple[str, ...]]:
    """Return the patterns in three groups: plain names, the prefixes of patterns such as `llama-*`, and others."""
    names = frozenset(pattern for pattern in patterns if "*" not in pattern)
    starts = tuple(pattern[:-1] for pattern in patterns if 0 <= pattern.find("*") == len(pattern) - 1)
    return names, starts, tuple(pattern for pattern in patterns if 0 <= pattern.find("*") < len(pattern) - 1)


def matches(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern, in which `*` stands for any text. Case matters.

    It searches each text between two stars once, after the text before it. The first match is always right, because it
    leaves the most room for the texts that follow. So a match needs no backtracking.
    """
    first, *middle = pattern.split("*")
    if not middle:
        return name == pattern
    last = middle.pop()
    end = len(name) - len(last)
    if end < len(first) or not name.startswith(first) or not name.endswith(last):
        return False
    at = len(first)
    for text in middle:
        at = name.find(text, at, end)
        if at < 0:
            return False
        at += len(text)
    return True
