"""Sends that a sender has started on its transport and not waited for yet."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.transfer.transport.base import Operation, SendingTransport
    from kvstore.transfer.transport.staging import Slot


class UnderWay:
    """Started operations, in order, with the slots that they hold."""

    def __init__(self, transport: SendingTransport) -> None:
        self._transport = transport
        self._operations: deque[tuple[Operation, Slot | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._operations)

    def add(self, operation: Operation, slot: Slot | None) -> None:
        """Add a started operation, and the slot that is in use until its end."""
        self._operations.append((operation, slot))

    def complete_one(self) -> None:
        """Wait for the oldest operation, and release its slot."""
        operation, slot = self._operations[0]
        operation.wait()
        self._operations.popleft()
        if slot is not None:
            self._transport.slots.release(slot)

    def complete_all(self) -> None:
        """Wait for all operations."""
        while self._operations:
            self.complete_one()

    def give_up(self) -> None:
        """Discard the slots of operations in progress: the transport has failed, or is about to be closed."""
        for _, slot in self._operations:
            if slot is not None:
                self._transport.slots.discard(slot)
