"""Transport over shared memory of one host: chunks lie in memory that both processes map, and packets name the slot.

    sender                                            receiver
      acquire: a free slot of the ring
      gather straight into it
      send_chunk   -- header | slot number ------->   recv_chunk: the slot is the sender's memory
      send_signal  -- header --------------------->   scatter straight out of it
      acquire      <- slot number -----------------   release

The ring is a memfd of the sender. The receiver's mapping is private, so its writes stay local, and a sender that stalls
or dies can corrupt nothing but its own ring. The memfd is sealed, because a process that reads a page of a truncated
file gets a signal that ends it. It is passed over the connection of the packets (see `packets`). Nothing gets a name in
a file system, and each side keeps one file descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton.errors import TransferError
from kvstore.transfer.device import boot_id
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import TransportEnd, TransportKind
from kvstore.transfer.transport.packets import PacketSignal, RingReceiver, RingSender, accept, connect, well_formed
from kvstore.transfer.transport.staging import Slot

if TYPE_CHECKING:
    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.staging import SlotSource

_SHM = "shm"
_RING = struct.Struct("<IQ")
"""Sent with the memfd: the number of slots, and the distance between two slots in bytes."""


def host_id() -> str:
    """Return an id of kernel, network namespace and user: processes with equal ids can open an shm transport."""
    return f"{boot_id()}/{Path('/proc/self/ns/net').stat().st_ino}/{os.getuid()}"


class ShmSender(RingSender):
    """Sending side, which owns the ring."""

    def __init__(self, end: TransportEnd) -> None:
        slot_bytes = end.staging.slot_bytes
        stride = -(-(HEADER_BYTES + slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, end.max_slots * stride)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            ring = _map(memory, end.max_slots, stride, shared=True)
            with contextlib.ExitStack() as undo:
                connection = undo.enter_context(accept(_SHM, end.rendezvous, end.open_timeout_s))
                socket.send_fds(connection, [_RING.pack(end.max_slots, stride)], [memory])
                undo.pop_all()
        finally:
            os.close(memory)
        slots = [Slot(row) for row in ring[:, : HEADER_BYTES + slot_bytes]]
        super().__init__(_SHM, connection, slots, end.op_timeout_s)


class ShmReceiver(RingReceiver):
    """Receiving side, which maps the sender's ring; it stages nothing."""

    def __init__(self, end: TransportEnd) -> None:
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(connect(_SHM, end.rendezvous, end.open_timeout_s))
            message, fds, _, _ = socket.recv_fds(connection, _RING.size, 1, socket.MSG_CMSG_CLOEXEC)
            try:
                if not fds:
                    raise TransferError("the sender left while the transport was being opened")
                num_slots, stride = _RING.unpack(message)
                _require_lasting(fds[0])
                ring = _map(fds[0], num_slots, stride, shared=False)
            finally:
                for fd in fds:
                    os.close(fd)
            undo.pop_all()
        super().__init__(_SHM, connection, end.op_timeout_s)
        self._ring = [Slot(row) for row in ring]
        self.slots: SlotSource = _ReceiverSlots(self, stride)

    def recv_signal(self) -> SignalOperation:
        return PacketSignal(self)

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return _ShmChunk(self, slot)

    def next_slot(self) -> Slot:
        """Wait for the next packet, which must announce a chunk, and return its slot in the sender's ring."""
        header, number = self.next_chunk()
        slot: Slot | None = self._ring[number] if number < len(self._ring) else None
        if slot is None or slot.read_header() != header:
            raise TransferError("the shm transport is broken: a chunk is not where its announcement says")
        return slot


KIND = TransportKind(
    open_sender=ShmSender,
    open_receiver=ShmReceiver,
    is_well_formed=well_formed(_SHM),
    is_usable=lambda devices: devices[0].type == "cpu",
    needs_one_host=True,
)


class _ShmChunk:
    def __init__(self, receiver: ShmReceiver, slot: Slot) -> None:
        self._receiver = receiver
        self._slot = slot

    def wait(self) -> None:
        self._slot.show(self._receiver.next_slot())


class _ReceiverSlots:
    """Slots of the sender's ring at the receiver; they have no separate limit, because the ring is limited."""

    def __init__(self, end: ShmReceiver, stride: int) -> None:
        self._end = end
        self._stride = stride

    def acquire(self, wait_s: float) -> Slot | None:
        return Slot(_NOTHING)

    def release(self, slot: Slot) -> None:
        if slot.buffer is not _NOTHING:
            self._end.give_back(slot.buffer.storage_offset() // self._stride)

    def discard(self, slot: Slot) -> None:
        pass


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _require_lasting(memory: int) -> None:
    """Raise TransferError if the memory's owner could truncate it. torch maps no memory that is too short already."""
    if not fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise TransferError("the shm transport is broken: the sender's ring may become shorter")


def _map(memory: int, num_slots: int, stride: int, shared: bool) -> torch.Tensor:
    """Map the memfd as slots, `uint8` [num_slots, stride], by its path: Python's mmap would keep a descriptor open."""
    size = num_slots * stride
    return torch.from_file(f"/proc/self/fd/{memory}", shared=shared, size=size, dtype=torch.uint8).view(num_slots, -1)
