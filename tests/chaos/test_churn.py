"""Workers join and leave under load, and no request notices."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import is_idle
from tests.support.load import Clients, Requests, Stream
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

SECONDS = float(os.environ.get("CHAOS_SECONDS", "20"))
PERIOD_S = 2.0
NUM_CLIENTS = 6


class Load(Clients):
    """Clients that ask one request after the other, and check every token."""

    def __init__(self, fleet: Fleet) -> None:
        self.num_retries = 0
        self._fleet = fleet
        super().__init__(self._ask, NUM_CLIENTS)

    def _ask(self, number: int) -> Requests:
        rng = random.Random(number)
        while True:
            prompt = [rng.randrange(1, 40_000) for _ in range(rng.randrange(20, 600))]
            stream = Stream(inference=self._fleet.inference, prompt=prompt, max_tokens=rng.randrange(1, 150))
            yield stream.served
            self.num_retries += stream.retries


def test_workers_join_and_leave_and_no_request_fails() -> None:
    rng = random.Random(7)
    transfer = TransferConfig(op_timeout_s=3.0, ping_s=0.5)
    with running_fleet(transfer, RouterConfig(mode="disaggregated", max_attempts=8, cache_secret="chaos")) as fleet:
        alive = {role: [fleet.add(role), fleet.add(role)] for role in Role}
        fleet.wait_for(*(worker for workers in alive.values() for worker in workers))
        num_changes = 0
        joined_s: list[float] = []
        with Load(fleet) as load:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                began = time.monotonic()
                role = rng.choice(list(Role))
                newcomer = fleet.add(role)
                fleet.wait_for(newcomer)
                joined_s.append(time.monotonic() - began)
                leaver = alive[role].pop(rng.randrange(len(alive[role])))
                alive[role].append(newcomer)
                fleet.remove(leaver, rng.choice([signal.SIGTERM, signal.SIGKILL]))
                num_changes += 1
                time.sleep(max(0.0, began + PERIOD_S - time.monotonic()))
        print(
            f"{num_changes} workers joined (ready after {sorted(joined_s)[len(joined_s) // 2]:.2f} s) and left in "
            f"{SECONDS:g} s; {load.num_served} requests served, {load.num_retries} placements repeated"
        )
        assert load.num_served > 2 * SECONDS
        assert num_changes > SECONDS / PERIOD_S / 2
        expected = {worker for workers in alive.values() for worker in workers}

        def at_rest() -> set[str]:
            return {w["id"] for w in fleet.client.status()["workers"] if w["state"] == "ready" and is_idle(w)}

        wait_until(lambda: at_rest() >= expected, every_s=0.1, seen=fleet.client.status)
