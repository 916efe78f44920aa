"""The loop around the policy, over a cluster that does what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster import ClusterStatus, PoolStatus, Role, RouterInfo, WorkerLoad, WorkerState
from baton.config import AutoscaleConfig, Config, PoolConfig, PoolsConfig, RouterConfig, SloClassConfig
from baton.errors import Conflict, InvalidRequest, NoController, StoreUnavailable
from deploy.scaling.autoscaler import Autoscaler, strictest
from deploy.scaling.command import as_dict, status_of, summary
from deploy.scaling.values import Needs, PolicyState, ScalingDecision, Sizes
from tests.support.builders import cluster_status, worker


class Cluster:
    """Prefill workers are busy all the time, decode workers never; it carries out its orders at once."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.now = 0.0
        self.roles = {f"w{n}": Role.PREFILL if n < prefill else Role.DECODE for n in range(prefill + decode)}
        self.running = dict.fromkeys(self.roles, 0)
        self.orders: list[tuple[str, object, object]] = []
        self.refuses: Callable[[], None] = lambda: None
        self.engine: tuple[str, ...] = ()
        self.is_busy = True
        self.routers: tuple[RouterInfo, ...] = ()

    async def observe(self) -> ClusterStatus:
        workers = []
        for name, role in self.roles.items():
            busy_s = self.now if role is Role.PREFILL and self.is_busy else 0.0
            load = WorkerLoad(
                state=WorkerState.READY, running=self.running[name], busy_s=busy_s, computed_tokens=int(1000 * busy_s)
            )
            workers.append(worker(name, role, load))
        count = {role: sum(r is role for r in self.roles.values()) for role in Role}
        pools = {role.value: PoolStatus(count[role], count[role], self.engine) for role in Role}
        return cluster_status(*workers, pools=pools, routers=self.routers)

    async def scale(self, pool: Role, num_workers: int) -> None:
        self.orders.append(("scale", pool, num_workers))
        self.refuses()

    async def set_role(self, worker_id: str, role: Role) -> None:
        self.orders.append(("role", worker_id, role))
        self.refuses()
        self.roles[worker_id] = role

    async def sleep(self) -> None:
        self.orders.append(("sleep", None, None))
        self.refuses()
        self.roles.clear()


def autoscaler(cluster: Cluster, config: AutoscaleConfig | None = None, pools: PoolsConfig | None = None) -> Autoscaler:
    return Autoscaler(
        Config(autoscale=config or AutoscaleConfig(), pools=pools or PoolsConfig()),
        cluster.observe,
        cluster,
        clock=lambda: cluster.now,
    )


def windows(scaler: Autoscaler, cluster: Cluster, num: int) -> list[ScalingDecision]:
    async def run() -> list[ScalingDecision]:
        found = []
        for _ in range(num):
            if decision := await scaler.step():
                found.append(decision)
            cluster.now += 10.0
        return found

    return asyncio.run(run())


def test_after_the_cool_down_the_least_busy_workers_change_their_roles() -> None:
    cluster = Cluster(1, 4)
    cluster.running |= {"w1": 3, "w3": 5}
    decisions = windows(autoscaler(cluster), cluster, 5)
    assert [decision.num_actions for decision in decisions] == [0, 0, 3]
    assert cluster.orders == [("role", name, Role.PREFILL) for name in ("w2", "w4", "w1")]


@pytest.mark.parametrize(("prefill", "orders"), [(1, [("decode", 1), ("prefill", 4)]), (4, [])])
def test_between_pools_of_different_engines_workers_stop_and_start(prefill: int, orders: list[tuple[str, int]]) -> None:
    """The pool that stops workers makes room first."""
    cluster = Cluster(prefill, 5 - prefill)
    two_ranks = PoolsConfig(decode=PoolConfig(engine={"tensor_parallel": 2}))
    decisions = windows(autoscaler(cluster, pools=two_ranks), cluster, 5)
    assert cluster.orders == [("scale", pool, size) for pool, size in orders]
    if orders:
        assert decisions[-1].flips is None
        assert (decisions[-1].starts, decisions[-1].stops) == (Sizes(3, 0), Sizes(0, 3))
        assert summary(decisions[-1]) == "1:4 -> 4:1: start 3 prefill; stop 3 decode"


