"""How long a client waits before it tries the store again."""

from __future__ import annotations

import random

import pytest

from kvstore.index.backoff import FIRST_S, LONGEST_S, backoff_s


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_pause_doubles_up_to_the_longest(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression of the suite: nothing saw that all came back after up to 51 s."""
    drawn: list[tuple[float, float]] = []

    def uniform(least: float, most: float) -> float:
        drawn.append((least, most))
        return share

    monkeypatch.setattr(random, "uniform", uniform)
    pauses = [backoff_s(number) for number in range(1, 8)]
    assert pauses == pytest.approx([share * each for each in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0)])
    assert [backoff_s(number) for number in (8, 11, 100, 10_000)] == [share * LONGEST_S] * 4
    assert set(drawn) == {(0.5, 1.0)}


def test_clients_do_not_all_come_back_at_once() -> None:
    pauses = [backoff_s(50) for _ in range(200)]
    assert len(set(pauses)) > 190
    assert LONGEST_S / 2 <= min(pauses) < 0.6 * LONGEST_S < 0.9 * LONGEST_S < max(pauses) <= LONGEST_S
    assert all(FIRST_S / 2 <= backoff_s(1) <= FIRST_S for _ in range(200))
