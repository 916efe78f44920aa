"""Staging memory: slots of one chunk each, a fixed number of them for all transports of one side.

StagingPool --share(max_slots)--> a transport's SlotSource --acquire--> Slot --release or discard--> StagingPool
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

from kvstore.transfer.device import gpu_of
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES

if TYPE_CHECKING:
    from kvstore.transfer.device import GpuDevice


class Slot:
    """Buffer, `uint8`, for the header and the payload of one chunk; or for the payload, with a separate header.

    Args:
        header: holds the header of a slot on a GPU, which the host reads and writes: HEADER_BYTES of main memory.
    """

    __slots__ = ("_header", "_start", "buffer", "is_on_gpu")

    def __init__(self, buffer: torch.Tensor, header: bytearray | None = None) -> None:
        self.buffer = buffer
        # numpy finds a header in front of a payload in a tenth of the time that torch takes
        self._header = memoryview(header if header is not None else buffer.numpy().data)[:HEADER_BYTES]
        self._start = HEADER_BYTES if header is None else 0
        self.is_on_gpu = header is not None
        """True if the payload is in a GPU's memory."""

    def show(self, other: Slot) -> None:
        """Make this slot a view of `other`'s memory: for a transport that copies no bytes itself."""
        self.buffer, self._header, self._start = other.buffer, other._header, other._start

    def write_header(self, header: bytes) -> None:
        """Store the payload's header."""
        self._header[:] = header

    def read_header(self) -> bytes:
        """Return the payload's header."""
        return bytes(self._header)

    def payload(self, num_bytes: int) -> torch.Tensor:
        """Return the first `num_bytes` of payload, `uint8`; shares memory."""
        return self.buffer[self._start : self._start + num_bytes]

    def message(self, num_bytes: int) -> torch.Tensor:
        """Return the header and `num_bytes` of payload, `uint8`, of a slot in main memory; shares memory."""
        return self.buffer[: self._start + num_bytes]

    def flip(self, bit: int) -> None:
        """Corrupt a bit of header and payload on purpose."""
        place, mask = bit // 8, 1 << bit % 8
        if place < HEADER_BYTES:
            self._header[place] ^= mask
        else:
            self.payload(place - HEADER_BYTES + 1)[-1] ^= mask


class SlotSource(Protocol):
    """Slots of one transport on one side, for the thread that owns it."""

    def acquire(self, wait_s: float) -> Slot | None:
        """Take a slot, or return None when none became free in time.

        With `wait_s` 0 it takes only a slot that is free and that no other transport waits for.

        Raises:
            TransferError: slots come from the peer on this transport, and the peer is gone or released none for too
                long.
        """

    def release(self, slot: Slot) -> None:
        """Return a slot, whether or not a message was transferred with it."""

    def discard(self, slot: Slot) -> None:
        """Abandon a slot whose operation has not ended: it is never used again, and lives as long as the operation."""


class StagingPool:
    """Slots of one device, created on first use. Thread-safe.

    Waiters are served in the order in which they started to wait, and before any caller that does not wait. Together
    with the limit of each share this keeps a busy transport from starving the others.

    Args:
        pinned_for: the GPU that copies by itself between slots in main memory and its own.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, device: torch.device, *, pinned_for: GpuDevice | None = None
    ) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        """Largest payload of a slot."""
        self.device = device
        self.num_discarded = 0
        """Number of slots abandoned with operations that never ended, since the start. New ones replaced them."""
        self._pinned_for = pinned_for
        self._lock = threading.Lock()
        self._num_made = 0
        self._free: list[Slot] = []
        self._waiting: deque[_Waiter] = deque()

    @property
    def in_use(self) -> int:
        """Number of slots that transports hold."""
        with self._lock:
            return self._num_made - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Number of transports that wait for a slot."""
        with self._lock:
            return len(self._waiting)

    def share(self, max_slots: int) -> SlotSource:
        """Return one transport's view of the pool, which holds `max_slots` at most.

        At its limit, `acquire` returns None at once: only the transport's own thread could release a slot.
        """
        return _PoolShare(self, max_slots)

    def take(self, wait_s: float) -> Slot | None:
        """Take a slot like `SlotSource.acquire`, without a share's limit."""
        with self._lock:
            if slot := self._take_free():
                return slot  # no transport waits: a slot that is returned while one waits is never free
            if wait_s <= 0:
                return None
            waiter = _Waiter(self._lock)
            self._waiting.append(waiter)
            waiter.served.wait_for(lambda: waiter.slot is not None, wait_s)
            if waiter.slot is None:
                self._waiting.remove(waiter)
            return waiter.slot

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        with self._lock:
            self._free.append(slot)
            self._serve()

    def lose(self) -> None:
        """Count a discarded slot, so that a new one may replace it."""
        with self._lock:
            self._num_made -= 1
            self.num_discarded += 1
            self._serve()

    def _serve(self) -> None:
        if self._waiting and (slot := self._take_free()):
            waiter = self._waiting.popleft()
            waiter.slot = slot
            waiter.served.notify()

    def _take_free(self) -> Slot | None:
        if self._free:
            return self._free.pop()
        if self._num_made == self.num_slots:
            return None
        slot = self._make()
        self._num_made += 1
        return slot

    def _make(self) -> Slot:
        if (gpu := gpu_of(self.device)) is not None:
            return Slot(gpu.buffer(self.slot_bytes), bytearray(HEADER_BYTES))
        num_bytes = HEADER_BYTES + self.slot_bytes
        if self._pinned_for is not None:
            return Slot(self._pinned_for.pinned_buffer(num_bytes))
        return Slot(torch.zeros(num_bytes, dtype=torch.uint8))


class _Waiter:
    __slots__ = ("served", "slot")

    def __init__(self, lock: threading.Lock) -> None:
        self.served = threading.Condition(lock)
        self.slot: Slot | None = None


class _PoolShare:
    def __init__(self, pool: StagingPool, max_slots: int) -> None:
        self._pool = pool
        self._max_slots = max_slots
        self._num_held = 0

    def acquire(self, wait_s: float) -> Slot | None:
        if self._num_held == self._max_slots:
            return None
        slot = self._pool.take(wait_s)
        self._num_held += slot is not None
        return slot

    def release(self, slot: Slot) -> None:
        self._num_held -= 1
        self._pool.give(slot)

    def discard(self, slot: Slot) -> None:
        self._num_held -= 1
        self._pool.lose()
