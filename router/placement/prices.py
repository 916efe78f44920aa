"""Fits the cost of KV transfers to measured transfers."""

from __future__ import annotations

from dataclasses import dataclass

from baton.fit import CostFit


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of KV transfers: seconds per transfer, and seconds per token."""

    pull_s: float = 2e-3
    pull_s_per_token: float = 5e-6
    exposed_s: float = 2e-3
    """Part of a KV transfer after the first token."""
    exposed_s_per_token: float = 1e-7


DEFAULT_PRICES = Prices()


class PriceFit:
    """Fit of transfer costs over all workers: a single pair of workers seldom has enough transfers."""

    def __init__(self, prior: Prices = DEFAULT_PRICES) -> None:
        self._pull = CostFit((prior.pull_s, prior.pull_s_per_token))
        self._exposed = CostFit((prior.exposed_s, prior.exposed_s_per_token))
        self.prices = prior

    def pulled(self, num_tokens: int, took_s: float) -> None:
        """Learn from the duration of a pull."""
        self._pull.observe((1.0, num_tokens), took_s)
        self._update()

    def transferred(self, num_tokens: int, exposed_s: float) -> None:
        """Learn from the time between the first token and the arrival of a prompt's KV."""
        self._exposed.observe((1.0, num_tokens), exposed_s)
        self._update()

    def _update(self) -> None:
        self.prices = Prices(*self._pull.coefficients, *self._exposed.coefficients)
