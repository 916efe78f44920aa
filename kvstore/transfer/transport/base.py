"""What every transport offers, what one is opened with, and what the table of transports says of each kind.

A transport carries signals and chunks one way between two processes, in an order both agree on, and knows nothing of
KV:

    signal   exactly HEADER_BYTES: a header alone
    chunk    a header and its payload, in a slot that comes from the transport's own `slots`

Transports do no framing: an earlier header announced kind and length of each message. A lost message shows up as an
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
    """A message under way, from the call that returned it or from `wait` at the latest.

    The operations of one transport are waited for in the order in which they were started.
    """

    def wait(self) -> None:
        """Blocks until the message has moved and the slot is the caller's again.

        A message that is received into a slot on a GPU may still be on its way there, in the calling thread's stream.

        Raises:
            TransferTimeout: not within the transport's operation timeout; the transport is broken.
            TransferError: the peer is gone, the transport was aborted, or the message was not the one announced.
        """


class SignalOperation(Operation, Protocol):
    """A signal that is being received."""

    @property
    def header(self) -> bytes:
        """The header that arrived; valid once `wait` has returned."""


class Transport(Protocol):
    """One side of a transport. One thread owns it, and alone may use it, except for `abort`.

    An operation that raises leaves the transport broken: the owner discards the slots of operations under way and
    closes it.
    """

    slots: SlotSource
    """The slots in which this side stages the chunks of this transport."""

    def close(self) -> None:
        """Closes this side; called by the owner. Operations still under way fail, or never end. Idempotent."""

    def abort(self) -> None:
        """Ends what is under way as soon as the transport can; called by any thread. Idempotent."""


class SendingTransport(Transport, Protocol):
    """The side that sends."""

    def send_signal(self, header: bytes) -> Operation:
        """Starts to send a header alone."""

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        """Starts to send a slot, which holds the header already; `num_bytes` of payload follow it."""


class ReceivingTransport(Transport, Protocol):
    """The side that receives."""

    def recv_signal(self) -> SignalOperation:
        """Starts to receive a header alone."""

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        """Starts to receive a header and `num_bytes` of payload.

        `slot.buffer` may be read, not written, once `wait` has returned and until the slot is released. On a GPU that
        holds for what comes later in the calling thread's stream, and for others after `settle`.
        """

    def has_next(self) -> bool:
        """Returns whether the next message has come; False also where the transport does not know."""

    def settle(self) -> None:
        """Waits until all messages whose `wait` has returned are in their slots, and the peer may use its own again.

        The owner does so before it releases a slot that nothing has read in its stream, and before it waits for long.
        """


@dataclass(frozen=True, slots=True)
class FarSide:
    """The peer, as this side knows it from elsewhere than the rendezvous."""

    rank: int
    addresses: frozenset[IpAddress]
    """Where it is: to nothing else does this side connect."""

    def is_at(self, address: str) -> bool:
        """Whether the peer is at this IP address; False also where it is none."""
        try:
            return ip_address(address) in self.addresses
        except ValueError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportEnd:
    """What one side of a transport is opened with."""

    rendezvous: Store
    """The keys that the two sides exchange while they open the transport."""
    host: str
    """This side's address, for the kinds that listen on it."""
    peer_host: str
    """The peer's host: the one that its ticket, permit or lease names, or from which its control stream has come."""
    staging: StagingPool
    """Slots on the kind's staging device. A sender over shm takes only their size from it and has memory of its own."""
    max_slots: int
    """Slots that this side may hold at a time."""
    max_ring_bytes: int
    """The most that the rings of all ipc transports may take of this side's GPU."""
    open_timeout_s: float
    op_timeout_s: float
    nccl_mode: str = "nonblocking-eager"
    is_sealed: bool = False
    """Whether a kind that can encrypts its messages; the rendezvous must then be secret, since it carries the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearness:
    """How near two ranks are to each other."""

    is_same_host: bool = False
    is_same_gpu: bool = False
    """Both have their caches on one GPU, as far as NCCL knows."""
    may_read_gpu: bool = False
    """The receiver may be able to read the sender's GPU."""
    must_be_sealed: bool = False
    """What leaves a host must be encrypted."""
    plain_links: tuple[str, ...] = ()
    """Kinds that both sides except from that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """A row of the table of transports: how a kind is opened, and where it fits.

    Both `open_...` block until the peer has joined; they are for the thread that will own the transport.
    """

    open_sender: Callable[[TransportEnd], SendingTransport]
    open_receiver: Callable[[TransportEnd], ReceivingTransport]
    is_well_formed: Callable[[FarSide, str, bytes], bool]
    """Whether the peer sets this key to this value during the rendezvous: it has the form, and names no other host."""
    is_usable: Callable[[Sequence[torch.device]], bool]
    """Whether a worker with caches on these devices, one a rank, can use it."""
    needs_one_host: bool = False
    """Both sides must have the same `host_id`."""
    needs_two_gpus: bool = False
    """The sides must not share a GPU."""
    needs_readable_gpu: bool = False
    """The receiver reads the sender's GPU: it must not be known that its own does not reach that one."""
    is_plain: bool = False
    """Nothing that leaves a host over it is encrypted."""
    opens_slowly: bool = False
    """Opening takes seconds and may have to wait: KV travels over another kind meanwhile."""
    stages_on_gpu: bool = False
    """Slots are on the cache's device; otherwise they are in main memory."""
    prefers_warm_chunks: bool = False
    """Chunks should fit the processor's cache: its thread copies each of them into the kernel."""

    def fits(self, near: Nearness) -> bool:
        """Returns whether ranks that are so near to each other can use it, where it need not be encrypted."""
        return (
            (near.is_same_host or not self.needs_one_host)
            and (near.may_read_gpu or not self.needs_readable_gpu)
            and not (near.is_same_gpu and self.needs_two_gpus)
        )
