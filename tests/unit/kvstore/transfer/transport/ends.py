"""What a side of a transport is opened with, in tests."""

from __future__ import annotations

import multiprocessing

from torch._C._distributed_c10d import Store

from kvstore.transfer.protocol.chunk_header import Header
from kvstore.transfer.transport.base import TransportEnd
from kvstore.transfer.transport.staging import StagingPool

LOADED = multiprocessing.get_context("forkserver")
"""It starts processes out of one that has loaded torch, which takes seconds, and has no threads."""
LOADED.set_forkserver_preload([__name__])


def header_of(num_bytes: int) -> bytes:
    """The header of some chunk of this payload."""
    return Header(flags=0, epoch=1, place=0, next_bytes=0, num_bytes=num_bytes).pack()


def transport_end(
    rendezvous: Store,
    staging: StagingPool,
    max_slots: int,
    open_timeout_s: float = 5.0,
    op_timeout_s: float = 5.0,
    nccl_mode: str = "nonblocking-eager",
    max_ring_bytes: int = 2**30,
    *,
    is_sealed: bool = False,
) -> TransportEnd:
    return TransportEnd(
        rendezvous=rendezvous,
        host="127.0.0.1",
        peer_host="127.0.0.1",
        staging=staging,
        max_slots=max_slots,
        max_ring_bytes=max_ring_bytes,
        open_timeout_s=open_timeout_s,
        op_timeout_s=op_timeout_s,
        nccl_mode=nccl_mode,
        is_sealed=is_sealed,
    )
