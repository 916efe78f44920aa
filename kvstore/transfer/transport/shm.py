"""A link between two processes of one host: chunks lie in memory that both map, and packets say where.

    sender                                            receiver
      acquire: a free slot of the ring
      gather straight into it
      send_chunk   -- header | slot number ------->   recv_chunk: the slot is the sender's memory
      send_signal  -- header --------------------->   scatter straight out of it
      acquire      <- slot number -----------------   release

The ring is a memfd of the sender's. The receiver's mapping is private: what it writes stays its own, and a sender that
stalls or dies can spoil nothing but its own ring. The packets go through a Unix socket (SOCK_SEQPACKET): the kernel
orders them after the stores that they announce, and a peer's death is an end of file at once.

To open, the sender listens on an abstract name, random and published through the session, and hands the memfd over the
connection. Each side wants the other to be its own user's. Nothing gets a name in a file system, and what stays is one
file descriptor a side.
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
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import RECEIVER, SENDER
from kvstore.transfer.transport.staging import Slot

if TYPE_CHECKING:
    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.gloo import RendezvousStore
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
    """Processes with the same one can open shm links: one kernel, one network namespace, one user."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{Path('/proc/self/ns/net').stat().st_ino}/{os.getuid()}"


def is_of_shm(peer: int, key: str, value: bytes) -> bool:
    """Whether an shm link's side of rank `peer` says this while it is opened."""
    if (peer, key) == (SENDER, _NAME):
        return _NAME_FORM.fullmatch(value) is not None
    return (peer, key, value) == (RECEIVER, _JOINED, b"")


