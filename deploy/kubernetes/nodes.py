"""Keeps the Deployments whose pods are Ray nodes as `node_plan` says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import httpx2
from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from baton.cluster import Role
from deploy.kubernetes.node_plan import NodePod, PlacedWorker, plan

logger = logging.getLogger(__name__)
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
TICK_S = 1.0


class WorkerNodes:
    """
    Args:
        deployments: names, by the pool that they are for.
        look: the desired sizes, and the workers as they are.
    """

    def __init__(
        self,
        client: AsyncClient,
        namespace: str,
        deployments: Mapping[Role, str],
        look: Callable[[], tuple[Mapping[Role, int], list[PlacedWorker]]],
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._deployments = deployments
        self._look = look

    async def run(self) -> None:
        """Until cancelled. While Kubernetes does not answer, the nodes stay as they are."""
        while True:
            try:
                await self.step()
            except (ApiError, httpx2.HTTPError, OSError) as error:
                logger.warning("the worker nodes cannot be kept: %s; trying again", error)
            await asyncio.sleep(TICK_S)

    async def step(self) -> None:
        sizes: dict[Role, int] = {}
        pods: list[NodePod] = []
        for role, name in self._deployments.items():
            deployment = await self._client.get(Deployment, name, namespace=self._namespace)
            assert deployment.spec is not None
            sizes[role] = 1 if deployment.spec.replicas is None else deployment.spec.replicas
            labels = deployment.spec.selector.matchLabels or {}
            found = self._client.list(Pod, namespace=self._namespace, labels={**labels})
            pods += [_node_pod(pod, role) async for pod in found]
        desired, workers = self._look()
        wanted = plan(desired, sizes, pods, workers)
        for name, cost in wanted.costs.items():
            change = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
            await self._client.patch(Pod, name, change, namespace=self._namespace, patch_type=PatchType.MERGE)
        for role, size in wanted.sizes.items():
            if size != sizes[role]:
                name = self._deployments[role]
                logger.info("%s: %d nodes, after %d", name, size, sizes[role])
                await self._client.patch(
                    Deployment.Scale,
                    name,
                    {"spec": {"replicas": size}},
                    namespace=self._namespace,
                    patch_type=PatchType.MERGE,
                )


def _node_pod(pod: Pod, role: Role) -> NodePod:
    assert pod.metadata is not None
    assert pod.metadata.name is not None
    cost = (pod.metadata.annotations or {}).get(DELETION_COST, "0")
    return NodePod(pod.metadata.name, role, int(cost), pod.metadata.deletionTimestamp is not None)
