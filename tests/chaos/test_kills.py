"""SIGKILL at every point of one request's life: the client hears the same bytes each time."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest

from baton import wire
from baton.api import Explanation, GenerateRequest
from baton.cluster import Role
from baton.config import Config, RouterConfig, TransferConfig
from tests.chaos import asks
from tests.chaos.asks import Listening, listen
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import is_idle
from tests.support.asking import metric, prompt_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.first

NUM_TOKENS = 24
STEP_MS = 8.0
"""Long enough to kill within the token that is meant."""
IS_LONG = "CHAOS_SECONDS" in os.environ
NUM_VICTIMS = 3
"""Workers of the role that is killed: one dies, one takes over, and one may be on its way."""
TRANSFER = TransferConfig(op_timeout_s=3.0, ping_s=0.5)
NUM_LONG_PROMPT_TOKENS = 1500
"""Three steps, so three parts of it leave for the decode worker one after the other."""


_NUMBERS = itertools.count()
"""Of requests: their ids are new to the router, which the tests share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A request whose worker was killed."""

    heard: Listening
    num_drawn: int
    """Tokens that the worker had drawn of it when it was dead."""
    step_age_s: float
    """From the begin of the worker's last step to its death."""

    @property
    def is_retried(self) -> bool:
        return self.heard.retries > 0


class Killer:
    """Asks, and kills the worker that serves."""

    def __init__(self, fleet: Fleet, role: Role, config: Config) -> None:
        self.fleet = fleet
        self._role = role
        self._config = config

    def add(self, role: Role) -> str:
        return self.fleet.add(role, config=self._config)

    def ask(self, request: GenerateRequest) -> Listening:
        """Undisturbed."""
        return listen(self.fleet.inference.Generate(wire.generate_request(request), timeout=60))

    def ask_and_kill(self, request: GenerateRequest, after_tokens: int, delay_s: float = 0.0) -> Killed:
        """The worker dies once the client has so many tokens, and that long; with 0, once the request is placed."""
        request = replace(request, request_id=f"killed-{next(_NUMBERS)}")
        victims: list[str] = []
        drawn_before = {worker: self.fleet.progress[worker].num_drawn for worker in self.fleet.workers}
        died_s = 0.0

        def kill(num_tokens: int) -> None:
            nonlocal died_s
            if num_tokens >= after_tokens and not victims:
                victims.append(self._served_by(request.request_id))
                time.sleep(delay_s)
                # One that nobody talked to as it died is listed for a while: then this request meets a dead worker.
                if victims[0] in self.fleet.workers:
                    self.fleet.send(victims[0], signal.SIGKILL)
                    self.fleet.workers[victims[0]].join(30)
                    died_s = time.monotonic()

        parts = self.fleet.inference.Generate(wire.generate_request(request), timeout=60)
        if after_tokens == 0:
            kill(0)
        heard = listen(parts, kill)
        (victim,) = victims
        progress = self.fleet.progress[victim]
        killed = Killed(
            heard=heard,
            num_drawn=progress.num_drawn - drawn_before[victim] if victim in drawn_before else 0,
            step_age_s=died_s - progress.step_began_s,
        )
        if victim in self.fleet.workers:
            self.fleet.remove(victim, signal.SIGKILL)
            self.add(self._role)
        return killed

    def _served_by(self, request_id: str) -> str:
        placed = wait_until(lambda: self.fleet.client.explain(request_id), every_s=0.0)
        return _worker(placed[0], self._role)


def _worker(placed: Explanation, role: Role) -> str:
    return placed.prefill_worker if role is Role.PREFILL else placed.decode_worker


Fleets = Callable[[str], Fleet]


@pytest.fixture(scope="module")
def fleets() -> Iterator[Fleets]:
    """A router of each mode, started when it is first asked for; each test brings workers of its own."""
    with ExitStack() as stack:

        @functools.cache
        def fleet_of(mode: str) -> Fleet:
            router = RouterConfig(mode=mode, max_attempts=4, cache_secret="kills")
            return stack.enter_context(running_fleet(TRANSFER, router, step_ms=STEP_MS))

        yield fleet_of


@contextmanager
def killing(fleet: Fleet, role: Role, faults: str = "") -> Iterator[Killer]:
    """Afterwards, whoever is left holds nothing and has found nothing amiss."""
    killer = Killer(fleet, role, replace(fleet.config, testing=replace(fleet.config.testing, faults=faults)))
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    try:
        fleet.wait_for(*(killer.add(role) for _ in range(NUM_VICTIMS)), killer.add(other))
        yield killer
        fleet.wait_for(*fleet.workers)
        wait_until(
            lambda: {w["id"] for w in fleet.client.status()["workers"] if is_idle(w)} >= set(fleet.workers),
            seen=lambda: fleet.client.status(),
        )
    finally:
        fleet.clear()


