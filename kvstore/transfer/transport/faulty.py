"""A link on which chunks go wrong on purpose: see `faults.Faults` for how. Signals are spared, but for a stall.

It spoils what the sender hands over, so the receiver sees it as it would a fault of the wire: any kind of link will do.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from baton.errors import TransferError
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.faults import every

if TYPE_CHECKING:
    from kvstore.transfer.transport.base import Operation, SendingTransport
    from kvstore.transfer.transport.faults import Faults
    from kvstore.transfer.transport.staging import Slot


class FaultyTransport:
    """Wraps the sending side.

    Attributes:
        injected: how often each fault happened, by its name.
    """

    def __init__(self, link: SendingTransport, faults: Faults, seed: int = 0) -> None:
        self.slots = link.slots
        self.injected: Counter[str] = Counter()
        self._link = link
        self._faults = faults
        self._random = random.Random(seed)
        self._num_chunks = 0
        self._held_back: _HeldBack | None = None
        self._stalled = False
        self._aborted = threading.Event()

    def send_signal(self, header: bytes) -> Operation:
        if self._stalled:
            return _Never(self._aborted)
        self.send_held_back()
        return self._link.send_signal(header)

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        if self._stalled:
            return _Never(self._aborted)
        self._num_chunks += 1
        if delay_ms := self._faults.link_delay_ms:
            self.injected["link_delay_ms"] += 1
            time.sleep(delay_ms / 1e3)
        if self._inject("link_flip"):
            bit = self._random.randrange((HEADER_BYTES + num_bytes) * 8)
            slot.buffer[bit // 8] ^= 1 << bit % 8
        sent_bytes = num_bytes
        if self._inject("link_truncate"):
            sent_bytes = num_bytes // 2
            # Where the receiver shares the slot's memory, the rest would be there without being sent.
            slot.message(num_bytes)[HEADER_BYTES + sent_bytes :] ^= 0xA5
        return self._send(slot, sent_bytes)

    def close(self) -> None:
        self._link.close()

    def abort(self) -> None:
        self._aborted.set()
        self._link.abort()

    def _send(self, slot: Slot, num_bytes: int) -> Operation:
        if self._inject("link_kill"):
            under_way = self._link.send_chunk(slot, num_bytes)
            self.abort()
            self.close()
            del under_way
            raise TransferError("the link was killed on purpose")
        if self._inject("link_stall"):
            self._stalled = True
            return _Never(self._aborted)
        if self._inject("link_drop"):
            return _NOT_SENT
        if self._inject("link_duplicate"):
            return _Both(self._link.send_chunk(slot, num_bytes), self._link.send_chunk(slot, num_bytes))
        if self._held_back is None and self._is_due("link_reorder"):
            self._held_back = _HeldBack(self, slot, num_bytes)
            return self._held_back
        operation = self._link.send_chunk(slot, num_bytes)
        if self._held_back is not None:
            self.injected["link_reorder"] += 1
            self.send_held_back()
        return operation

    def send_held_back(self) -> None:
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            held_back.operation = self._link.send_chunk(held_back.slot, held_back.num_bytes)

    def _inject(self, fault: str) -> bool:
        if not self._is_due(fault):
            return False
        self.injected[fault] += 1
        return True

    def _is_due(self, fault: str) -> bool:
        rate = getattr(self._faults, fault)
        return self._random.random() < rate if 0 < rate < 1 else every(rate, self._num_chunks)


class _HeldBack:
    """A chunk that is sent after the next one, or when somebody waits for it."""

    def __init__(self, link: FaultyTransport, slot: Slot, num_bytes: int) -> None:
        self.slot = slot
        self.num_bytes = num_bytes
        self.operation: Operation | None = None
        self._link = link

    def wait(self) -> None:
        if self.operation is None:
            self._link.send_held_back()
        assert self.operation is not None
        self.operation.wait()


class _Both:
    def __init__(self, first: Operation, second: Operation) -> None:
        self._first = first
        self._second = second

    def wait(self) -> None:
        self._first.wait()
        self._second.wait()


class _NotSent:
    def wait(self) -> None:
        pass


_NOT_SENT = _NotSent()


class _Never:
    def __init__(self, aborted: threading.Event) -> None:
        self._aborted = aborted

    def wait(self) -> None:
        self._aborted.wait()
        raise TransferError("the link was aborted")
