"""Reads the Deployments whose pods are Ray nodes, and changes them by `node_plan`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightkube import AsyncClient
from lightkube.resources.apps_v1 import Deployment, ReplicaSet
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from baton.cluster import Role
from deploy.kubernetes.node_plan import NodeLayout, NodePod, PlacedWorker, plan

logger = logging.getLogger(__name__)
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
REVISION = "deployment.kubernetes.io/revision"
TEMPLATE_HASH = "pod-template-hash"
CONTAINER = "worker"
"""Container with the Ray node."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Worker nodes as Kubernetes reports them."""

    sizes: Mapping[str, int]
    """Desired number of pods of each Deployment."""
    pods: Sequence[NodePod]


class WorkerNodes:
    """Deployments of the worker nodes. Both methods raise lightkube's and httpx's errors."""

    def __init__(self, client: AsyncClient, namespace: str, layout: NodeLayout) -> None:
        self.layout = layout
        self._client = client
        self._namespace = namespace

    async def read(self) -> Nodes:
        sizes: dict[str, int] = {}
        pods: list[NodePod] = []
        for name in dict.fromkeys(self.layout.deployments.values()):
            deployment = await self._client.get(Deployment, name, namespace=self._namespace)
            assert deployment.spec is not None
            sizes[name] = 1 if deployment.spec.replicas is None else deployment.spec.replicas
            labels = deployment.spec.selector.matchLabels or {}
            found = [pod async for pod in self._client.list(Pod, namespace=self._namespace, labels={**labels})]
            current = await self._present_version(deployment) if len(set(map(_version, found))) > 1 else ""
            pods += [_node_pod(pod, name, current) for pod in found]
        return Nodes(sizes, pods)

    async def _present_version(self, deployment: Deployment) -> str:
        """Return the hash of the template of new pods; empty: Kubernetes has not seen the latest one yet."""
        assert deployment.metadata is not None
        assert deployment.spec is not None
        seen = deployment.status.observedGeneration if deployment.status else None
        revision = (deployment.metadata.annotations or {}).get(REVISION)
        if revision is None or seen != deployment.metadata.generation:
            return ""
        labels = deployment.spec.selector.matchLabels or {}
        async for each in self._client.list(ReplicaSet, namespace=self._namespace, labels={**labels}):
            assert each.metadata is not None
            owners = {owner.uid for owner in each.metadata.ownerReferences or ()}
            if deployment.metadata.uid in owners and (each.metadata.annotations or {}).get(REVISION) == revision:
                return str((each.metadata.labels or {}).get(TEMPLATE_HASH, ""))
        return ""

    async def keep(self, nodes: Nodes, desired: Mapping[Role, int], workers: Sequence[PlacedWorker]) -> None:
        """Change the nodes to the workers' needs. The workers must have been observed after `read`."""
        wanted = plan(self.layout, desired, nodes.sizes, nodes.pods, workers)
        for name, cost in wanted.costs.items():
            change = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
            await self._client.patch(Pod, name, change, namespace=self._namespace, patch_type=PatchType.MERGE)
        for name, size in wanted.sizes.items():
            if size != nodes.sizes[name]:
                logger.info("%s: %d nodes, after %d", name, size, nodes.sizes[name])
                await self._client.patch(
                    Deployment.Scale,
                    name,
                    {"spec": {"replicas": size}},
                    namespace=self._namespace,
                    patch_type=PatchType.MERGE,
                )


def _version(pod: Pod) -> str:
    assert pod.metadata is not None
    return str((pod.metadata.labels or {}).get(TEMPLATE_HASH, ""))


def _node_pod(pod: Pod, deployment: str, current: str) -> NodePod:
    """Return a pod of a Deployment.

    Args:
        current: hash of the Deployment's current version; empty: unknown, and every pod counts as current.
    """
    assert pod.metadata is not None
    assert pod.metadata.name is not None
    containers = (pod.status.containerStatuses if pod.status else None) or ()
    return NodePod(
        name=pod.metadata.name,
        deployment=deployment,
        address=(pod.status.podIP if pod.status else None) or "",
        cost=int((pod.metadata.annotations or {}).get(DELETION_COST, "0")),
        is_leaving=pod.metadata.deletionTimestamp is not None,
        is_current=current in ("", _version(pod)),
        is_running=any(c.name == CONTAINER and c.state is not None and c.state.running for c in containers),
    )
