"""What a sender has handed to its transport and not waited for yet."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.transfer.transport.base import Operation, SendingTransport
    from kvstore.transfer.transport.staging import Slot


class UnderWay:
    """The operations that have begun, in order, and the slots that they hold."""

    def __init__(self, transport: SendingTransport) -> None:
        self._transport = transport
        self._operations: deque[tuple[Operation, Slot | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._operations)

    def add(self, operation: Operation, slot: Slot | None) -> None:
        """Takes in one that has begun, and the slot that is in use until its end."""
        self._operations.append((operation, slot))

    def complete_one(self) -> None:
        """Waits for the oldest, and releases its slot."""
        operation, slot = self._operations[0]
        operation.wait()
        self._operations.popleft()
        if slot is not None:
            self._transport.slots.release(slot)

    def complete_all(self) -> None:
        """Waits for each of them."""
        while self._operations:
            self.complete_one()

    def give_up(self) -> None:
        """Discards the slots of operations under way: the transport has failed, or is about to be closed."""
        for _, slot in self._operations:
            if slot is not None:
                self._transport.slots.discard(slot)
