"""Choice of the workers to which a prefill worker connects before a KV transfer needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from baton.cluster import Role, WorkerState
from kvstore.transfer.connection.control_stream import Peer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.cluster import Worker, WorkerInfo


def peers_of(own: WorkerInfo, workers: Iterable[Worker]) -> list[Peer]:
    """Return the decode workers to which a worker may transfer, each as the rank that takes an nccl transport.

    Workers that are starting or draining, or hold KV of another kind, are left out. Each worker has its own order: if
    there are more peers than a worker connects to, the connections are spread evenly over all of them.
    are more than a worker connects to, all of them together connect to each about equally often.
    """
    found = [worker.info for worker in workers if _takes_kv_of(own, worker)]
    found.sort(key=lambda info: xxhash.xxh3_64_intdigest(f"{own.id}\0{info.id}".encode()))
    return [Peer(info.id, info.incarnation, info.address, 0) for info in found]


def _takes_kv_of(own: WorkerInfo, worker: Worker) -> bool:
    info = worker.info
    is_staying = info.role is Role.DECODE and worker.load.state is WorkerState.READY
    return is_staying and info.incarnation != "" and info.id != own.id and info.wire_compat == own.wire_compat
