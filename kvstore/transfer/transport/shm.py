"""Shared memory between two processes of one host: chunks lie in memory that both map, and packets name the slot.

    sender                                            receiver
      acquire: a free slot of the ring
      gather straight into it
      send_chunk   -- header | slot number ------->   recv_chunk: the slot is the sender's memory
      send_signal  -- header --------------------->   scatter straight out of it
      acquire      <- slot number -----------------   release

The ring is a memfd of the sender's. The receiver's mapping is private: its writes stay its own, and a sender that
stalls or dies can spoil nothing but its own ring. The packets go through a Unix socket (SOCK_SEQPACKET): the kernel
orders them after the stores that they announce, and a peer's death is an end of file at once.

To open, the sender listens on a random abstract name, publishes it in the rendezvous, and hands the memfd over the
connection. Each side requires the other to belong to its own user. Nothing gets a name in a file system, and each side
keeps one file descriptor.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import select
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import RECEIVER, SENDER, TransportEnd, TransportKind
from kvstore.transfer.transport.socket_end import SENT, SocketEnd
from kvstore.transfer.transport.staging import Slot

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.staging import SlotSource

_NAME, _JOINED = "shm", "shm/joined"
"""Keys of the rendezvous: the sender's address, and that the receiver has connected to it."""
_NAME_FORM = re.compile(rb"\0baton-kv-[0-9a-f]{32}")
_RING = struct.Struct("<IQ")
"""Sent with the memfd: the number of slots, and the bytes from one to the next."""
_CHUNK = struct.Struct(f"<{HEADER_BYTES}sI")
"""Header and slot number. A signal is a header alone."""
_ACK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""


def host_id() -> str:
    """Identifies kernel, network namespace and user: processes with the same id can open an shm transport."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{Path('/proc/self/ns/net').stat().st_ino}/{os.getuid()}"


def _is_well_formed(peer: int, key: str, value: bytes) -> bool:
    if (peer, key) == (SENDER, _NAME):
        return _NAME_FORM.fullmatch(value) is not None
    return (peer, key, value) == (RECEIVER, _JOINED, b"")


class _ShmEnd(SocketEnd):
    """A nonblocking socket of packets."""

    def __init__(self, connection: socket.socket, op_timeout_s: float) -> None:
        super().__init__("shm", connection, op_timeout_s)
        connection.setblocking(False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def send(self, packet: bytes) -> None:
        """Hands `packet` to the kernel."""
        with self._errors_named():
            while True:
                try:
                    self._socket.send(packet)
                    return
                except BlockingIOError:
                    if not self._writable.poll(self._op_timeout_s * 1e3):
                        raise TransferTimeout(f"the peer read nothing within {self._op_timeout_s:g} s") from None

    def receive(self, timeout_s: float) -> bytes | None:
        """Returns the next packet, or None if none comes in time."""
        with self._errors_named():
            while True:
                try:
                    packet = self._socket.recv(_CHUNK.size)
                    break
                except BlockingIOError:
                    if not timeout_s or not self._readable.poll(timeout_s * 1e3):
                        return None
        if not packet:
            raise self._peer_is_gone()
        return packet


class ShmSender(_ShmEnd):
    """The sending side, which owns the ring."""

    def __init__(self, end: TransportEnd) -> None:
        slot_bytes = end.staging.slot_bytes
        stride = -(-(HEADER_BYTES + slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = os.memfd_create("baton-kv")
        try:
            os.ftruncate(memory, end.max_slots * stride)
            ring = _map(memory, end.max_slots, stride, shared=True)
            with contextlib.ExitStack() as undo:
                connection = undo.enter_context(_accept(end.rendezvous, end.open_timeout_s))
                socket.send_fds(connection, [_RING.pack(end.max_slots, stride)], [memory])
                undo.pop_all()
        finally:
            os.close(memory)
        super().__init__(connection, end.op_timeout_s)
        self._slots = _SenderSlots(self, ring[:, : HEADER_BYTES + slot_bytes], end.op_timeout_s)
        self.slots: SlotSource = self._slots

    def send_signal(self, header: bytes) -> Operation:
        self.send(header)
        return SENT

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        self.send(_CHUNK.pack(slot.read_header(), self._slots.lend(slot)))
        return SENT


class ShmReceiver(_ShmEnd):
    """The receiving side, which maps the sender's ring; it stages nothing."""

    def __init__(self, end: TransportEnd) -> None:
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(_connect(end.rendezvous, end.open_timeout_s))
            message, fds, _, _ = socket.recv_fds(connection, _RING.size, 1, socket.MSG_CMSG_CLOEXEC)
            try:
                if not fds:
                    raise TransferError("the sender left while the transport was being opened")
                num_slots, stride = _RING.unpack(message)
                ring = _map(fds[0], num_slots, stride, shared=False)
            finally:
                for fd in fds:
                    os.close(fd)
            undo.pop_all()
        super().__init__(connection, end.op_timeout_s)
        self._ring = [Slot(row) for row in ring]
        self.slots: SlotSource = _ReceiverSlots(self, stride)

    def recv_signal(self) -> SignalOperation:
        return _ShmSignal(self)

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return _ShmChunk(self, slot)

    def next_signal(self) -> bytes:
        """Waits for the next packet, which must be a signal, and returns its header."""
        return self._next(HEADER_BYTES)

    def next_chunk(self) -> Slot:
        """Waits for the next packet, which must announce a chunk, and returns its slot in the sender's ring."""
        header, number = _CHUNK.unpack(self._next(_CHUNK.size))
        slot: Slot | None = self._ring[number] if number < len(self._ring) else None
        if slot is None or slot.read_header() != header:
            raise TransferError("the shm transport is broken: a chunk is not where its announcement says")
        return slot

    def _next(self, num_bytes: int) -> bytes:
        packet = self.receive(self._op_timeout_s)
        if packet is None:
            raise TransferTimeout(f"no message came within {self._op_timeout_s:g} s")
        if len(packet) != num_bytes:
            raise TransferError("the shm transport is out of step: a signal came for a chunk, or a chunk for a signal")
        return packet


