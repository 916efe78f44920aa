"""The registry in Redis; `kvstore/index/keys.py` lists the keys."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from baton.errors import Fenced
from kvstore.index.connection import Connection, Script
from kvstore.index.keys import Keys
from kvstore.leases.codec import decode_controller, decode_router, decode_worker, encode
from kvstore.leases.journal import choices_of, fields_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.cluster import ControllerInfo, RouterInfo, Worker, WorkerInfo, WorkerLoad
    from kvstore.leases.journal import Ended, Entry, Noted, RecordKey

ACQUIRE = Script("kvstore.leases", "acquire.lua")
RENEW = Script("kvstore.leases", "renew.lua")
RELEASE = Script("kvstore.leases", "release.lua")
PRUNE = Script("kvstore.leases", "prune.lua")

EPOCH_TTL_MS = 24 * 3600 * 1000
"""By then the clock alone keeps epochs apart."""
BATCH = 64
"""Records in one round trip: what is packed at once, in a millisecond, holds up everybody's tokens."""


class RedisLeases:
    """A `LeaseStore`. Owns `connection`: `close` closes it. `clock` is wall time in seconds."""

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        *,
        lease_s: float = 10.0,
        blocks_ttl_s: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._connection = connection
        self._keys = Keys(namespace)
        self._lease_ms = int(lease_s * 1000)
        self._blocks_ttl_ms = int(blocks_ttl_s * 1000)
        self._clock = clock

    async def acquire(self, worker_id: str, after: int | None = None) -> int:
        keys = self._keys
        now_ms = int(self._clock() * 1000)
        epoch, is_acquired = await self._connection.run(
            ACQUIRE,
            [keys.epoch(worker_id), keys.lease(worker_id), keys.workers],
            *(worker_id, now_ms, self._lease_ms, EPOCH_TTL_MS, "" if after is None else after),
        )
        if not is_acquired:
            raise _fenced(worker_id, int(epoch), after)
        return int(epoch)

    async def renew(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        keys = self._keys
        highest = await self._connection.run(
            RENEW,
            [keys.epoch(info.id), keys.lease(info.id), keys.workers, *self._owned(info.id, info.epoch)],
            *(info.id, info.epoch, encode(info), encode(load), self._lease_ms, self._blocks_ttl_ms, EPOCH_TTL_MS),
        )
        if int(highest) > info.epoch:
            raise _fenced(info.id, int(highest), info.epoch)
        return not int(highest)

    async def release(self, worker_id: str, epoch: int) -> None:
        keys = self._keys
        await self._connection.run(
            RELEASE, [keys.lease(worker_id), keys.workers, *self._owned(worker_id, epoch)], worker_id, epoch
        )

    async def list_workers(self) -> list[Worker]:
        ids = await self._ids(self._keys.workers)
        leases = await self._connection.pipeline(
            [("HMGET", self._keys.lease(worker_id), "epoch", "info", "load") for worker_id in ids]
        )
        for worker_id, (epoch, _, _) in zip(ids, leases, strict=True):
            if epoch is None:
                await self._connection.run(PRUNE, [self._keys.lease(worker_id), self._keys.workers], worker_id)
        return [decode_worker(info, load) for _, info, load in leases if info is not None]

    async def announce_router(self, info: RouterInfo) -> None:
        await self._connection.pipeline(
            [
                ("SET", self._keys.router(info.id), encode(info), "PX", self._lease_ms),
                ("SADD", self._keys.routers, info.id),
            ]
        )

    async def list_routers(self) -> list[RouterInfo]:
        ids = await self._ids(self._keys.routers)
        found = await self._connection.pipeline([("GET", self._keys.router(router_id)) for router_id in ids])
        for router_id, info in zip(ids, found, strict=True):
            if info is None:
                await self._connection.run(PRUNE, [self._keys.router(router_id), self._keys.routers], router_id)
        return [decode_router(info) for info in found if info is not None]

    async def announce_controller(self, info: ControllerInfo) -> None:
        await self._connection.call("SET", self._keys.controller, encode(info), "PX", self._lease_ms)

    async def get_controller(self) -> ControllerInfo | None:
        found = await self._connection.call("GET", self._keys.controller)
        return decode_controller(found) if found else None

    async def set_desired(self, sizes: Mapping[str, int]) -> None:
        if sizes:
            fields = [part for pool, size in sizes.items() for part in (pool, size)]
            await self._connection.call("HSET", self._keys.desired, *fields)

    async def get_desired(self) -> dict[str, int]:
        sizes = await self._connection.call("HGETALL", self._keys.desired)
        return {pool.decode(): int(size) for pool, size in sizes.items()}

    async def boot(self) -> str:
        return await self._connection.boot(self._keys.boot)

    async def close(self) -> None:
        await self._connection.close()

    async def _ids(self, key: str) -> list[str]:
        return sorted(found.decode() for found in await self._connection.call("SMEMBERS", key))

    def _owned(self, worker_id: str, epoch: int) -> list[str]:
        keys = self._keys
        return [keys.seq(worker_id, epoch), keys.blocks(worker_id, epoch), keys.parts(worker_id, epoch)]


def _fenced(worker_id: str, newer: int, own: int | None) -> Fenced:
    return Fenced(f"{worker_id}: epoch {newer} holds the lease, this is epoch {own}")


class RedisRecords:
    """A `RecordStore`. Owns `connection`: `close` closes it."""

    def __init__(self, connection: Connection, namespace: str, *, ttl_s: float = 60.0) -> None:
        self._connection = connection
        self._keys = Keys(namespace)
        self._ttl_ms = int(ttl_s * 1000)

    async def write(self, entries: Sequence[Entry], ended: Sequence[Ended]) -> None:
        for begin in range(0, len(ended), BATCH):
            await self._connection.pipeline([self._forget(past) for past in ended[begin : begin + BATCH]])
        for begin in range(0, len(entries), BATCH):
            commands: list[tuple[object, ...]] = []
            for entry in entries[begin : begin + BATCH]:
                name = self._name(entry.key)
                commands.append(("HSET", name, *(part for field in fields_of(entry).items() for part in field)))
                commands.append(("PEXPIRE", name, self._ttl_ms))
            await self._connection.pipeline(commands)

    async def read(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        return choices_of(await self._connection.call("HGETALL", self._name(key)), digest)

    async def close(self) -> None:
        await self._connection.close()

    def _forget(self, past: Ended) -> tuple[object, ...]:
        """A record without fields is none."""
        name = self._name(past.key)
        return ("UNLINK", name) if past.fields is None else ("HDEL", name, *past.fields)

    def _name(self, key: RecordKey) -> str:
        return self._keys.record(key.tenant_id, key.request_id)
