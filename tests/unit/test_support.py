"""The helpers of the tests themselves: a wait that never ends, or a builder that drops a field, would hide failures."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest

from baton.cluster import Role
from baton.v1 import inference_pb2
from engine.testing import expected_tokens
from tests.support import builders
from tests.support.load import Clients, Requests, Stream
from tests.support.spoiling import spoiled_json
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


def test_a_spoiled_body_depends_on_its_dice_alone() -> None:
    """What one request did to an odd value the next one had: a number did not repeat what had failed, and values
    became their own parts.
    """
    body = {"messages": [{"role": "user", "content": "a"}], "stop": ["x"]}
    first, again = ([spoiled_json(body, random.Random(seed)) for seed in range(3000)] for _ in range(2))
    assert first == again


def test_builders_take_every_field_to_its_place() -> None:
    info = builders.worker_info("p", Role.PREFILL, epoch=3)
    assert (info.id, info.role, info.epoch, info.block_size) == ("p", Role.PREFILL, 3, 16)
    spec = builders.sequence_spec(range(9), "name", num_prompt_tokens=5, max_tokens=2, seed=4)
    assert (spec.token_ids, spec.num_prompt_tokens, spec.is_continued) == (tuple(range(9)), 5, True)
    assert (spec.request_id, spec.sampling.max_tokens, spec.sampling.seed) == ("name", 2, 4)
    with pytest.raises(TypeError):
        builders.sequence_spec(unknown=1)
    costs = builders.step_costs(s_per_pair=2.0)
    assert (costs.s_per_pair, costs.s_per_token, costs.s_weights) == (2.0, 0.0, 0.0)
    assert builders.claim(priority=2).priority == 2
    assert builders.cluster_status(builders.worker("a")).workers[0].info.id == "a"


class _Router:
    """Answers every request with the tokens that it was given, and then fails, or does not."""

    def __init__(self, tokens: list[int], error: Exception | None = None) -> None:
        self._tokens = tokens
        self._error = error

    def Generate(self, message: Any, **_: Any) -> Iterator[Any]:  # noqa: N802 - the service's own name
        for token in self._tokens:
            yield inference_pb2.GenerateResponse(token_ids=[token])
        if self._error is not None:
            raise self._error


def stream(tokens: list[int], error: Exception | None = None) -> Stream:
    return Stream(inference=cast("Any", _Router(tokens, error)), prompt=[1, 2], max_tokens=3)


def test_a_stream_is_served_if_every_token_is_right_and_no_error_came() -> None:
    right = expected_tokens([1, 2], 3)
    heard = stream(right).served()
    assert (heard.tokens, len(heard.arrived_s)) == (right, 3)
    assert heard.first_s <= heard.took_s < 60
    with pytest.raises(AssertionError, match="2 tokens, and wrong ones"):
        stream(right[:2]).served()
    with pytest.raises(AssertionError, match="3 tokens, and wrong ones"):
        stream([*right[:2], right[2] + 1]).served()
    with pytest.raises(AssertionError, match="ValueError: broken"):
        stream(right, ValueError("broken")).served()


def test_clients_ask_until_the_block_ends() -> None:
    ended = []

    def script(number: int) -> Requests:
        try:
            while True:
                yield lambda: time.sleep(0.001)
        finally:
            ended.append(number)

    with Clients(script, 3) as clients:
        wait_until(lambda: clients.num_served > 10)
    assert sorted(ended) == [0, 1, 2]
    num_served = clients.num_served
    time.sleep(0.02)
    assert clients.num_served == num_served


def test_a_failed_request_fails_the_block_and_the_client_goes_on() -> None:
    def script(number: int) -> Requests:
        yield partial(int, "no number")
        while True:
            yield lambda: time.sleep(0.001)

    with (
        pytest.raises(AssertionError, match=r"1 failures: .*ValueError: invalid literal"),
        Clients(script, 1) as clients,
    ):
        wait_until(lambda: clients.num_served > 2)


def test_a_script_that_breaks_fails_the_block() -> None:
    def script(number: int) -> Requests:
        yield lambda: None
        raise KeyError("script")

    with pytest.raises(AssertionError, match="KeyError: 'script'"), Clients(script, 1) as clients:
        wait_until(lambda: clients.failures)


def test_what_the_block_raises_is_not_hidden_by_what_clients_have_seen() -> None:
    def script(number: int) -> Requests:
        yield partial(int, "no number")

    with pytest.raises(ZeroDivisionError), Clients(script, 1) as clients:
        wait_until(lambda: 1 // 0 if clients.failures else 0)