KIND = TransportKind(
    open_sender=ShmSender,
    open_receiver=ShmReceiver,
    is_well_formed=_is_well_formed,
    is_usable=lambda devices: devices[0].type == "cpu",
    needs_one_host=True,
)


class _ShmSignal:
    def __init__(self, receiver: ShmReceiver) -> None:
        self._receiver = receiver
        self.header = b""

    def wait(self) -> None:
        self.header = self._receiver.next_signal()


class _ShmChunk:
    def __init__(self, receiver: ShmReceiver, slot: Slot) -> None:
        self._receiver = receiver
        self._slot = slot

    def wait(self) -> None:
        self._slot.show(self._receiver.next_chunk())


class _SenderSlots:
    """The ring's slots. A slot is free again once both the owner and the receiver have released it."""

    def __init__(self, end: _ShmEnd, ring: torch.Tensor, op_timeout_s: float) -> None:
        self._end = end
        self._op_timeout_s = op_timeout_s
        self._stride = ring.stride(0)
        self._slots = [Slot(row) for row in ring]
        self._free = list(range(len(ring)))
        """Numbers of free slots; the last one to come back is taken first, while it is warm."""
        self._held: set[int] = set()
        self._lent: list[tuple[int, float]] = []
        """Number and sending time of each chunk that the receiver has not released, oldest first."""

    def acquire(self, wait_s: float) -> Slot | None:
        """Takes a free slot.

        Raises:
            TransferTimeout: the receiver has kept every slot for longer than the operation timeout.
        """
        deadline = time.monotonic() + wait_s
        while not self._free:
            if self._take_back(0.0):
                continue
            if not self._lent:
                return None
            now = time.monotonic()
            overdue = self._lent[0][1] + self._op_timeout_s
            if now >= overdue:
                raise TransferTimeout(f"the receiver released no slot within {self._op_timeout_s:g} s")
            if now >= deadline:
                return None
            self._take_back(min(deadline, overdue) - now)
        number = self._free.pop()
        self._held.add(number)
        return self._slots[number]

    def lend(self, slot: Slot) -> int:
        """Passes a slot to the receiver, and returns its number."""
        number = self._number(slot)
        self._lent.append((number, time.monotonic()))
        return number

    def release(self, slot: Slot) -> None:
        self._held.remove(self._number(slot))
        self._free_unless_used(self._number(slot))

    def discard(self, slot: Slot) -> None:
        self._held.remove(self._number(slot))

    def _take_back(self, timeout_s: float) -> bool:
        """Frees a slot that the receiver has released, and returns whether there was one."""
        packet = self._end.receive(timeout_s)
        if packet is None:
            return False
        (number,) = _ACK.unpack(packet)
        place = next((place for place, (lent, _) in enumerate(self._lent) if lent == number), None)
        if place is None:
            raise TransferError(
                f"the shm transport is broken: the receiver released slot {number}, which it did not have"
            )
        del self._lent[place]
        self._free_unless_used(number)
        return True

    def _free_unless_used(self, number: int) -> None:
        if number not in self._held and all(lent != number for lent, _ in self._lent):
            self._free.append(number)

    def _number(self, slot: Slot) -> int:
        return slot.buffer.storage_offset() // self._stride


class _ReceiverSlots:
    """Places for slots of the sender's ring, without a limit of their own: the ring is limited."""

    def __init__(self, end: _ShmEnd, stride: int) -> None:
        self._end = end
        self._stride = stride

    def acquire(self, wait_s: float) -> Slot | None:
        return Slot(_NOTHING)

    def release(self, slot: Slot) -> None:
        """Returns a slot to the sender. If the sender is gone, the next receive raises the error."""
        if slot.buffer is not _NOTHING:
            number = slot.buffer.storage_offset() // self._stride
            with contextlib.suppress(TransferError):
                self._end.send(_ACK.pack(number))

    def discard(self, slot: Slot) -> None:
        pass


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _map(memory: int, num_slots: int, stride: int, shared: bool) -> torch.Tensor:
    """Maps the memfd as slots, `uint8` [num_slots, stride], by its path: Python's mmap would keep a descriptor open."""
    size = num_slots * stride
    return torch.from_file(f"/proc/self/fd/{memory}", shared=shared, size=size, dtype=torch.uint8).view(num_slots, -1)


def _accept(store: Store, timeout_s: float) -> socket.socket:
    address = "\0baton-kv-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(1)
        store.set(_NAME, address)
        store.wait([_JOINED], timedelta(seconds=timeout_s))  # so that the end of the control stream ends the wait
        listener.settimeout(timeout_s)
        connection, _ = listener.accept()
    return _require_own_user(connection)


def _connect(store: Store, timeout_s: float) -> socket.socket:
    store.wait([_NAME], timedelta(seconds=timeout_s))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as undo:
        undo.enter_context(connection)
        connection.settimeout(timeout_s)
        connection.connect(store.get(_NAME))
        store.set(_JOINED, "")
        undo.pop_all()
    return _require_own_user(connection)


def _require_own_user(connection: socket.socket) -> socket.socket:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        connection.close()
        raise TransferError(f"the peer of an shm transport is user {uid}'s")
    return connection
