"""A GPU that computes nothing more in its worker's process: the worker ends, and others do what it was asked for.

A worker that stayed would fail each request at once, have nothing to do, and so attract the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from baton import wire
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from deploy.worker.process import LOST_S
from tests.chaos import asks
from tests.chaos.asks import listen
from tests.chaos.fleet import Fleet, running_fleet
from tests.support.asking import prompt_of
from tests.support.waiting import wait_until

STEP_MS = 8.0
NUM_TOKENS = 60
ENDS_S = 30.0
"""Time after which a worker is taken for one that stays, on whatever machine."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(TransferConfig(op_timeout_s=3.0), RouterConfig(mode="split"), step_ms=STEP_MS) as fleet:
        yield fleet


@pytest.mark.parametrize("role", Role)
def test_a_worker_whose_device_is_lost_ends_and_its_requests_do_not(role: Role, fleet: Fleet) -> None:
    workers = {each: [fleet.add(each) for _ in range(1 + (each is role))] for each in Role}
    fleet.wait_for(*workers[Role.PREFILL], *workers[Role.DECODE])
    victim, other = workers[role]
    requests = [
        replace(asks.seeded(prompt_of(seed, 600), NUM_TOKENS, seed=seed), request_id=f"lost-{role}-{seed}")
        for seed in range(8)
    ]
    with ThreadPoolExecutor(len(requests)) as threads:
        heard = [
            threads.submit(listen, fleet.inference.Generate(wire.generate_request(each), timeout=60))
            for each in requests
        ]
        wait_until(lambda: fleet.progress[victim].step_began_s > 0)
        fleet.progress[victim].lose_device()
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
