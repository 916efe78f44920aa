"""The registry in Redis; `kvstore/index/keys.py` lists the keys."""

from __future__ import annotations

import json
import time
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from baton.cluster import Worker
from baton.errors import Fenced, StoreUnavailable
from baton.tasks import paced
from baton.trust import Principal
from baton.trust.keys import SIGNATURE_BYTES
from baton.trust.proofs import MAX_SKEW_S
from kvstore.index import reads
from kvstore.index.connection import BadValue, RedisConnection, Script
from kvstore.index.keys import Keys
from kvstore.index.names import IdSet
from kvstore.index.signed import EPOCH_PROOF_BYTES, proved_epoch, signed_epoch
from kvstore.index.values import MAX_EPOCH, MAX_NAME_BYTES, MAX_NUMBER_BYTES, natural, text
from kvstore.leases.announcements import ANNOUNCE, Announcements
from kvstore.leases.chain import RENEWAL_BYTES
from kvstore.leases.codec import (
    MAX_BYTES,
    decode_controller,
    decode_info,
    decode_load,
    decode_sizes,
    encode,
)
from kvstore.leases.loads import ReportedLoads
from kvstore.leases.signed import HEAD_BYTES, SignedRegistry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from baton.cluster import ControllerInfo, WorkerInfo, WorkerLoad
    from baton.trust import KeyFile