def test_that_engines_differ_may_be_known_from_the_status_alone() -> None:
    """The settings of `baton autoscale` need not be the cluster's."""
    cluster = Cluster(1, 4)
    cluster.engine = ("tensor_parallel=2",)
    windows(autoscaler(cluster), cluster, 5)
    assert cluster.orders == [("scale", "decode", 1), ("scale", "prefill", 4)]


def test_new_workers_come_after_the_flips() -> None:
    cluster = Cluster(2, 3)
    windows(autoscaler(cluster, AutoscaleConfig(max_workers=8, target_utilisation=0.3)), cluster, 5)
    assert [order[0] for order in cluster.orders] == ["role", "role", "scale"]
    assert cluster.orders[-1] == ("scale", Role.PREFILL, 7)


def test_an_order_that_is_refused_is_given_again_after_the_cool_down(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(1, 4)

    def refuse() -> None:
        raise Conflict("w2 is the last one that decodes")

    cluster.refuses = refuse
    scaler = autoscaler(cluster)
    windows(scaler, cluster, 5)
    assert len(cluster.orders) == 1, "what follows the refused one is dropped"
    assert "refused: w1 becomes a prefill worker: w2 is the last one that decodes" in caplog.text
    assert "dropped, until the next decision: w2 becomes a prefill worker, w3 becomes a prefill worker" in caplog.text
    windows(scaler, cluster, 1)
    assert len(cluster.orders) == 1
    windows(scaler, cluster, 1)
    assert len(cluster.orders) == 2


def test_a_dry_run_tells_and_orders_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    cluster = Cluster(1, 4)
    decisions = windows(autoscaler(cluster, AutoscaleConfig(dry_run=True)), cluster, 9)
    assert any(decision.num_actions for decision in decisions)
    assert cluster.orders == []
    assert "1:4 -> 4:1" in caplog.text


def test_a_cluster_that_cannot_be_observed_is_waited_for() -> None:
    cluster = Cluster(1, 4)
    observe, seen = cluster.observe, []

    async def sometimes() -> ClusterStatus:
        seen.append(cluster.now)
        if 10.0 < cluster.now < 50.0:
            raise NoController("gone")
        return await observe()

    scaler = Autoscaler(Config(), sometimes, cluster, clock=lambda: cluster.now)
    decisions = windows(scaler, cluster, 9)
    assert len(seen) == 9
    assert len(decisions) == 1 + 2, "50 s and 70 s begin a window, after what was missed and after what was changed"


def test_a_restarted_controller_does_not_act_twice() -> None:
    cluster = Cluster(1, 4)
    windows(autoscaler(cluster), cluster, 5)
    num_orders = len(cluster.orders)
    windows(autoscaler(cluster), cluster, 20)
    assert num_orders == len(cluster.orders) == 3


MAY_SLEEP = AutoscaleConfig(enabled=True, min_prefill=0, min_decode=0, max_workers=4, idle_s=60.0)
ROUTER = RouterInfo(id="r", pid=1, grpc="", http="", mirror_lag_s=0.0, met=7)


def idle(prefill: int = 2, decode: int = 2) -> Cluster:
    cluster = Cluster(prefill, decode)
    cluster.is_busy, cluster.routers = False, (ROUTER,)
    return cluster


def test_an_idle_model_sleeps_once_and_all_of_it_at_a_time() -> None:
    cluster = idle()
    decisions = windows(autoscaler(cluster, MAY_SLEEP), cluster, 20)
    assert cluster.orders == [("sleep", None, None)]
    assert [decision.sizes for decision in decisions if decision.num_actions] == [Sizes(0, 0)]
    slept = next(decision for decision in decisions if decision.num_actions)
    assert slept.reasons == (
        "No request has arrived for 60 s, so the model sleeps until the next one (autoscale.idle_s).",
    )
    assert {pool.wanted for pool in slept.scaling} == {0}
    assert "the model is asleep" in decisions[-1].reasons[0]


def test_a_request_in_the_last_window_keeps_it_awake() -> None:
    cluster = idle()
    scaler = autoscaler(cluster, MAY_SLEEP)
    windows(scaler, cluster, 6)
    cluster.routers = (replace(ROUTER, met=8),)
    windows(scaler, cluster, 6)
    assert not cluster.orders
    windows(scaler, cluster, 1)
    assert cluster.orders == [("sleep", None, None)]


@pytest.mark.parametrize(
    "config", [replace(MAY_SLEEP, min_decode=1), replace(MAY_SLEEP, dry_run=True), replace(MAY_SLEEP, enabled=False)]
)
def test_only_a_model_that_may_sleep_does(config: AutoscaleConfig) -> None:
    cluster = idle()
    windows(autoscaler(cluster, config), cluster, 20)
    assert ("sleep", None, None) not in cluster.orders


def test_without_routers_or_redis_it_does_not_sleep() -> None:
    """They may have requests that nobody has counted."""
    cluster = idle()
    scaler = autoscaler(cluster, MAY_SLEEP)
    windows(scaler, cluster, 6)
    cluster.routers = ()
    windows(scaler, cluster, 1)
    cluster.routers = (ROUTER,)
    windows(scaler, cluster, 6)
    assert not cluster.orders
    observe, scaler._observe = scaler._observe, nothing
    windows(scaler, cluster, 1)
    scaler._observe = observe
    windows(scaler, cluster, 6)
    assert not cluster.orders
    windows(scaler, cluster, 1)
    assert cluster.orders


async def nothing() -> ClusterStatus:
    raise StoreUnavailable("away")


def test_a_sleep_that_is_refused_is_ordered_again_after_as_long(caplog: pytest.LogCaptureFixture) -> None:
    cluster = idle()

    def refuse() -> None:
        raise Conflict("its files are not copied yet")

    cluster.refuses = refuse
    scaler = autoscaler(cluster, MAY_SLEEP)
    windows(scaler, cluster, 12)
    assert len(cluster.orders) == 1
    assert "refused: the model sleeps: its files are not copied yet" in caplog.text
    windows(scaler, cluster, 2)
    assert len(cluster.orders) == 2


def test_the_strictest_class_is_what_pools_are_sized_for() -> None:
    classes = {"default": SloClassConfig(), "chat": SloClassConfig(ttft_ms=500), "quick": SloClassConfig(itl_ms=40)}
    found = strictest(RouterConfig(slo_classes=classes))
    assert (found.ttft_s, found.itl_s) == (0.5, 0.04)


def test_a_decision_is_told_in_words_and_as_json() -> None:
    decision = ScalingDecision(
        before=Sizes(1, 4), sizes=Sizes(3, 3), reasons=("because.",), needs=Needs(2.0, 1.0), state=PolicyState()
    )
    assert summary(decision) == "1:4 -> 3:3: 1 of the other pool becomes prefill; start 1 prefill"
    assert summary(replace(decision, sizes=Sizes(1, 4))) == "1:4 stays"
    document = json.loads(json.dumps(as_dict(decision)))
    assert document["flips"] == {"num": 1, "role": "prefill"}
    assert document["starts"] == {"prefill": 1, "decode": 0}


def test_a_status_as_the_cluster_tells_it_is_read() -> None:
    from baton import wire

    cluster = Cluster(1, 1)
    cluster.engine = ("tensor_parallel=2",)
    told = asyncio.run(cluster.observe())
    told = replace(
        told, workers=tuple(replace(w, load=replace(w.load, busy_s=2.5, queued_tokens=7)) for w in told.workers)
    )
    document = wire.status_as_json(wire.status_response(told))
    read = status_of(document)
    assert read.pools == told.pools
    assert [(w.info.id, w.info.role, w.load) for w in read.workers] == [
        (w.info.id, w.info.role, w.load) for w in told.workers
    ]


def test_of_a_status_with_several_models_one_must_be_chosen() -> None:
    """Their loads have nothing to do with each other."""
    zeros = {"met": 0, "missed": 0, "rejected": 0}
    models = [zeros | {"content_id": name, "met": met, "in_flight": 1, "held": 0} for name, met in (("a", 3), ("b", 5))]
    router = zeros | {"id": "r", "pid": 1, "grpc": "", "http": "", "mirror_lag_s": 0.0, "met": 8, "models": models}
    document: dict[str, Any] = {"pools": {}, "workers": [], "routers": [router], "redis": {"address": "", "ok": True}}
    (read,) = status_of(document | {"models": [{"id": "m", "content_id": "b"}]}).routers
    assert (read.met, [model.content_id for model in read.models]) == (5, ["b"])
    with pytest.raises(InvalidRequest, match=r"choose one of m, m-2 with --model"):
        status_of(document | {"models": [{"id": "m", "content_id": "a"}, {"id": "m", "release": "m-2"}]})
