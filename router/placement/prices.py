"""Learns what moving KV takes, from what it has taken."""

from __future__ import annotations

from baton.fit import CostFit
from router.placement.policy import DEFAULT_PRICES, Prices


class PriceFit:
    """Over all pairs of workers: one seldom has enough transfers of its own."""

    def __init__(self, prior: Prices = DEFAULT_PRICES) -> None:
        self._pull = CostFit((prior.pull_s, prior.pull_s_per_token))
        self._exposed = CostFit((prior.exposed_s, prior.exposed_s_per_token))
        self.prices = prior

    def pulled(self, num_tokens: int, took_s: float) -> None:
        """A prefix has arrived."""
        self._pull.observe((1.0, num_tokens), took_s)
        self._update()

    def handed_over(self, num_tokens: int, exposed_s: float) -> None:
        """Learns how long after the first token a prompt's KV arrived."""
        self._exposed.observe((1.0, num_tokens), exposed_s)
        self._update()

    def _update(self) -> None:
        self.prices = Prices(*self._pull.coefficients, *self._exposed.coefficients)
