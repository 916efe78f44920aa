"""Events of ServingPools, as `kubectl describe servingpool` shows them: it is scaled, limited, or rolled out."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx2
from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError
from lightkube.models.core_v1 import EventSource, ObjectReference
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Event

logger = logging.getLogger(__name__)
COMPONENT = "baton-controller"
API_VERSION = "baton.dev/v1alpha1"
QUIET_S = 60.0
"""Time in which the same event of a pool is posted once."""


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """Something that has happened to a pool."""

    reason: str
    message: str
    is_warning: bool = False


def of_statuses(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[PoolEvent]:
    """Return what has happened between two statuses of a ServingPool. Pure.

    Args:
        before: the status before; empty: it is unknown, as after a restart of the controller.
    """
    found = []
    sizes = [status.get("desiredReplicas") for status in (before, after)]
    if None not in sizes and sizes[0] != sizes[1]:
        found.append(PoolEvent("Scaled", f"the pool should have {sizes[1]} workers, after {sizes[0]}"))
    limits = [_limit(status) for status in (before, after)]
    if limits[1] and limits[1] != limits[0]:
        found.append(PoolEvent("Limited", limits[1], is_warning=True))
    return found


def of_rollouts(num_before: int, num_after: int) -> list[PoolEvent]:
    """Return what has happened, by a pool's numbers of pods of older versions before and after. Pure."""
    if num_after and not num_before:
        return [PoolEvent("RollingOut", f"{num_after} pods with workers of an older version are being replaced")]
    if num_before and not num_after:
        return [PoolEvent("RolledOut", "all pods with workers are of the current version")]
    return []


def _limit(status: Mapping[str, Any]) -> str:
    """Return why the pool does not have the size that was asked for; empty: it does."""
    conditions: Sequence[Mapping[str, str]] = status.get("conditions", ())
    return next((c["message"] for c in conditions if (c["type"], c["status"]) == ("Limited", "True")), "")


class PoolEvents:
    """Client that posts events. A failure is logged and has no other effect."""

    def __init__(self, client: AsyncClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._posted_s: dict[tuple[str, PoolEvent], float] = {}

    async def post(self, pool: str, uid: str, events: Sequence[PoolEvent]) -> None:
        """Post the events of a pool, except those that were posted a moment ago.

        Args:
            pool: name of the ServingPool.
            uid: its uid.
        """
        now_s = time.monotonic()
        self._posted_s = {key: at_s for key, at_s in self._posted_s.items() if now_s - at_s < QUIET_S}
        for each in events:
            if (pool, each) in self._posted_s:
                continue
            self._posted_s[pool, each] = now_s
            try:
                await self._client.create(self._object(pool, uid, each))
            except (ApiError, httpx2.HTTPError, OSError) as error:
                logger.warning(
                    "an event of ServingPool %s is lost (%s: %s): %s", pool, each.reason, each.message, error
                )

    def _object(self, pool: str, uid: str, event: PoolEvent) -> Event:
        now = datetime.now(UTC)
        return Event(
            metadata=ObjectMeta(name=f"{pool}.{time.time_ns():x}", namespace=self._namespace),
            involvedObject=ObjectReference(
                apiVersion=API_VERSION, kind="ServingPool", name=pool, namespace=self._namespace, uid=uid
            ),
            reason=event.reason,
            message=event.message,
            type="Warning" if event.is_warning else "Normal",
            source=EventSource(component=COMPONENT),
            reportingComponent=COMPONENT,
            reportingInstance=COMPONENT,
            firstTimestamp=now,
            lastTimestamp=now,
            count=1,
        )
