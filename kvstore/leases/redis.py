"""The registry in Redis; `kvstore/index/keys.py` lists the keys."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from baton.errors import Fenced
from kvstore.index.connection import RedisConnection, Script, WrongType
from kvstore.index.keys import Keys
from kvstore.index.values import MAX_EPOCH, natural, text
from kvstore.leases.codec import decode_controller, decode_router, decode_worker, encode
from kvstore.leases.journal import choices_of, fields_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.cluster import ControllerInfo, RouterInfo, Worker, WorkerInfo, WorkerLoad
    from kvstore.leases.journal import Noted, RecordEnd, RecordEntry, RecordKey

T = TypeVar("T")
ACQUIRE = Script("kvstore.leases", "acquire.lua")
RENEW = Script("kvstore.leases", "renew.lua")
RELEASE = Script("kvstore.leases", "release.lua")
PRUNE = Script("kvstore.leases", "prune.lua")

EPOCH_TTL_MS = 24 * 3600 * 1000
"""Lifetime of the highest epoch; after it the clock alone keeps epochs apart."""
MAX_WORKERS = 1_000_000
"""Largest desired pool size that is read."""
BATCH = 64
"""Records in one round trip: packing more of them at once would hold up the tokens of all streams."""


class RedisLeases:
    """A `LeaseStore` in Redis. Owns `connection`: `close` closes it. `clock` is wall time in seconds."""

    def __init__(
        self,
        connection: RedisConnection,
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
            [keys.epoch(worker_id), keys.lease(worker_id), keys.workers, keys.boot],
            *(worker_id, now_ms, self._lease_ms, EPOCH_TTL_MS, "" if after is None else after),
        )
        if not is_acquired:
            raise _fenced(worker_id, int(epoch), after)
        return int(epoch)

    async def renew(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        keys = self._keys
        (found,) = await self._connection.run(
            RENEW,
            [keys.epoch(info.id), keys.lease(info.id), keys.workers, keys.boot, *self._owned(info.id, info.epoch)],
            *(info.id, info.epoch, encode(info), encode(load), self._lease_ms, self._blocks_ttl_ms, EPOCH_TTL_MS),
        )
        holder = int(found)
        if holder > info.epoch:
            raise _fenced(info.id, holder, info.epoch)
        return not holder

    async def release(self, worker_id: str, epoch: int) -> None:
        keys = self._keys
        await self._connection.run(
            RELEASE, [keys.lease(worker_id), keys.workers, *self._owned(worker_id, epoch)], worker_id, epoch
        )

    async def list_workers(self) -> list[Worker]:
        return [worker for worker in (await self.list_leases()).values() if worker]

    async def list_leases(self) -> dict[str, Worker | None]:
        keys = self._keys
        ids = await self._connection.ids(keys.workers)
        found = await self._connection.pipeline(
            [
                command
                for each in ids
                for command in (("HMGET", keys.lease(each), "epoch", "info", "load"), ("GET", keys.epoch(each)))
            ]
        )
        workers: dict[str, Worker | None] = {}
        for worker_id, lease, epoch in zip(ids, found[::2], found[1::2], strict=True):
            key = keys.lease(worker_id)
            if epoch is not None:
                self._read(keys.epoch(worker_id), _epoch, epoch)  # only the owner reads it, and raises Fenced here
            match lease:
                case [None, None, None]:
                    await self._connection.run(PRUNE, [key, keys.workers], worker_id)
                case [_, None, None]:
                    pass  # acquired, and not described yet
                case _:
                    workers[worker_id] = next(iter(self._read(key, partial(_leased, worker_id), lease)), None)
        return workers

    async def announce_router(self, info: RouterInfo) -> None:
        announced = ("SADD", self._keys.routers, info.id)
        _, listed = await self._connection.pipeline(
            [("SET", self._keys.router(info.id), encode(info), "PX", self._lease_ms), announced]
        )
        if isinstance(listed, WrongType):
            self._connection.note(self._keys.routers, listed.reason)
            await self._connection.pipeline([("UNLINK", self._keys.routers), announced])

    async def list_routers(self) -> list[RouterInfo]:
        ids = await self._connection.ids(self._keys.routers)
        found = await self._connection.pipeline([("GET", self._keys.router(router_id)) for router_id in ids])
        routers = []
        for router_id, info in zip(ids, found, strict=True):
            if info is None:
                await self._connection.run(PRUNE, [self._keys.router(router_id), self._keys.routers], router_id)
            else:
                routers += self._read(self._keys.router(router_id), partial(_announced, router_id), info)
        return routers

    async def announce_controller(self, info: ControllerInfo) -> None:
        await self._connection.call("SET", self._keys.controller, encode(info), "PX", self._lease_ms)

    async def get_controller(self) -> ControllerInfo | None:
        (found,) = await self._connection.pipeline([("GET", self._keys.controller)])
        known = [] if found is None else self._read(self._keys.controller, decode_controller, found)
        return known[0] if known else None

    async def set_desired(self, sizes: Mapping[str, int]) -> None:
        if sizes:
            write = ("HSET", self._keys.desired, *(part for pool, size in sizes.items() for part in (pool, size)))
            (written,) = await self._connection.pipeline([write])
            if isinstance(written, WrongType):
                self._connection.note(self._keys.desired, written.reason)
                await self._connection.pipeline([("UNLINK", self._keys.desired), write])

    async def get_desired(self) -> dict[str, int]:
        (sizes,) = await self._connection.pipeline([("HGETALL", self._keys.desired)])
        if isinstance(sizes, WrongType):
            self._connection.note(self._keys.desired, sizes.reason)
            return {}
        read = [self._read(self._keys.desired, _size, size) for size in sizes.items()]
        return dict(size for found in read for size in found)

    async def boot(self) -> str:
        return await self._connection.boot(self._keys.boot)

    async def close(self) -> None:
        await self._connection.close()

    def _read(self, key: str, decode: Callable[[Any], T], found: Any) -> list[T]:
        """Returns the decoded value as a list of one; an empty list if `decode` raises ValueError."""
        try:
            if isinstance(found, WrongType):
                raise ValueError(found.reason)
            return [decode(found)]
        except ValueError as error:
            self._connection.note(key, error)
            return []

    def _owned(self, worker_id: str, epoch: int) -> list[str]:
        keys = self._keys
        return [keys.seq(worker_id, epoch), keys.blocks(worker_id, epoch), keys.parts(worker_id, epoch)]


def _fenced(worker_id: str, newer: int, own: int | None) -> Fenced:
    return Fenced(f"{worker_id}: epoch {newer} holds the lease, this is epoch {own}")


def _epoch(found: bytes) -> int:
    """Raises ValueError."""
    return natural(found, MAX_EPOCH)


def _leased(worker_id: str, lease: Sequence[bytes | None]) -> Worker:
    """Decodes a lease; raises ValueError unless it is that worker's."""
    epoch, info, load = lease
    worker = decode_worker(info or b"", load or b"")
    if (worker.info.id, worker.info.epoch) != (worker_id, natural(epoch, MAX_EPOCH)):
        raise ValueError(f"the entry names worker {worker.info.id!r}, epoch {worker.info.epoch}")
    return worker


