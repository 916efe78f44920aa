"""The pods that are Ray nodes, where Deployments make them: as many as workers need, and never the wrong one less.

A worker needs a node of the pool in which it began, and keeps it when its role changes. No node has room for two. So a
pool's Deployment grows by the workers that lack a node, and shrinks by the pods that have no worker; a pod that has one
is dearer to delete (controller.kubernetes.io/pod-deletion-cost). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.cluster import Role

COST_OF_A_WORKER = 100


@dataclass(frozen=True, slots=True)
class NodePod:
    name: str
    deployment: Role
    """The pool that it was made for."""
    cost: int = 0
    """Of deleting it, as Kubernetes knows it."""
    is_leaving: bool = False
    """It is being deleted: its Deployment counts it no more."""


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    pool: Role
    """In which it began."""
    role: Role
    pod: str
    """Empty: it waits for a node."""
    is_staying: bool


@dataclass(frozen=True, slots=True)
class Plan:
    sizes: Mapping[Role, int]
    """Of the Deployments."""
    costs: Mapping[str, int]
    """Of the pods whose cost is to change."""


def plan(
    desired: Mapping[Role, int],
    sizes: Mapping[Role, int],
    pods: Sequence[NodePod],
    workers: Sequence[PlacedWorker],
) -> Plan:
    """What the Deployments should be like. With the pods that result, it asks for nothing twice.

    Args:
        desired: workers of each pool.
        sizes: of the Deployments now.
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
    return Plan(wanted, changed)
