"""Reads the Deployments whose pods are Ray nodes, and changes them as `node_plan` says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightkube import AsyncClient
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from baton.cluster import Role
from deploy.kubernetes.node_plan import NodeLayout, NodePod, PlacedWorker, plan

logger = logging.getLogger(__name__)
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass(frozen=True, slots=True)
class Nodes:
    """The worker nodes as Kubernetes has them."""

    sizes: Mapping[str, int]
    """The number of pods that each Deployment should have."""
    pods: Sequence[NodePod]


class WorkerNodes:
    """The Deployments of the worker nodes. Both methods raise lightkube's and httpx's errors."""

    def __init__(self, client: AsyncClient, namespace: str, layout: NodeLayout) -> None:
        self._client = client
        self._namespace = namespace
        self._layout = layout

    async def read(self) -> Nodes:
        sizes: dict[str, int] = {}
        pods: list[NodePod] = []
        for name in dict.fromkeys(self._layout.deployments.values()):
            deployment = await self._client.get(Deployment, name, namespace=self._namespace)
            assert deployment.spec is not None
            sizes[name] = 1 if deployment.spec.replicas is None else deployment.spec.replicas
            labels = deployment.spec.selector.matchLabels or {}
            found = self._client.list(Pod, namespace=self._namespace, labels={**labels})
            pods += [_node_pod(pod, name) async for pod in found]
        return Nodes(sizes, pods)

    async def keep(self, nodes: Nodes, desired: Mapping[Role, int], workers: Sequence[PlacedWorker]) -> None:
        """Changes what was read into what the workers need. They must have been observed after `read`."""
        wanted = plan(self._layout, desired, nodes.sizes, nodes.pods, workers)
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


def _node_pod(pod: Pod, deployment: str) -> NodePod:
    assert pod.metadata is not None
    assert pod.metadata.name is not None
    cost = (pod.metadata.annotations or {}).get(DELETION_COST, "0")
    return NodePod(pod.metadata.name, deployment, int(cost), pod.metadata.deletionTimestamp is not None)
