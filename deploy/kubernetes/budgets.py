"""Disruption budgets of workers' pods that no Deployment has created. A drain evicts one of them at a time.

Kubernetes counts the pods that should be there only for controllers that it knows. For others, such as a RayCluster, it
takes nothing but the number of pods that must stay, which changes with the size of a pool.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from lightkube import AsyncClient
from lightkube.resources.policy_v1 import PodDisruptionBudget
from lightkube.types import PatchType

from baton.cluster import Role

logger = logging.getLogger(__name__)
AGAIN_S = 60.0
"""Time after which an unchanged number is written again: an upgrade of the chart sets it back."""


def num_staying(budgets: Mapping[Role, str], desired: Mapping[Role, int], workers_per_pod: int) -> dict[str, int]:
    """Return how many pods must stay by each budget: all but one, and at least one. Pure.

    Args:
        budgets: name of the budget of each pool's pods; the pools may share one, as they may share pods.
        desired: desired number of workers of each pool.
    """
    workers: dict[str, int] = {}
    for role, name in budgets.items():
        workers[name] = workers.get(name, 0) + desired[role]
    return {name: max(math.ceil(number / workers_per_pod) - 1, 1) for name, number in workers.items()}


class Budgets:
    """Client that writes the budgets. `keep` raises lightkube's and httpx's errors."""

    def __init__(
        self, client: AsyncClient, namespace: str, budgets: Mapping[Role, str], workers_per_pod: int = 1
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._budgets = budgets
        self._workers_per_pod = workers_per_pod
        self._written: dict[str, tuple[int, float]] = {}

    async def keep(self, desired: Mapping[Role, int]) -> None:
        """Write the numbers that have changed, and every minute all of them."""
        for name, number in num_staying(self._budgets, desired, self._workers_per_pod).items():
            known, at_s = self._written.get(name, (-1, 0.0))
            if known == number and time.monotonic() - at_s < AGAIN_S:
                continue
            await self._client.patch(
                PodDisruptionBudget,
                name,
                {"spec": {"minAvailable": number}},
                namespace=self._namespace,
                patch_type=PatchType.MERGE,
            )
            if known != number:
                logger.info("PodDisruptionBudget %s: %d pods must stay", name, number)
            self._written[name] = (number, time.monotonic())
