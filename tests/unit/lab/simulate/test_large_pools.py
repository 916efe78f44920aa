"""Pools so large that the router considers few of their workers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from baton.cluster import Role
from baton.config import RouterConfig
from lab.simulate.costs import PROFILES
from lab.simulate.members import Members
from lab.simulate.policy import TwoLegs, WorkerView
from lab.simulate.production import Production
from lab.simulate.report import Result, result_of
from lab.simulate.textbook import LeastLoad
from lab.simulate.views import PoolViews
from lab.simulate.worker import WorkerShape, key_of
from lab.simulate.world import World
from lab.traces.generator import Conversations, generate
from lab.traces.shape import faster
from lab.traces.trace import TraceRequest
from router.placement import Objective, Prices
from router.placement.pool_view import FEW_WORKERS

COSTS = PROFILES["llama-3-8b@h200"]
PRICES = Prices(COSTS.transfer_s(0), COSTS.transfer_s_per_token, COSTS.transfer_s(0), 0.0)
OBJECTIVE = Objective(5.0, 0.1)
TRACE = faster(generate(Conversations(duration_s=60.0), seed=2), 60.0)
LARGE = FEW_WORKERS + 2
LAYERS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "windows": {"window": 1024},
    "states": {"has_states": True, "snapshot_tokens": 2048},
}


def shape(**layers: Any) -> WorkerShape:
    return WorkerShape(num_blocks=400, block_tokens=TRACE.block_tokens, **layers)


def ran(prefill: int, decode: int, mode: str = "auto", **layers: Any) -> tuple[World, Result]:
    placer = Production(RouterConfig(mode=mode), OBJECTIVE, PRICES)
    world = World(TRACE, placer, shape(**layers), COSTS, prefill=prefill, decode=decode)
    return world, result_of("baton", world, world.run(), OBJECTIVE)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("prefill", "mode"), [(0, "aggregated"), (50, "disaggregated")])
def test_the_mirror_knows_what_every_worker_holds(layers: str, prefill: int, mode: str) -> None:
    world, result = ran(prefill, LARGE - prefill, mode, **LAYERS[layers])
    assert result.good_share > 0.9
    mirror = world.members.mirror
    assert mirror is not None
    mirror.check()
    held = mirror.workers()
    for worker in world.workers:
        assert held.get(str(worker.index), 0) == len(worker.engine.pool.keys())


def test_the_results_are_those_of_a_walk_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _, few = ran(0, LARGE)
    monkeypatch.setattr("lab.simulate.members.FEW_WORKERS", 10**6)
    world, walk = ran(0, LARGE)
    assert world.members.mirror is None
    assert few.good_share == pytest.approx(walk.good_share, abs=0.01)
    assert few.hit_rate == pytest.approx(walk.hit_rate, abs=0.01)
    assert few.ttft_s[0] == pytest.approx(walk.ttft_s[0], rel=0.05)


class Seeing(LeastLoad):
    """Remembers how many workers it was shown."""

    def __init__(self) -> None:
        super().__init__(Random(0))
        self.numbers: set[int] = set()

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        self.numbers.add(len(workers))
        return super().choose(request, workers)


def test_policies_of_others_see_all_workers_of_a_large_pool() -> None:
    policy = Seeing()
    served = World(TRACE, TwoLegs(policy), shape(), COSTS, decode=LARGE).run()
    assert policy.numbers == {LARGE}
    assert all(one.finished_s < float("inf") for one in served)


def test_views_are_taken_when_they_are_read() -> None:
    members = Members(shape(), COSTS, 0, LARGE)
    request = TRACE.requests[0]
    keys = tuple(map(key_of, request.block_ids))
    views = PoolViews(members.ready(Role.DECODE), request, keys, members)
    assert len(views) == LARGE
    before = views[3]
    members.worker(3).num_requests = 7
    assert (before.num_requests, views[3].num_requests, [view.index for view in views[2:4]]) == (0, 7, [2, 3])
    assert views.num_cached_tokens(3) == 0
    assert not views.lookup()
