"""Names in Redis. `{ns}` is literal: the hash tag that keeps one content id, or one endpoint, in one slot of a Redis
cluster. Names of the second list belong to an endpoint (`endpoint_namespace`), so that all of its models share them.

kv:{ns}:boot               token, drawn by the first client that misses it: a new one means that the state was lost
kv:{ns}:ev                 STREAM of block events, bounded by age, number and bytes
kv:{ns}:evb                bytes that were ever appended to it
kv:{ns}:blk:<wid>:<epoch>  SET of entries               one lifetime for these four, renewed with the lease,
kv:{ns}:seq:<wid>:<epoch>  seq of the last event        so they are lost together or not at all
kv:{ns}:snap:<wid>:<epoch> SET, parts of an unfinished snapshot
kv:{ns}:seal:<wid>:<epoch> the worker's signature of the set (`kvstore/index/signed_events.py`)
kv:{ns}:lease:<wid>        HASH epoch, info, load, and their signature (`kvstore/leases/signed.py`)  PX lease
kv:{ns}:epoch:<wid>        the highest epoch ever issued (kept for a day)
kv:{ns}:claim:<wid>        the same, signed by a worker (kept as long)
kv:{ns}:workers            SET of worker ids, so that no client scans the keyspace
kv:{ns}:controller         JSON                         PX lease
kv:{ns}:desired            HASH pool -> size
kv:{ns}:adapters           STRING, all registered LoRA adapters (`kvstore/adapters/codec.py`)
kv:{ns}:req:<n>:<t>:<d>:<id> HASH, a request in flight  PX a minute; tenant t of n characters, digest, request id

kv:{ns}:model:<content id> JSON                         PX a minute
kv:{ns}:models             SET of content ids
kv:{ns}:router:<id>        JSON                         PX lease
kv:{ns}:routers            SET of router ids
kv:{ns}:acct:<n>:<t>       account of tenant t: its usage against its limits, answers in flight PX until nothing counts
kv:{ns}:acct:<n>:<t>:<m>   the same with model m; n and t as in req
kv:{ns}:use:<n>:<t>:<id>   JSON, the writer of a request's usage record                        PX; names as in req
kv:{ns}:hist:<slot>        HASH router's process -> JSON, its counters of ten seconds                   PX an hour
kv:{ns}:held               ZSET of usage records that wait until their request ends or resumes  score: due time
"""

from __future__ import annotations

KINDS = {
    "ev": "event",
    "evb": "event",
    "blk": "blocks",
    "snap": "snapshot",
    "req": "record",
    "acct": "account",
    "use": "usage",
    "hist": "history",
}
"""Readable names of values whose key has a short name."""


def key_kind(key: str) -> str:
    """Return the readable name of the value under a key."""
    name = key.partition("}:")[2].partition(":")[0]
    return KINDS.get(name, name)


def endpoint_namespace(name: str) -> str:
    """Return the namespace of an endpoint, which is no content id: those have no colon."""
    return f"endpoint:{name}"


class Keys:
    """The names of the keys under one content id or one endpoint."""

    def __init__(self, namespace: str) -> None:
        self._prefix = f"kv:{{{namespace}}}:"
        self.boot = self._prefix + "boot"
        self.events = self._prefix + "ev"
        self.event_bytes = self._prefix + "evb"
        self.workers = self._prefix + "workers"
        self.routers = self._prefix + "routers"
        self.models = self._prefix + "models"
        self.desired = self._prefix + "desired"
        self.controller = self._prefix + "controller"
        self.held = self._prefix + "held"
        self.adapters = self._prefix + "adapters"

    def lease(self, worker_id: str) -> str:
        """Return the key of a worker's lease."""
        return f"{self._prefix}lease:{worker_id}"

    def epoch(self, worker_id: str) -> str:
        """Return the key of the highest epoch of a worker."""
        return f"{self._prefix}epoch:{worker_id}"

    def claim(self, worker_id: str) -> str:
        """Return the key of the highest epoch of a worker, signed."""
        return f"{self._prefix}claim:{worker_id}"

    def router(self, router_id: str) -> str:
        """Return the key of a router's announcement."""
        return f"{self._prefix}router:{router_id}"

    def model(self, content_id: str) -> str:
        """Return the key of a model's announcement."""
        return f"{self._prefix}model:{content_id}"

    def record(self, tenant_id: str, request_id: str, digest: bytes) -> str:
        """Return the key of a request's record; the length keeps tenant `a:b` and id `c` apart from `a` and `b:c`."""
        return f"{self._prefix}req:{len(tenant_id)}:{tenant_id}:{digest.hex()}:{request_id}"

    def account(self, tenant_id: str, model: str = "") -> str:
        """Return the key of a tenant's account, over all models or with one; see `record` for the length."""
        return f"{self._prefix}acct:{len(tenant_id)}:{tenant_id}{model and ':'}{model}"

    def usage(self, tenant_id: str, request_id: str) -> str:
        """Return the key that names the writer of a request's usage record; see `record` for the length."""
        return f"{self._prefix}use:{len(tenant_id)}:{tenant_id}:{request_id}"

    def history(self, slot: int) -> str:
        """Return the key of a router's counters for a time slot (`router.cluster.history`)."""
        return f"{self._prefix}hist:{slot}"

    def blocks(self, worker_id: str, epoch: int) -> str:
        """Return the key of a worker's set of entries."""
        return f"{self._prefix}blk:{worker_id}:{epoch}"

    def seq(self, worker_id: str, epoch: int) -> str:
        """Return the key of a worker's last event."""
        return f"{self._prefix}seq:{worker_id}:{epoch}"

    def seal(self, worker_id: str, epoch: int) -> str:
        """Return the key of a worker's signature of its set of entries."""
        return f"{self._prefix}seal:{worker_id}:{epoch}"

    def parts(self, worker_id: str, epoch: int) -> str:
        """Return the key of the parts of a worker's unfinished snapshot."""
        return f"{self._prefix}snap:{worker_id}:{epoch}"
