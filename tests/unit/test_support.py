"""The helpers of the tests themselves: a wait that never ends, or a builder that drops a field, would hide failures."""

from __future__ import annotations

import pytest

from baton.cluster import Role
from tests.support import builders
from tests.support.waiting import until, wait_until


def test_a_wait_returns_the_first_truthy_answer() -> None:
    answers = iter([0, None, 7, 8])
    assert wait_until(lambda: next(answers), every_s=0.0) == 7


async def test_a_wait_lets_the_event_loop_run() -> None:
    answers = iter(["", "yes"])
    assert await until(lambda: next(answers), every_s=0.0) == "yes"


def test_a_wait_that_fails_says_what_was_seen() -> None:
    with pytest.raises(AssertionError, match=r"not within 0.01 s; seen last: \[\]"):
        wait_until(list, within_s=0.01, every_s=0.0)
    with pytest.raises(AssertionError, match="three of four"):
        wait_until(lambda: False, within_s=0.0, seen=lambda: "three of four")


def test_an_error_ends_a_wait_unless_it_means_not_yet() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 // 0)
    numbers = iter([0, 0, 2])
    assert wait_until(lambda: 4 // next(numbers), every_s=0.0, not_yet=(ZeroDivisionError,)) == 2
    with pytest.raises(AssertionError, match="seen last: ZeroDivisionError"):
        wait_until(lambda: 1 // 0, within_s=0.0, not_yet=(ZeroDivisionError,))


async def test_a_wait_asks_once_more_after_its_deadline() -> None:
    """A process that was not scheduled meanwhile has not given the condition its time."""
    assert wait_until(lambda: "so", within_s=0.0) == await until(lambda: "so", within_s=0.0) == "so"


def test_builders_take_every_field_to_its_place() -> None:
    info = builders.worker_info("p", Role.PREFILL, epoch=3)
    assert (info.id, info.role, info.epoch, info.block_size) == ("p", Role.PREFILL, 3, 16)
    spec = builders.sequence_spec(range(9), "name", num_prompt_tokens=5, max_tokens=2, seed=4)
    assert (spec.token_ids, spec.num_prompt_tokens, spec.is_continued) == (tuple(range(9)), 5, True)
    assert (spec.request_id, spec.sampling.max_tokens, spec.sampling.seed) == ("name", 2, 4)
    with pytest.raises(TypeError):
        builders.sequence_spec(unknown=1)
    assert builders.claim(priority=2).priority == 2
    assert builders.cluster_status(builders.worker("a")).workers[0].info.id == "a"
