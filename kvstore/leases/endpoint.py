"""Announcements of an endpoint's routers and models in Redis; `kvstore/index/keys.py` lists the keys.

Routers announce themselves for a lease, and controllers announce their models for `MODEL_LEASE_S`. A reader accepts the
announcement of a model only if a controller has signed it for this content id.
"""

from __future__ import annotations

import time
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from baton.cluster import ModelAnnouncement, RouterInfo
from baton.trust import Principal
from kvstore.index.keys import Keys, endpoint_namespace
from kvstore.leases.announcements import AnnouncedKind, AnnouncedSet, Announcements
from kvstore.leases.codec import MAX_BYTES, ROUTER_BYTES, decode_model, decode_router, encode
from kvstore.leases.protocol import MAX_MODELS, MODEL_LEASE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.trust import KeyFile
    from kvstore.index.connection import RedisConnection


ROUTERS: AnnouncedKind[RouterInfo] = AnnouncedKind(
    author=Principal.ROUTER, max_bytes=ROUTER_BYTES, decode=decode_router, id_of=attrgetter("id")
)
MODELS: AnnouncedKind[ModelAnnouncement] = AnnouncedKind(
    author=Principal.CONTROLLER, max_bytes=MAX_BYTES, decode=decode_model, id_of=attrgetter("content_id")
)


class RedisEndpoint:
    """`EndpointStore` in Redis. Owns `connection`: `close` closes it.

    Args:
        name: name of the endpoint (`cluster.endpoint`).
        lease_s: time for which an announcement lists a router.
        clock: wall time in seconds.
        monotonic_s: monotonic seconds.
        keys: this member's keys; None: nothing is signed, and every readable value is accepted.
    """

    def __init__(
        self,
        connection: RedisConnection,
        name: str,
        *,
        lease_s: float = 10.0,
        clock: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
        keys: KeyFile | None = None,
    ) -> None:
        self._connection = connection
        self._keys = Keys(endpoint_namespace(name))
        announcements = partial(Announcements, connection, clock=clock, monotonic_s=monotonic_s, keys=keys)
        self._routers = AnnouncedSet(connection, announcements(lease_s), ROUTERS, self._keys.routers, self._keys.router)
        self._models = AnnouncedSet(
            connection, announcements(MODEL_LEASE_S), MODELS, self._keys.models, self._keys.model
        )

    async def announce_router(self, info: RouterInfo) -> None:
        await self._routers.announce(info.id, encode(info))

    async def list_routers(self) -> list[RouterInfo]:
        return await self._routers.list()

    async def announce_model(self, model: ModelAnnouncement) -> None:
        await self._models.announce(model.content_id, encode(model))

    async def list_models(self) -> list[ModelAnnouncement]:
        return (await self._models.list())[:MAX_MODELS]

    async def boot(self) -> str:
        return await self._connection.boot(self._keys.boot)

    async def close(self) -> None:
        await self._connection.close()