REQUESTS: dict[str, Callable[[], GenerateRequest]] = {
    "greedy": lambda: asks.of_split_character(NUM_TOKENS),
    "seeded": lambda: asks.seeded(prompt_of(2, 50), NUM_TOKENS, seed=11),
    "stop string": lambda: asks.seeded(prompt_of(3, 50), 3 * NUM_TOKENS // 2, seed=12),
}
STRIDES = dict.fromkeys(REQUESTS, 1) if IS_LONG else {"greedy": 3, "seeded": 6, "stop string": 6}
"""Tokens of the answer from one death to the next: in `make chaos` a worker dies at every single one."""
NUM_PROMPTS = 20 if IS_LONG else 8
"""In each of which a prefill worker dies a little later than in the one before."""


@pytest.mark.parametrize("mode", ["disaggregated", pytest.param("aggregated", marks=pytest.mark.chaos)])
def test_the_decode_worker_dies_at_any_token(fleets: Fleets, mode: str) -> None:
    with killing(fleets(mode), Role.DECODE) as killer:
        for kind, make in REQUESTS.items():
            stride = STRIDES[kind]
            if mode == "aggregated" and kind == "greedy" and not IS_LONG:
                continue
            request = make()
            answer = killer.ask(request).answer
            assert [choice.token_ids for choice in answer.choices] == asks.expected(request)
            if kind == "stop string":
                whole = answer
                request = asks.stopped_by(request, whole, share=0.6)
                answer = killer.ask(request).answer
                (stopped,), (unstopped,) = answer.choices, whole.choices
                assert stopped.finish_reason == "stop"
                assert unstopped.text.startswith(stopped.text), "cut where the string begins"
                assert len(stopped.token_ids) < len(unstopped.token_ids)
            num_tokens = answer.num_completion_tokens
            killed = {index: killer.ask_and_kill(request, index) for index in range(0, num_tokens, stride)}
            wrong = [index for index, one in killed.items() if one.heard.answer != answer]
            assert not wrong, (kind, wrong, killed[wrong[0]].heard.answer, answer)
            # A worker that dies when it has drawn the last token may have sent it, and done its work.
            num_to_draw = num_tokens - 1 if mode == "disaggregated" else num_tokens
            unfinished = [index for index, one in killed.items() if one.num_drawn < num_to_draw]
            num_retried = sum(one.is_retried for one in killed.values())
            print(
                f"{mode}, {kind}: killed at {len(killed)} of {num_tokens} tokens, {len(unfinished)} times while "
                f"decoding, placed again {num_retried} times; "
                f"longest gap {max(one.heard.longest_gap_s for one in killed.values()) * 1e3:.0f} ms"
            )
            assert [index for index in unfinished if not killed[index].is_retried] == []
            assert num_retried >= len(killed) - math.ceil(5 / stride)


@pytest.mark.parametrize(("after_tokens", "link_delay_ms"), [(0, 0), pytest.param(1, 100, marks=pytest.mark.chaos)])
def test_the_prefill_worker_dies(fleets: Fleets, after_tokens: int, link_delay_ms: int) -> None:
    """Before the first token, at every stage of the prompt; and after it, while the last of its KV is on the way."""
    faults = f"link_delay_ms={link_delay_ms}" if link_delay_ms else ""
    with killing(fleets("disaggregated"), Role.PREFILL, faults) as killer:
        unfinished = []
        num_retried = 0
        for number in range(NUM_PROMPTS):
            request = asks.seeded(prompt_of(100 + number, NUM_LONG_PROMPT_TOKENS), 8, seed=number)
            killed = killer.ask_and_kill(request, after_tokens, delay_s=number * 0.04 / NUM_PROMPTS)
            assert [choice.token_ids for choice in killed.heard.answer.choices] == asks.expected(request)
            assert killed.heard.answer == killer.ask(request).answer
            num_retried += killed.is_retried
            # Its last part of the KV is computed in its last step, and is sent no sooner than the link allows.
            if killed.num_drawn == 0 or killed.step_age_s < link_delay_ms / 1e3:
                unfinished.append((number, killed))
        print(
            f"{'before' if after_tokens == 0 else 'after'} the first token: {len(unfinished)} of {NUM_PROMPTS} killed "
            f"in their work, {num_retried} placed again"
        )
        assert [number for number, killed in unfinished if not killed.is_retried] == []
        assert num_retried >= 0.75 * NUM_PROMPTS


def placements_on(fleet: Fleet) -> dict[str, float]:
    """How often each decode worker that is alive was chosen."""
    router = fleet.routers[0]
    workers = fleet.started_as(Role.DECODE)
    return {worker: metric(router, "baton_placements_total", f'decode="{worker}"') for worker in workers}


@pytest.mark.chaos
def test_a_long_answer_outlives_more_workers_than_may_fail_in_a_row(fleets: Fleets) -> None:
    num_deaths, num_between = 6, 70
    with killing(fleets("disaggregated"), Role.DECODE) as killer:
        fleet = killer.fleet
        request = asks.seeded(prompt_of(4, 50), (num_deaths + 8) * num_between, seed=13)
        num_killed = 0
        placed_before = placements_on(fleet)

        def kill(num_tokens: int) -> None:
            nonlocal num_killed, placed_before
            if num_killed == num_deaths or num_tokens < (num_killed + 1) * num_between:
                return
            placed = placements_on(fleet)
            serving = [worker for worker in placed if placed[worker] > placed_before.get(worker, 0)]
            if len(serving) > 1:
                # A worker says that it is running a while after it has begun, and after it has ended.
                running = {worker["id"] for worker in fleet.client.status()["workers"] if worker["running"]}
                serving = [worker for worker in serving if worker in running]
            if len(serving) == 1:
                fleet.remove(serving[0], signal.SIGKILL)
                killer.add(Role.DECODE)
                num_killed += 1
                placed_before = placed

        heard = listen(fleet.inference.Generate(wire.generate_request(request), timeout=120), kill)
        assert [choice.token_ids for choice in heard.answer.choices] == asks.expected(request)
        assert num_killed == num_deaths
        # A worker that has just died may be met once more before all know of it.
        assert num_deaths <= heard.retries <= 2 * num_deaths, (
            "one that died did not serve it, or was met again and again"
        )
