"""The pods that are Ray nodes, where Deployments make them: as many as the workers need, and no used one is removed.

A worker needs a node of the pool in which it was started, and keeps it when its role changes. No node has room for two.
A pool's Deployment therefore grows by the workers that lack a node, and shrinks by the pods without a worker; a pod
with one is more expensive to delete (controller.kubernetes.io/pod-deletion-cost). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.cluster import Role

COST_OF_A_WORKER = 100


@dataclass(frozen=True, slots=True)
class NodePod:
    """A pod that is a Ray node."""

    name: str
    deployment: Role
    """The pool whose Deployment made it."""
    cost: int = 0
    """Deletion cost that the pod has in Kubernetes."""
    is_leaving: bool = False
    """Whether it is being deleted, so that its Deployment no longer counts it."""


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

    sizes: Mapping[Role, int]
    """The number of pods that each Deployment should have."""
    costs: Mapping[str, int]
    """The new deletion costs of the pods whose cost changes, by name."""


def plan(
    desired: Mapping[Role, int],
    sizes: Mapping[Role, int],
    pods: Sequence[NodePod],
    workers: Sequence[PlacedWorker],
) -> NodePlan:
    """The plan for the Deployments. With the pods that result from it, it asks for nothing twice.

    Args:
        desired: workers of each pool.
        sizes: the Deployments' sizes now.
    """
    by_name = {pod.name: pod for pod in pods if not pod.is_leaving}
    used = {worker.pod for worker in workers} & by_name.keys()
    costs = {name: COST_OF_A_WORKER * (name in used) for name in by_name}
    changed = {name: cost for name, cost in costs.items() if cost != by_name[name].cost}
    staying = [worker for worker in workers if worker.is_staying]
    wanted = {}
    for pool in Role:
        num_waiting = sum(worker.pool is pool and worker.pod not in used for worker in staying)
        num_to_come = max(0, desired[pool] - sum(worker.role is pool for worker in staying))
        num_used = sum(by_name[name].deployment is pool for name in used)
        num_lacking = num_waiting + num_to_come
        # While a worker looks for a node, none goes: it may be about to run there.
        wanted[pool] = max(sizes[pool], num_used + num_lacking) if num_lacking else min(sizes[pool], num_used)
    return NodePlan(wanted, changed)
