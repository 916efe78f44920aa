"""Injected faults, for tests: in a payload after its checksum was taken, and in the transport itself.

`FaultyTransport` wraps the sending side of any transport and corrupts its messages, so the receiver sees the effect of
a network fault. It spares signals, except for a stall. Its `FaultInjector` corrupts payloads. Only `testing.faults`
makes a connection import this module.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from baton.config import Faults, parse_faults
from baton.errors import TransferError
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES, VOID

if TYPE_CHECKING:
    import torch

    from baton.config import TestingConfig
    from kvstore.transfer.device import GpuDevice
    from kvstore.transfer.transport.base import Operation, SendingTransport
    from kvstore.transfer.transport.staging import Slot


def faulty(transport: SendingTransport, testing: TestingConfig, gpu: GpuDevice | None) -> SendingTransport:
    """Return the transport with the faults that `testing.faults` names.

    Args:
        gpu: the GPU that holds the payloads, if any.
    """
    return FaultyTransport(transport, parse_faults(testing.faults), gpu=gpu)


class FaultInjector:
    """Injector of faults into the payloads of one connection."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._num_chunks = 0
        self._num_swappable = 0

    def spoil(self, num_rows: int, payload: torch.Tensor) -> None:
        """Corrupt the next payload, `uint8[bytes]`, which has this number of block rows, if a fault is due."""
        self._num_chunks += 1
        if every(self._faults.corrupt_chunk, self._num_chunks):
            # the top bit of every byte: a float changes its sign and its exponent
            payload.view(max(1, num_rows), -1)[num_rows // 2] ^= 0x80
        if every(self._faults.drop_chunk, self._num_chunks):
            payload.zero_()
        self._num_swappable += num_rows > 1
        if num_rows > 1 and every(self._faults.swap_blocks, self._num_swappable):
            rows = payload.view(num_rows, -1)
            rows[[0, -1]] = rows[[-1, 0]]


_FLAGS, _SPAN = struct.Struct("<5xB"), struct.Struct("<36xHHII")
"""Parts of a chunk's header: flags, and the range of layers and units."""


def rows_of(header: bytes) -> int:
    """Return the number of block rows of the chunk with this header; 0 if its payload is undefined."""
    (flags,), (layer_lo, layer_hi, unit_lo, unit_hi) = _FLAGS.unpack_from(header), _SPAN.unpack_from(header)
    return 0 if flags & VOID else int((layer_hi - layer_lo) * (unit_hi - unit_lo))


def every(nth: float, count: int) -> bool:
    """Return whether a fault of every `nth` chunk happens at chunk `count`, counted from 1; 0 is never."""
    return bool(nth) and count % nth == 0


class FaultyTransport:
    """Wrapper of the sending side of a transport.

    Attributes:
        injected: how often each fault has happened, by its name.
    """

    def __init__(
        self, transport: SendingTransport, faults: Faults, seed: int = 0, gpu: GpuDevice | None = None
    ) -> None:
        self._gpu = gpu
        self.slots = transport.slots
        self.injected: Counter[str] = Counter()
        self._transport = transport
        self._faults = faults
        self._injector = FaultInjector(faults)
        self._random = random.Random(seed)
        self._num_chunks = 0
        self._held_back: _HeldBack | None = None
        self._stalled = False
        self._aborted = threading.Event()

    def send_signal(self, header: bytes) -> Operation:
        if self._stalled:
            return _Never(self._aborted)
        self.send_held_back()
        return self._transport.send_signal(header)

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        if self._stalled:
            return _Never(self._aborted)
        if num_rows := rows_of(slot.read_header()):
            self._injector.spoil(num_rows, slot.payload(num_bytes))
        self._num_chunks += 1
        if delay_ms := self._faults.link_delay_ms:
            self.injected["link_delay_ms"] += 1
            time.sleep(delay_ms / 1e3)
        if self._inject("link_flip"):
            slot.flip(self._random.randrange((HEADER_BYTES + num_bytes) * 8))
        sent_bytes = num_bytes
        if self._inject("link_truncate"):
            sent_bytes = num_bytes // 2
            # If the receiver shares the slot's memory, the rest would be there without being sent.
            slot.payload(num_bytes)[sent_bytes:] ^= 0xA5
        if self._gpu is not None:
            self._gpu.current_stream().synchronize()
        return self._send(slot, sent_bytes)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._aborted.set()
        self._transport.abort()

    def _send(self, slot: Slot, num_bytes: int) -> Operation:
        if self._inject("link_kill"):
            under_way = self._transport.send_chunk(slot, num_bytes)
            self.abort()
            self.close()
            del under_way
            raise TransferError("the transport was killed on purpose")
        if self._inject("link_stall"):
            self._stalled = True
            return _Never(self._aborted)
        if self._inject("link_drop"):
            return _NOT_SENT
        if self._inject("link_duplicate"):
            return _Both(self._transport.send_chunk(slot, num_bytes), self._transport.send_chunk(slot, num_bytes))
        if self._held_back is None and self._is_due("link_reorder"):
            self._held_back = _HeldBack(self, slot, num_bytes)
            return self._held_back
        operation = self._transport.send_chunk(slot, num_bytes)
        if self._held_back is not None:
            self.injected["link_reorder"] += 1
            self.send_held_back()
        return operation

    def send_held_back(self) -> None:
        """Send the chunk that was held back, if there is one."""
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            held_back.operation = self._transport.send_chunk(held_back.slot, held_back.num_bytes)

    def _inject(self, fault: str) -> bool:
        if not self._is_due(fault):
            return False
        self.injected[fault] += 1
        return True

    def _is_due(self, fault: str) -> bool:
        rate = getattr(self._faults, fault)
        return self._random.random() < rate if 0 < rate < 1 else every(rate, self._num_chunks)


class _HeldBack:
    """A chunk that is sent after the next one, or when the owner waits for it."""

    def __init__(self, transport: FaultyTransport, slot: Slot, num_bytes: int) -> None:
        self.slot = slot
        self.num_bytes = num_bytes
        self.operation: Operation | None = None
        self._faulty = transport

    def wait(self) -> None:
        if self.operation is None:
            self._faulty.send_held_back()
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
        raise TransferError("the transport was aborted")
