"""Packets through a Unix socket (SOCK_SEQPACKET) that describe a ring of slots which two processes of a host share.

    sender                                            receiver
      send_signal  -- header --------------------->   next_signal
      send_chunk   -- header | slot number ------->   next_chunk
      acquire      <- slot number -----------------   release

The kernel orders the packets after earlier memory operations, and a peer's death is an end of file at once. To open,
the sender listens on a random abstract name and publishes it in the rendezvous. Each side requires that the other
belongs to its own user.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import socket
import struct
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import RECEIVER, SENDER, FarSide
from kvstore.transfer.transport.socket_end import SENT, SocketEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

    from kvstore.transfer.transport.base import Operation
    from kvstore.transfer.transport.staging import Slot, SlotSource

_NAME_FORM = re.compile(rb"\0baton-kv-[0-9a-f]{32}")
_CHUNK = struct.Struct(f"<{HEADER_BYTES}sI")
"""Header and slot number. A signal is a header alone."""
_ACK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""


def well_formed(kind: str) -> Callable[[FarSide, str, bytes], bool]:
    """Return a check of the keys and values that a peer sets while it opens a transport of a kind."""
    return partial(_is_well_formed, kind)


def _is_well_formed(kind: str, peer: FarSide, key: str, value: bytes) -> bool:
    if (peer.rank, key) == (SENDER, kind):
        return _NAME_FORM.fullmatch(value) is not None
    return (peer.rank, key, value) == (RECEIVER, f"{kind}/joined", b"")


class PacketEnd(SocketEnd):
    """Nonblocking socket of packets."""

    def __init__(self, kind: str, connection: socket.socket, op_timeout_s: float) -> None:
        super().__init__(kind, connection, op_timeout_s)
        connection.setblocking(False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def send(self, packet: bytes) -> None:
        """Pass `packet` to the kernel."""
        with self._errors_named():
            while True:
                try:
                    self._socket.send(packet)
                    return
                except BlockingIOError:
                    if not self._writable.poll(self._op_timeout_s * 1e3):
                        raise TransferTimeout(f"the peer read nothing within {self._op_timeout_s:g} s") from None

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next packet, or None if none comes in time."""
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


class RingSender(PacketEnd):
    """Sending side, which owns the ring."""

    def __init__(self, kind: str, connection: socket.socket, slots: Sequence[Slot], op_timeout_s: float) -> None:
        super().__init__(kind, connection, op_timeout_s)
        self._ring_slots = _RingSlots(self, slots, op_timeout_s)
        self.slots: SlotSource = self._ring_slots

    def send_signal(self, header: bytes) -> Operation:
        self.send(header)
        return SENT

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        self.send(_CHUNK.pack(slot.read_header(), self._ring_slots.lend(slot)))
        return SENT


class RingReceiver(PacketEnd):
    """Receiving side, which reaches the sender's ring."""

    def next_signal(self) -> bytes:
        """Wait for the next packet, which must be a signal, and return its header."""
        return self._next(HEADER_BYTES)

    def next_chunk(self) -> tuple[bytes, int]:
        """Wait for the next packet, which must announce a chunk, and return its header and the number of its slot."""
        header, number = _CHUNK.unpack(self._next(_CHUNK.size))
        return header, number

    def has_next(self) -> bool:
        """Implement `ReceivingTransport.has_next`."""
        with self._errors_named():
            return bool(self._readable.poll(0))

    def settle(self) -> None:
        """Return at once; a transport that copies messages waits for the copies."""

    def give_back(self, number: int) -> None:
        """Return a slot to the sender. If the sender is gone, the next receive raises the error."""
        with contextlib.suppress(TransferError):
            self.send(_ACK.pack(number))

    def _next(self, num_bytes: int) -> bytes:
        packet = self.receive(0.0)
        if packet is None:
            self.settle()
            packet = self.receive(self._op_timeout_s)
        if packet is None:
            raise TransferTimeout(f"no message came within {self._op_timeout_s:g} s")
        if len(packet) != num_bytes:
            raise TransferError(
                f"the {self._kind} transport is out of step: a signal came for a chunk, or a chunk for a signal"
            )
        return packet


class PacketSignal:
    """A signal that is being received."""

    def __init__(self, receiver: RingReceiver) -> None:
        self._receiver = receiver
        self.header = b""

    def wait(self) -> None:
        self.header = self._receiver.next_signal()


class _RingSlots:
    """Slots of the ring. A slot is free again once both the owner and the receiver have released it."""

    def __init__(self, end: PacketEnd, slots: Sequence[Slot], op_timeout_s: float) -> None:
        self._end = end
        self._op_timeout_s = op_timeout_s
        self._slots = list(slots)
        self._numbers = {id(slot): number for number, slot in enumerate(self._slots)}
        self._free = list(range(len(self._slots)))
        """Numbers of free slots; the last returned one is taken first, while it is warm."""
        self._held: set[int] = set()
        self._lent: list[tuple[int, float]] = []
        """Number and sending time of each chunk that the receiver has not released, oldest first."""

    def acquire(self, wait_s: float) -> Slot | None:
        """Take a free slot.

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
        """Pass a slot to the receiver, and return its number."""
        number = self._numbers[id(slot)]
        self._lent.append((number, time.monotonic()))
        return number

    def release(self, slot: Slot) -> None:
        number = self._numbers[id(slot)]
        self._held.remove(number)
        self._free_unless_used(number)

    def discard(self, slot: Slot) -> None:
        self._held.remove(self._numbers[id(slot)])

    def _take_back(self, timeout_s: float) -> bool:
        """Free a slot that the receiver has released, and return whether there was one."""
        packet = self._end.receive(timeout_s)
        if packet is None:
            return False
        (number,) = _ACK.unpack(packet)
        place = next((place for place, (lent, _) in enumerate(self._lent) if lent == number), None)
        if place is None:
            raise TransferError(f"the transport is broken: the receiver released slot {number}, which it did not have")
        del self._lent[place]
        self._free_unless_used(number)
        return True

    def _free_unless_used(self, number: int) -> None:
        if number not in self._held and all(lent != number for lent, _ in self._lent):
            self._free.append(number)


def accept(kind: str, store: Store, timeout_s: float) -> socket.socket:
    """Wait for the receiver, which finds the sender's name in the rendezvous."""
    address = "\0baton-kv-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(1)
        store.set(kind, address)
        # so that the end of the control stream ends the wait
        store.wait([f"{kind}/joined"], timedelta(seconds=timeout_s))
        listener.settimeout(timeout_s)
        connection, _ = listener.accept()
    return _require_own_user(kind, connection)


def connect(kind: str, store: Store, timeout_s: float) -> socket.socket:
    """Connect to the sender, once its name is in the rendezvous."""
    store.wait([kind], timedelta(seconds=timeout_s))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as undo:
        undo.enter_context(connection)
        connection.settimeout(timeout_s)
        connection.connect(store.get(kind))
        store.set(f"{kind}/joined", "")
        undo.pop_all()
    return _require_own_user(kind, connection)


def _require_own_user(kind: str, connection: socket.socket) -> socket.socket:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        connection.close()
        raise TransferError(f"the peer of an {kind} transport is user {uid}'s")
    return connection
