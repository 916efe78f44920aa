"""Learns what moving KV takes, from what it has taken."""

from __future__ import annotations

from dataclasses import dataclass

from baton.fit import CostFit


@dataclass(frozen=True, slots=True)
class Prices:
    """What moving KV takes: seconds, and seconds a token."""

    pull_s: float = 2e-3
    pull_s_per_token: float = 5e-6
    exposed_s: float = 2e-3
    """Part of a KV transfer that comes after the first token."""
    exposed_s_per_token: float = 1e-7


DEFAULT_PRICES = Prices()


class PriceFit:
    """What moving KV costs over all pairs of workers: one pair seldom has enough transfers of its own."""

    def __init__(self, prior: Prices = DEFAULT_PRICES) -> None:
        self._pull = CostFit((prior.pull_s, prior.pull_s_per_token))
        self._exposed = CostFit((prior.exposed_s, prior.exposed_s_per_token))
        self.prices = prior

    def pulled(self, num_tokens: int, took_s: float) -> None:
        """Learn how long the pull of a prefix took."""
        self._pull.observe((1.0, num_tokens), took_s)
        self._update()

    def transferred(self, num_tokens: int, exposed_s: float) -> None:
        """Learn how long after the first token a prompt's KV arrived."""
        self._exposed.observe((1.0, num_tokens), exposed_s)
        self._update()

    def _update(self) -> None:
        self.prices = Prices(*self._pull.coefficients, *self._exposed.coefficients)
