"""The claim of a controller to its model's keys in Redis, which no other cluster may share.

Leases, sizes and the index of a model are stored under its content id. The controllers of two clusters with the same
content id would end each other's workers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time

from baton.addresses import host_of
from baton.cluster import ControllerInfo
from baton.errors import ConfigError
from kvstore.leases import LeaseStore

POLL_S = 0.2
CONNECT_S = 1.0


class Claim:
    """This controller's claim to the keys.

    Args:
        me: this controller; `me.cluster` identifies its cluster.
        lease_s: time after which a controller that no longer runs is no longer listed.
    """

    def __init__(self, leases: LeaseStore, me: ControllerInfo, lease_s: float) -> None:
        self._leases = leases
        self._cluster = me.cluster
        self._lease_s = lease_s
        self._is_held = False

    async def hold(self) -> None:
        """Make sure that no other cluster's controller holds the keys. Called before each announcement.

        A controller of the same cluster is a predecessor, and this one replaces it. Another cluster's controller may
        have ended recently, so the first call waits up to a lease until it is no longer listed. If two controllers
        start at the same time, the one whose cluster's name sorts first continues.

        Raises:
            ConfigError: the controller of another cluster holds them.
            StoreUnavailable: Redis does not answer.
        """
        other = await self._other()
        if other is not None and not self._is_held:
            other = await self._after_a_lease(other)
        if other is not None and (not self._is_held or other.cluster < self._cluster):
            raise ConfigError(
                f"cluster {other.cluster}, whose controller is at {other.address}, already serves this model in the "
                "same Redis; stop it, or set another model.revision, model.weights or index.redis_url here"
            )
        self._is_held = True

    async def _other(self) -> ControllerInfo | None:
        """Return the controller of another cluster, if one is listed. Earlier releases do not report their cluster."""
        found = await self._leases.get_controller()
        return found if found is not None and found.cluster not in ("", self._cluster) else None

    async def _after_a_lease(self, other: ControllerInfo) -> ControllerInfo | None:
        """Return the other cluster's controller that is still listed after a lease; None: there is none."""
        deadline_s = time.monotonic() + self._lease_s + POLL_S
        listed: ControllerInfo | None = other
        while listed is not None and time.monotonic() < deadline_s:
            if await is_surely_gone(listed.address):
                return None
            await asyncio.sleep(POLL_S)
            listed = await self._other()
        return listed


async def is_surely_gone(address: str) -> bool:
    """Return True if the address is a loopback address and no process listens there.

    It is False for addresses of other machines, which may be unreachable for other reasons.
    """
    try:
        if not ipaddress.ip_address(host_of(address)).is_loopback:
            return False
        async with asyncio.timeout(CONNECT_S):
            _, connection = await asyncio.open_connection(host_of(address), int(address.rpartition(":")[2]))
    except ConnectionRefusedError:
        return True
    except (ValueError, OSError, TimeoutError):
        return False
    connection.close()
    return False
