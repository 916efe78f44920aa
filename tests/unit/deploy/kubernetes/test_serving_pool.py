"""What the controller asks of Kubernetes, as pure functions: node pods and ServingPools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster import Role
from deploy.kubernetes import node_plan
from deploy.kubernetes.node_plan import (
    COST_OF_A_WORKER,
    NodeLayout,
    NodePlan,
    NodePod,
    PlacedWorker,
    PodRollout,
    pod_rollout,
)
from deploy.kubernetes.serving_pool import PoolReport, PoolSpec, spec_of, status_of

P, D = Role.PREFILL, Role.DECODE
BOTH = "both"


def pod(name: str, role: Role, cost: int = COST_OF_A_WORKER, leaving: bool = False) -> NodePod:
    return NodePod(name=name, deployment=role, cost=cost, is_leaving=leaving)


def worker(role: Role, pod: str = "", stays: bool = True, pool: Role | None = None) -> PlacedWorker:
    """In the role with which it began, unless `pool` is given."""
    return PlacedWorker(pool or role, role, pod, stays)


def plan(
    desired: Mapping[Role, int], sizes: Mapping[Role, int], pods: Sequence[NodePod], workers: Sequence[PlacedWorker]
) -> NodePlan:
    """A Deployment for each pool, of the pool's name, and a pod for each worker."""
    by_name = {pool.value: size for pool, size in sizes.items()}
    return node_plan.plan(NodeLayout({P: P, D: D}), desired, by_name, pods, workers)


def shared(
    desired: tuple[int, int], size: int, pods: Sequence[str], workers: Sequence[PlacedWorker], room: int = 4
) -> NodePlan:
    """One Deployment for both pools."""
    found = [NodePod(name=name, deployment=BOTH) for name in pods]
    return node_plan.plan(
        NodeLayout({P: BOTH, D: BOTH}, room), dict(zip(Role, desired, strict=True)), {BOTH: size}, found, workers
    )


def test_workers_of_both_pools_share_a_pod_that_has_room_for_them() -> None:
    assert shared((1, 3), 1, ["a"], []).sizes == {BOTH: 1}
    assert shared((1, 4), 1, ["a"], []).sizes == {BOTH: 2}
    here = [worker(P, "a"), worker(D, "a"), worker(D, "a")]
    assert shared((1, 2), 2, ["a", "b"], here) == NodePlan({BOTH: 1}, {"a": 3 * COST_OF_A_WORKER})
    assert shared((1, 3), 1, ["a"], [*here, worker(D)]).sizes == {BOTH: 1}, "the fourth fits beside them"
    assert shared((2, 3), 1, ["a"], here).sizes == {BOTH: 2}, "the fifth does not"
    assert shared((2, 3), 2, ["a", "b"], [*here, worker(D), worker(P)]).sizes == {BOTH: 2}, "it is on its way"


def test_a_shared_pod_stays_until_its_last_worker_has_gone() -> None:
    full = [worker(P, "a"), *(worker(D, "a") for _ in range(3))]
    for leaving in (worker(D, "b"), worker(D, "b", stays=False)):
        assert shared((1, 3), 2, ["a", "b"], [*full, leaving]).sizes == {BOTH: 2}
    assert shared((1, 3), 2, ["a", "b"], full).sizes == {BOTH: 1}
    drained = [*full[:3], worker(D, "a", stays=False), worker(D)]
    assert shared((1, 3), 1, ["a"], drained).sizes == {BOTH: 2}, "its successor needs room while it is still there"
    assert shared((1, 3), 2, ["a", "b"], [*full[:3], worker(D)]).sizes == {BOTH: 2}, "no pod goes while it starts"


def test_pools_as_they_should_be_change_nothing() -> None:
    pods = [pod("p", P), pod("d", D)]
    assert plan({P: 1, D: 1}, {P: 1, D: 1}, pods, [worker(P, "p"), worker(D, "d")]) == NodePlan({P: 1, D: 1}, {})


