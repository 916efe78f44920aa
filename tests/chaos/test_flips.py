"""Workers change their roles again and again under load: nobody notices, and what was cached stays cached."""

from __future__ import annotations

import os
import random
import time

import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.v1 import worker_pb2
from tests.chaos.fleet import Fleet, RouterProcess, running_fleet
from tests.chaos.test_index import NUM_BLOCKS, SOON_S, Load, Tally
from tests.integration.cluster import is_idle
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

SECONDS = float(os.environ.get("CHAOS_SECONDS", "8"))
PERIOD_S = 5.0 if "CHAOS_SECONDS" in os.environ else 2.0
WARM_UP_REQUESTS = 2000
"""Until the conversations differ in age and the pools are full. Before, the hit rate is higher than it can stay."""
WINDOW_REQUESTS = 1500
"""Over 500, without any flip, it differs by up to 3 %."""
HIT_RATE_LOSS = 0.05
TOKEN_MS = 0.1
"""What computing a prompt's token takes. Were it nothing, nobody would pull a prefix from a worker whose role changed:
computing it again would be as quick, and count as a miss."""


def flip(fleet: Fleet, rng: random.Random) -> tuple[str, Role]:
    """Gives one worker the other role; both roles stay filled."""
    workers = fleet.client.status()["workers"]
    by_role = {role: [worker for worker in workers if worker["role"] == role] for role in Role}
    role = rng.choice([role for role, those in by_role.items() if len(those) > 1])
    worker = rng.choice(by_role[role])
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    with fleet.control(worker["id"]) as stub:
        stub.SetRole(worker_pb2.SetRoleRequest(role=other, timeout_s=20), timeout=30)
    worker_id: str = worker["id"]
    wait_until(lambda: all(_role(each, worker_id) == other for each in fleet.routers), SOON_S)
    return worker_id, other


def test_roles_are_flipped_under_load() -> None:
    rng = random.Random(17)
    router = RouterConfig(max_attempts=8, cache_secret="chaos")
    with running_fleet(TransferConfig(), router, num_routers=2, num_blocks=NUM_BLOCKS, token_ms=TOKEN_MS) as fleet:
        fleet.wait_for(*[fleet.add(role) for role in (*Role, *Role)])
        with Load(fleet) as load:
            window(load, WARM_UP_REQUESTS)
            before = window(load, WINDOW_REQUESTS)
            until = time.monotonic() + SECONDS
            num_flips, slowest_s = 0, 0.0
            while time.monotonic() < until:
                began = time.monotonic()
                flip(fleet, rng)
                num_flips, slowest_s = num_flips + 1, max(slowest_s, time.monotonic() - began)
                time.sleep(max(0.0, began + PERIOD_S - time.monotonic()))
            after = window(load, WINDOW_REQUESTS)
        print(
            f"{num_flips} flips in {SECONDS:g} s, {slowest_s:.2f} s at most until every router knew; hit rate "
            f"{hit_rate(before):.3f} before, {hit_rate(after):.3f} after; {load.tally().num_served} requests served, "
            f"{load.tally().num_retries} placements repeated"
        )
        assert hit_rate(after) > hit_rate(before) * (1 - HIT_RATE_LOSS)
        for each in fleet.routers:
            each.wait_for(lambda status: all(is_idle(worker) for worker in status["workers"]), SOON_S)


def window(load: Load, num_requests: int) -> Tally:
    """What happens from now on, until so many requests have been served."""
    before = load.tally()

    def found() -> Tally:
        return load.tally() - before

    def enough() -> Tally | None:
        tally = found()
        return tally if tally.num_served >= num_requests else None

    return wait_until(enough, 300.0, every_s=0.2, seen=lambda: f"too little load: {found()}; {load.failures[:5]}")


def hit_rate(tally: Tally) -> float:
    return tally.num_cached_tokens / tally.num_prompt_tokens


def _role(router: RouterProcess, worker_id: str) -> str:
    workers = router.client.status()["workers"]
    return next((f"{w['role']}" for w in workers if w["id"] == worker_id and w["state"] == "ready"), "")
