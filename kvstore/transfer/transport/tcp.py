"""TCP: one connection a transport; the owner thread itself copies slots into the socket and out of it.

Messages follow each other in the order of sending, headers in front, without framing: both sides know what comes next.

The kernel's buffer lies between the sides: a send is complete when the kernel has it. Posted receives hold back no
sender, and a receiver that stops is noticed once the buffer is full, or by the control stream.

To open, the sender listens on a free port of its host, publishes it, and takes the first connection that sends the
random token published with it. The receiver connects only to an IP address of the sender's host, which it knows
independently. Any process may find the port: its connections are kept until they have sent something else, or until
there are too many, and none of them delays the receiver.

If the control stream is encrypted, the messages are encrypted, too (`seal`): the sender draws a secret for the
connection and publishes it there, so only the process at the other end of that stream can read and write them.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import selectors
import socket
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from baton.addresses import MAX_PORT
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import RECEIVER, SENDER, FarSide, TransportEnd, TransportKind
from kvstore.transfer.transport.socket_end import SENT, SocketEnd

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.seal import RecordSeal
    from kvstore.transfer.transport.staging import Slot

_ADDRESS, _JOINED, _SECRET = "tcp", "tcp/joined", "tcp/secret"
"""Keys of the rendezvous.

They are `token address port` of the sender, the receiver's note that it has connected, and the sender's secret for
both.
"""
SECRET_BYTES = 32
_SECRET_FORM = re.compile(rb"[0-9a-f]{%d}" % (2 * SECRET_BYTES))
_ADDRESS_FORM = re.compile(rb"[0-9a-f]{32} ([0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,15})?) ([1-9][0-9]{0,4})")
_TIMEVAL = struct.Struct("@ll")
_SLACK_S = 0.05
_TOKEN_BYTES = 16
_LOOK_S = 0.1
"""Interval at which a listening sender checks whether its control stream has ended."""
_MAX_CALLERS = 64
"""Maximum number of silent connections; the oldest is closed. The receiver's connection sends its token at once."""


def is_well_formed(peer: FarSide, key: str, value: bytes) -> bool:
    """Return whether the peer may set this key to this value while it opens."""
    if (peer.rank, key) == (SENDER, _ADDRESS):
        address = _ADDRESS_FORM.fullmatch(value)
        return address is not None and peer.is_at(address[1].decode()) and int(address[2]) <= MAX_PORT
    if (peer.rank, key) == (SENDER, _SECRET):
        return _SECRET_FORM.fullmatch(value) is not None
    return (peer.rank, key, value) == (RECEIVER, _JOINED, b"")


class _TcpEnd(SocketEnd):
    """Blocking socket with the kernel's timeouts: a message is one call, while Python's timeouts would poll first.

    Signals go both ways, though only NCCL's go to the sender.

    Args:
        rank: this side's.
        secret: encrypts both directions; empty: no encryption.
    """

    def __init__(self, connection: socket.socket, op_timeout_s: float, rank: int, secret: bytes) -> None:
        super().__init__("tcp", connection, op_timeout_s)
        self._out: RecordSeal | None = None
        self._in: RecordSeal | None = None
        if secret:
            from kvstore.transfer.transport.seal import RecordSeal  # imports cryptography, for sealed connections only

            self._out, self._in = RecordSeal(secret, rank), RecordSeal(secret, 1 - rank)
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
        """Pass all of `message` to the kernel."""
        deadline = time.monotonic() + self._op_timeout_s
        with self._errors_named():
            for record in (message,) if self._out is None else self._out.sealed(message):
                self._send(record, deadline)

    def _send(self, message: memoryview, deadline: float) -> None:
        while message:
            with contextlib.suppress(BlockingIOError):
                message = message[self._socket.send(message) :]
            self._require_in_time(message, deadline)

    def receive(self, message: memoryview) -> None:
        """Fill all of `message`. Raises TransferCorrupted if an encrypted message is not what the peer sent."""
        deadline = time.monotonic() + self._op_timeout_s
        with self._errors_named():
            for record in (message,) if self._in is None else self._in.opened(message):
                self._receive(record, deadline)

    def _receive(self, message: memoryview, deadline: float) -> None:
        while message:
            with contextlib.suppress(BlockingIOError):
                num_bytes = self._socket.recv_into(message, 0, socket.MSG_WAITALL)
                if num_bytes == 0:
                    raise self._peer_is_gone()
                message = message[num_bytes:]
            self._require_in_time(message, deadline)

    @staticmethod
    def _require_in_time(rest: memoryview, deadline: float) -> None:
        """Raise TimeoutError if the deadline is near: the kernel's timeout restarts with each call.

        The kernel's timeout may also expire early: it counts ticks, and a virtual processor that was stalled gets all
        of them at once. Then the whole call may take nearly twice as long.
        """
        if rest and time.monotonic() > deadline - _SLACK_S:
            raise TimeoutError


