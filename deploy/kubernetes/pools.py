"""ServingPools: the sizes of the pools in Kubernetes, where every change of a size is made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

from baton.cluster import Role
from baton.errors import StoreUnavailable
from deploy.kubernetes.events import PoolEvents, of_rollouts, of_statuses
from deploy.kubernetes.serving_pool import PoolReport, PoolSpec, spec_of, status_of

logger = logging.getLogger(__name__)
ServingPool = create_namespaced_resource("baton.dev", "v1alpha1", "ServingPool", "servingpools")
WATCH_S = 240
"""Duration of a watch. The next one lists everything again."""
RETRY_S = 1.0


class ServingPools:
    """Client that reads, follows and writes the ServingPools.

    Args:
        names: names of the ServingPools, by role.
    """

    def __init__(self, client: AsyncClient, namespace: str, names: Mapping[Role, str]) -> None:
        self._client = client
        self._namespace = namespace
        self._names = names
        self._known: dict[Role, PoolSpec] = {}
        self._reported: dict[Role, dict[str, Any]] = {}
        self._events = PoolEvents(client, namespace)
        self._uids: dict[Role, str] = {}
        self._outdated: dict[Role, int] = {}

    async def read(self) -> dict[Role, PoolSpec]:
        """Return the current specifications. Raises StoreUnavailable."""
        for role, name in self._names.items():
            async with _api(f"the question for ServingPool {name}"):
                await self._learn(role, await self._client.get(ServingPool, name, namespace=self._namespace))
        return dict(self._known)

    async def follow(self) -> AsyncGenerator[tuple[Role, PoolSpec]]:
        """Yield each specification: initially, whenever it changes, and again with every new watch. Never ends.

        It yields nothing while Kubernetes does not answer.
        """
        roles = {name: role for role, name in self._names.items()}
        while True:
            try:
                async for kind, pool in self._client.watch(
                    ServingPool, namespace=self._namespace, server_timeout=WATCH_S
                ):
                    role = roles.get(_name(pool))
                    if role is not None and kind != "DELETED" and (spec := await self._learn(role, pool)):
                        yield role, spec
            except (ApiError, httpx2.HTTPError, OSError) as error:
                logger.warning("the ServingPools cannot be watched: %s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def set_sizes(self, sizes: Mapping[Role, int]) -> dict[Role, PoolSpec]:
        """Write sizes and return the resulting specifications. Raises StoreUnavailable if one is not accepted."""
        for role, size in sizes.items():
            async with _api(f"the size of ServingPool {self._names[role]}"):
                await self._learn(role, await self._patch(role, {"spec": {"replicas": size}}))
        return {role: self._known[role] for role in sizes}

    async def report(self, reports: Mapping[Role, PoolReport]) -> None:
        """Write the statuses that have changed, and post events of it. Raises StoreUnavailable."""
        for role, report in reports.items():
            spec = self._known.get(role)
            if spec is None:
                continue
            status = status_of(spec, report, self._reported.get(role, {}))
            if status == self._reported.get(role):
                continue
            async with _api(f"the status of ServingPool {self._names[role]}"):
                await self._client.patch(
                    ServingPool.Status,
                    self._names[role],
                    {"status": status},
                    namespace=self._namespace,
                    patch_type=PatchType.MERGE,
                )
            events = of_statuses(self._reported.get(role, {}), status)
            self._reported[role] = status
            await self._events.post(self._names[role], self._uids[role], events)

    async def report_outdated(self, numbers: Mapping[Role, int]) -> None:
        """Post an event of each pool whose roll-out has started or has ended.

        Args:
            numbers: pods of older versions that have workers of the pool.
        """
        for role, number in numbers.items():
            events = of_rollouts(self._outdated.get(role, 0), number)
            self._outdated[role] = number
            if events and role in self._uids:
                await self._events.post(self._names[role], self._uids[role], events)

    async def _learn(self, role: Role, pool: Any) -> PoolSpec | None:
        """Return the pool's specification, after setting its initial size if it has none. None: it is outdated."""
        if "replicas" not in pool.spec:
            logger.info("%s starts with %d workers", self._names[role], size := int(pool.spec["initialReplicas"]))
            pool = await self._patch(role, {"spec": {"replicas": size}})
        self._uids[role] = str(pool.metadata.uid or "")
        spec = spec_of(role, pool)
        known = self._known.get(role)
        if known is not None and spec.generation < known.generation:
            return None  # older than our own latest write
        self._known[role] = spec
        return spec

    async def _patch(self, role: Role, change: dict[str, Any]) -> Any:
        return await self._client.patch(
            ServingPool, self._names[role], change, namespace=self._namespace, patch_type=PatchType.MERGE
        )


def _name(pool: Any) -> str:
    return str(pool.metadata.name)


@asynccontextmanager
async def _api(what: str) -> AsyncGenerator[None]:
    """Context manager: raises StoreUnavailable if Kubernetes refuses or does not answer."""
    try:
        yield
    except (ApiError, httpx2.HTTPError, OSError) as error:
        raise StoreUnavailable(f"Kubernetes has not taken {what}: {error}") from error
