"""A GPU that computes nothing more in its worker's process, whether it says so or hangs: the worker ends, and others do
what it was asked for.

A worker that stayed would fail each request at once, have nothing to do, and so attract the next one. One that hangs
would take the next one, too, and never answer it, while its lease is renewed and its health checks are answered.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from baton import wire
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos import asks
from tests.chaos.asks import listen
from tests.chaos.fleet import Fleet, Progress, running_fleet
from tests.support.asking import prompt_of
from tests.support.waiting import wait_until
from worker.process import LOST_S

STEP_MS = 8.0
STEP_TIMEOUT_S = 3.0
NUM_TOKENS = 60
ENDS_S = 30.0
"""Time after which a worker is taken for one that stays, on whatever machine."""
BREAKS = {"fails": Progress.lose_device, "hangs": Progress.hang_device}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    transfer, router = TransferConfig(op_timeout_s=3.0), RouterConfig(mode="disaggregated")
    with running_fleet(transfer, router, step_ms=STEP_MS, step_timeout_s=STEP_TIMEOUT_S) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("role", "breaks"),
    [
        pytest.param(role, BREAKS[breaks], id=f"{role}-{breaks}", marks=marks)
        for role, breaks, marks in (
            (Role.PREFILL, "hangs", ()),
            (Role.DECODE, "fails", ()),
            (Role.PREFILL, "fails", pytest.mark.full),
            (Role.DECODE, "hangs", pytest.mark.full),
        )
    ],
)
def test_a_worker_whose_device_is_lost_ends_and_its_requests_do_not(
    role: Role, breaks: Callable[[Progress], None], fleet: Fleet
) -> None:
    workers = {each: [fleet.add(each) for _ in range(1 + (each is role))] for each in Role}
    fleet.wait_for(*workers[Role.PREFILL], *workers[Role.DECODE])
    victim, other = workers[role]
    requests = [
        replace(asks.seeded(prompt_of(seed, 600), NUM_TOKENS, seed=seed), request_id=f"{victim}-{seed}")
        for seed in range(8)
    ]
    with ThreadPoolExecutor(len(requests)) as threads:
        heard = [
            threads.submit(listen, fleet.inference.Generate(wire.generate_request(each), timeout=60))
            for each in requests
        ]
        wait_until(lambda: fleet.progress[victim].step_began_s > 0)
        breaks(fleet.progress[victim])
        answers = [each.result(60) for each in heard]
    for request, each in zip(requests, answers, strict=True):
        assert [choice.token_ids for choice in each.answer.choices] == asks.expected(request)
    assert sum(each.retries for each in answers) > 0
    process = fleet.workers[victim]
    process.join(LOST_S + ENDS_S)
    assert process.exitcode == 1, "neither what waits for the device nor a status of success keeps it from a new start"
    listed = wait_until(lambda: [w["id"] for w in fleet.client.status()["workers"] if w["role"] == role])
    assert other in listed
    wait_until(lambda: victim not in [w["id"] for w in fleet.client.status()["workers"]])
    fleet.clear()


def test_a_worker_that_is_to_leave_while_its_device_hangs_ends(fleet: Fleet) -> None:
    """Nothing waits for its last step without a limit, and its requests move."""
    decoding = [fleet.add(Role.DECODE) for _ in range(2)]
    fleet.wait_for(fleet.add(Role.PREFILL), *decoding)
    request = replace(asks.seeded(prompt_of(1, 40), 10 * NUM_TOKENS, seed=1), request_id="leaves")
    with ThreadPoolExecutor(1) as threads:
        heard = threads.submit(listen, fleet.inference.Generate(wire.generate_request(request), timeout=60))
        victim = wait_until(lambda: next((each for each in decoding if fleet.progress[each].num_drawn > 3), None))
        fleet.progress[victim].hang_device()
        fleet.send(victim, signal.SIGTERM)
        answer = heard.result(60)
    assert [choice.token_ids for choice in answer.answer.choices] == asks.expected(request)
    process = fleet.workers[victim]
    process.join(STEP_TIMEOUT_S + LOST_S + ENDS_S)
    assert process.exitcode == 1
    fleet.clear()