def test_a_pool_that_grows_gets_nodes_at_once_and_only_as_many_as_lack() -> None:
    pods, workers = [pod("p", P), pod("d", D)], [worker(P, "p"), worker(D, "d")]
    assert plan({P: 1, D: 3}, {P: 1, D: 1}, pods, workers).sizes == {P: 1, D: 3}
    waiting = [*workers, worker(D), worker(D)]
    assert plan({P: 1, D: 3}, {P: 1, D: 3}, pods, waiting).sizes == {P: 1, D: 3}, "they are on their way"


def test_a_node_stays_until_its_worker_has_gone_and_then_goes_itself() -> None:
    pods = [pod("p", P), pod("a", D), pod("b", D)]
    leaving = [worker(P, "p"), worker(D, "a"), worker(D, "b", stays=False)]
    assert plan({P: 1, D: 1}, {P: 1, D: 2}, pods, leaving) == NodePlan({P: 1, D: 2}, {"b": 1}), "b is the next to go"
    gone = plan({P: 1, D: 1}, {P: 1, D: 2}, pods, leaving[:2])
    assert gone == NodePlan({P: 1, D: 1}, {"b": 0}), "and b is the one that costs least"


def test_pools_of_a_model_that_sleeps_have_no_node_until_it_wakes() -> None:
    """The nodes of its last workers go with them."""
    pods, none = [pod("p", P), pod("d", D)], {P: 0, D: 0}
    leaving = [worker(P, "p", stays=False), worker(D, "d", stays=False)]
    assert plan(none, {P: 1, D: 1}, pods, leaving).sizes == {P: 1, D: 1}
    assert plan(none, {P: 1, D: 1}, pods, []).sizes == none
    assert plan(none, none, [], []) == NodePlan({P: 0, D: 0}, {})
    assert plan({P: 1, D: 1}, none, [], []).sizes == {P: 1, D: 1}, "at once, before its workers wait"
    assert plan({P: 1, D: 1}, {P: 1, D: 1}, [], [worker(P), worker(D)]).sizes == {P: 1, D: 1}
    assert shared((0, 0), 2, ["a", "b"], []).sizes == {BOTH: 0}
    assert shared((0, 1), 0, [], []).sizes == {BOTH: 1}
    report = PoolReport(desired=0, num_workers=0, num_ready=0, num_draining=0)
    ready, limited = status_of(PoolSpec(size=0, asked=0), report, {})["conditions"]
    assert (ready["status"], limited["status"]) == ("True", "False")


def test_a_worker_that_changed_its_role_keeps_its_node() -> None:
    """Of the prefill Deployment, in which it decodes now."""
    pods = [pod("a", P), pod("b", P), pod("c", D)]
    workers = [worker(P, "a"), worker(D, "b", pool=P), worker(D, "c")]
    assert plan({P: 1, D: 2}, {P: 2, D: 1}, pods, workers) == NodePlan({P: 2, D: 1}, {})
    down = [*workers[::2], worker(D, pool=P)]
    assert plan({P: 1, D: 2}, {P: 2, D: 1}, pods, down).sizes == {P: 2, D: 1}, "it comes back there"
    assert plan({P: 2, D: 2}, {P: 2, D: 1}, pods, workers).sizes == {P: 3, D: 1}, "another one begins in its place"


def test_a_drained_worker_has_a_node_until_its_successor_serves() -> None:
    pods = [pod("p", P), pod("a", D)]
    workers = [worker(P, "p"), worker(D, "a", stays=False), worker(D)]
    assert plan({P: 1, D: 1}, {P: 1, D: 1}, pods, workers).sizes == {P: 1, D: 2}


def test_a_rollout_makes_its_own_nodes() -> None:
    """The Deployment replaces the pod that goes; its worker moves there, and the size stays."""
    pods = [pod("p", P), pod("old", D, leaving=True), pod("new", D, cost=0)]
    for workers in (
        [worker(P, "p"), worker(D, "old")],
        [worker(P, "p"), worker(D, "old", stays=False), worker(D)],
        [worker(P, "p"), worker(D, "old", stays=False), worker(D, "new")],
    ):
        assert plan({P: 1, D: 1}, {P: 1, D: 1}, pods, workers).sizes == {P: 1, D: 1}


