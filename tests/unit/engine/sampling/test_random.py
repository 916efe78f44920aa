from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.steps import uniform


@given(seed=st.integers(-(2**63), 2**64 - 1), choice=st.integers(0, 15), position=st.integers(0, 10**6))
def test_uniform_is_a_pure_function_into_the_unit_interval(seed: int, choice: int, position: int) -> None:
    number = uniform(seed, choice, position)
    assert 0 <= number < 1
    assert uniform(seed, choice, position) == number
    assert uniform(seed % 2**64, choice, position) == number, "signed and unsigned seeds are one"
    assert uniform(seed, choice + 1, position) != number
    assert uniform(seed, choice, position + 1) != number
    assert uniform(seed + 1, choice, position) != number


def test_uniform_never_changes() -> None:
    """A stream may be resumed on a worker of another release: these numbers are part of the contract."""
    assert [uniform(0, 0, 0), uniform(1, 2, 3), uniform(-1, 0, 10**6)] == [
        0.7945189032113016,
        0.022057785001024288,
        0.9501800128864419,
    ]


def test_uniform_is_uniform_over_positions() -> None:
    numbers = [uniform(7, 0, position) for position in range(20_000)]
    counts = [0] * 50
    for number in numbers:
        counts[int(number * 50)] += 1
    chi_square = sum((count - 400) ** 2 / 400 for count in counts)
    assert chi_square < 49 + 5 * (2 * 49) ** 0.5
    pairs = sum((a < 0.5) == (b < 0.5) for a, b in itertools.pairwise(numbers))
    assert abs(pairs - 10_000) < 5 * 5000**0.5, "neighbours are independent"
