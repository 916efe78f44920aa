"""Number of pods that are Ray nodes, if Deployments create them: enough for the workers, and no used pod is removed.

A worker needs room on a node of the pool in which it was started, and keeps it when its role changes. The pools may
share one Deployment, whose pods have room for several workers of either pool. A Deployment grows if workers without a
node do not fit on its pods, and shrinks by its pods without workers. Pods with workers have a higher deletion cost
(controller.kubernetes.io/pod-deletion-cost). While a Deployment rolls out a newer version, it has a few pods more than
its size (`maxSurge`), and the workers on older pods leave as others serve in their place. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.cluster import Role

COST_OF_A_WORKER = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePod:
    """Pod that is a Ray node."""

    name: str
    deployment: str
    """Deployment that created it."""
    address: str = ""
    """IP address; empty: the pod has none yet."""
    cost: int = 0
    """Deletion cost in Kubernetes."""
    is_leaving: bool = False
    """The pod is being deleted, so its Deployment no longer counts it."""
    is_current: bool = True
    """The pod has its Deployment's current version."""
    is_running: bool = True
    """The pod's container runs."""


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """Worker with its node."""

    pool: Role
    """Pool in which it was started."""
    role: Role
    pod: str
    """Pod of the worker's node; empty: it waits for a node."""
    is_staying: bool
    """The worker does not have to leave."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Changes to make."""

    sizes: Mapping[str, int]
    """Desired number of pods of each Deployment."""
    costs: Mapping[str, int]
    """New deletion costs of pods whose cost changes, by name."""


@dataclass(frozen=True, slots=True)
class PodRollout:
    """Progress of the Deployments' rollout."""

    outdated: frozenset[str] = frozenset()
    """Pods of an older version, which will be removed."""
    room: Mapping[Role, int] = field(default_factory=dict)
    """Number of workers for which pods of the current version have room, for each pool with outdated pods."""


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Deployments with the nodes of each pool, and the size of a node."""

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
    """Return the plan for the Deployments. A repeated call with the resulting pods changes nothing.

    Args:
        desired: workers of each pool.
        sizes: current sizes of the Deployments.
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
        # While a worker waits for a node, no node is removed, because the worker may be about to run there.
        wanted[deployment] = max(size, num_needed - num_surplus) if num_lacking else min(size, num_needed)
    return NodePlan(wanted, changed)


def pod_rollout(layout: NodeLayout, pods: Sequence[NodePod], on: Iterable[str]) -> PodRollout:
    """Return the progress of a rollout.

    Args:
        on: the pod of each worker that has a node.
    """
    num_on = Counter(on)
    outdated = frozenset(pod.name for pod in pods if not (pod.is_current or pod.is_leaving))
    rolling = {pod.deployment for pod in pods if pod.name in outdated}
    free: Counter[str] = Counter()
    for pod in pods:
        if pod.is_current and pod.is_running and not pod.is_leaving:
            free[pod.deployment] += max(layout.workers_per_pod - num_on[pod.name], 0)
    places = {pool: free[layout.deployments[pool]] for pool in Role if layout.deployments[pool] in rolling}
    return PodRollout(outdated, {pool: num for pool, num in places.items() if num})
