"""Redis at its memory limit under load: no lease is lost, no request fails, and hints are right again within 5 s."""

from __future__ import annotations

import os
import time

import pytest
import redis

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos.fleet import running_fleet
from tests.chaos.test_index import Cluster, Load, held, mirrored
from tests.integration.cluster import is_idle
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

SECONDS = float(os.environ.get("CHAOS_SECONDS", "8"))
"""Time at the limit."""
RIGHT_AGAIN_S = 5.0
SOON_S = 15.0
NUM_BLOCKS = 2000
ROOM = 2**22
"""What the index needs later, and others take at first."""
BLOB = 2**14


def fill(store: redis.Redis) -> int:
    """Takes what is left of the memory, as another application does; returns how many blobs it took."""
    for number in range(10_000):
        try:
            store.rpush("another's", "x" * BLOB)
        except redis.exceptions.OutOfMemoryError:
            return number
    raise AssertionError("Redis has no limit")


def test_a_full_redis_loses_no_lease_and_no_request() -> None:
    """Regression: once Redis was full, half of the renewals failed, and workers disappeared one after the other."""
    transfer = TransferConfig(op_timeout_s=3.0, ping_s=0.5)
    router = RouterConfig(max_attempts=8, cache_secret="chaos")
    with running_fleet(transfer, router, num_routers=2, num_blocks=NUM_BLOCKS, lease_s=3.0) as fleet:
        cluster = Cluster(fleet, {fleet.add(role): role for role in (*Role, *Role)})
        fleet.wait_for(*cluster.workers)
        epochs = cluster.epochs(fleet.routers[0])
        with redis.Redis.from_url(fleet.redis.url) as store:
            with Load(fleet) as load:
                wait_until(lambda: load.tally().num_hits > 100)
                used = store.info("memory")["used_memory"]
                store.config_set("maxmemory", used + ROOM)
                until_s, num_blobs = time.monotonic() + SECONDS, 0
                while time.monotonic() < until_s:
                    num_blobs += fill(store)
                    for each in fleet.routers:
                        assert cluster.epochs(each) == epochs
                    time.sleep(0.1)
                before = load.tally()
                assert num_blobs
                store.delete("another's")
                freed_s = time.monotonic()
                time.sleep(1.0)
                assert load.tally().num_served > before.num_served
                assert not load.failures, load.failures[:3]
            for each in fleet.routers:
                each.wait_for(lambda status: all(is_idle(worker) for worker in status["workers"]), SOON_S)
                wait_until(
                    lambda: mirrored(each) == held(each) and set(held(each)) == set(cluster.workers),  # noqa: B023
                    SOON_S,
                    seen=lambda: (mirrored(each), held(each)),  # noqa: B023 - at once
                )
            took_s = time.monotonic() - freed_s
        print(f"{load.tally()}; {num_blobs} blobs of others; right {took_s:.1f} s after")
        assert took_s < RIGHT_AGAIN_S + 1.0, "a second of which was load"
        assert cluster.epochs(fleet.routers[0]) == epochs
