"""Transport over GPU memory of one host: the receiver copies chunks from the sender's ring, packets name the slot.

    sender                                            receiver
      acquire: a free slot of the ring
      gather straight into it
      send_chunk   -- header | slot number ------->   recv_chunk: a copy into a receiver's slot
      send_signal  -- header --------------------->   scatter
      acquire      <- slot number, after the copy -   wait

The ring is on the sender's GPU. The receiver's GPU reads it; it is the same GPU or reaches it over NVLink or PCIe. Only
the receiver writes into its memory, so a sender cannot corrupt a chunk after it was checked. No kernel waits for
another one, so there are no circular waits, and no order with the collectives of several ranks is needed. The host
orders the two sides: a chunk is announced after it is gathered, and its slot is returned after it is copied. A CUDA
event that both share would save the two waits, but then a stream would wait for the event of a process that may be
dead. The receiver's stream orders its further use of a copy, so it need not wait before it continues.

To open, the sender lets the receiver connect as over shm, and sends a description of the ring, whose start holds a
secret; the receiver answers with the secret. This detects, for example, that a GPU cannot reach the other one. Header
and payload of a slot are separate: the packets carry the header.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING

import torch

from baton.errors import TransferError
from engine.gpu_memory import HANDLE_BYTES
from kvstore.transfer.device import gpu_of
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import TransportEnd, TransportKind
from kvstore.transfer.transport.exports import rings_of
from kvstore.transfer.transport.packets import PacketSignal, RingReceiver, RingSender, accept, connect, well_formed
from kvstore.transfer.transport.staging import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.transfer.device import GpuDevice, GpuImport, StreamEvent
    from kvstore.transfer.transport.base import Operation, SignalOperation

_IPC = "ipc"
_RING = struct.Struct(f"<IQ{HANDLE_BYTES}s")
"""Sent with the lifeline: the number of slots, the distance between two slots in bytes, and the handle of the ring."""
_SECRET_BYTES = 32
_ALIGNED = 512
"""Slots start at multiples of this, which keeps copies and gathers fast."""
_MAX_SLOTS, _MAX_STRIDE = 1024, 2**32


class IpcSender(RingSender):
    """Sending side, which owns the ring."""

    def __init__(self, end: TransportEnd) -> None:
        stride = -(-end.staging.slot_bytes // _ALIGNED) * _ALIGNED
        with contextlib.ExitStack() as undo:
            ring = rings_of(end.staging.device).lend(end.max_slots * stride, end.max_ring_bytes)
            undo.callback(ring.give_back)
            secret = secrets.token_bytes(_SECRET_BYTES)
            ring.memory[:_SECRET_BYTES].copy_(torch.frombuffer(bytearray(secret), dtype=torch.uint8))
            _settle(end.staging.device)
            connection = undo.enter_context(accept(_IPC, end.rendezvous, end.open_timeout_s))
            socket.send_fds(connection, [_RING.pack(end.max_slots, stride, ring.handle)], [ring.theirs])
            ring.passed_on()
            connection.settimeout(end.open_timeout_s)
            if not secrets.compare_digest(connection.recv(_SECRET_BYTES), secret):
                raise TransferError("the receiver cannot read this GPU's memory")
            self._ending = undo.pop_all()
        slots = [Slot(row[: end.staging.slot_bytes], bytearray(HEADER_BYTES)) for row in ring.memory.view(-1, stride)]
        super().__init__(_IPC, connection, slots, end.op_timeout_s)

    def close(self) -> None:
        super().close()
        self._ending.close()


class IpcReceiver(RingReceiver):
    """Receiving side, which copies each chunk into one of its slots."""

    def __init__(self, end: TransportEnd) -> None:
        self.slots = end.staging.share(end.max_slots)
        gpu = gpu_of(end.staging.device)
        assert gpu is not None
        self._gpu = gpu
        self._copying: deque[tuple[StreamEvent, int]] = deque()
        """Copies that may be in progress, each with the number of the sender's slot."""
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(connect(_IPC, end.rendezvous, end.open_timeout_s))
            message, lifelines, _, _ = socket.recv_fds(connection, _RING.size, 1, socket.MSG_CMSG_CLOEXEC)
            for lifeline in lifelines:
                undo.callback(os.close, lifeline)
            handle = self._checked(message, lifelines)
            self._ring = gpu.open_buffer(handle)
            undo.callback(self._ring.close)
            connection.sendall(_start_of(self._ring, gpu))
            self._ending = undo.pop_all()
        super().__init__(_IPC, connection, end.op_timeout_s)

    def recv_signal(self) -> SignalOperation:
        return PacketSignal(self)

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return _IpcChunk(self, slot, num_bytes)

    def copy(self, slot: Slot, num_bytes: int) -> None:
        """Wait for the next packet, which must announce a chunk, and start to copy it into `slot`."""
        header, number = self.next_chunk()
        if number >= self._num_slots or num_bytes > self._stride:
            raise TransferError("the ipc transport is broken: there is no such slot in the sender's ring")
        self._ring.read(number * self._stride, slot.payload(num_bytes))
        copied = self._gpu.event()
        copied.record(self._gpu.current_stream())
        self._copying.append((copied, number))
        slot.write_header(header)
        while self._copying and self._copying[0][0].query():
            self.give_back(self._copying.popleft()[1])

    def settle(self) -> None:
        """Implement `ReceivingTransport.settle`."""
        while self._copying:
            copied, number = self._copying.popleft()
            copied.synchronize()
            self.give_back(number)

    def close(self) -> None:
        try:
            self.settle()
        finally:
            super().close()
            self._ending.close()

    def _checked(self, message: bytes, lifelines: Sequence[int]) -> bytes:
        """Store the sender's description of its ring, and return the handle; nothing is opened before."""
        if len(message) != _RING.size or len(lifelines) != 1:
            raise TransferError("the sender left while the transport was being opened, or did not describe its ring")
        self._num_slots, self._stride, handle = _RING.unpack(message)
        if not (0 < self._num_slots <= _MAX_SLOTS and 0 < self._stride <= _MAX_STRIDE and self._stride % _ALIGNED == 0):
            raise TransferError(f"the sender has a ring of {self._num_slots} slots of {self._stride} bytes")
        return bytes(handle)


KIND = TransportKind(
    open_sender=IpcSender,
    open_receiver=IpcReceiver,
    is_well_formed=well_formed(_IPC),
    is_usable=lambda devices: devices[0].type == "cuda",
    needs_one_host=True,
    needs_readable_gpu=True,
    stages_on_gpu=True,
)


class _IpcChunk:
    def __init__(self, receiver: IpcReceiver, slot: Slot, num_bytes: int) -> None:
        self._receiver = receiver
        self._slot = slot
        self._num_bytes = num_bytes

    def wait(self) -> None:
        self._receiver.copy(self._slot, self._num_bytes)


def _start_of(ring: GpuImport, gpu: GpuDevice) -> bytes:
    """Return the secret at the start of the ring."""
    found, stream = gpu.buffer(_SECRET_BYTES), gpu.current_stream()
    ring.read(0, found)
    stream.synchronize()
    return found.cpu().numpy().tobytes()


def _settle(device: torch.device) -> None:
    gpu = gpu_of(device)
    assert gpu is not None
    gpu.current_stream().synchronize()