def _announced(router_id: str, found: bytes) -> RouterInfo:
    """Decodes an announcement; raises ValueError unless it is that router's."""
    info = decode_router(found)
    if info.id != router_id:
        raise ValueError(f"the entry names router {info.id!r}")
    return info


def _size(found: tuple[bytes, bytes]) -> tuple[str, int]:
    """Decodes the desired size of a pool; raises ValueError."""
    pool, size = found
    return text(pool), natural(size, MAX_WORKERS)


class RedisRecords:
    """A `RecordStore` in Redis. Owns `connection`: `close` closes it."""

    def __init__(self, connection: RedisConnection, namespace: str, *, ttl_s: float = 60.0) -> None:
        self._connection = connection
        self._keys = Keys(namespace)
        self._ttl_ms = int(ttl_s * 1000)

    async def write(self, entries: Sequence[RecordEntry], ended: Sequence[RecordEnd]) -> None:
        for begin in range(0, len(ended), BATCH):
            await self._connection.pipeline([self._forget(past) for past in ended[begin : begin + BATCH]])
        for begin in range(0, len(entries), BATCH):
            batch = entries[begin : begin + BATCH]
            written = await self._connection.pipeline([command for entry in batch for command in self._add(entry)])
            for entry, answer in zip(batch, written[::2], strict=True):
                if isinstance(answer, WrongType):
                    name = self._name(entry.key)
                    self._connection.note(name, answer.reason)
                    await self._connection.pipeline([("UNLINK", name), *self._add(entry)])

    async def read(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        name = self._name(key)
        (found,) = await self._connection.pipeline([("HGETALL", name)])
        try:
            if isinstance(found, WrongType):
                raise ValueError(found.reason)
            return choices_of(found, digest)
        except ValueError as error:
            self._connection.note(name, error)
            raise

    async def close(self) -> None:
        await self._connection.close()

    def _add(self, entry: RecordEntry) -> list[tuple[object, ...]]:
        name = self._name(entry.key)
        return [
            ("HSET", name, *(part for field in fields_of(entry).items() for part in field)),
            ("PEXPIRE", name, self._ttl_ms),
        ]

    def _forget(self, past: RecordEnd) -> tuple[object, ...]:
        """Removes fields of records; Redis removes a record without fields."""
        name = self._name(past.key)
        return ("UNLINK", name) if past.fields is None else ("HDEL", name, *past.fields)

    def _name(self, key: RecordKey) -> str:
        return self._keys.record(key.tenant_id, key.request_id)