class ShmSender:
    def __init__(
        self, store: RendezvousStore, num_slots: int, slot_bytes: int, open_timeout_s: float, op_timeout_s: float
    ) -> None:
        stride = -(-(HEADER_BYTES + slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = os.memfd_create("baton-kv")
        try:
            os.ftruncate(memory, num_slots * stride)
            ring = _map(memory, num_slots, stride, shared=True)
            with contextlib.ExitStack() as undo:
                connection = undo.enter_context(_accept(store, open_timeout_s))
                socket.send_fds(connection, [_RING.pack(num_slots, stride)], [memory])
                undo.pop_all()
        finally:
            os.close(memory)
        self._op_timeout_s = op_timeout_s
        self._packets = _Packets(connection)
        self._slots = _SenderSlots(self._packets, ring[:, : HEADER_BYTES + slot_bytes], op_timeout_s)
        self.slots: SlotSource = self._slots

    def send_signal(self, header: bytes) -> Operation:
        self._packets.send(header, self._op_timeout_s)
        return _SENT

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        self._packets.send(_CHUNK.pack(slot.read_header(), self._slots.lend(slot)), self._op_timeout_s)
        return _SENT

    def close(self) -> None:
        self._packets.close()

    def abort(self) -> None:
        self._packets.abort()


class ShmReceiver:
    def __init__(self, store: RendezvousStore, open_timeout_s: float, op_timeout_s: float) -> None:
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(_connect(store, open_timeout_s))
            message, fds, _, _ = socket.recv_fds(connection, _RING.size, 1, socket.MSG_CMSG_CLOEXEC)
            try:
                if not fds:
                    raise TransferError("the sender left while the link was being opened")
                num_slots, stride = _RING.unpack(message)
                ring = _map(fds[0], num_slots, stride, shared=False)
            finally:
                for fd in fds:
                    os.close(fd)
            undo.pop_all()
        self._op_timeout_s = op_timeout_s
        self._ring = [Slot(row) for row in ring]
        self._packets = _Packets(connection)
        self.slots: SlotSource = _ReceiverSlots(self._packets, stride, op_timeout_s)

    def recv_signal(self) -> SignalOperation:
        return _SignalArrival(self)

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return _ChunkArrival(self, slot)

    def close(self) -> None:
        self._packets.close()

    def abort(self) -> None:
        self._packets.abort()

    def next_signal(self) -> bytes:
        return self._next(HEADER_BYTES)

    def next_chunk(self) -> Slot:
        """In the sender's ring."""
        header, number = _CHUNK.unpack(self._next(_CHUNK.size))
        slot: Slot | None = self._ring[number] if number < len(self._ring) else None
        if slot is None or slot.read_header() != header:
            raise TransferError("the shm link is broken: a chunk is not where its announcement says")
        return slot

    def _next(self, num_bytes: int) -> bytes:
        packet = self._packets.receive(self._op_timeout_s)
        if packet is None:
            raise TransferTimeout(f"no message came within {self._op_timeout_s:g} s")
        if len(packet) != num_bytes:
            raise TransferError("the shm link is out of step: a signal came for a chunk, or a chunk for a signal")
        return packet


class _Sent:
    """A packet is sent when the kernel has it; that the receiver takes chunks is seen by the slots coming back."""

    def wait(self) -> None:
        pass


_SENT = _Sent()


class _SignalArrival:
    def __init__(self, link: ShmReceiver) -> None:
        self._link = link
        self.header = b""

    def wait(self) -> None:
        self.header = self._link.next_signal()


class _ChunkArrival:
    def __init__(self, link: ShmReceiver, slot: Slot) -> None:
        self._link = link
        self._slot = slot

    def wait(self) -> None:
        self._slot.show(self._link.next_chunk())


class _SenderSlots:
    """The ring's slots. One is free again when the owner has released it and the receiver too."""

    def __init__(self, packets: _Packets, ring: torch.Tensor, op_timeout_s: float) -> None:
        self._packets = packets
        self._op_timeout_s = op_timeout_s
        self._stride = ring.stride(0)
        self._slots = [Slot(row) for row in ring]
        self._free = list(range(len(ring)))
        """The one that came back last is taken first, while it is warm."""
        self._held: set[int] = set()
        self._lent: list[tuple[int, float]] = []
        """Number and time of each chunk that was sent and is not released, oldest first."""

    def acquire(self, wait_s: float) -> Slot | None:
        """Raises TransferTimeout where the receiver has kept every slot for longer than the operation timeout."""
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
        """Its number. From now on the receiver has it."""
        number = self._number(slot)
        self._lent.append((number, time.monotonic()))
        return number

    def release(self, slot: Slot) -> None:
        self._held.remove(self._number(slot))
        self._free_unless_used(self._number(slot))

    def discard(self, slot: Slot) -> None:
        self._held.remove(self._number(slot))

    def _take_back(self, timeout_s: float) -> bool:
        """Whether the receiver has released a slot."""
        packet = self._packets.receive(timeout_s)
        if packet is None:
            return False
        (number,) = _ACK.unpack(packet)
        place = next((place for place, (lent, _) in enumerate(self._lent) if lent == number), None)
        if place is None:
            raise TransferError(f"the shm link is broken: the receiver released slot {number}, which it did not have")
        del self._lent[place]
        self._free_unless_used(number)
        return True

    def _free_unless_used(self, number: int) -> None:
        if number not in self._held and all(lent != number for lent, _ in self._lent):
            self._free.append(number)

    def _number(self, slot: Slot) -> int:
        return slot.buffer.storage_offset() // self._stride


class _ReceiverSlots:
    """Places for slots of the sender's ring. As many as wanted: it is the ring that is limited."""

    def __init__(self, packets: _Packets, stride: int, op_timeout_s: float) -> None:
        self._packets = packets
        self._stride = stride
        self._op_timeout_s = op_timeout_s

    def acquire(self, wait_s: float) -> Slot | None:
        return Slot(_NOTHING)

    def release(self, slot: Slot) -> None:
        """If the sender is gone by now, the next receive says so."""
        if slot.buffer is not _NOTHING:
            number = slot.buffer.storage_offset() // self._stride
            with contextlib.suppress(TransferError):
                self._packets.send(_ACK.pack(number), self._op_timeout_s)

    def discard(self, slot: Slot) -> None:
        pass


_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Packets:
    """The connection. Belongs to the link's owner thread, but for `abort`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._closing = threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def send(self, packet: bytes, timeout_s: float) -> None:
        try:
            while True:
                try:
                    self._socket.send(packet)
                    return
                except BlockingIOError:
                    if not self._writable.poll(timeout_s * 1e3):
                        raise TransferTimeout(f"the peer read nothing within {timeout_s:g} s") from None
        except OSError as error:
            raise TransferError(f"the shm link is broken: {error}") from error

    def receive(self, timeout_s: float) -> bytes | None:
        """None: nothing came in time."""
        try:
            while True:
                try:
                    packet = self._socket.recv(_CHUNK.size)
                    break
                except BlockingIOError:
                    if not timeout_s or not self._readable.poll(timeout_s * 1e3):
                        return None
        except OSError as error:
            raise TransferError(f"the shm link is broken: {error}") from error
        if not packet:
            raise TransferError("the shm link is broken: the peer is gone, or the link was aborted")
        return packet

    def close(self) -> None:
        with self._closing:
            self._socket.close()

    def abort(self) -> None:
        with self._closing, contextlib.suppress(OSError):  # closed by now
            self._socket.shutdown(socket.SHUT_RDWR)


def _map(memory: int, num_slots: int, stride: int, shared: bool) -> torch.Tensor:
    """The memfd as slots, `uint8` [num_slots, stride]. By its path, because Python's mmap keeps a descriptor open."""
    size = num_slots * stride
    return torch.from_file(f"/proc/self/fd/{memory}", shared=shared, size=size, dtype=torch.uint8).view(num_slots, -1)


def _accept(store: RendezvousStore, timeout_s: float) -> socket.socket:
    address = "\0baton-kv-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(1)
        store.set(_NAME, address)
        store.wait([_JOINED], timedelta(seconds=timeout_s))  # so that the end of the session ends the wait
        listener.settimeout(timeout_s)
        connection, _ = listener.accept()
    return _of_own_user(connection)


def _connect(store: RendezvousStore, timeout_s: float) -> socket.socket:
    store.wait([_NAME], timedelta(seconds=timeout_s))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as undo:
        undo.enter_context(connection)
        connection.settimeout(timeout_s)
        connection.connect(store.get(_NAME))
        store.set(_JOINED, b"")
        undo.pop_all()
    return _of_own_user(connection)


def _of_own_user(connection: socket.socket) -> socket.socket:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        connection.close()
        raise TransferError(f"the peer of an shm link is user {uid}'s")
    return connection
