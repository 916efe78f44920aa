"""SIGKILL at every point of one request's life: the client hears the same bytes each time."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from baton import wire
from baton.api import Explanation, GenerateRequest
from baton.cluster import Role
from baton.config import Config, FaultsConfig, RouterConfig, TransferConfig
from tests.chaos import asks
from tests.chaos.asks import Listening, listen
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import is_idle
from tests.support.asking import metric
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

    def ask_and_kill(self, request: GenerateRequest, after_tokens: int, delay_s: float = 0.0) -> Listening:
        """The worker dies once the client has so many tokens, and that long; with 0, once the request is placed."""
        request = replace(request, request_id=f"killed-{next(_NUMBERS)}")
        victims: list[str] = []

        def kill(num_tokens: int) -> None:
            if num_tokens >= after_tokens and not victims:
                victims.append(self._served_by(request.request_id))
                time.sleep(delay_s)
                # One that nobody talked to as it died is listed for a while: then this request meets a dead worker.
                if victims[0] in self.fleet.workers:
                    self.fleet.send(victims[0], signal.SIGKILL)

        parts = self.fleet.inference.Generate(wire.generate_request(request), timeout=60)
        if after_tokens == 0:
            kill(0)
        heard = listen(parts, kill)
        (victim,) = victims
        if victim in self.fleet.workers:
            self.fleet.remove(victim, signal.SIGKILL)
            self.add(self._role)
        return heard

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
    killer = Killer(fleet, role, replace(fleet.config, faults=FaultsConfig(spec=faults)))
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
    "seeded": lambda: asks.seeded(asks.prompt_of(2, 50), NUM_TOKENS, seed=11),
    "stop string": lambda: asks.seeded(asks.prompt_of(3, 50), 3 * NUM_TOKENS // 2, seed=12),
}


@pytest.mark.parametrize("mode", ["split", "aggregated"])
def test_the_decode_worker_dies_at_every_token(fleets: Fleets, mode: str) -> None:
    with killing(fleets(mode), Role.DECODE) as killer:
        for kind, make in REQUESTS.items():
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
            heard = [killer.ask_and_kill(request, index) for index in range(num_tokens)]
            wrong = [index for index, listening in enumerate(heard) if listening.answer != answer]
            assert not wrong, (kind, wrong, heard[wrong[0]].answer, answer)
            num_retried = sum(listening.retries > 0 for listening in heard)
            print(
                f"{mode}, {kind}: killed at each of {num_tokens} tokens, {num_retried} times while it was decoding; "
                f"longest gap {max(listening.longest_gap_s for listening in heard) * 1e3:.0f} ms"
            )
            # What is killed as it sends the last tokens has done its work.
            assert num_retried >= num_tokens - 5


@pytest.mark.parametrize(("after_tokens", "faults"), [(0, ""), (1, "link_delay_ms=100")])
def test_the_prefill_worker_dies(fleets: Fleets, after_tokens: int, faults: str) -> None:
    """Before the first token, at every stage of the prompt; and after it, while the last of its KV is on the way."""
    with killing(fleets("split"), Role.PREFILL, faults) as killer:
        num_retried = 0
        for number in range(20):
            request = asks.seeded(asks.prompt_of(100 + number, NUM_LONG_PROMPT_TOKENS), 8, seed=number)
            heard = killer.ask_and_kill(request, after_tokens, delay_s=number * 2e-3)
            assert [choice.token_ids for choice in heard.answer.choices] == asks.expected(request)
            assert heard.answer == killer.ask(request).answer
            num_retried += heard.retries > 0
        # What was killed too late for its last chunk has done its work.
        print(f"{'before' if after_tokens == 0 else 'after'} the first token: {num_retried} of 20 placed again")
        assert num_retried >= 15


def placements_on(fleet: Fleet) -> dict[str, float]:
    """How often each decode worker that is alive was chosen."""
    router = fleet.routers[0]
    workers = [worker for worker in fleet.workers if worker.startswith(Role.DECODE)]
    return {worker: metric(router, "baton_placements_total", f'decode="{worker}"') for worker in workers}


def test_a_long_answer_outlives_more_workers_than_may_fail_in_a_row(fleets: Fleets) -> None:
    num_deaths, num_between = 6, 70
    with killing(fleets("split"), Role.DECODE) as killer:
        fleet = killer.fleet
        request = asks.seeded(asks.prompt_of(4, 50), (num_deaths + 3) * num_between, seed=13)
        num_killed = 0
        placed_before = placements_on(fleet)

        def kill(num_tokens: int) -> None:
            nonlocal num_killed, placed_before
            if num_killed == num_deaths or num_tokens < (num_killed + 1) * num_between:
                return
            placed = placements_on(fleet)
            # A worker says that it is running a while after it has begun, and after it has ended.
            running = {worker["id"] for worker in fleet.client.status()["workers"] if worker["running"]}
            serving = [worker for worker in running if placed.get(worker, 0) > placed_before.get(worker, 0)]
            if len(serving) == 1:
                fleet.remove(serving[0], signal.SIGKILL)
                killer.add(Role.DECODE)
                num_killed += 1
                placed_before = placed

        heard = listen(fleet.inference.Generate(wire.generate_request(request), timeout=120), kill)
        assert [choice.token_ids for choice in heard.answer.choices] == asks.expected(request)
        assert num_killed == num_deaths
        assert heard.retries >= num_deaths, "one that died did not serve it"
