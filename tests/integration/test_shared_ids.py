"""Two tenants over two routers choose the same request ids, and each call gets its own answer, whatever happens.

Every answer is worked out without a cluster, so one token of another call's shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from baton.api import GenerateRequest
from baton.cluster import Role
from baton.config import RouterConfig, SloClassConfig, TransferConfig
from deploy.operator.client import Client
from tests.chaos import asks
from tests.chaos.fleet import Fleet, running_fleet
from tests.support.listener import Listener
from tests.support.operator import OPERATOR_ENTRY
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

NUM_REQUESTS = int(os.environ.get("SHARED_ID_REQUESTS", "36"))
IDS = ("1", "order-7", "shared/0/0", "x" * 128, "null", "2")
TENANTS = ("alice", "bob")
NUM_BETWEEN_LEAVES = 10
"""Answers heard before the next worker leaves."""
TRANSFER = TransferConfig(op_timeout_s=3.0, ping_s=0.5)
NUM_BEFORE = 4
"""Tokens that a client has of an answer before it hangs up."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two routers; the first one does not survive the last test."""
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    entries = (f"{name}: {{key_sha256: ['{hashlib.sha256(name.encode()).hexdigest()}']}}\n" for name in TENANTS)
    tenants.write_text(OPERATOR_ENTRY + "".join(entries))
    unhurried = {"default": SloClassConfig(ttft_ms=600_000.0)}  # nothing is shed where the machine is slow
    router = RouterConfig(
        mode="disaggregated",
        cache_secret="shared-ids",
        max_attempts=64,
        slo_classes=unhurried,
        tenants_file=str(tenants),
    )
    with running_fleet(TRANSFER, router, num_routers=2, step_ms=8.0, lease_s=15.0) as fleet:
        fleet.wait_for(*(fleet.add(role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)))
        yield fleet


def request(number: int, request_id: str) -> GenerateRequest:
    """Every third one is a long beam search, which carries most state when it migrates."""
    asked = asks.of_options(number)
    if number % 3 == 0:
        search = {"temperature": 0.0, "top_k": 0, "use_beam_search": True, "beam_width": 2 + number % 4}
        asked = asks.greedy(asked.prompt.ids, 40 + number % 60)  # type: ignore[union-attr]
        asked = replace(asked, sampling={**asked.sampling, **search, "seed": number, "n": 1 + number % 2})
    return replace(asked, request_id=request_id)


def check(asked: GenerateRequest, choices: list[tuple[int, ...]], reasons: list[str]) -> None:
    """The tokens are those of this request; where a stop string may end it, their beginning."""
    for tokens, reason, expected in zip(choices, reasons, asks.expected(asked), strict=True):
        assert tokens == expected[: len(tokens)], asked
        assert len(tokens) == len(expected) or reason == "stop", asked


def ask(asked: GenerateRequest, address: str, tenant: str) -> None:
    with contextlib.closing(Client(address, tenant)) as client:
        answer = asks.listen(client.generate(asked)).answer
    check(asked, [each.token_ids for each in answer.choices], [each.finish_reason for each in answer.choices])


@contextlib.contextmanager
def leaving(fleet: Fleet) -> Iterator[Callable[[], None]]:
    """Decode workers leave while the block is entered: drained, killed and drained again.

    Yields:
        To be called after each answer.
    """
    answered, is_over, num_left = threading.Semaphore(0), threading.Event(), 0

    def leave() -> None:
        nonlocal num_left
        for number in itertools.cycle((signal.SIGTERM, signal.SIGKILL)):
            leaver, stays = fleet.started_as(Role.DECODE)[0], fleet.started_as(Role.DECODE)[1]
            fleet.wait_for(fleet.add(Role.DECODE), stays)
            for _ in range(NUM_BETWEEN_LEAVES):
                answered.acquire()
            if is_over.is_set():
                return
            fleet.remove(leaver, number)
            num_left += 1

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(leave)
        try:
            yield answered.release
        finally:
            is_over.set()
            answered.release(NUM_BETWEEN_LEAVES)
            going.result(120)
    print(f"{num_left} decode workers left")
    assert num_left >= 2


