"""How `threads` reckons the rate of workers that run at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import stats, threads
from tests.bench.engine_cases import Case


class Worker:
    def __init__(self, began_s: float, ended_s: float) -> None:
        self._found = {"num_tokens": 100, "began_s": began_s, "ended_s": ended_s}
        self.questions: list[dict[str, Any]] = []

    def tell(self, op: str, **arguments: Any) -> None:
        self.questions.append(arguments)

    def answer(self) -> dict[str, Any]:
        return self._found


def test_two_workers_are_as_fast_as_the_time_in_which_both_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_busy_s", lambda: 0.0)
    peers: dict[str, Any] = {"worker": Worker(10.0, 12.0), "other": Worker(11.0, 14.0), "threads": Worker(0.0, 1.0)}
    row = threads._row(Case("decode, streams: 8", [[1]] * 8, 5), peers, 3, 1)
    # 50 tokens a second of one, 200 within 4 s of both, and 100 a second of two threads.
    assert [row[1].median, row[2].median, row[5].median] == [50.0, 2.0, 1.0]
    assert [row[3], row[4], row[6], row[7]] == [">= 1.6", "yes", ">= 1.8", "no"]
    assert [len(peer.questions) for peer in peers.values()] == [8, 4, 4]


def test_beside_others_two_threads_take_what_one_takes_times_the_ratio_of_the_rates() -> None:
    slow, fast = Worker(10.0, 13.0), Worker(10.0, 12.0)
    for threads_side, found in ((slow, (1.5, "no")), (fast, (1.0, "yes"))):
        peers: dict[str, Any] = {"worker": Worker(10.0, 12.0), "threads": threads_side}
        row = threads._row_beside(Case("decode, streams: 8", [[1]] * 8, 5), peers, 3)
        assert (row[1].median, row[2].median, row[4]) == (50.0, *found)
