"""What routers know of a worker's load between two renewals of its lease."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos.fleet import running_fleet
from tests.support.asking import prompt_of
from tests.support.load import Stream


def test_routers_learn_a_load_from_events() -> None:
    """The lease is renewed each minute here: what a router knows earlier came with an event."""
    router = RouterConfig(mode="aggregated", cache_secret="loads")
    with running_fleet(TransferConfig(), router, num_routers=2, lease_s=120.0, step_ms=100.0) as fleet:
        fleet.config = replace(fleet.config, index=replace(fleet.config.index, renew_s=60.0))
        worker_id = fleet.add(Role.DECODE)
        fleet.wait_for(worker_id)
        asked, other = fleet.routers
        stream = Stream(inference=asked.inference, prompt=prompt_of(1, 40), max_tokens=80)
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(stream.served)
            for each in (asked, other):
                each.wait_for(lambda status: status["workers"][0]["running"] == 1, 6.0)
            assert not served.done(), "it told of its end instead"
            served.result()
        assert stream.error is None
        for each in (asked, other):
            each.wait_for(lambda status: status["workers"][0]["running"] == 0, 6.0)
