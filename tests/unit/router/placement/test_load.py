"""What a router knows of a worker's load, at times that the tests say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster import BlockCounts, Role, Worker, WorkerLoad
from router.placement import Candidate, Job, LoadTracker, Residence, Turn
from router.placement.load import RECENT_S, RESIDENCE_S, SMOOTHING
from tests.support import builders

COSTS = builders.step_costs(s_per_token=1e-3)
"""A token takes a millisecond."""
LOAD = WorkerLoad(costs=COSTS, blocks=BlockCounts(100, 100))
NORMAL: Turn = (0, False)
URGENT: Turn = (-5, False)
LATE: Turn = (0, True)


def worker(role: Role = Role.DECODE, **load: Any) -> Worker:
    return builders.worker("w", role, replace(LOAD, **load), block_size=16, chunk_tokens=256)


def book_of(role: Role = Role.DECODE, **load: Any) -> LoadTracker:
    return LoadTracker.of(worker(role, **load), Residence())


def job(compute_s: float = 1.0, turn: Turn = NORMAL, num_prompt_tokens: int = 100, num_expected: int = 20) -> Job:
    return Job(turn=turn, compute_s=compute_s, num_prompt_tokens=num_prompt_tokens, num_expected_tokens=num_expected)


def test_those_before_wait_and_those_after_do_not_count() -> None:
    book = book_of()
    for turn, compute_s in ((NORMAL, 1.0), (URGENT, 2.0), (LATE, 4.0), (NORMAL, 8.0)):
        book.queue(job(compute_s, turn), 0.0)
    assert book.wait_s((-9, False), 0.0) == 0.0
    assert book.wait_s(URGENT, 0.0) == 2.0
    assert book.wait_s(NORMAL, 0.0) == 11.0, "who is already there comes first"
    assert book.wait_s(LATE, 0.0) == 15.0
    assert book.wait_s((3, False), 0.0) == 15.0


def test_what_the_eldest_has_computed_already_is_not_waited_for() -> None:
    book = book_of()
    first, second = job(2.0), job(3.0)
    book.queue(first, 10.0)
    book.queue(second, 11.0)
    assert book.wait_s(NORMAL, 11.0) == 4.0
    assert book.wait_s(NORMAL, 11.5) == 3.5
    assert book.wait_s(NORMAL, 99.0) == 3.0, "no more than it was to take: it is not done"
    book.computed(first, 12.0)
    assert book.wait_s(NORMAL, 12.0) == 3.0, "the next one begins"
    assert book.wait_s(NORMAL, 13.0) == 2.0
    book.computed(second, 13.0)
    assert book.wait_s(NORMAL, 13.0) == 0.0
    book.queue(job(5.0), 20.0)
    assert book.wait_s(NORMAL, 20.0) == 5.0, "nothing was computed while there was nothing"


def test_the_eldest_takes_nothing_off_the_wait_of_those_that_come_before_it() -> None:
    book = book_of()
    book.queue(job(10.0, LATE), 0.0)
    book.queue(job(4.0), 8.0)
    assert book.wait_s(NORMAL, 9.0) == 4.0
    assert book.wait_s(LATE, 9.0) == 5.0


def test_what_others_sent_shows_in_the_report() -> None:
    book = book_of(queued_tokens=3000)
    assert book.wait_s(NORMAL, 0.0) == 3.0
    assert book.wait_s(URGENT, 0.0) == 3.0, "nobody knows their turns"
    mine = job(1.0)
    book.queue(mine, 0.0)
    assert book.wait_s(NORMAL, 0.0) == 4.0, "it is not in the report yet"
    book.report(worker(queued_tokens=3500))
    assert book.wait_s(NORMAL, 0.0) == 3.5
    book.report(worker(queued_tokens=500))
    assert book.wait_s(NORMAL, 0.0) == 1.0, "a report may be late"
    book.computed(mine, 0.0)
    assert book.wait_s(NORMAL, 0.0) == 0.0


def test_a_report_brings_the_workers_costs() -> None:
    book = book_of(queued_tokens=1000)
    slow = builders.step_costs(s_per_token=5e-3)
    book.report(worker(queued_tokens=1000, costs=slow))
    candidate = book.seen(NORMAL, 48, 0.0)
    assert (candidate.costs, candidate.chunk_tokens, candidate.num_cached_tokens) == (slow, 256, 48)
    assert candidate.wait_s == 5.0
    assert (candidate.worker_id, candidate.role) == ("w", Role.DECODE)


def test_a_candidate_waits_no_longer_than_its_own_turn() -> None:
    book = book_of()
    book.queue(job(4.0, LATE), 0.0)
    assert book.seen(NORMAL, 0, 0.0).wait_s == 0.0
    assert book.seen(LATE, 0, 1.0).wait_s == 3.0


def test_what_is_decoded_is_what_was_sent_or_what_is_reported_whichever_is_more() -> None:
    blocks = BlockCounts(total=100, free=80, cached=10, in_use=10)
    book = book_of(running=2, blocks=blocks)
    candidate = book.candidate

    def state() -> tuple[int, int, int]:
        return candidate.num_decoding, candidate.num_kv_tokens, candidate.room_tokens

    assert state() == (2, 160, 1440)
    jobs = [job(num_prompt_tokens=100, num_expected=20) for _ in range(3)]
    book.decode(jobs[0], 0.0)
    assert state() == (2, 160, 1440), "120 tokens are less than 10 blocks"
    book.decode(jobs[1], 0.0)
    assert state() == (2, 200, 1360)
    book.decode(jobs[2], 0.0)
    assert state() == (3, 300, 1240)
    book.report(worker(running=9, blocks=BlockCounts(100, 0, 0, 100)))
    assert state() == (9, 1600, 0)
    book.report(worker(running=0, blocks=blocks))
    assert state() == (3, 300, 1240)
    for each in jobs:
        book.finished(each, 0.0)
    assert state() == (0, 0, 1440), "blocks that are reserved hold no context yet"


def test_more_may_be_sent_than_there_is_room_for() -> None:
    book = book_of()
    book.decode(job(num_prompt_tokens=1500, num_expected=500), 0.0)
    assert book.candidate.room_tokens == -400


def test_who_computes_prompts_only_has_room_always() -> None:
    book = book_of(Role.PREFILL, running=3, blocks=BlockCounts(100, 50, 0, 50))
    book.decode(job(), 0.0)
    fresh = Candidate(worker_id="w", role=Role.PREFILL)
    seen = (book.candidate.num_decoding, book.candidate.num_kv_tokens, book.candidate.room_tokens)
    assert seen == (fresh.num_decoding, fresh.num_kv_tokens, fresh.room_tokens)


def test_room_comes_back_as_fast_as_sequences_have_left() -> None:
    residence = Residence()
    book, other = LoadTracker.of(worker(), residence), LoadTracker.of(worker(), residence)
    leaving = job(num_prompt_tokens=300, num_expected=100)
    book.decode(leaving, 5.0)
    assert book.candidate.freed_tokens_per_s == 400 / RESIDENCE_S
    staying = job(num_prompt_tokens=500, num_expected=100)
    book.decode(staying, 5.0)
    assert book.candidate.freed_tokens_per_s == 1000 / RESIDENCE_S
    book.finished(leaving, 35.0)
    assert residence.mean_s == RESIDENCE_S + SMOOTHING * (30.0 - RESIDENCE_S)
    assert book.candidate.freed_tokens_per_s == 600 / residence.mean_s
    other.decode(job(num_prompt_tokens=80, num_expected=20), 0.0)
    assert other.candidate.freed_tokens_per_s == 100 / residence.mean_s, "all workers' sequences tell"


def test_residences_of_no_time_divide_by_nothing() -> None:
    residence = Residence(0.0)
    residence.observe(0.0)
    book = LoadTracker.of(worker(), residence)
    book.decode(job(num_prompt_tokens=80, num_expected=20), 0.0)
    assert book.candidate.freed_tokens_per_s == 100_000.0


def test_what_was_computed_lately_fades() -> None:
    book = book_of()
    assert book.seen(NORMAL, 0, 5.0).recent_s == 0.0
    first = job(8.0)
    book.queue(first, 10.0)
    assert book.seen(NORMAL, 0, 10.0).recent_s == 8.0
    book.computed(first, 18.0)
    e = math.e
    assert book.seen(NORMAL, 0, 10.0 + RECENT_S).recent_s == pytest.approx(8.0 / e)
    book.queue(job(2.0, URGENT), 10.0 + RECENT_S)
    assert book.seen(NORMAL, 0, 10.0 + RECENT_S).recent_s == pytest.approx(2.0 + 8.0 / e), "of whatever turn"
    assert book.seen(NORMAL, 0, 10.0 + 2 * RECENT_S).recent_s == pytest.approx(2.0 / e + 8.0 / e**2)


def test_leaving_twice_or_elsewhere_is_leaving_once() -> None:
    book, other = book_of(), book_of()
    mine, stays = job(1.0), job(2.0)
    for each in (mine, stays):
        book.queue(each, 0.0)
        book.decode(each, 0.0)
    for _ in range(2):
        other.computed(mine, 0.0)
        other.finished(mine, 0.0)
    assert (book.wait_s(NORMAL, 0.0), book.candidate.num_decoding) == (3.0, 2)
    for _ in range(2):
        book.computed(mine, 0.0)
        book.finished(mine, 0.0)
    assert (book.wait_s(NORMAL, 0.0), book.candidate.num_decoding) == (2.0, 1)
    assert other.candidate == book_of().candidate


TURNS = st.tuples(st.integers(-2, 2), st.booleans())
SECONDS = st.floats(1e-6, 1e3)
JOBS = st.lists(
    st.builds(
        Job,
        turn=TURNS,
        compute_s=SECONDS,
        num_prompt_tokens=st.integers(1, 900),
        num_expected_tokens=st.integers(0, 90),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60)
@given(jobs=JOBS, asked=TURNS)
def test_the_wait_is_that_of_the_turns_not_after_ones_own(jobs: list[Job], asked: Turn) -> None:
    book = book_of()
    for each in jobs:
        book.queue(each, 0.0)
    assert book.wait_s(asked, 0.0) == pytest.approx(sum(each.compute_s for each in jobs if each.turn <= asked))


@settings(max_examples=60)
@given(jobs=JOBS, asked=TURNS, data=st.data())
def test_those_after_never_make_a_wait_shorter(jobs: list[Job], asked: Turn, data: st.DataObject) -> None:
    """Two routers' books of the same worker, one of which knows only the jobs that count."""
    book, without = book_of(), book_of()
    now = 0.0
    for each in jobs:
        now += data.draw(st.floats(0.0, 10.0))
        book.queue(each, now)
        if each.turn <= asked:
            without.queue(
                Job(turn=each.turn, compute_s=each.compute_s, num_prompt_tokens=1, num_expected_tokens=1), now
            )
    now += data.draw(st.floats(0.0, 10.0))
    assert book.wait_s(asked, now) >= without.wait_s(asked, now) - 1e-9
    assert book.wait_s(asked, now) <= sum(each.compute_s for each in jobs if each.turn <= asked) + 1e-9