def test_a_rollout_with_a_pod_more_than_the_size_needs_no_other_one() -> None:
    """The worker in it is one more than desired until another one leaves."""
    pods = [pod("p", P), pod("old", D), pod("new", D, cost=0)]
    for workers, costs in (
        ([worker(P, "p"), worker(D, "old")], {}),
        ([worker(P, "p"), worker(D, "old"), worker(D)], {}),
        ([worker(P, "p"), worker(D, "old", stays=False), worker(D, "new")], {"old": 1, "new": COST_OF_A_WORKER}),
        ([worker(P, "p"), worker(D, "new")], {"old": 0, "new": COST_OF_A_WORKER}),
    ):
        assert plan({P: 1, D: 1}, {P: 1, D: 1}, pods, workers) == NodePlan({P: 1, D: 1}, costs)


def test_the_status_says_in_what_the_engine_differs_from_the_other_pool_s() -> None:
    own = ("kv_dtype=bfloat16", "tensor_parallel=2")
    report = PoolReport(desired=2, num_workers=2, num_ready=1, num_draining=0, engine=own)
    spec = PoolSpec(size=2, asked=2)
    messages = [status_of(spec, each, {})["conditions"][0]["message"] for each in (report, replace(report, engine=()))]
    assert messages == [
        "1 of 2 workers serve, with kv_dtype=bfloat16, tensor_parallel=2",
        "1 of 2 workers serve",
    ]


def test_room_for_a_newer_version_is_that_of_its_running_pods() -> None:
    """An older pod that is about to go has none to give way."""
    old, new = NodePod(name="old", deployment=D, is_current=False), NodePod(name="new", deployment=D)
    layout, prefill = NodeLayout({P: P, D: D}), NodePod(name="p", deployment=P)
    assert pod_rollout(layout, [prefill, old, new], []) == PodRollout(frozenset({"old"}), {D: 1})
    assert pod_rollout(layout, [prefill, old, new], ["new"]).room == {}
    assert pod_rollout(NodeLayout({P: P, D: D}, 4), [old, new, replace(new, name="b")], ["new"]).room == {D: 7}
    assert pod_rollout(
        NodeLayout({P: BOTH, D: BOTH}), [replace(each, deployment=BOTH) for each in (old, new)], []
    ).room == {
        P: 1,
        D: 1,
    }
    for other in (replace(new, is_running=False), replace(new, is_leaving=True), replace(new, is_current=False)):
        assert pod_rollout(layout, [prefill, old, other], []).room == {}
    assert pod_rollout(layout, [prefill, new], []) == PodRollout(), "nothing is rolled out"
    assert pod_rollout(layout, [replace(old, is_leaving=True), new], []) == PodRollout()


def test_an_idle_node_of_the_other_pool_is_none_for_a_worker() -> None:
    """It may have another GPU."""
    pods = [pod("a", P), pod("idle", P, cost=0), pod("d", D)]
    workers = [worker(P, "a"), worker(D, "d"), worker(D)]
    assert plan({P: 1, D: 2}, {P: 2, D: 1}, pods, workers).sizes == {P: 1, D: 2}


sizes = st.fixed_dictionaries({P: st.integers(0, 4), D: st.integers(1, 4)})


