"""Connection of the controller to Kubernetes: reads sizes from ServingPools, writes statuses and worker nodes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.core.exceptions import ConfigError as NoAccess

from baton.cluster import Role
from baton.config import KubernetesConfig
from baton.errors import ConfigError, StoreUnavailable
from deploy.controller.controller import Controller
from deploy.kubernetes.budgets import Budgets
from deploy.kubernetes.node_plan import NodeLayout, NodePod
from deploy.kubernetes.nodes import WorkerNodes
from deploy.kubernetes.pools import ServingPools

logger = logging.getLogger(__name__)
FIELD_MANAGER = "baton-controller"
REPORT_S = 1.0
NODES_TICK_S = 1.0


class Kubernetes:
    """The ServingPools and, if the workers' nodes are plain Deployments, the nodes."""

    def __init__(self, client: AsyncClient, config: KubernetesConfig) -> None:
        self._client = client
        self._config = config
        names = {Role.PREFILL: config.prefill_pool, Role.DECODE: config.decode_pool}
        self._pools = ServingPools(client, config.namespace, names)

    async def sizes(self) -> dict[Role, int]:
        """Return the sizes requested by the ServingPools. Raises StoreUnavailable."""
        return {role: spec.size for role, spec in (await self._pools.read()).items()}

    async def set_sizes(self, controller: Controller, sizes: Mapping[Role, int]) -> None:
        """Write sizes to the ServingPools. Raises StoreUnavailable if Kubernetes does not accept one of them."""
        for role, spec in (await self._pools.set_sizes(sizes)).items():
            controller.follow(role, spec)

    async def run(self, controller: Controller) -> None:
        """Follow and report until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(controller), name="pools")
            tasks.create_task(self._report(controller), name="status")
            deployments = {Role.PREFILL: self._config.prefill_deployment, Role.DECODE: self._config.decode_deployment}
            if all(deployments.values()):
                layout = NodeLayout(deployments, self._config.workers_per_pod)
                nodes = WorkerNodes(self._client, self._config.namespace, layout)
                tasks.create_task(_keep_nodes(nodes, controller, self._pools), name="nodes")
            budgets = {Role.PREFILL: self._config.prefill_budget, Role.DECODE: self._config.decode_budget}
            if budgets := {role: name for role, name in budgets.items() if name}:
                kept = Budgets(self._client, self._config.namespace, budgets, self._config.workers_per_pod)
                tasks.create_task(_keep_budgets(kept, controller), name="budgets")

    async def _follow(self, controller: Controller) -> None:
        async with aclosing(self._pools.follow()) as specs:
            async for role, spec in specs:
                controller.follow(role, spec)

    async def _report(self, controller: Controller) -> None:
        while True:
            try:
                await self._pools.report(controller.reports())
            except StoreUnavailable as error:
                logger.warning("%s; trying again", error)
            await asyncio.sleep(REPORT_S)


async def _keep_nodes(nodes: WorkerNodes, controller: Controller, pools: ServingPools) -> None:
    """Keep the number of nodes that the pools need. While Kubernetes does not answer, the nodes stay as they are."""
    while True:
        try:
            found = await nodes.read()
            controller.see_pods(nodes.layout, found.pods)
            await pools.report_outdated(num_outdated(nodes.layout, found.pods))
            await nodes.keep(found, controller.state.desired, controller.placed_workers())
        except (ApiError, httpx2.HTTPError, OSError) as error:
            logger.warning("the worker nodes cannot be kept: %s; trying again", error)
        await asyncio.sleep(NODES_TICK_S)


async def _keep_budgets(budgets: Budgets, controller: Controller) -> None:
    """Keep the budgets of pods without a Deployment. While Kubernetes does not answer, they stay as they are."""
    while True:
        try:
            await budgets.keep(controller.state.desired)
        except (ApiError, httpx2.HTTPError, OSError) as error:
            logger.warning("the disruption budgets cannot be kept: %s; trying again", error)
        await asyncio.sleep(NODES_TICK_S)


def num_outdated(layout: NodeLayout, pods: Sequence[NodePod]) -> dict[Role, int]:
    """Return the number of pods of older versions, by pool. Pools may share a Deployment."""
    older = Counter(pod.deployment for pod in pods if not pod.is_current)
    return {role: older[name] for role, name in layout.deployments.items()}


@asynccontextmanager
async def connected(config: KubernetesConfig) -> AsyncGenerator[Kubernetes]:
    """Connect with the pod's service account or $KUBECONFIG.

    Raises:
        ConfigError: neither exists, or only one Deployment is configured.
    """
    if bool(config.prefill_deployment) != bool(config.decode_deployment):
        raise ConfigError("kubernetes.prefill_deployment and kubernetes.decode_deployment go together")
    try:
        access = KubeConfig.from_env()
    except NoAccess as error:
        raise ConfigError(f"kubernetes.namespace is set, and there is no access to Kubernetes: {error}") from error
    client = AsyncClient(access, namespace=config.namespace, field_manager=FIELD_MANAGER)
    try:
        yield Kubernetes(client, config)
    finally:
        await client.close()