@settings(max_examples=60)
@given(jobs=JOBS, data=st.data())
def test_loads_are_never_negative_and_return_to_nothing(jobs: list[Job], data: st.DataObject) -> None:
    """Jobs come and leave in any order, some with their prompts not computed."""
    book = book_of()
    steps = data.draw(st.permutations([(each, is_first) for each in jobs for is_first in (True, False)]))
    inside: dict[Job, None] = {}
    now = 0.0
    for each, _ in steps:
        now += data.draw(st.floats(0.0, 5.0))
        if each in inside:
            book.computed(each, now)
            book.finished(each, now)
            del inside[each]
        else:
            book.decode(each, now)
            book.queue(each, now)
            inside[each] = None
            if data.draw(st.booleans()):
                book.computed(each, now)
        assert book.candidate.num_decoding == len(inside)
        assert book.candidate.num_kv_tokens == sum(job.num_prompt_tokens for job in inside)
        assert book.candidate.freed_tokens_per_s >= 0.0
        queued_s = sum(job.compute_s for job in inside if job.queued_at is book)
        waits = [book.wait_s(turn, now) for turn in ((-9, False), *sorted({job.turn for job in jobs}), (9, True))]
        assert waits[0] == 0.0
        assert min(waits) >= 0.0
        assert waits[-1] <= queued_s + 1e-6
        if all(job.queued_at is None for job in inside):
            assert waits[-1] == 0.0
    assert not inside
    assert replace(book.candidate, recent_s=0.0) == book_of().candidate
