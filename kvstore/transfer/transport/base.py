"""A link carries signals and chunks one way between two processes, in an order both agree on, and knows nothing else.

    signal   exactly HEADER_BYTES: a header alone
    chunk    a header and its payload, in a slot that comes from the link's own `slots`

Which of the two comes next, and how long it is, the receiver knows before it asks: the header of an earlier message
said so. No link here tells a length, and a kind is told by some at best. A message that is not sent is therefore seen
as the wrong header in the next one of its kind, or as a timeout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore.transfer.transport.staging import Slot, SlotSource

SENDER, RECEIVER = 0, 1
"""Ranks of a link's two sides."""


class Operation(Protocol):
    """Under way from the call that returned it, or from `wait` at the latest. One link's operations are waited for in
    the order they were started."""

    def wait(self) -> None:
        """Blocks until the message has moved and the slot is the caller's again.

        Raises:
            TransferTimeout: not within the link's operation timeout; the link is broken.
            TransferError: the peer is gone, the link was aborted, or the message was not the one announced.
        """


class SignalOperation(Operation, Protocol):
    @property
    def header(self) -> bytes:
        """What arrived; for use once `wait` has returned."""


class Transport(Protocol):
    """One side. Belongs to one thread, which alone may use it, but for `abort`.

    An operation that raises leaves the link broken: slots of operations under way are discarded, and it is closed.
    """

    slots: SlotSource
    """Where this side stages the chunks of this link."""

    def close(self) -> None:
        """Called by the owner thread. Operations still under way fail, or never end. Idempotent."""

    def abort(self) -> None:
        """Called by any thread: ends what is under way as soon as the link can. Idempotent."""


class SendingTransport(Transport, Protocol):
    def send_signal(self, header: bytes) -> Operation: ...

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        """The slot holds the header already; `num_bytes` of payload follow it."""


class ReceivingTransport(Transport, Protocol):
    def recv_signal(self) -> SignalOperation: ...

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        """`slot.buffer` is for use once `wait` has returned, until the slot is released. Not to be written."""
