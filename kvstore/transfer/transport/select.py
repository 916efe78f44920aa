"""Table of transports, and the choice between them. A new transport is one file and one row here."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from baton.addresses import addresses_of
from baton.errors import ConfigError, TransferError, TransferTimeout
from kvstore.transfer.device import gpu_of
from kvstore.transfer.transport import ipc, nccl, shm, tcp
from kvstore.transfer.transport.base import (
    RECEIVER,
    SENDER,
    FarSide,
    Nearness,
    ReceivingTransport,
    SendingTransport,
    TransportEnd,
    TransportKind,
)
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.shm import host_id
from kvstore.transfer.transport.staging import StagingPool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.config import TestingConfig, TransferConfig
    from baton.messages import Hello
    from baton.trust import KeyFile
    from kvstore.transfer.device import GpuDevice

KINDS: dict[str, TransportKind] = {
    "ipc": ipc.KIND,
    "nccl": nccl.KIND,
    "shm": shm.KIND,
    "tcp": tcp.KIND,
}

_WARM_BYTES = 2**20
"""Half of a current core's second-level cache."""


def usable_transports(devices: Sequence[torch.device], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Filter the wanted kinds by what a worker with caches on `devices`, one per rank, can use, keeping their order.

    Raises:
        ConfigError: none is left.
    """
    usable = tuple(kind for kind in wanted if KINDS[kind].is_usable(devices))
    if not usable:
        raise ConfigError(
            f"none of transfer.transports ({', '.join(wanted)}) works for a KV cache on {devices[0]}; add tcp"
        )
    return usable


def choose_transport(offered: Sequence[str], usable: Sequence[str], near: Nearness) -> str | None:
    """Return the first of the sender's kinds that the receiver can use too, or None."""
    plain = must_not_be_plain(offered, usable, near)
    return next((k for k in offered if k in usable and KINDS[k].fits(near) and k not in plain), None)


def must_not_be_plain(offered: Sequence[str], usable: Sequence[str], near: Nearness) -> tuple[str, ...]:
    """Return the kinds that cannot be used only because traffic that leaves a host must be encrypted."""
    if near.is_same_host or not near.must_be_sealed:
        return ()
    both = (kind for kind in offered if kind in usable and KINDS[kind].fits(near))
    return tuple(kind for kind in both if KINDS[kind].is_plain and kind not in near.plaintext_transports)


def nearness(hello: Hello, device: torch.device, *, is_sealed: bool, plaintext_transports: Sequence[str]) -> Nearness:
    """Compare a sender's description of itself with this process and the device of a cache in it.

    Args:
        is_sealed: whether this side has certificates.
        plaintext_transports: kinds that this side exempts from encryption.
    """
    gpu = gpu_of(device)
    is_same_gpu = gpu is not None and hello.gpu_id != "" and hello.gpu_id == gpu.id
    is_of_another_instance = is_same_gpu and gpu is not None and hello.gpu_uuid != gpu.uuid  # of MIG
    return Nearness(
        is_same_host=hello.host_id == host_id(),
        must_be_sealed=is_sealed,
        plaintext_transports=tuple(kind for kind in plaintext_transports if kind in hello.plaintext_transports),
        is_same_gpu=is_same_gpu,
        may_read_gpu=gpu is not None
        and hello.gpu_uuid != ""
        and not is_of_another_instance
        and gpu.may_read(hello.gpu_uuid),
    )


def quick_and_slow(kinds: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split kinds into those that open quickly, and those that do not."""
    slow = tuple(kind for kind in kinds if KINDS[kind].opens_slowly)
    return tuple(kind for kind in kinds if kind not in slow), slow


def like_all(kinds: Sequence[str]) -> str:
    """Return the first of these kinds if all have their slots on a GPU, so that all have the same chunk size.

    Returns "" otherwise, because the size of a slot is not known yet.
    """
    return kinds[0] if all(KINDS[kind].stages_on_gpu for kind in kinds) else ""


def gpu_names(device: torch.device) -> tuple[str, str]:
    """Return the `GpuDevice.id` and the `GpuDevice.uuid` of a cache's device; empty for a CPU."""
    gpu = gpu_of(device)
    return (gpu.id, gpu.uuid) if gpu is not None else ("", "")


def staging_device(kind: str, cache_device: torch.device) -> torch.device:
    """Return the device on which a transport of this kind has its slots."""
    return cache_device if KINDS[kind].stages_on_gpu else torch.device("cpu")


def num_connections_kept(kinds: Sequence[str], num_ranks: int) -> int:
    """Return the number of connections that a sender with these kinds keeps open, unless the settings set it.

    A connection that stages on a GPU takes GPU memory: with NCCL about 30 MB, with ipc a ring of slots.
    """
    return num_ranks * (32 if any(KINDS[kind].stages_on_gpu for kind in kinds) else 64)


def slot_bytes(kind: str, config: TransferConfig, cache_device: torch.device) -> int:
    """Return the largest payload of a slot of a transport of a kind; "" stands for a kind that is not chosen yet."""
    is_on_gpu = kind != "" and staging_device(kind, cache_device).type != "cpu"
    return config.gpu_slot_bytes if is_on_gpu else config.slot_bytes


def chunk_bytes(kind: str, slot_bytes: int, at_least: int, cache_device: torch.device) -> int:
    """Return the largest payload of a chunk that suits a kind, in slots of this size; "" stands for no kind yet.

    The thread of a tcp transport gathers a chunk and copies it into the socket, which is twice as fast from the
    processor's cache. For other kinds, and for chunks from a GPU's memory, the cost of a message exceeds that gain.
    """
    is_warm = kind != "" and KINDS[kind].prefers_warm_chunks and cache_device.type == "cpu"
    return max(at_least, min(slot_bytes, _WARM_BYTES)) if is_warm else slot_bytes


class StagingPools:
    """Staging of one side: a pool for each device on which its transports have slots."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._pools: dict[str, StagingPool] = {}

    @property
    def slots_in_use(self) -> int:
        """Number of slots that transports hold."""
        return sum(pool.in_use for pool in self._pools.values())

    def pool(self, kind: str, cache_device: torch.device) -> StagingPool:
        """Return the pool for transports of a kind and a cache, created on first use."""
        at = staging_device(kind, cache_device)
        if str(at) not in self._pools:
            pinned_for = gpu_of(cache_device) if at.type == "cpu" else None
            size = slot_bytes(kind, self._config, cache_device)
            self._pools[str(at)] = StagingPool(self._config.num_slots, size, at, pinned_for=pinned_for)
        return self._pools[str(at)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """One rank of this worker, as its connections and their transports use it."""

    host: str
    """Address on which peers reach this worker's transports."""
    device: torch.device
    """Device of the rank's cache."""
    staging: StagingPools
    testing: TestingConfig
    keys: KeyFile | None = None
    """Keys that prove the worker's identity to a peer; None: the cluster has no secret."""
    is_sealed: bool = False
    """True if traffic that leaves this host must be encrypted."""

    @property
    def gpu(self) -> GpuDevice | None:
        """GPU of the rank's cache; None for a CPU."""
        return gpu_of(self.device)

    def end(self, kind: str, rendezvous: RendezvousStore, config: TransferConfig, peer_host: str) -> TransportEnd:
        """Return the parameters with which this rank's side of a transport of a kind is opened."""
        return TransportEnd(
            rendezvous=rendezvous,
            host=self.host,
            peer_host=peer_host,
            staging=self.staging.pool(kind, self.device),
            max_slots=config.window,
            max_ring_bytes=config.gpu_rings_mib * 2**20,
            open_timeout_s=config.nccl_open_timeout_s if KINDS[kind].opens_slowly else config.open_timeout_s,
            op_timeout_s=config.op_timeout_s,
            nccl_mode=self.testing.nccl_mode,
            is_sealed=self.is_sealed,
        )


def open_sender(kind: str, end: TransportEnd) -> SendingTransport:
    """Open the sending side; blocks until the receiver has joined. For the thread that will own the transport.

    Raises:
        TransferTimeout: the receiver did not join.
        TransferError: the transport could not be built.
    """
    with _opening(kind, end, RECEIVER):
        return KINDS[kind].open_sender(end)


def open_receiver(kind: str, end: TransportEnd) -> ReceivingTransport:
    """Open the receiving side; see `open_sender`."""
    with _opening(kind, end, SENDER):
        return KINDS[kind].open_receiver(end)


@contextlib.contextmanager
def _opening(kind: str, end: TransportEnd, peer: int) -> Iterator[None]:
    """Context manager: check the entries that the peer sets during the rendezvous, and convert the errors."""
    try:
        if isinstance(end.rendezvous, RendezvousStore):  # in benchmarks both sides share one of torch's stores
            far = FarSide(peer, addresses_of(end.peer_host))
            end.rendezvous.expect(partial(KINDS[kind].is_well_formed, far))
        yield
    except TimeoutError as error:
        raise TransferTimeout(f"the peer did not join the {kind} transport in time") from error
    except (RuntimeError, OSError, ValueError, struct.error) as error:
        raise TransferError(f"the {kind} transport could not be opened: {error}") from error
