"""Estimates how long answers are, from the answers so far."""

from __future__ import annotations

from collections import deque

REMEMBERED = 256
ENOUGH = 16
"""Answers of a tenant before its own history is used instead of everybody's."""
QUANTILE = 0.9


class AnswerHistory:
    """Lengths of the latest answers, by tenant.

    Args:
        floor: least length that is expected where a request allows as much.
        default: expected while nothing has been seen.
    """

    def __init__(self, floor: int, default: int) -> None:
        self._floor = floor
        self._default = default
        self._all: _Lengths = _Lengths()
        self._by_tenant: dict[str, _Lengths] = {}

    def observe(self, tenant_id: str, num_tokens: int) -> None:
        """An answer came to its end by itself or by its limit."""
        self._all.add(num_tokens)
        self._by_tenant.setdefault(tenant_id, _Lengths()).add(num_tokens)

    def expect(self, tenant_id: str, max_tokens: int, ignore_eos: bool = False) -> int:
        """Tokens for which a decode worker should have room: nine answers in ten are no longer."""
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
        if self._num_new >= ENOUGH:  # sorting at each request would cost more than it shows
            self._num_new, self._quantile = 0, None

    @property
    def quantile(self) -> int:
        if self._quantile is None:
            ordered = sorted(self._latest)
            self._quantile = ordered[min(self.num - 1, int(QUANTILE * self.num))]
        return self._quantile