T = TypeVar("T")
ACQUIRE = Script("kvstore.leases", "acquire.lua")
RENEW = Script("kvstore.leases", "renew.lua")
RELEASE = Script("kvstore.leases", "release.lua")
DISOWN = Script("kvstore.leases", "disown.lua")
CHANGED = Script("kvstore.leases", "changed.lua")
LEASE_FIELDS = {
    "epoch": MAX_NUMBER_BYTES,
    "since": MAX_NUMBER_BYTES,
    "renewal": RENEWAL_BYTES,
    "info": MAX_BYTES,
    "load": MAX_BYTES,
    "anchored": SIGNATURE_BYTES,
    "stamp": MAX_NUMBER_BYTES,
    "signature": SIGNATURE_BYTES,
}
"""Fields of a lease, with the maximum size of each in bytes."""
LEASES_AT_ONCE = max(1, reads.ANSWER_BYTES // sum(LEASE_FIELDS.values()))
SLICE_S = 0.002
"""Time for which leases are decoded and verified before other tasks run."""
ANNOUNCEMENT_BYTES = HEAD_BYTES + MAX_BYTES
SIZES_BOUNDS = reads.HashBounds(
    num_fields=64, name_bytes=MAX_NAME_BYTES, value_bytes=MAX_NUMBER_BYTES, num_bytes=64 * MAX_NUMBER_BYTES
)

EPOCH_TTL_MS = 24 * 3600 * 1000
"""Lifetime of the highest epoch; after that, only the clock keeps epochs apart."""
MAX_WORKERS = 1_000_000
"""Largest desired pool size that is accepted when read."""
SIGNED_SIZES = "signed"
"""Field of the desired sizes that contains all of them, signed."""


class _Decoded(NamedTuple):
    """A lease's description and load as found, and decoded."""

    info: bytes | None
    load: bytes | None
    worker: Worker


class RedisLeases:
    """`LeaseStore` in Redis. Owns `connection`: `close` closes it.

    Args:
        clock: wall time in seconds.
        monotonic_s: monotonic seconds.
        keys: this member's keys; None: nothing is signed, and every readable value is accepted.
        loads: loads that workers have reported since; the listed workers have the newer ones.
    """

    def __init__(
        self,
        connection: RedisConnection,
        namespace: str,
        *,
        lease_s: float = 10.0,
        blocks_ttl_s: float = 60.0,
        clock: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
        keys: KeyFile | None = None,
        loads: ReportedLoads | None = None,
    ) -> None:
        self._connection = connection
        self._loads = loads
        self._keys = Keys(namespace)
        self._lease_ms = int(lease_s * 1000)
        self._blocks_ttl_ms = int(blocks_ttl_s * 1000)
        self._clock = clock
        self._member = keys
        self._announced = Announcements(connection, lease_s, clock=clock, monotonic_s=monotonic_s, keys=keys)
        self._signed = self._announced.signed
        self._sizes: dict[str, int] = {}
        """Desired sizes that this process has set."""
        self._decoded: dict[str, _Decoded] = {}
        """Leases as they were decoded last, by worker."""
        self._workers = IdSet(connection, self._keys.workers, self._keys.lease)

    async def acquire(self, worker_id: str, after: int | None = None) -> int:
        keys = self._keys
        await self._announced.set_stamps(may_fall=True)
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
            await self._connection.run(ANNOUNCE, [keys.claim(worker_id)], claim, EPOCH_TTL_MS)
        return int(epoch)

    async def renew(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        keys = self._keys
        if not await self._announced.set_stamps(may_fall=False):
            return False
        texts = encode(info), encode(load)
        proof: tuple[str | bytes | int, ...] = ("",)
        if self._signed is not None:
            proof = astuple(self._signed.renewed(keys.lease(info.id), info.epoch, *texts))
        (found,) = await self._connection.run(
            RENEW,
            [keys.epoch(info.id), keys.lease(info.id), keys.workers, keys.boot, *self._owned(info.id, info.epoch)],
            *(info.id, info.epoch, *texts, self._lease_ms, self._blocks_ttl_ms, EPOCH_TTL_MS, *proof),
        )
        holder = int(found)
        if holder > info.epoch:
            raise await self._overtaken(info.id, holder, info.epoch)
        return not holder

    async def release(self, worker_id: str, epoch: int) -> None:
        keys = self._keys
        await self._connection.run(
            RELEASE, [keys.lease(worker_id), keys.workers, *self._owned(worker_id, epoch)], worker_id, epoch
        )

    async def list_workers(self) -> list[Worker]:
        return [worker for worker in (await self.list_leases()).values() if worker]

    async def list_leases(self) -> dict[str, Worker | None]:
        workers: dict[str, Worker | None] = {}
        async for worker_id, lease in self._found(await self._workers.look()):
            match lease:
                case None | [_, _, _, None, None, *_]:
                    pass  # the lease is just ending, or was acquired and not described yet
                case _ if self._signed is None:
                    key = self._keys.lease(worker_id)
                    workers[worker_id] = next(
                        iter(self._announced.decoded(key, partial(self._leased, worker_id), lease)), None
                    )
                case _:
                    for worker in self._read_signed(self._signed, worker_id, lease):
                        workers[worker_id] = worker
        if self._signed is not None:
            self._signed.forget_all_but({self._keys.lease(each) for each in workers})
        for worker_id, holder in (self._signed.borrowed(workers) if self._signed is not None else {}).items():
            self._connection.note(self._keys.lease(worker_id), f"it names the address of {holder}, which lives")
            workers[worker_id] = None
        self._workers.keep(worker_id for worker_id, worker in workers.items() if worker is not None)
        self._decoded = {each: self._decoded[each] for each in workers.keys() & self._decoded.keys()}
        return workers if self._loads is None else _with_newest(self._loads, workers)

    async def _found(self, ids: Sequence[str]) -> AsyncIterator[tuple[str, Any]]:
        """Yield each id with the fields of its lease as `LEASE_FIELDS` lists them.

        Of a lease whose signed values were read before, the renewal alone is yielded. None stands for no lease, and a
        BadValue for one that is too large. Other tasks run between two slices.
        """
        bounds = [len(LEASE_FIELDS), *(part for field in LEASE_FIELDS.items() for part in field)]
        for start in range(0, len(ids), LEASES_AT_ONCE):
            some = ids[start : start + LEASES_AT_ONCE]
            leases = [self._keys.lease(each) for each in some]
            known = [self._signed.version(key) if self._signed is not None else "" for key in leases]
            epochs = [self._keys.epoch(each) for each in some]
            (answers,) = await self._connection.ask(CHANGED, [*leases, *epochs], *bounds, *known)
            async for worker_id, found in paced(zip(some, answers, strict=True), SLICE_S):
                yield worker_id, BadValue(found.decode()) if isinstance(found, bytes) else found

    async def announce_controller(self, info: ControllerInfo) -> None:
        await self._announced.announce(self._keys.controller, encode(info))

    async def get_controller(self) -> ControllerInfo | None:
        key = self._keys.controller
        found = await reads.string(self._connection, key, ANNOUNCEMENT_BYTES)
        known = [] if found is None else self._announced.read(key, Principal.CONTROLLER, decode_controller, found)
        return known[0] if known else None

    async def set_desired(self, sizes: Mapping[str, int]) -> None:
        if sizes:
            key = self._keys.desired
            write: tuple[object, ...] = ("HSET", key, *(part for size in sizes.items() for part in size))
            if self._signed is not None:
                await self.get_desired()  # learns the stamp that must be exceeded
                self._sizes |= sizes
                write += (SIGNED_SIZES, self._signed.lasting(key, json.dumps(self._sizes)))
            written, size = await self._connection.pipeline([write, ("HLEN", key)])
            if isinstance(written, BadValue) or size > SIZES_BOUNDS.num_fields:
                self._connection.note(key, written.reason if isinstance(written, BadValue) else f"{size} pools")
                await self._connection.pipeline([("UNLINK", key), write])

    async def get_desired(self) -> dict[str, int]:
        key = self._keys.desired
        if self._signed is not None:
            fields = await reads.fields(self._connection, key, {SIGNED_SIZES: ANNOUNCEMENT_BYTES})
            found = fields[0] if isinstance(fields, list) else fields
            known = (
                []
                if found is None
                else self._announced.read(key, Principal.CONTROLLER, decode_sizes, found, is_lasting=True)
            )
            return known[0] if known else {}
        sizes: dict[str, int] = {}
        async for pair in reads.pairs(self._connection, key, SIZES_BOUNDS):
            sizes.update(self._announced.decoded(key, _size, pair))
        return sizes

    async def boot(self) -> str:
        return await self._connection.boot(self._keys.boot)

    async def close(self) -> None:
        await self._connection.close()

    def _read_signed(self, signed: SignedRegistry, worker_id: str, lease: Any) -> list[Worker | None]:
        """Return the signed lease of a live worker as a list of one; None stands for a lease that cannot be decoded.

        A lease that is unsigned or was replaced earlier does not change the value that was read last.
        """
        key = self._keys.lease(worker_id)
        seen = self._announced.decoded(key, partial(signed.seen_lease, key), lease)
        sight = seen[0] if seen else signed.last(key)
        if sight is None or not signed.is_alive(sight):
            return []
        if seen and sight.is_new:
            sight.value = next(iter(self._announced.decoded(key, partial(self._leased, worker_id), lease)), None)
        return [sight.value]

    def _leased(self, worker_id: str, lease: Sequence[bytes | None]) -> Worker:
        """Decode a lease, except for the parts that have not changed; raises ValueError if it is another worker's."""
        found_epoch, _, _, info, load, *_ = lease
        last = self._decoded.get(worker_id)
        is_same = last is not None and last.info == info, last is not None and last.load == load
        if last is not None and all(is_same):
            worker = last.worker
        else:
            worker = Worker(
                last.worker.info if last is not None and is_same[0] else decode_info(info or b""),
                last.worker.load if last is not None and is_same[1] else decode_load(load or b""),
            )
        if (worker.info.id, worker.info.epoch) != (worker_id, natural(found_epoch, MAX_EPOCH)):
            raise ValueError(f"the entry names worker {worker.info.id!r}, epoch {worker.info.epoch}")
        self._decoded[worker_id] = _Decoded(info, load, worker)
        return worker

    async def _overtaken(self, worker_id: str, newer: int, own: int) -> Fenced | StoreUnavailable:
        """Return the error for a worker whose lease names a newer epoch.

        A lease with an epoch that no worker has signed is removed, and the next attempt can acquire the lease.
        """
        key = self._keys.lease(worker_id)
        if self._member is not None and await self._claimed(self._member, worker_id) <= own:
            self._connection.note(key, f"no worker has signed its epoch {newer}")
            await self._connection.run(DISOWN, [self._keys.epoch(worker_id), key], own)
            return StoreUnavailable(f"Redis: no worker has signed the epoch {newer} of {worker_id}")
        return Fenced(f"{worker_id}: epoch {newer} holds the lease, this is epoch {own}")

    async def _claimed(self, member: KeyFile, worker_id: str) -> int:
        """Return the highest epoch of this id that a worker has signed; 0 if none is known."""
        key = self._keys.claim(worker_id)
        return proved_epoch(member.keys, key, await reads.string(self._connection, key, EPOCH_PROOF_BYTES))

    def _owned(self, worker_id: str, epoch: int) -> list[str]:
        """Return the keys that live and expire with the lease of an epoch."""
        keys = self._keys
        return [
            keys.seq(worker_id, epoch),
            keys.blocks(worker_id, epoch),
            keys.parts(worker_id, epoch),
            keys.seal(worker_id, epoch),
        ]


def _with_newest(loads: ReportedLoads, workers: Mapping[str, Worker | None]) -> dict[str, Worker | None]:
    loads.keep(workers.keys())
    return {each: None if worker is None else loads.newest(worker) for each, worker in workers.items()}


def _size(found: tuple[bytes, bytes]) -> tuple[str, int]:
    """Decode the desired size of a pool; raises ValueError."""
    pool, size = found
    return text(pool), natural(size, MAX_WORKERS)
