"""Staging memory: slots of one chunk each, a fixed number of them for all links of one side.

StagingPool --share(max_slots)--> a link's SlotSource --acquire--> Slot --release or discard--> StagingPool
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

import numpy as np
import torch

from kvstore.transfer.protocol.chunk_header import HEADER_BYTES


class Slot:
    """Header and payload of one chunk in one buffer, `uint8`."""

    __slots__ = ("_bytes", "buffer")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._bytes = buffer.numpy() if buffer.device.type == "cpu" else None
        """The same memory, in which numpy finds a header in a tenth of the time."""

    def show(self, other: Slot) -> None:
        """From now on this is `other`'s memory: for a link that moves no bytes of its own."""
        self.buffer, self._bytes = other.buffer, other._bytes

    def write_header(self, header: bytes) -> None:
        if self._bytes is not None:
            self._bytes[:HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
        else:
            self.buffer[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def read_header(self) -> bytes:
        if self._bytes is not None:
            return self._bytes[:HEADER_BYTES].tobytes()
        return self.buffer[:HEADER_BYTES].cpu().numpy().tobytes()

    def payload(self, num_bytes: int) -> torch.Tensor:
        return self.buffer[HEADER_BYTES : HEADER_BYTES + num_bytes]

    def message(self, num_bytes: int) -> torch.Tensor:
        """Header and payload."""
        return self.buffer[: HEADER_BYTES + num_bytes]


class SlotSource(Protocol):
    """One link's slots on one side. For the link's owner thread."""

    def acquire(self, wait_s: float) -> Slot | None:
        """A slot, or None when none came free in time; with `wait_s` 0 only one that is free and nobody waits for.

        Raises:
            TransferError: slots come from the peer on this link, and it is gone or has not moved for too long.
        """

    def release(self, slot: Slot) -> None:
        """The owner is done with it, whether or not it sent or received with it."""

    def discard(self, slot: Slot) -> None:
        """An operation on it has not ended: the slot is not used again, and its memory lives as long as that does."""


class StagingPool:
    """Slots of one device, made when first needed. Any thread.

    Who waits is served in the order in which the waiting began, and before anybody who does not wait; with the limit of
    each share that keeps a busy link from starving the others.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device, pinned: bool) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        """Largest payload."""
        self.device = device
        self.num_discarded = 0
        """Slots given up with operations that never ended, since the start. Others were made in their place."""
        self._pinned = pinned
        self._lock = threading.Lock()
        self._num_made = 0
        self._free: list[Slot] = []
        self._waiting: deque[_Waiter] = deque()

    @property
    def in_use(self) -> int:
        with self._lock:
            return self._num_made - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Links that wait for a slot."""
        with self._lock:
            return len(self._waiting)

    def share(self, max_slots: int) -> SlotSource:
        """A link's view of the pool, which holds `max_slots` at most.

        At its limit it returns None at once: only its own thread could release one.
        """
        return _Share(self, max_slots)

    def take(self, wait_s: float) -> Slot | None:
        with self._lock:
            if slot := self._take_free():
                return slot  # nobody waits: a slot that comes back to somebody's wait is never free
            if wait_s <= 0:
                return None
            waiter = _Waiter(self._lock)
            self._waiting.append(waiter)
            waiter.served.wait_for(lambda: waiter.slot is not None, wait_s)
            if waiter.slot is None:
                self._waiting.remove(waiter)
            return waiter.slot

    def give(self, slot: Slot) -> None:
        with self._lock:
            self._free.append(slot)
            self._serve()

    def lose(self) -> None:
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
        size = HEADER_BYTES + self.slot_bytes
        slot = Slot(torch.zeros(size, dtype=torch.uint8, device=self.device, pin_memory=self._pinned))
        self._num_made += 1
        return slot


class _Waiter:
    __slots__ = ("served", "slot")

    def __init__(self, lock: threading.Lock) -> None:
        self.served = threading.Condition(lock)
        self.slot: Slot | None = None


class _Share:
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
