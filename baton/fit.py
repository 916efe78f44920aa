"""Online least squares that learns a cost from its measurements.

Coefficients are fitted by exponentially weighted least squares of *relative* errors (each observation is divided by the
measured value), so that a step of 10 ms counts as much as one of 1 s. A prior gives the ratios of the coefficients; the
first measurement gives their scale. Coefficients are costs, so none is below 0 (an active set that drops the most
negative one: Lawson and Hanson, 1974). At most three coefficients are fitted here, so no linear algebra library is
needed.
"""

from __future__ import annotations

from collections.abc import Sequence

FORGETTING = 0.995
"""Weight of an observation after the next one: about 200 of them are remembered."""
PRIOR_WEIGHT = 0.1
"""Weight of each of the prior's coefficients, in observations that it alone explains; it fades with new ones."""

SMALLEST_PIVOT = 1e-14
"""Minimum pivot as a share of its diagonal element; a smaller one is rounding error."""


class CostFit:
    """Fit of `y = sum(c_i * x_i)` for costs `c` to the observations so far."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        size = len(self._prior)
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._solved: tuple[float, ...] | None = self._prior
        self.num_observations = 0

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Record one measurement; a duration of 0 is ignored."""
        if seconds <= 0:
            return
        if not self.num_observations:
            predicted = self.predict(features)
            self._prior = tuple(c * seconds / predicted for c in self._prior) if predicted > 0 else self._prior
        scaled = [feature / seconds for feature in features]
        for i, left in enumerate(scaled):
            row = self._products[i]
            for j, right in enumerate(scaled):
                row[j] = FORGETTING * row[j] + left * right
            self._targets[i] = FORGETTING * self._targets[i] + left
        self.num_observations += 1
        self._solved = None

    @property
    def coefficients(self) -> tuple[float, ...]:
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def predict(self, features: Sequence[float]) -> float:
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def _solve(self) -> tuple[float, ...]:
        active = list(range(len(self._prior)))
        while True:
            found = self._solve_for(active)
            worst = min(range(len(active)), key=lambda k: found[k])
            if found[worst] >= 0:
                result = [0.0] * len(self._prior)
                for index, value in zip(active, found, strict=True):
                    result[index] = value
                return tuple(result)
            del active[worst]

    def _solve_for(self, active: Sequence[int]) -> list[float]:
        """Solve by Gaussian elimination.

        The prior keeps the matrix positive definite within 53 bits. A cost that cannot be distinguished from those
        before it becomes 0.
        """
        matrix = []
        weight = PRIOR_WEIGHT / self.num_observations
        for i in active:
            pull = weight / max(self._prior[i], 1e-12) ** 2
            row = [self._products[i][j] + (pull if i == j else 0.0) for j in active]
            matrix.append([*row, self._targets[i] + pull * self._prior[i]])
        size = len(matrix)
        smallest = [SMALLEST_PIVOT * matrix[k][k] for k in range(size)]
        for k in range(size):
            if matrix[k][k] <= smallest[k]:
                continue
            for r in range(k + 1, size):
                factor = matrix[r][k] / matrix[k][k]
                for c in range(k, size + 1):
                    matrix[r][c] -= factor * matrix[k][c]
        found = [0.0] * size
        for k in reversed(range(size)):
            rest = sum(matrix[k][c] * found[c] for c in range(k + 1, size))
            found[k] = (matrix[k][size] - rest) / matrix[k][k] if matrix[k][k] > smallest[k] else 0.0
        return found
