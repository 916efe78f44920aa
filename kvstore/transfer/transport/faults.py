"""Injected faults, for tests: in a payload after its checksum was taken, and in the transport itself.

`FaultInjector` corrupts payloads. `FaultyTransport` wraps the sending side of any transport and corrupts its messages,
so the receiver sees the effect of a network fault. It spares signals, except for a stall.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import ConfigError, TransferError
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES

if TYPE_CHECKING:
    import torch

    from kvstore.transfer.device import GpuDevice
    from kvstore.transfer.protocol.plan import Chunk
    from kvstore.transfer.transport.base import Operation, SendingTransport
    from kvstore.transfer.transport.staging import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Frequency of each fault: at every Nth chunk of a connection; 0 is never.

    The faults of the transport also take a probability between 0 and 1.
    """

    corrupt_chunk: int = 0
    """Flip the top bit of every byte of one block row."""
    drop_chunk: int = 0
    """Send zeros instead."""
    swap_blocks: int = 0
    """Exchange the first and the last block row, of different layers if a chunk has several.

    Within one layer, attention ignores the order of a sequence's blocks. Chunks of a single row do not count.
    """
    link_drop: float = 0
    """Do not send the chunk."""
    link_duplicate: float = 0
    """Send it twice."""
    link_reorder: float = 0
    """Send the next chunk first, if that comes before a signal and before the owner waits for this one."""
    link_truncate: float = 0
    """Omit the second half of its payload; the receiver finds undefined bytes there."""
    link_flip: float = 0
    """Change one bit of its header or its payload."""
    link_stall: float = 0
    """Send nothing from this chunk on; a wait for it lasts until the transport is aborted."""
    link_kill: float = 0
    """Close the transport while the chunk is being sent."""
    link_delay_ms: int = 0
    """Wait this long before each chunk."""

    @property
    def on_payload(self) -> bool:
        """True if a `FaultInjector` has anything to inject."""
        return any(getattr(self, name) for name in self.__slots__ if not name.startswith("link_"))

    @property
    def on_transport(self) -> bool:
        """True if a `FaultyTransport` has anything to inject."""
        return any(getattr(self, name) for name in self.__slots__ if name.startswith("link_"))


_PROBABILITY = re.compile(r"0?\.\d*[1-9]\d*")


def parse_faults(spec: str) -> Faults:
    """Parse `FaultsConfig.spec`, such as `corrupt_chunk=3,link_drop=0.01,link_delay_ms=5`.

    Raises:
        ConfigError: an unknown fault, or a count that is not a positive number.
    """
    counts: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, _, count = item.partition("=")
        if name in Faults.__slots__ and count.isdigit() and int(count):
            counts[name] = int(count)
        elif name in _MAY_BE_RANDOM and _PROBABILITY.fullmatch(count):
            counts[name] = float(count)
        else:
            raise ConfigError(
                f"faults.spec: {item!r} is not one of {', '.join(Faults.__slots__)} with =N, "
                f"or of {', '.join(sorted(_MAY_BE_RANDOM))} with a probability below 1"
            )
    return Faults(**counts)  # type: ignore[arg-type]


_MAY_BE_RANDOM = {name for name in Faults.__slots__ if name.startswith("link_")} - {"link_delay_ms"}


class FaultInjector:
    """Injector of faults into the payloads of one connection.

    Args:
        gpu: the GPU that holds the payloads, if any.
    """

    def __init__(self, faults: Faults, gpu: GpuDevice | None = None) -> None:
        self._faults = faults
        self._gpu = gpu
        self._num_chunks = 0
        self._num_swappable = 0

    def spoil(self, chunk: Chunk, payload: torch.Tensor) -> None:
        """Corrupt the next payload, `uint8[chunk.num_bytes]`, if a fault is due."""
        num_rows = (chunk.layer_hi - chunk.layer_lo) * (chunk.unit_hi - chunk.unit_lo)
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
        if self._gpu is not None:
            self._gpu.current_stream().synchronize()


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
