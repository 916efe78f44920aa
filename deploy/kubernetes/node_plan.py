"""The pods that are Ray nodes, where Deployments make them: as many as workers need, and never the wrong one less.

A worker needs a node, and no node has room for two. Which of the two Deployments has it does not matter to a worker,
who may have changed its role since. So Deployments grow by the workers that lack a node, and shrink by the pods that
have none; a pod that has one is dearer to delete (controller.kubernetes.io/pod-deletion-cost). Pure.
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
    num_used = {role: sum(by_name[name].deployment is role for name in used) for role in Role}
    placed = [worker.role for worker in workers if worker.is_staying and worker.pod in used]
    lacking = {role: max(0, desired[role] - placed.count(role)) for role in Role}
    num_free = sum(sizes.values()) - sum(num_used.values())
    if not any(lacking.values()):
        return Plan({role: min(sizes[role], num_used[role]) for role in Role}, changed)
    num_more = max(0, sum(lacking.values()) - num_free)
    grown = dict(sizes)
    for role in Role:
        more = min(num_more, max(0, lacking[role] - max(0, sizes[role] - num_used[role])))
        grown[role] += more
        num_more -= more
    return Plan(grown, changed)
