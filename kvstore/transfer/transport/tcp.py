"""TCP: one connection a transport; the owner thread itself copies slots into the socket and out of it.

Messages follow each other in the order of sending, headers in front, without framing: both sides know what comes next.
A hand-over takes three quarters of the processor time that it takes over gloo, which hands every message to a thread of
its own and announces each receive to the sender, and is half as fast again (tests/bench/README.md).

The kernel's buffer lies between the sides: a send is complete when the kernel has it. Posted receives hold back no
sender, and a receiver that stops is noticed once the buffer is full, or by the control stream.

To open, the sender listens on a free port of its host, publishes it, and takes the first connection that sends the
random token published with it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import RECEIVER, SENDER, TransportEnd, TransportKind
from kvstore.transfer.transport.socket_end import SENT, SocketEnd

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.staging import Slot

_ADDRESS, _JOINED = "tcp", "tcp/joined"
"""Keys of the rendezvous: `token host port` of the sender, and that the receiver has connected to it."""
_ADDRESS_FORM = re.compile(rb"[0-9a-f]{32} [!-~]{1,255} ([1-9][0-9]{0,4})")
_MAX_PORT = 65535
_TIMEVAL = struct.Struct("@ll")
_SLACK_S = 0.05
_TOKEN_BYTES = 16
_TOKEN_S = 1.0
"""The receiver sends its token before it reports that it has joined, so a stranger's connection is soon recognized."""


def is_well_formed(peer: int, key: str, value: bytes) -> bool:
    """Whether the side of rank `peer` sets this key to this value while it opens."""
    if (peer, key) == (SENDER, _ADDRESS):
        address = _ADDRESS_FORM.fullmatch(value)
        return address is not None and int(address[1]) <= _MAX_PORT
    return (peer, key, value) == (RECEIVER, _JOINED, b"")


class _TcpEnd(SocketEnd):
    """A blocking socket with the kernel's own timeouts: a message moves in one call, where Python would poll first.

    Signals go both ways, though only NCCL's go to the sender.
    """

    def __init__(self, connection: socket.socket, op_timeout_s: float) -> None:
        super().__init__("tcp", connection, op_timeout_s)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds, rest = divmod(op_timeout_s, 1)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(rest * 1e6)))

    def send_signal(self, header: bytes) -> Operation:
        self.send(memoryview(header))
        return SENT

    def recv_signal(self) -> SignalOperation:
        return _TcpSignal(self)

    def send(self, message: memoryview) -> None:
        """Hands all of `message` to the kernel."""
        deadline = time.monotonic() + self._op_timeout_s
        with self._errors_named():
            while message:
                with contextlib.suppress(BlockingIOError):
                    message = message[self._socket.send(message) :]
                self._require_in_time(message, deadline)

    def receive(self, message: memoryview) -> None:
        """Fills all of `message`."""
        deadline = time.monotonic() + self._op_timeout_s
        with self._errors_named():
            while message:
                with contextlib.suppress(BlockingIOError):
                    num_bytes = self._socket.recv_into(message, 0, socket.MSG_WAITALL)
                    if num_bytes == 0:
                        raise self._peer_is_gone()
                    message = message[num_bytes:]
                self._require_in_time(message, deadline)

    @staticmethod
    def _require_in_time(rest: memoryview, deadline: float) -> None:
        """Raises TimeoutError if the deadline is near: the kernel's timeout begins anew with each call.

        The kernel's timeout may also come early: it counts ticks, and a virtual processor that was held up gets all of
        them at once. Then the whole may take nearly twice as long.
        """
        if rest and time.monotonic() > deadline - _SLACK_S:
            raise TimeoutError


class TcpSender(_TcpEnd):
    """The sending side."""

    def __init__(self, end: TransportEnd) -> None:
        self.slots = end.staging.share(end.max_slots)
        super().__init__(_accept(end.rendezvous, end.host, end.open_timeout_s), end.op_timeout_s)

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        self.send(slot.message(num_bytes).numpy().data)
        return SENT


class TcpReceiver(_TcpEnd):
    """The receiving side."""

    def __init__(self, end: TransportEnd) -> None:
        self.slots = end.staging.share(end.max_slots)
        super().__init__(_connect(end.rendezvous, end.open_timeout_s), end.op_timeout_s)

    def has_next(self) -> bool:
        return False

    def settle(self) -> None:
        """Has nothing to wait for."""

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return _TcpChunk(self, slot.message(num_bytes).numpy().data)


KIND = TransportKind(
    open_sender=TcpSender,
    open_receiver=TcpReceiver,
    is_well_formed=is_well_formed,
    is_usable=lambda devices: True,
    prefers_warm_chunks=True,
)


class _TcpChunk:
    def __init__(self, end: _TcpEnd, message: memoryview) -> None:
        self._end = end
        self._message = message

    def wait(self) -> None:
        self._end.receive(self._message)


class _TcpSignal:
    def __init__(self, end: _TcpEnd) -> None:
        self._end = end
        self._message = bytearray(HEADER_BYTES)

    def wait(self) -> None:
        self._end.receive(memoryview(self._message))

    @property
    def header(self) -> bytes:
        return bytes(self._message)


def _accept(store: Store, host: str, timeout_s: float) -> socket.socket:
    token = secrets.token_bytes(_TOKEN_BYTES)
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as listener:
        store.set(_ADDRESS, f"{token.hex()} {host} {listener.getsockname()[1]}")
        store.wait([_JOINED], timedelta(seconds=timeout_s))  # so that the end of the control stream ends the wait
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            listener.settimeout(left_s)
            connection, _ = listener.accept()
            if _sends(connection, token, min(left_s, _TOKEN_S)):
                return connection
            connection.close()
            store.wait([_JOINED], timedelta(0))  # raises once the control stream has ended
        raise TimeoutError


def _sends(connection: socket.socket, token: bytes, timeout_s: float) -> bool:
    """Whether the peer knows the token: any process may connect to a port. The token comes in one segment."""
    connection.settimeout(timeout_s)
    try:
        return secrets.compare_digest(connection.recv(_TOKEN_BYTES), token)
    except OSError:
        return False


def _connect(store: Store, timeout_s: float) -> socket.socket:
    store.wait([_ADDRESS], timedelta(seconds=timeout_s))
    token, host, port = store.get(_ADDRESS).decode().split()
    connection = socket.create_connection((host, int(port)), timeout_s)
    with contextlib.ExitStack() as undo:
        undo.enter_context(connection)
        connection.sendall(bytes.fromhex(token))
        store.set(_JOINED, "")
        undo.pop_all()
    return connection