def test_everybody_uses_the_same_ids_while_workers_drain_and_die(fleet: Fleet) -> None:
    """Both tenants over both routers: four calls of each id at a time."""
    callers = list(itertools.product(TENANTS, fleet.routers, IDS))
    numbers = iter(range(NUM_REQUESTS))
    taking = threading.Lock()

    def go_on(caller: tuple[str, object, str]) -> None:
        tenant, router, request_id = caller
        while True:
            with taking:
                number = next(numbers, None)
            if number is None:
                return
            ask(request(number, request_id), router.grpc, tenant)  # type: ignore[attr-defined]
            has_answered()

    with leaving(fleet) as has_answered, ThreadPoolExecutor(len(callers)) as pool:
        for going in [pool.submit(go_on, caller) for caller in callers]:
            going.result(120 + 2 * NUM_REQUESTS)


def test_an_answer_goes_on_at_the_router_where_another_tenants_runs(fleet: Fleet) -> None:
    """Each tenant hangs up at its router, while the other one's request of the same id is there, and changes over."""

    def change_over(number: int) -> None:
        tenant = number % 2
        asked = request(1000 + number, IDS[number // 2 % len(IDS)])
        listener = Listener(asked)
        for place, until in ((tenant, NUM_BEFORE), (1 - tenant, 10**6)):
            listener.listen(
                fleet.routers[place],
                until=lambda until=until: listener.num_tokens >= until,  # type: ignore[misc]
                api_key=TENANTS[tenant],
            )
        reasons = [str(heard.finish_reason) for heard in listener.choices]
        check(asked, [heard.token_ids for heard in listener.choices], reasons)

    with ThreadPoolExecutor(2 * len(IDS)) as pool:
        for _ in range(max(1, NUM_REQUESTS // 120)):
            list(pool.map(change_over, range(2 * len(IDS))))


@pytest.mark.parametrize("seed", range(2))
def test_each_tenant_sees_its_own_requests_alone(fleet: Fleet, seed: int) -> None:
    """Operators see both, with whose they are."""
    request_id = f"seen-{seed}"
    asked = {tenant: request(random.Random(f"{seed}{tenant}").randrange(100, 900), request_id) for tenant in TENANTS}
    for place, tenant in enumerate(TENANTS):
        ask(asked[tenant], fleet.routers[place].grpc, tenant)
    known = [timeline for router in fleet.routers for timeline in router.client.timelines(request_id)]
    assert sorted(timeline.summary.tenant for timeline in known) == sorted(TENANTS)
    for timeline in known:
        num_prompt = len(asked[timeline.summary.tenant].prompt.ids)  # type: ignore[union-attr]
        assert timeline.summary.num_prompt_tokens == num_prompt


def test_a_router_dies_and_its_answers_go_on_where_the_others_are(fleet: Fleet) -> None:
    """Alice's calls continue at Bob's router, where his have their ids."""
    first, second = fleet.routers
    callers = itertools.product(TENANTS, IDS)
    asked = [(tenant, request(2000 + number, request_id)) for number, (tenant, request_id) in enumerate(callers)]
    addresses = {"alice": f"{first.grpc},{second.grpc}", "bob": second.grpc}
    begun = threading.Barrier(len(asked) + 1)

    def go_on(tenant: str, one: GenerateRequest) -> None:
        begun.wait(60)
        ask(one, addresses[tenant], tenant)

    with ThreadPoolExecutor(len(asked)) as pool:
        going = [pool.submit(go_on, *each) for each in asked]
        begun.wait(60)
        wait_until(lambda: sum(worker["running"] for worker in second.client.status()["workers"]) > len(IDS))
        first.process.kill()
        first.process.wait(60)
        for each in going:
            each.result(120)