class TcpSender(_TcpEnd):
    """Sending side."""

    def __init__(self, end: TransportEnd) -> None:
        self.slots = end.staging.share(end.max_slots)
        secret = _publish_secret(end.rendezvous) if end.is_sealed else b""
        connection = _accept(end.rendezvous, end.host, end.open_timeout_s)
        super().__init__(connection, end.op_timeout_s, SENDER, secret)

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        self.send(slot.message(num_bytes).numpy().data)
        return SENT


class TcpReceiver(_TcpEnd):
    """Receiving side."""

    def __init__(self, end: TransportEnd) -> None:
        self.slots = end.staging.share(end.max_slots)
        secret = _published_secret(end.rendezvous, end.open_timeout_s) if end.is_sealed else b""
        super().__init__(_connect(end.rendezvous, end.open_timeout_s), end.op_timeout_s, RECEIVER, secret)

    def has_next(self) -> bool:
        return False

    def settle(self) -> None:
        """Return at once."""

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


def _publish_secret(store: Store) -> bytes:
    secret = secrets.token_bytes(SECRET_BYTES)
    store.set(_SECRET, secret.hex())
    return secret


def _published_secret(store: Store, timeout_s: float) -> bytes:
    store.wait([_SECRET], timedelta(seconds=timeout_s))
    return bytes.fromhex(store.get(_SECRET).decode())


def _accept(store: Store, host: str, timeout_s: float) -> socket.socket:
    """Wait for the connection of the receiver."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    family, *_, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
    deadline = time.monotonic() + timeout_s
    with socket.create_server(address, family=family) as listener, _Callers(listener, token) as callers:
        ip, port, *_ = listener.getsockname()
        store.set(_ADDRESS, f"{token.hex()} {ip} {port}")
        while (left_s := deadline - time.monotonic()) > 0:
            if (receiver := callers.next(min(left_s, _LOOK_S))) is not None:
                with contextlib.ExitStack() as undo:
                    undo.enter_context(receiver)
                    store.wait([_JOINED], timedelta(seconds=left_s))
                    undo.pop_all()
                return receiver
            store.wait([], timedelta(0))  # raises once the control stream has ended
        raise TimeoutError


class _Callers:
    """Connections to a listener, until one of them sends the token. The others are closed."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener = listener
        self._token = token
        self._waiting: list[socket.socket] = []
        """Connections that have sent nothing yet, the oldest first."""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Callers:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for caller in self._waiting:
            caller.close()

    def next(self, timeout_s: float) -> socket.socket | None:
        """Wait for an event, and return the connection that has sent the token, if it has come."""
        ready: list[Any] = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        ready.sort(key=lambda each: each is self._listener)  # last: it may close another one
        for caller in ready:
            if caller is self._listener:
                self._take()
                continue
            self._waiting.remove(caller)
            self._selector.unregister(caller)
            if self._knows_token(caller):
                receiver: socket.socket = caller
                return receiver
            caller.close()
        return None

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(_MAX_CALLERS):  # usually one, at most as many as may wait
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                self._selector.register(caller, selectors.EVENT_READ)
                self._waiting.append(caller)
        while len(self._waiting) > _MAX_CALLERS:
            oldest = self._waiting.pop(0)
            self._selector.unregister(oldest)
            oldest.close()

    def _knows_token(self, caller: socket.socket) -> bool:
        """Return whether a connection has sent the token, which comes in one segment."""
        try:
            return secrets.compare_digest(caller.recv(_TOKEN_BYTES), self._token)
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
