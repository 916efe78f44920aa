"""Whatever a client asks, by whichever API, the answer is the same: aggregated, split, moved, after deaths, resumed.

Answers of Anthropic's API and of OpenAI's Responses come as streams, and whole in the fleet that splits nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from baton.api import GenerateRequest, TokenIds
from baton.cluster import Role
from baton.config import RouterConfig, SloClassConfig, TransferConfig
from tests.chaos import asks
from tests.chaos.asks import Answer, Listening
from tests.chaos.fleet import Fleet, running_fleet
from tests.support.asking import metric, prompt_of
from tests.support.listener import Heard, Listener
from tests.support.other_apis import Answer as ApiAnswer
from tests.support.other_apis import ApiRequest, api_request
from tests.support.reasoning import reasoning_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.first

NUM_REQUESTS = int(os.environ.get("TRANSPARENT_REQUESTS", "80"))
NUM_CLIENTS = 16
NUM_EXPECTED = 48
"""Answers that are worked out without a cluster, too."""
NUM_BETWEEN_LEAVES = 12
"""Answers heard before the next worker leaves."""
NUM_INTERRUPTED = 10
"""More answers than these are moved or begun anew, however many of them a fast machine ends before a worker leaves."""
MAX_ROUNDS = 6
"""How often all requests are asked until that many have been interrupted."""
STEP_MS = 8.0
LEASE_S = 15.0
TRANSFER = TransferConfig(op_timeout_s=3.0, ping_s=0.5)
NUM_CHATS = NUM_REQUESTS // 6
"""Requests over gRPC whose answers may reason: the last ones."""
NUM_OTHERS = max(12, NUM_REQUESTS // 10)
"""Requests of other APIs."""
REQUESTS = [
    replace(asked, request_id=f"transparent-{number}")
    for number, asked in enumerate(
        [asks.of_options(number) for number in range(NUM_REQUESTS - NUM_CHATS - NUM_OTHERS)]
        + [asks.of_chat(number) for number in range(NUM_CHATS)]
    )
]
OTHERS = [api_request(number) for number in range(NUM_OTHERS)]
ALL = [each for row in itertools.zip_longest(REQUESTS, OTHERS) for each in row if each is not None]
"""Those of other APIs among the first, so that something happens to them too."""
Asked = TypeVar("Asked")
Found = TypeVar("Found")


@contextlib.contextmanager
def fleet_of(mode: str, num_routers: int, model_path: Path) -> Iterator[Fleet]:
    unhurried = {"default": SloClassConfig(ttft_ms=600_000.0)}  # nothing is shed where the machine is slow
    router = RouterConfig(mode=mode, cache_secret="transparent", max_attempts=16, slo_classes=unhurried)
    settings: dict[str, Any] = {"num_routers": num_routers, "step_ms": STEP_MS, "lease_s": LEASE_S}
    with running_fleet(TRANSFER, router, model_path=model_path, **settings) as fleet:
        fleet.wait_for(*(fleet.add(role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)))
        yield fleet


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    return reasoning_model(tmp_path_factory.mktemp("reasoning"), model_dir)


@pytest.fixture(scope="module")
def split_fleet(model_path: Path) -> Iterator[Fleet]:
    """Two routers; the first one does not survive the last test."""
    with fleet_of("disaggregated", 2, model_path) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def all_answers(model_path: Path) -> list[Listening | ApiAnswer]:
    """To `ALL`, of a fleet that splits nothing and that nothing happens to."""
    with fleet_of("aggregated", 1, model_path) as fleet:
        return all_of(ALL, lambda request: heard_from(fleet, request, is_streamed=False))


@pytest.fixture(scope="module")
def answers(all_answers: list[Listening | ApiAnswer]) -> list[Answer]:
    """To `REQUESTS`."""
    return [heard.answer for heard in all_answers if isinstance(heard, Listening)]


@pytest.fixture(scope="module")
def other_answers(all_answers: list[Listening | ApiAnswer]) -> list[ApiAnswer]:
    """To `OTHERS`."""
    return [heard for heard in all_answers if not isinstance(heard, Listening)]


def heard_from(
    fleet: Fleet, request: GenerateRequest | ApiRequest, *, is_streamed: bool = True
) -> Listening | ApiAnswer:
    if isinstance(request, ApiRequest):
        return request.answered(fleet.routers[0].http, is_streamed=is_streamed)
    return listening_to(fleet, request)


def listening_to(fleet: Fleet, request: GenerateRequest) -> Listening:
    return asks.listen(fleet.client.generate(request))


def all_of(requests: list[Asked], ask: Callable[[Asked], Found], num_clients: int = NUM_CLIENTS) -> list[Found]:
    with ThreadPoolExecutor(num_clients) as pool:
        return list(pool.map(ask, requests))


def same(heard: list[Listening | ApiAnswer], answers: list[Listening | ApiAnswer]) -> None:
    found, expected = ([one.answer if isinstance(one, Listening) else one for one in side] for side in (heard, answers))
    wrong = [number for number, (one, answer) in enumerate(zip(found, expected, strict=True)) if one != answer]
    if wrong:
        first = wrong[0]
        pytest.fail(f"{wrong} differ; {ALL[first]}:\n{found[first]}\nnot\n{expected[first]}")


def test_answers_are_what_they_should_be(answers: list[Answer]) -> None:
    for request, answer in zip(REQUESTS[:NUM_EXPECTED], answers, strict=False):
        for choice, tokens in zip(answer.choices, asks.expected(request), strict=True):
            assert choice.token_ids == tokens[: len(choice.token_ids)]
            assert len(choice.token_ids) == len(tokens) or choice.finish_reason == "stop"
            is_long = len(choice.token_ids) > request.sampling.get("min_tokens", 0)
            assert is_long or choice.finish_reason == "length" or "structured_outputs" in request.sampling


def test_every_token_has_its_scores(answers: list[Answer]) -> None:
    for request, answer in zip(REQUESTS, answers, strict=True):
        for choice in answer.choices:
            num_top, named = request.sampling.get("logprobs"), request.sampling.get("logprob_token_ids", ())
            assert len(choice.scores) == (0 if num_top is None and not named else len(choice.token_ids))
            assert choice.scores.num_top == (len(named) or num_top or 0)


def test_prompts_have_their_scores(answers: list[Answer]) -> None:
    asked = [request.sampling.get("prompt_logprobs") for request in REQUESTS]
    assert sum(num_top is not None for num_top in asked) > NUM_REQUESTS // 24
    for request, num_top, answer in zip(REQUESTS, asked, answers, strict=True):
        if num_top is None:
            assert answer.prompt_scores is None
        else:
            assert isinstance(request.prompt, TokenIds)
            assert answer.prompt_scores is not None
            assert answer.prompt_scores.token_ids == request.prompt.ids
            assert len(answer.prompt_scores.scores) == len(request.prompt.ids) - 1
            assert answer.prompt_scores.scores.num_top == num_top


def test_every_end_occurs(answers: list[Answer]) -> None:
    """Else the comparisons would show little."""
    choices = [choice for answer in answers for choice in answer.choices]
    ends = {(choice.finish_reason, type(choice.stop_reason)) for choice in choices}
    plain = {("length", type(None)), ("stop", type(None)), ("stop", str), ("stop", int)}
    assert ends == plain | {("tool_calls", type(None))}
    assert sum(choice.finish_reason == "length" for choice in choices) > len(choices) / 4
    assert len({choice.token_ids for choice in choices}) > 0.75 * len(choices), "greedy choices are alike"
    chats = [choice for answer in answers[-NUM_CHATS:] for choice in answer.choices]
    parts = {(bool(choice.reasoning), bool(choice.text)) for choice in chats}
    assert parts >= {(True, True), (True, False)}
    assert any(choice.tool_calls and choice.reasoning for choice in chats)
    assert any(len(choice.tool_calls) > 1 for choice in chats)
    assert all(answer.num_reasoning_tokens <= answer.num_completion_tokens for answer in answers)
    assert all(answer.num_reasoning_tokens or not any(c.reasoning for c in answer.choices) for answer in answers)


def test_every_end_occurs_over_other_apis(other_answers: list[ApiAnswer]) -> None:
    messages = [answer for answer in other_answers if answer.get("type") == "message"]
    responses = [answer for answer in other_answers if answer.get("object") == "response"]
    assert len(messages) + len(responses) == NUM_OTHERS
    assert {answer["stop_reason"] for answer in messages} >= {"max_tokens", "tool_use"}
    assert {block["type"] for answer in messages for block in answer["content"]} == {"text", "tool_use"}
    assert {answer["status"] for answer in responses} == {"completed", "incomplete"}
    items = {item["type"] for answer in responses for item in answer["output"]}
    assert items == {"reasoning", "message", "function_call"}


@pytest.mark.chaos
def test_disaggregated_or_not(split_fleet: Fleet, all_answers: list[Listening | ApiAnswer]) -> None:
    same(all_of(ALL, lambda request: heard_from(split_fleet, request)), all_answers)


def test_a_prompt_is_computed_and_transferred_once_for_all_its_answers(split_fleet: Fleet) -> None:
    """Each of the others computes one token of it at most, and has its own answer.

    They begin before the first has ended: from then on its prompt is found by whole blocks.
    """
    num_prompt, num_answer, num_choices = 400, 40, 8

    def served(prompt_number: int, n: int) -> tuple[int, float]:
        """The tokens that were computed for a request, and the bytes that were transferred."""
        before = num_computed(split_fleet), metric(split_fleet.routers[0], "baton_transfer_bytes_total")
        request = asks.seeded(prompt_of(prompt_number, num_prompt), num_answer, seed=5, n=n)
        answer = listening_to(split_fleet, request).answer
        assert [choice.token_ids for choice in answer.choices] == asks.expected(request)
        wait_until(lambda: num_computed(split_fleet) - before[0] >= num_prompt + n * (num_answer - 1))
        sent = metric(split_fleet.routers[0], "baton_transfer_bytes_total") - before[1]
        return num_computed(split_fleet) - before[0], sent

    _, bytes_of_one = served(9001, 1)
    computed, sent = served(9002, num_choices)
    print(f"{num_choices} answers to {num_prompt} tokens: {computed} computed, {sent / bytes_of_one:.2f} x the bytes")
    assert computed <= num_prompt + num_choices * (1 + num_answer)
    assert 0 < sent <= 1.05 * bytes_of_one


def test_the_best_of_several_are_what_they_should_be(split_fleet: Fleet) -> None:
    """Whole, by their mean score; also of a client that has one of them from a router that has died."""
    request = asks.seeded(prompt_of(77, 60), 12, seed=3, n=6)
    all_answers = listening_to(split_fleet, with_sampling(request, logprobs=0)).answer.choices
    means = [sum(choice.scores.logprobs) / len(choice.scores) for choice in all_answers]
    best = sorted(range(6), key=lambda index: -means[index])[:2]
    asked = with_sampling(request, n=2, best_of=6)
    answer = listening_to(split_fleet, asked).answer
    assert [choice.token_ids for choice in answer.choices] == [all_answers[index].token_ids for index in best]
    assert [choice.text for choice in answer.choices] == [all_answers[index].text for index in best]
    assert not any(choice.scores for choice in answer.choices)
    assert answer.num_completion_tokens == 72, "of all six"
    resumed = listening_to(split_fleet, replace(asked, request_id="best-of", resume_from={0: 12})).answer
    assert [choice.token_ids for choice in resumed.choices] == [(), answer.choices[1].token_ids]
    assert resumed.num_completion_tokens == 72


def with_sampling(request: GenerateRequest, **asked: object) -> GenerateRequest:
    return replace(request, sampling={**request.sampling, **asked})


def num_computed(fleet: Fleet) -> int:
    return sum(worker["computed_tokens"] for worker in fleet.client.status()["workers"])


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, id="drained", marks=pytest.mark.chaos), pytest.param(signal.SIGKILL, id="killed")],
)
def test_decode_workers_leave_in_the_middle(
    split_fleet: Fleet, all_answers: list[Listening | ApiAnswer], number: signal.Signals
) -> None:
    """One after the other, as long as there are requests; by the answers heard, so that each of them gets on."""
    done = threading.Event()
    answered = threading.Semaphore(0)

    def ask(request: GenerateRequest | ApiRequest) -> Listening | ApiAnswer:
        heard = heard_from(split_fleet, request)
        answered.release()
        return heard

    def leave() -> int:
        for count in itertools.count():
            decoding = split_fleet.started_as(Role.DECODE)
            split_fleet.wait_for(split_fleet.add(Role.DECODE), decoding[-1])
            for _ in range(NUM_BETWEEN_LEAVES):
                answered.acquire()
            if done.is_set():
                return count
            split_fleet.remove(decoding[0], number)
        raise AssertionError

    migrations_before = metric(split_fleet.routers[0], "baton_migrations_total")
    num_retried, num_migrated, num_interrupted = 0, 0.0, 0.0
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(leave)
        try:
            for _ in range(MAX_ROUNDS):
                heard = all_of(ALL, ask)
                same(heard, all_answers)
                num_retried += sum(one.retries > 0 for one in heard if isinstance(one, Listening))
                num_migrated = metric(split_fleet.routers[0], "baton_migrations_total") - migrations_before
                num_interrupted = num_migrated if number is signal.SIGTERM else num_retried
                if num_interrupted > NUM_INTERRUPTED:
                    break
        finally:
            done.set()
            answered.release(NUM_BETWEEN_LEAVES)
        num_left = leaving.result(60)
    print(f"{num_left} decode workers left, {num_retried} answers began anew elsewhere, {num_migrated} choices moved")
    assert num_left > 1
    assert num_interrupted > NUM_INTERRUPTED


def test_a_search_goes_on_where_the_leaving_worker_was(split_fleet: Fleet) -> None:
    """Its next worker computes what is left of it, and not all of it again."""
    num_tokens, width = 160, 4
    asked = {"temperature": 0.0, "top_k": 0, "use_beam_search": True, "beam_width": width, "early_stopping": "never"}
    request = with_sampling(asks.greedy(prompt_of(4242, 48), num_tokens), **asked)

    def computed() -> dict[str, int]:
        return {worker["id"]: worker["computed_tokens"] for worker in split_fleet.client.status()["workers"]}

    before = computed()
    with ThreadPoolExecutor(1) as pool:
        hearing = pool.submit(listening_to, split_fleet, request)

        def busy() -> str:
            """The worker that has done more than half of the search; empty: none yet."""
            most = num_tokens * width * 0.6
            found = (name for name, number in computed().items() if number - before.get(name, 0) > most)
            return next(found, "")

        wait_until(lambda: bool(busy()))
        left = busy()
        split_fleet.remove(left, signal.SIGTERM)
        heard = hearing.result(60)
    assert [choice.token_ids for choice in heard.answer.choices] == asks.expected(request)

    def computed_elsewhere() -> int:
        live = split_fleet.started_as(Role.DECODE)
        return sum(number - before.get(name, 0) for name, number in computed().items() if name in live)

    wait_until(lambda: computed_elsewhere() > 0)
    split_fleet.routers[0].wait_until_idle()
    print(f"{left} left; {computed_elsewhere()} of {num_tokens * width} tokens were computed elsewhere")
    assert computed_elsewhere() < num_tokens * width * 0.6
    split_fleet.wait_for(split_fleet.add(Role.DECODE))


@pytest.mark.chaos
def test_a_router_dies_in_the_middle(split_fleet: Fleet, answers: list[Answer], other_answers: list[ApiAnswer]) -> None:
    """Each client has half of its answer, and gets the rest from the other router; with another API all of it, anew."""
    first, second = split_fleet.routers
    all_of(OTHERS, lambda request: request.left(first.http, 6))
    listeners = [Listener(request) for request in REQUESTS]
    for batch in range(0, len(REQUESTS), len(REQUESTS) // 4):
        part = listeners[batch : batch + len(REQUESTS) // 4]
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(lambda one: one.listen(first, until=lambda: one.num_tokens >= 6), part))
    first.process.kill()
    first.process.wait(60)
    began_s = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(lambda one: one.listen(second), listeners))
    print(f"{len(REQUESTS)} answers resumed in {time.monotonic() - began_s:.1f} s")
    assert all_of(OTHERS, lambda request: request.answered(second.http, is_streamed=True)) == other_answers
    for request, listener, answer in zip(REQUESTS, listeners, answers, strict=True):
        heard = [all_of_choice(choice) for choice in listener.choices]
        expected = [all_of_choice(choice) for choice in answer.choices]
        assert heard == expected, request.sampling
        assert listener.num_completion_tokens == answer.num_completion_tokens
        assert listener.num_reasoning_tokens == answer.num_reasoning_tokens


def all_of_choice(choice: asks.Choice | Heard) -> tuple[Any, ...]:
    return (*(getattr(choice, field.name) for field in fields(asks.Choice)),)
