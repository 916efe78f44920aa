"""The registry in Redis; `kvstore/index/keys.py` lists the keys."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from baton.errors import Fenced, StoreUnavailable
from baton.trust import Principal
from baton.trust.proofs import MAX_SKEW_S
from kvstore.index.connection import RedisConnection, Script, WrongType
from kvstore.index.keys import Keys
from kvstore.index.signed import proved_epoch, signed_epoch
from kvstore.index.values import MAX_EPOCH, natural, text
from kvstore.leases.codec import decode_controller, decode_router, decode_sizes, decode_worker, encode
from kvstore.leases.signed import SignedRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.cluster import ControllerInfo, RouterInfo, Worker, WorkerInfo, WorkerLoad
    from baton.trust import KeyFile

T = TypeVar("T")
ACQUIRE = Script("kvstore.leases", "acquire.lua")
RENEW = Script("kvstore.leases", "renew.lua")
RELEASE = Script("kvstore.leases", "release.lua")
PRUNE = Script("kvstore.leases", "prune.lua")
DISOWN = Script("kvstore.leases", "disown.lua")
LEASE_FIELDS = ("epoch", "info", "load", "stamp", "signature")

EPOCH_TTL_MS = 24 * 3600 * 1000
"""Lifetime of the highest epoch; after it the clock alone keeps epochs apart."""
MAX_WORKERS = 1_000_000
"""Largest desired pool size that is read."""
SIGNED_SIZES = "signed"
"""Field of the desired sizes that holds all of them, signed."""


class RedisLeases:
    """A `LeaseStore` in Redis. Owns `connection`: `close` closes it.

    Args:
        clock: wall time in seconds.
        keys: this member's keys; None: nothing is signed, and everything that can be read is believed.
    """

    def __init__(
        self,
        connection: RedisConnection,
        namespace: str,
        *,
        lease_s: float = 10.0,
        blocks_ttl_s: float = 60.0,
        clock: Callable[[], float] = time.time,
        keys: KeyFile | None = None,
    ) -> None:
        self._connection = connection
        self._keys = Keys(namespace)
        self._lease_ms = int(lease_s * 1000)
        self._blocks_ttl_ms = int(blocks_ttl_s * 1000)
        self._clock = clock
        self._member = keys
        self._signed = None if keys is None else SignedRegistry(keys, lease_s, clock)
        self._sizes: dict[str, int] = {}
        """The desired sizes that this process has set."""

    async def acquire(self, worker_id: str, after: int | None = None) -> int:
        keys = self._keys
        now_ms, most = int(self._clock() * 1000), MAX_EPOCH
        if self._member is not None:
            now_ms = max(now_ms, await self._claimed(self._member, worker_id) + 1, (after or 0) + 1)
            most = now_ms + int(MAX_SKEW_S * 1000)
        epoch, is_acquired = await self._connection.run(
            ACQUIRE,
            [keys.epoch(worker_id), keys.lease(worker_id), keys.workers, keys.boot],
            *(worker_id, now_ms, self._lease_ms, EPOCH_TTL_MS, "" if after is None else after, most),
        )
        if not is_acquired:
            raise await self._overtaken(worker_id, int(epoch), after or 0)
        if self._member is not None:
            claim = signed_epoch(self._member.keys, keys.claim(worker_id), int(epoch))
            await self._connection.call("SET", keys.claim(worker_id), claim, "PX", EPOCH_TTL_MS)
        return int(epoch)

    async def renew(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        keys = self._keys
        texts = encode(info), encode(load)
        stamp: tuple[int | str, bytes] = ("", b"")
        if self._signed is not None:
            stamp = self._signed.lease(keys.lease(info.id), info.epoch, *texts)
        (found,) = await self._connection.run(
            RENEW,
            [keys.epoch(info.id), keys.lease(info.id), keys.workers, keys.boot, *self._owned(info.id, info.epoch)],
            *(info.id, info.epoch, *texts, self._lease_ms, self._blocks_ttl_ms, EPOCH_TTL_MS, *stamp),
        )
        holder = int(found)
        if holder > info.epoch:
            raise await self._overtaken(info.id, holder, info.epoch)
        return not holder and (self._signed is None or not self._signed.stamps.is_far_ahead)

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
                for command in (("HMGET", keys.lease(each), *LEASE_FIELDS), ("GET", keys.epoch(each)))
            ]
        )
        workers: dict[str, Worker | None] = {}
        for worker_id, lease, epoch in zip(ids, found[::2], found[1::2], strict=True):
            key = keys.lease(worker_id)
            if epoch is not None:
                self._read(keys.epoch(worker_id), _epoch, epoch)  # only the owner reads it, and raises Fenced here
            match lease:
                case [None, None, None, *_]:
                    await self._connection.run(PRUNE, [key, keys.workers], worker_id)
                case [_, None, None, *_]:
                    pass  # acquired, and not described yet
                case _ if self._signed is None:
                    workers[worker_id] = next(iter(self._read(key, partial(_leased, worker_id), lease)), None)
                case _:
                    for worker in self._read_signed(self._signed, worker_id, lease):
                        workers[worker_id] = worker
        for worker_id, holder in (self._signed.borrowed(workers) if self._signed is not None else {}).items():
            self._connection.note(keys.lease(worker_id), f"it names the address of {holder}, which lives")
            workers[worker_id] = None
        return workers

    async def announce_router(self, info: RouterInfo) -> None:
        key = self._keys.router(info.id)
        announced = ("SADD", self._keys.routers, info.id)
        _, listed = await self._connection.pipeline(
            [("SET", key, self._announcement(key, encode(info)), "PX", self._lease_ms), announced]
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
                decode = partial(_announced, router_id)
                routers += self._read_announced(self._keys.router(router_id), Principal.ROUTER, decode, info)
        return routers

    async def announce_controller(self, info: ControllerInfo) -> None:
        key = self._keys.controller
        await self._connection.call("SET", key, self._announcement(key, encode(info)), "PX", self._lease_ms)

    async def get_controller(self) -> ControllerInfo | None:
        key = self._keys.controller
        (found,) = await self._connection.pipeline([("GET", key)])
        known = [] if found is None else self._read_announced(key, Principal.CONTROLLER, decode_controller, found)
        return known[0] if known else None

    async def set_desired(self, sizes: Mapping[str, int]) -> None:
        if sizes:
            key = self._keys.desired
            write: tuple[object, ...] = ("HSET", key, *(part for size in sizes.items() for part in size))
            if self._signed is not None:
                self._sizes |= sizes
                write += (SIGNED_SIZES, self._signed.announcement(key, json.dumps(self._sizes)))
            (written,) = await self._connection.pipeline([write])
            if isinstance(written, WrongType):
                self._connection.note(self._keys.desired, written.reason)
                await self._connection.pipeline([("UNLINK", self._keys.desired), write])

    async def get_desired(self) -> dict[str, int]:
        if self._signed is not None:
            key = self._keys.desired
            (found,) = await self._connection.pipeline([("HGET", key, SIGNED_SIZES)])
            known = [] if found is None else self._read_announced(key, Principal.CONTROLLER, decode_sizes, found)
            return known[0] if known else {}
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

    def _read_signed(self, signed: SignedRegistry, worker_id: str, lease: Any) -> list[Worker | None]:
        """Returns the signed lease of a worker that lives as a list of one; None stands for one that cannot be decoded.

        What is not signed, or was replaced before, changes nothing of what was read last.
        """
        key = self._keys.lease(worker_id)
        seen = self._read(key, partial(signed.seen_lease, key), lease)
        sight = seen[0] if seen else signed.last(key)
        if sight is None or not signed.is_alive(sight):
            return []
        if seen and sight.is_new:
            sight.value = next(iter(self._read(key, partial(_leased, worker_id), lease)), None)
        return [sight.value]

    def _read_announced(self, key: str, author: Principal, decode: Callable[[bytes], T], found: Any) -> list[T]:
        """Returns the decoded value as a list of one; an empty list if it is not to be believed, or cannot be read."""
        if self._signed is None:
            return self._read(key, decode, found)
        is_lasting = key == self._keys.desired
        seen = self._read(key, partial(self._signed.seen, key, author, must_be_timely=not is_lasting), found)
        if not seen:
            last = self._signed.last(key)
            return last.value if last is not None else []
        sight, body = seen[0]
        if sight.is_new:
            sight.value = self._read(key, decode, body)
        return sight.value if is_lasting or self._signed.is_alive(sight) else []

    def _announcement(self, key: str, body: str) -> str | bytes:
        return body if self._signed is None else self._signed.announcement(key, body)

    async def _overtaken(self, worker_id: str, newer: int, own: int) -> Fenced | StoreUnavailable:
        """Returns the error for a worker whose lease names a newer epoch. One that no worker has signed is removed, and
        the lease can be had at the next try.
        """
        key = self._keys.lease(worker_id)
        if self._member is not None and await self._claimed(self._member, worker_id) <= own:
            self._connection.note(key, f"no worker has signed its epoch {newer}")
            await self._connection.run(DISOWN, [self._keys.epoch(worker_id), key], own)
            return StoreUnavailable(f"Redis: no worker has signed the epoch {newer} of {worker_id}")
        return Fenced(f"{worker_id}: epoch {newer} holds the lease, this is epoch {own}")

    async def _claimed(self, member: KeyFile, worker_id: str) -> int:
        """Returns the highest epoch that a worker has signed of this id; 0 if none is known."""
        key = self._keys.claim(worker_id)
        (found,) = await self._connection.pipeline([("GET", key)])
        return proved_epoch(member.keys, key, found)

    def _owned(self, worker_id: str, epoch: int) -> list[str]:
        """Returns the keys that live and end with the lease of an epoch."""
        keys = self._keys
        return [
            keys.seq(worker_id, epoch),
            keys.blocks(worker_id, epoch),
            keys.parts(worker_id, epoch),
            keys.seal(worker_id, epoch),
        ]


def _epoch(found: bytes) -> int:
    """Raises ValueError."""
    return natural(found, MAX_EPOCH)


def _leased(worker_id: str, lease: Sequence[bytes | None]) -> Worker:
    """Decodes a lease; raises ValueError unless it is that worker's."""
    epoch, info, load, *_ = lease
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
