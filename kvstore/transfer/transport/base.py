"""Interfaces of transports, the parameters with which one is opened, and the properties of each kind.

A transport carries signals and chunks one way between two processes, in an order both agree on, and is independent of
KV:

    signal   exactly HEADER_BYTES: a header alone
    chunk    a header and its payload, in a slot from the transport's `slots`

Transports do no framing: an earlier header announced kind and length of each message. A lost message appears as an
unexpected header in the next message of its kind, or as a timeout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.addresses import IpAddress, ip_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch._C._distributed_c10d import Store

    from kvstore.transfer.transport.staging import Slot, SlotSource, StagingPool

SENDER, RECEIVER = 0, 1
"""Ranks of a transport's two sides."""


class Operation(Protocol):
    """A message in progress, which starts with the call that returned it or at the latest with `wait`.

    The operations of one transport are awaited in the order in which they were started.
    """

    def wait(self) -> None:
        """Block until the message has been transferred and the caller owns the slot again.

        A message that is received into a slot on a GPU may still be on its way there, in the calling thread's stream.

        Raises:
            TransferTimeout: not within the transport's operation timeout; the transport is broken.
            TransferError: the peer is gone, the transport was aborted, or the message was not the one announced.
        """


class SignalOperation(Operation, Protocol):
    """A signal that is being received."""

    @property
    def header(self) -> bytes:
        """Received header; valid once `wait` has returned."""


class Transport(Protocol):
    """One side of a transport. Only the thread that owns it may use it, except for `abort`.

    An operation that raises leaves the transport broken: the owner discards the slots of operations in progress and
    closes it.
    """

    slots: SlotSource
    """Slots in which this side stages the chunks of this transport."""

    def close(self) -> None:
        """Close this side; called by the owner. Operations still in progress fail, or never end. Idempotent."""

    def abort(self) -> None:
        """End operations in progress as soon as the transport can; called by any thread. Idempotent."""


class SendingTransport(Transport, Protocol):
    """Sending side."""

    def send_signal(self, header: bytes) -> Operation:
        """Start to send a header alone."""

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        """Start to send a slot that already holds the header; `num_bytes` of payload follow it."""


class ReceivingTransport(Transport, Protocol):
    """Receiving side."""

    def recv_signal(self) -> SignalOperation:
        """Start to receive a header alone."""

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        """Start to receive a header and `num_bytes` of payload.

        `slot.buffer` may be read, not written, after `wait` has returned and until the slot is released. On a GPU this
        holds for later work in the calling thread's stream, and for other streams after `settle`.
        """

    def has_next(self) -> bool:
        """Return whether the next message has arrived; False also if the transport does not know."""

    def settle(self) -> None:
        """Wait until all messages whose `wait` has returned are in their slots, and the peer may reuse its slots.

        The owner does so before it releases a slot that no work in its stream has read, and before a long wait.
        """


@dataclass(frozen=True, slots=True)
class FarSide:
    """The peer, as this side knows it independently of the rendezvous."""

    rank: int
    addresses: frozenset[IpAddress]
    """The peer's addresses: this side connects to no others."""

    def is_at(self, address: str) -> bool:
        """Return whether the peer is at this IP address; False also if it is not an IP address."""
        try:
            return ip_address(address) in self.addresses
        except ValueError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportEnd:
    """Parameters with which one side of a transport is opened."""

    rendezvous: Store
    """Keys that the two sides exchange while they open the transport."""
    host: str
    """This side's address, for kinds that listen on it."""
    peer_host: str
    """The peer's host: named by its ticket, permit or lease, or the origin of its control stream."""
    staging: StagingPool
    """Slots on the kind's staging device. A sender over shm takes only their size from it and has separate memory."""
    max_slots: int
    """Maximum number of slots that this side may hold."""
    max_ring_bytes: int
    """Maximum bytes that the rings of all ipc transports may take of this side's GPU."""
    open_timeout_s: float
    op_timeout_s: float
    nccl_mode: str = "nonblocking-eager"
    is_sealed: bool = False
    """True if a kind that can encrypt does so; the rendezvous must then be secret, since it carries the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearness:
    """Proximity of two ranks."""

    is_same_host: bool = False
    is_same_gpu: bool = False
    """Both have their caches on one GPU, as far as NCCL detects it."""
    may_read_gpu: bool = False
    """The receiver may be able to read the sender's GPU."""
    must_be_sealed: bool = False
    """Traffic that leaves a host must be encrypted."""
    plaintext_transports: tuple[str, ...] = ()
    """Kinds that both sides exempt from encryption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """Row of the table of transports: how to open a kind, and its requirements.

    Both `open_...` block until the peer has joined; they are for the thread that will own the transport.
    """

    open_sender: Callable[[TransportEnd], SendingTransport]
    open_receiver: Callable[[TransportEnd], ReceivingTransport]
    is_well_formed: Callable[[FarSide, str, bytes], bool]
    """Returns whether the peer may set this key to this value: the form is right, and it names no other host."""
    is_usable: Callable[[Sequence[torch.device]], bool]
    """Returns whether a worker with caches on these devices, one per rank, can use it."""
    needs_one_host: bool = False
    """Both sides must have the same `host_id`."""
    needs_two_gpus: bool = False
    """The sides must not share a GPU."""
    needs_readable_gpu: bool = False
    """The receiver reads the sender's GPU: its own GPU must not be known to be unable to reach it."""
    is_plain: bool = False
    """Traffic that leaves a host over it is never encrypted."""
    opens_slowly: bool = False
    """Opening takes seconds and may have to wait; KV travels over another kind in the meantime."""
    stages_on_gpu: bool = False
    """Slots are on the cache's device; otherwise they are in main memory."""
    prefers_warm_chunks: bool = False
    """Chunks should fit the processor's cache: its thread copies each of them into the kernel."""

    def fits(self, near: Nearness) -> bool:
        """Return whether ranks with this proximity can use it, apart from encryption."""
        return (
            (near.is_same_host or not self.needs_one_host)
            and (near.may_read_gpu or not self.needs_readable_gpu)
            and not (near.is_same_gpu and self.needs_two_gpus)
        )
