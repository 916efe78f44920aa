"""The kinds of link, and which of them fits where."""

from __future__ import annotations

import contextlib
import struct
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from baton.errors import ConfigError, TransferError, TransferTimeout
from kvstore.transfer.transport.base import RECEIVER, SENDER
from kvstore.transfer.transport.gloo import GlooTransport, NcclTransport, RendezvousStore, is_of_gloo, is_of_nccl
from kvstore.transfer.transport.shm import ShmReceiver, ShmSender, is_of_shm
from kvstore.transfer.transport.staging import StagingPool
from kvstore.transfer.transport.tcp import TcpReceiver, TcpSender, is_of_tcp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.config import TransferConfig
    from kvstore.transfer.transport.base import ReceivingTransport, SendingTransport


_IS_OF = {"nccl": is_of_nccl, "shm": is_of_shm, "tcp": is_of_tcp, "gloo": is_of_gloo}
"""What a peer may say while a link is opened."""
_WARM_BYTES = 2**20
"""Half of what a core's second-level cache holds on the machines of today."""


def usable_transports(devices: Sequence[torch.device], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Of the link kinds wanted, those that a worker with caches on `devices`, one a rank, can use here, in order.

    Whether the peer can use them too is another question; for shm the answer is that its `host_id` is the same. NCCL
    forbids transfers beside the sums of several ranks in no order that all agree on, and a link knows nothing of those.

    Raises:
        ConfigError: there is none.
    """
    device = devices[0]
    can_use = {
        "gloo": True,
        "tcp": True,
        "nccl": device.type == "cuda" and len(devices) == 1 and dist.is_nccl_available(),
        "shm": device.type == "cpu",
    }
    usable = tuple(kind for kind in wanted if can_use[kind])
    if not usable:
        raise ConfigError(f"none of transfer.links ({', '.join(wanted)}) works for a KV cache on {device}; add tcp")
    return usable


def staging_device(kind: str, cache_device: torch.device) -> torch.device:
    """Where the slots of such a link are."""
    return cache_device if kind == "nccl" else torch.device("cpu")


def chunk_bytes(kind: str, slot_bytes: int, at_least: int) -> int:
    """Largest payload of a chunk that suits such a link; "" is one that is not chosen yet.

    The thread of a tcp link gathers a chunk and copies it into the socket: twice as fast from the processor's cache.
    Elsewhere a message costs more than that saves.
    """
    return max(at_least, min(slot_bytes, _WARM_BYTES)) if kind == "tcp" else slot_bytes


class StagingPools:
    """The staging of one side: a pool for each device that its links stage on."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._pools: dict[str, StagingPool] = {}

    @property
    def slots_in_use(self) -> int:
        return sum(pool.in_use for pool in self._pools.values())

    def pool(self, kind: str, cache_device: torch.device) -> StagingPool:
        at = staging_device(kind, cache_device)
        if str(at) not in self._pools:
            pinned = cache_device.type == "cuda" and at.type == "cpu"
            self._pools[str(at)] = StagingPool(self._config.num_slots, self._config.slot_bytes, at, pinned)
        return self._pools[str(at)]


def open_sender(
    kind: str,
    store: RendezvousStore,
    host: str,
    staging: StagingPool,
    max_slots: int,
    open_timeout_s: float,
    op_timeout_s: float,
) -> SendingTransport:
    """Blocks until the receiver has joined. For the thread that will own the link.

    Args:
        host: this side's address, for the kinds that listen on it.
        staging: on `staging_device`; an shm link takes the size of its slots from it, and has memory of its own.
        max_slots: that this link may hold at a time.

    Raises:
        TransferTimeout: the receiver did not join.
        TransferError: the link could not be built.
    """
    _expect(store, kind, RECEIVER)
    with _errors_named(kind):
        if kind == "shm":
            return ShmSender(store, max_slots, staging.slot_bytes, open_timeout_s, op_timeout_s)
        if kind == "tcp":
            return TcpSender(store, host, staging.share(max_slots), open_timeout_s, op_timeout_s)
        return _open_torch_link(kind, store, SENDER, host, staging, max_slots, open_timeout_s, op_timeout_s)


def open_receiver(
    kind: str,
    store: RendezvousStore,
    host: str,
    staging: StagingPool,
    max_slots: int,
    open_timeout_s: float,
    op_timeout_s: float,
) -> ReceivingTransport:
    """As `open_sender`, on the other side; an shm link stages nothing on this one."""
    _expect(store, kind, SENDER)
    with _errors_named(kind):
        if kind == "shm":
            return ShmReceiver(store, open_timeout_s, op_timeout_s)
        if kind == "tcp":
            return TcpReceiver(store, staging.share(max_slots), open_timeout_s, op_timeout_s)
        return _open_torch_link(kind, store, RECEIVER, host, staging, max_slots, open_timeout_s, op_timeout_s)


def _open_torch_link(
    kind: str,
    store: RendezvousStore,
    rank: int,
    host: str,
    staging: StagingPool,
    max_slots: int,
    open_timeout_s: float,
    op_timeout_s: float,
) -> GlooTransport | NcclTransport:
    slots = staging.share(max_slots)
    if kind == "nccl":
        return NcclTransport(store, rank, host, staging.device, slots, open_timeout_s, op_timeout_s)
    return GlooTransport(store, rank, host, slots, open_timeout_s, op_timeout_s)


def _expect(store: object, kind: str, peer: int) -> None:
    """Of the stores only a session's is filled by somebody else."""
    if isinstance(store, RendezvousStore):
        store.expect(partial(_IS_OF[kind], peer))


@contextlib.contextmanager
def _errors_named(kind: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TransferTimeout(f"the peer did not join the {kind} link in time") from error
    except (RuntimeError, OSError, ValueError, struct.error) as error:
        raise TransferError(f"the {kind} link could not be opened: {error}") from error
