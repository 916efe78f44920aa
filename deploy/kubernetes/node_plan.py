"""The pods that are Ray nodes, where Deployments make them: as many as the workers need, and no used one is removed.

A worker needs room on a node of the pool in which it was started, and keeps it when its role changes. The pools may
share one Deployment, whose pods have room for several workers of either. A Deployment grows by the pods for which the
workers that lack a node do not fit on those in use, and shrinks by the pods without a worker; a pod with workers is
more expensive to delete (controller.kubernetes.io/pod-deletion-cost). While a Deployment rolls out a newer version it
has a pod more than its size, and the workers on older pods give way one by one. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.cluster import Role

COST_OF_A_WORKER = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePod:
    """A pod that is a Ray node."""

    name: str
    deployment: str
    """The Deployment that made it."""
    cost: int = 0
    """Deletion cost that the pod has in Kubernetes."""
    is_leaving: bool = False
    """Whether it is being deleted, so that its Deployment no longer counts it."""
    is_current: bool = True
    """Whether it is of its Deployment's present version."""
    is_running: bool = True
    """Whether its container runs."""


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """A worker, and the node that it has."""

    pool: Role
    """The pool in which it was started."""
    role: Role
    pod: str
    """Pod of the worker's node; empty: it waits for a node."""
    is_staying: bool
    """Whether it does not have to leave."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What to change."""

    sizes: Mapping[str, int]
    """The number of pods that each Deployment should have."""
    costs: Mapping[str, int]
    """The new deletion costs of the pods whose cost changes, by name."""


@dataclass(frozen=True, slots=True)
class PodRollout:
    """How far the Deployments are with a newer version."""

    outdated: frozenset[str] = frozenset()
    """Pods of an older version that are to go."""
    room: frozenset[Role] = frozenset()
    """Pools with such pods, for which a pod of the present version has room."""


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Which Deployment has the nodes of a pool, and how large they are."""

    deployments: Mapping[Role, str]
    """Names of the Deployments by pool; both pools may have the same one."""
    workers_per_pod: int = 1


def plan(
    layout: NodeLayout,
    desired: Mapping[Role, int],
    sizes: Mapping[str, int],
    pods: Sequence[NodePod],
    workers: Sequence[PlacedWorker],
) -> NodePlan:
    """The plan for the Deployments. With the pods that result from it, it asks for nothing twice.

    Args:
        desired: workers of each pool.
        sizes: the Deployments' sizes now.
    """
    by_name = {pod.name: pod for pod in pods if not pod.is_leaving}
    num_on = Counter(worker.pod for worker in workers if worker.pod in by_name)
    num_staying_on = Counter(worker.pod for worker in workers if worker.is_staying)
    costs = {name: (COST_OF_A_WORKER - 1) * num_staying_on[name] + num_on[name] for name in by_name}
    changed = {name: cost for name, cost in costs.items() if cost != by_name[name].cost}
    staying = [worker for worker in workers if worker.is_staying]
    wanted = {}
    for deployment, size in sizes.items():
        pools = [pool for pool in Role if layout.deployments[pool] == deployment]
        num_waiting = sum(worker.pool in pools and worker.pod not in num_on for worker in staying)
        num_to_come = sum(max(0, desired[pool] - sum(worker.role is pool for worker in staying)) for pool in pools)
        used = [name for name in num_on if by_name[name].deployment == deployment]
        num_lacking = num_waiting + num_to_come
        num_homeless = max(0, num_lacking - sum(layout.workers_per_pod - num_on[name] for name in used))
        num_surplus = max(0, sum(pod.deployment == deployment for pod in by_name.values()) - size)  # in a roll-out
        num_needed = len(used) + -(-num_homeless // layout.workers_per_pod)
        # While a worker looks for a node, none goes: it may be about to run there.
        wanted[deployment] = max(size, num_needed - num_surplus) if num_lacking else min(size, num_needed)
    return NodePlan(wanted, changed)


def pod_rollout(layout: NodeLayout, pods: Sequence[NodePod], on: Iterable[str]) -> PodRollout:
    """How far the Deployments are.

    Args:
        on: for each worker that has a node the pod in which it is.
    """
    num_on = Counter(on)
    outdated = frozenset(pod.name for pod in pods if not (pod.is_current or pod.is_leaving))
    rolling = {pod.deployment for pod in pods if pod.name in outdated}
    free = {
        pod.deployment
        for pod in pods
        if pod.is_current and pod.is_running and not pod.is_leaving and num_on[pod.name] < layout.workers_per_pod
    }
    return PodRollout(outdated, frozenset(pool for pool in Role if layout.deployments[pool] in rolling & free))
