"""Registry in memory. It shares one `MemoryStore` with the index in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.cluster import Worker
from baton.errors import Fenced
from kvstore.index.memory import MemoryLease, MemoryStore
from kvstore.leases.journal import choices_of, fields_of
from kvstore.leases.protocol import MODEL_LEASE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.cluster import ControllerInfo, ModelAnnouncement, RouterInfo, WorkerInfo, WorkerLoad
    from kvstore.leases.journal import Noted, RecordEnd, RecordEntry, RecordKey


class MemoryLeases:
    """A `LeaseStore` in a `MemoryStore`."""

    def __init__(self, store: MemoryStore, *, lease_s: float = 10.0, blocks_ttl_s: float = 60.0) -> None:
        self._store = store
        self._lease_s = lease_s
        self._blocks_ttl_s = blocks_ttl_s

    async def acquire(self, worker_id: str, after: int | None = None) -> int:
        store = self._store
        highest = store.epochs.get(worker_id, 0)
        if after is not None and highest > after:
            raise Fenced(f"{worker_id}: epoch {highest} holds the lease, this is epoch {after}")
        epoch = max(int(store.clock() * 1000), highest + 1)
        store.epochs[worker_id] = epoch
        store.leases[worker_id] = MemoryLease(epoch, store.clock() + self._lease_s)
        return epoch

    async def renew(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        store = self._store
        highest = store.epochs.get(info.id, 0)
        if highest > info.epoch:
            raise Fenced(f"{info.id}: epoch {highest} holds the lease, this is epoch {info.epoch}")
        if highest == info.epoch and not store.lease(info.id):
            return False
        store.epochs[info.id] = info.epoch
        store.leases[info.id] = MemoryLease(info.epoch, store.clock() + self._lease_s, Worker(info, load))
        if blocks := store.owned(info.id, info.epoch):
            blocks.expires_at = store.clock() + self._blocks_ttl_s
        return True

    async def release(self, worker_id: str, epoch: int) -> None:
        self._store.blocks.pop((worker_id, epoch), None)
        lease = self._store.lease(worker_id)
        if lease and lease.epoch == epoch:
            del self._store.leases[worker_id]

    async def list_workers(self) -> list[Worker]:
        return [worker for worker in (await self.list_leases()).values() if worker]

    async def list_leases(self) -> dict[str, Worker | None]:
        leases = {worker_id: self._store.lease(worker_id) for worker_id in sorted(self._store.leases)}
        return {worker_id: lease.worker for worker_id, lease in leases.items() if lease and lease.worker}

    async def announce_controller(self, info: ControllerInfo) -> None:
        self._store.controller = (self._store.clock() + self._lease_s, info)

    async def get_controller(self) -> ControllerInfo | None:
        if self._store.controller is None or self._store.controller[0] <= self._store.clock():
            return None
        return self._store.controller[1]

    async def set_desired(self, sizes: Mapping[str, int]) -> None:
        self._store.desired.update(sizes)

    async def get_desired(self) -> dict[str, int]:
        return dict(self._store.desired)

    async def boot(self) -> str:
        return self._store.boot

    async def close(self) -> None:
        """Nothing to close."""


class MemoryEndpoint:
    """An `EndpointStore` in a `MemoryStore`."""

    def __init__(self, store: MemoryStore, *, lease_s: float = 10.0) -> None:
        self._store = store
        self._lease_s = lease_s

    async def announce_router(self, info: RouterInfo) -> None:
        self._store.routers[info.id] = (self._store.clock() + self._lease_s, info)

    async def list_routers(self) -> list[RouterInfo]:
        now = self._store.clock()
        return [info for _, (expires_at, info) in sorted(self._store.routers.items()) if expires_at > now]

    async def announce_model(self, model: ModelAnnouncement) -> None:
        self._store.models[model.content_id] = (self._store.clock() + MODEL_LEASE_S, model)

    async def list_models(self) -> list[ModelAnnouncement]:
        now = self._store.clock()
        return [model for _, (expires_at, model) in sorted(self._store.models.items()) if expires_at > now]

    async def boot(self) -> str:
        return self._store.boot

    async def close(self) -> None:
        """Nothing to close."""


class MemoryRecords:
    """A `RecordStore` in a `MemoryStore`."""

    def __init__(self, store: MemoryStore, *, ttl_s: float = 60.0) -> None:
        self._store = store
        self._ttl_s = ttl_s

    async def write(self, entries: Sequence[RecordEntry], ended: Sequence[RecordEnd]) -> None:
        records, now = self._store.records, self._store.clock()
        for past in ended:
            key = (past.key.tenant_id, past.key.request_id, past.digest)
            if past.fields is None:
                records.pop(key, None)
            elif key in records:
                for name in past.fields:
                    records[key][1].pop(name, None)
        for entry in entries:
            key = (entry.key.tenant_id, entry.key.request_id, entry.digest)
            records[key] = (now + self._ttl_s, self._fields(key) | fields_of(entry))

    async def read(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        return choices_of(self._fields((key.tenant_id, key.request_id, digest)))

    async def close(self) -> None:
        """Nothing to close."""

    def _fields(self, key: tuple[str, str, bytes]) -> dict[bytes, bytes]:
        expires_at, fields = self._store.records.get(key, (0.0, {}))
        return fields if expires_at > self._store.clock() else {}
