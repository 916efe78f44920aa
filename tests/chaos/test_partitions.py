"""Processes that live and cannot hear each other: every stream ends with its tokens, and after the healing all is used.

A fleet of real processes, with a proxy before each part that is cut off. Answers are long, so that they are in flight
when the cut comes and would still be when it is noticed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from baton import wire
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos import asks
from tests.chaos.asks import Listening, listen
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import is_idle
from tests.support.asking import prompt_of
from tests.support.proxy import Proxy, Way
from tests.support.waiting import wait_until

STEP_MS = 20.0
NUM_PROMPT_TOKENS = 40
NUM_TOKENS = 100
"""Two seconds of steps."""
PER_WORKER = 2
"""Streams in flight for each decode worker."""
HANGS_S = 60.0
"""A worker that is cut off is noticed within 8 seconds, and a stream may meet several."""
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    transfer = TransferConfig(op_timeout_s=4.0, ping_s=0.5)
    router = RouterConfig(
        mode="disaggregated", max_attempts=8, cache_secret="cut"
    )  # a stream may meet all that are cut off
    with running_fleet(transfer, router, step_ms=STEP_MS, lease_s=20.0) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def no_workers_afterwards(fleet: Fleet) -> Iterator[None]:
    yield
    fleet.clear()
    wait_until(lambda: not fleet.client.status()["workers"])


@dataclass
class Asked:
    """A stream that is heard in a thread of its own."""

    id: str
    expected: list[tuple[int, ...]]
    heard: Future[Listening] = field(default_factory=Future)
    begun: threading.Event = field(default_factory=threading.Event)
    """It has a token of its decode worker: the first one comes before the KV is there."""

    def hears(self, num_tokens: int) -> None:
        if num_tokens > 1:
            self.begun.set()


class Streams:
    """Asks for streams that take two seconds, of which none may hang."""

    def __init__(self, fleet: Fleet, threads: ThreadPoolExecutor) -> None:
        self._fleet = fleet
        self._threads = threads

    def ask(self, num_tokens: int = NUM_TOKENS) -> Asked:
        number = next(_NUMBERS)
        request = asks.seeded(prompt_of(number, NUM_PROMPT_TOKENS), num_tokens, seed=number)
        request = replace(request, request_id=f"cut-{number}")
        asked = Asked(request.request_id, asks.expected(request))
        parts = self._fleet.inference.Generate(wire.generate_request(request), timeout=HANGS_S)
        asked.heard = self._threads.submit(listen, parts, asked.hears)
        return asked

    def in_flight(self, num: int, num_tokens: int = NUM_TOKENS) -> list[Asked]:
        """Streams of which each has begun at its decode worker."""
        asked = [self.ask(num_tokens) for _ in range(num)]
        for each in asked:
            assert each.begun.wait(30), f"{each.id} does not begin"
        return asked

    def served_by(self, asked: Asked) -> str:
        (placed,) = self._fleet.client.explain(asked.id)
        return placed.decode_worker

    def served(self, worker_id: str) -> bool:
        """Whether one of more requests than there are workers came to that one."""
        asked = [self.ask(NUM_TOKENS // 10) for _ in range(2 * len(self._fleet.workers))]
        retries(asked)
        return worker_id in map(self.served_by, asked)


def retries(asked: list[Asked]) -> dict[str, int]:
    """Those that had to be retried, and how often, once all of them have their tokens."""
    heard = [each.heard.result(HANGS_S) for each in asked]
    for each, listening in zip(asked, heard, strict=True):
        assert [choice.token_ids for choice in listening.answer.choices] == each.expected, each.id
    return {each.id: listening.retries for each, listening in zip(asked, heard, strict=True) if listening.retries}


def listed(fleet: Fleet, worker_id: str) -> dict[str, Any]:
    """What the router shows of a worker, whose lease may lapse for a moment on a busy machine."""
    return wait_until(lambda: fleet.routers[0].worker(worker_id), not_yet=(StopIteration,))


@contextlib.contextmanager
def asking(fleet: Fleet) -> Iterator[Streams]:
    """Afterwards all workers are idle and keep their books."""
    with ThreadPoolExecutor(64) as threads:
        yield Streams(fleet, threads)
    wait_until(lambda: all(is_idle(w) for w in fleet.client.status()["workers"]), seen=lambda: fleet.client.status())


@pytest.mark.chaos
def test_a_router_is_cut_from_decode_workers_that_their_prefill_peer_still_hears(fleet: Fleet) -> None:
    """In both directions, in either one, and half-open; one more worker is left."""
    router = fleet.routers[0].process.pid
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy()) for _ in range(4)]
        unheard, deaf, mute, forgotten = victims = [fleet.add(Role.DECODE, behind=proxy) for proxy in proxies]
        spare = fleet.add(Role.DECODE)
        fleet.wait_for(fleet.add(Role.PREFILL), *victims, spare)
        streams = stack.enter_context(asking(fleet))
        asked = streams.in_flight(PER_WORKER * (len(victims) + 1), 3 * NUM_TOKENS)
        served_by = {each.id: streams.served_by(each) for each in asked}
        assert set(served_by.values()) >= set(victims)
        for proxy, way in zip(proxies, (Way.BOTH, Way.TO_SERVER, Way.TO_CLIENT), strict=False):
            proxy.cut(way, router)
        proxies[-1].forget()
        asked += [streams.ask() for _ in range(PER_WORKER)]  # which may come to one that is cut off
        retried = retries(asked)
        # One that is deaf goes on to answer; what it is asked from now on does not reach it.
        assert retried.keys() >= {
            name for name, worker_id in served_by.items() if worker_id in (unheard, mute, forgotten)
        }
        for worker_id in (unheard, deaf, mute):
            assert listed(fleet, worker_id)["transfers"]["failed"] == 0, "its peer hears it"
        for proxy in proxies:
            proxy.heal()
        for worker_id in victims:
            wait_until(lambda worker_id=worker_id: streams.served(worker_id), 60.0)  # type: ignore[misc]


def test_a_worker_that_is_cut_from_redis_goes_on_with_its_streams(fleet: Fleet) -> None:
    """Once its lease has ended nothing new comes to it, and once it is back it is as good as the other."""
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(Proxy(urlsplit(fleet.config.index.redis_url).port or 0))
        index = replace(fleet.config.index, redis_url=f"redis://127.0.0.1:{proxy.port}/0", lease_s=2.0)
        victim = fleet.add(Role.DECODE, config=replace(fleet.config, index=index))
        other = fleet.add(Role.DECODE)
        fleet.wait_for(fleet.add(Role.PREFILL), victim, other)
        epoch = listed(fleet, victim)["epoch"]
        streams = stack.enter_context(asking(fleet))
        asked = streams.in_flight(2 * PER_WORKER, 6 * NUM_TOKENS)
        assert {streams.served_by(each) for each in asked} == {victim, other}
        proxy.cut()
        wait_until(lambda: victim not in {worker["id"] for worker in fleet.client.status()["workers"]})
        assert not any(each.heard.done() for each in asked)
        assert not retries(asked)
        assert not streams.served(victim)
        proxy.heal()
        fleet.wait_for(victim)
        assert listed(fleet, victim)["epoch"] > epoch
        wait_until(lambda: streams.served(victim), 60.0)


def test_a_prefill_worker_is_cut_from_a_decode_worker_that_the_router_hears(fleet: Fleet) -> None:
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(Proxy())
        victim, other = fleet.add(Role.DECODE, behind=proxy), fleet.add(Role.DECODE)
        prefill = fleet.add(Role.PREFILL)
        fleet.wait_for(prefill, victim, other)
        streams = stack.enter_context(asking(fleet))
        asked = streams.in_flight(2 * PER_WORKER)
        assert {streams.served_by(each) for each in asked} == {victim, other}
        proxy.cut(pid=fleet.workers[prefill].pid)
        met = wait_until(lambda: retries([streams.ask() for _ in range(2 * PER_WORKER)]), 60.0)
        assert not retries(asked), "they have their KV"
        assert set(met.values()) == {1}, "each meets the worker that is cut off once, or not at all"
        proxy.heal()
        wait_until(lambda: streams.served(victim), 60.0)


def test_what_comes_late_is_not_given_up(fleet: Fleet) -> None:
    with Proxy() as proxy, asking(fleet) as streams:
        fleet.wait_for(fleet.add(Role.DECODE, behind=proxy), fleet.add(Role.PREFILL))
        proxy.delay_s = 0.3
        assert not retries([streams.ask() for _ in range(PER_WORKER)])