@pytest.mark.parametrize("layout", [NodeLayout({P: P, D: D}), NodeLayout({P: BOTH, D: BOTH}, 3)], ids=["own", BOTH])
@settings(max_examples=300)
@given(data=st.data())
def test_whatever_happens_every_worker_gets_a_node_and_no_node_is_left_over(
    layout: NodeLayout, data: st.DataObject
) -> None:
    """A cluster that does as it is told, with workers that leave and change their roles on the way."""
    desired, workers = data.draw(sizes), list[PlacedWorker]()
    nodes = dict.fromkeys(layout.deployments.values(), 1)
    names = iter(range(10**6))
    pods: list[NodePod] = []
    for step in range(30):
        if step < 6:
            desired = data.draw(sizes)
        for role in Role:  # the controller's part, as it would do it
            have = [w for w in workers if w.role is role]
            workers += [worker(role)] * (desired[role] - len(have))
            for gone in have[desired[role] :]:
                workers.remove(gone)
        if step < 6 and workers and data.draw(st.booleans()):
            flipped = workers.pop(0)
            workers.append(worker(D if flipped.role is P else P, flipped.pod, pool=flipped.pool))
            desired = {role: sum(w.role is role for w in workers) for role in Role}
        wanted = node_plan.plan(layout, desired, nodes, pods, workers)
        pods = [replace(p, cost=wanted.costs.get(p.name, p.cost)) for p in pods]
        nodes = dict(wanted.sizes)
        for name in nodes:  # Kubernetes' part
            mine = sorted((p for p in pods if p.deployment == name), key=lambda p: -p.cost)
            pods = [p for p in pods if p.deployment != name] + mine[: nodes[name]]
            pods += [NodePod(name=f"pod-{next(names)}", deployment=name) for _ in range(nodes[name] - len(mine))]
        assert {w.pod for w in workers if w.pod} <= {p.name for p in pods}, "a node went with its worker"
        for place, waiting in enumerate(workers):  # Ray's part
            taken = Counter(w.pod for w in workers)
            home = layout.deployments[waiting.pool]
            free = [p.name for p in pods if p.deployment == home and taken[p.name] < layout.workers_per_pod]
            if not waiting.pod and free:
                workers[place] = worker(waiting.role, free[0], pool=waiting.pool)
    assert {w.pod for w in workers} == {p.name for p in pods}
    assert len(pods) == sum(nodes.values())
    if layout.workers_per_pod == 1:
        assert len(pods) == len(workers)


def serving_pool(**spec: Any) -> Any:
    metadata = SimpleNamespace(labels={"app.kubernetes.io/instance": "mine"}, generation=7)
    return SimpleNamespace(metadata=metadata, spec={"role": "decode", "initialReplicas": 1, **spec})


def test_a_serving_pools_size_is_kept_within_its_bounds() -> None:
    spec = spec_of(D, serving_pool(replicas=9, minReplicas=2, maxReplicas=4, drainTimeoutSeconds=5))
    assert (spec.size, spec.asked, spec.drain_timeout_s, spec.generation) == (4, 9, 5.0, 7)
    assert spec.selector == "app.kubernetes.io/instance=mine,baton.dev/pool=decode"
    assert spec_of(D, serving_pool(replicas=1, minReplicas=2)).size == 2
    assert [bool(spec.size_problem(size)) for size in (1, 2, 4, 5)] == [True, False, False, True]
    assert "paused" in spec_of(D, serving_pool(replicas=2, paused=True)).size_problem(3)


def test_a_status_says_what_becomes_of_it_and_since_when() -> None:
    spec = PoolSpec(size=4, asked=9, max_size=4, generation=7, selector="x=y")
    first = status_of(spec, PoolReport(desired=4, num_workers=3, num_ready=2, num_draining=1), {})
    conditions = {condition["type"]: condition for condition in first["conditions"]}
    assert (first["replicas"], first["readyReplicas"], first["drainingReplicas"], first["desiredReplicas"]) == (
        3,
        2,
        1,
        4,
    )
    assert (first["observedGeneration"], first["selector"]) == (7, "x=y")
    assert (conditions["Ready"]["status"], conditions["Limited"]["status"]) == ("False", "True")
    assert "9 is outside" in conditions["Limited"]["message"]
    for condition in first["conditions"]:
        condition["lastTransitionTime"] = "before"
    then = status_of(spec, PoolReport(desired=4, num_workers=4, num_ready=4, num_draining=0), first)
    since = {condition["type"]: condition["lastTransitionTime"] for condition in then["conditions"]}
    assert since["Limited"] == "before"
    assert since["Ready"] != "before"
    refused = status_of(
        PoolSpec(size=0, asked=0),
        PoolReport(desired=1, num_workers=1, num_ready=1, num_draining=0, refusal="there must be one"),
        {},
    )
    assert refused["conditions"][1]["message"] == "there must be one"
