"""Estimates the length of answers from earlier answers."""

from __future__ import annotations

from collections import deque

REMEMBERED = 256
ENOUGH = 16
"""Number of answers from which a tenant's own history is used instead of the history of all tenants."""
QUANTILE = 0.9


class AnswerHistory:
    """Lengths of the latest answers, by tenant.

    Args:
        floor: minimum of the expected length, unless the request allows less.
        default: expected length until ENOUGH answers have been observed.
    """

    def __init__(self, floor: int, default: int) -> None:
        self._floor = floor
        self._default = default
        self._all: _Lengths = _Lengths()
        self._by_tenant: dict[str, _Lengths] = {}

    def observe(self, tenant_id: str, num_tokens: int) -> None:
        """Record the length of a completed answer."""
        self._all.add(num_tokens)
        self._by_tenant.setdefault(tenant_id, _Lengths()).add(num_tokens)

    def expect(self, tenant_id: str, max_tokens: int, ignore_eos: bool = False) -> int:
        """Return the number of tokens to plan for: nine of ten answers are not longer."""
        if ignore_eos:
            return max_tokens
        own = self._by_tenant.get(tenant_id)
        lengths = own if own is not None and own.num >= ENOUGH else self._all
        expected = lengths.quantile if lengths.num >= ENOUGH else self._default
        return min(max_tokens, max(self._floor, expected))


class _Lengths:
    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=REMEMBERED)
        self._num_new = 0
        self._quantile: int | None = None

    @property
    def num(self) -> int:
        return len(self._latest)

    def add(self, num_tokens: int) -> None:
        self._latest.append(num_tokens)
        self._num_new += 1
        if self._num_new >= ENOUGH:  # sorting after every answer would be expensive
            self._num_new, self._quantile = 0, None

    @property
    def quantile(self) -> int:
        if self._quantile is None:
            ordered = sorted(self._latest)
            self._quantile = ordered[min(self.num - 1, int(QUANTILE * self.num))]
        return self._quantile
