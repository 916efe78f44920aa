"""A link over one TCP connection: the owner thread itself copies slots into the socket and out of it.

One message after the other in the order of sending, headers in front, without any framing: both sides know what comes
next. A hand-over takes three quarters of the processor time that it takes over gloo, which hands every message to a
thread of its own and announces each receive to the sender, and is half as fast again (tests/bench/README.md).

The kernel's buffer lies between the sides: a send is done when the kernel has it. So what is posted at the receiver
holds back nobody, and a receiver that stops is seen once the buffer is full, or by the session.

To open, the sender listens where the session can name it, on a free port, and takes the first connection that says the
random token which the session carried.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import RECEIVER, SENDER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.gloo import RendezvousStore
    from kvstore.transfer.transport.staging import Slot, SlotSource

_ADDRESS, _JOINED = "tcp", "tcp/joined"
"""Keys of the rendezvous: `token host port` of the sender, and that the receiver has connected to it."""
_ADDRESS_FORM = re.compile(rb"[0-9a-f]{32} [!-~]{1,255} ([1-9][0-9]{0,4})")
_MAX_PORT = 65535
_TIMEVAL = struct.Struct("@ll")
_SLACK_S = 0.05
_TOKEN_BYTES = 16
_TOKEN_S = 1.0
"""The receiver has sent its token by the time that it says that it has joined; whoever has not by then is another."""


def is_of_tcp(peer: int, key: str, value: bytes) -> bool:
    """Whether a tcp link's side of rank `peer` says this while it is opened."""
    if (peer, key) == (SENDER, _ADDRESS):
        address = _ADDRESS_FORM.fullmatch(value)
        return address is not None and int(address[1]) <= _MAX_PORT
    return (peer, key, value) == (RECEIVER, _JOINED, b"")


class TcpSender:
    def __init__(
        self, store: RendezvousStore, host: str, slots: SlotSource, open_timeout_s: float, op_timeout_s: float
    ) -> None:
        self.slots = slots
        self._stream = _Stream(_accept(store, host, open_timeout_s), op_timeout_s)

    def send_signal(self, header: bytes) -> Operation:
        self._stream.send(memoryview(header))
        return _SENT

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        self._stream.send(slot.message(num_bytes).numpy().data)
        return _SENT

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        self._stream.abort()


class TcpReceiver:
    def __init__(self, store: RendezvousStore, slots: SlotSource, open_timeout_s: float, op_timeout_s: float) -> None:
        self.slots = slots
        self._stream = _Stream(_connect(store, open_timeout_s), op_timeout_s)

    def recv_signal(self) -> SignalOperation:
        return _SignalArrival(self._stream)

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return _Arrival(self._stream, slot.message(num_bytes).numpy().data)

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        self._stream.abort()


class _Sent:
    """The kernel has the message."""

    def wait(self) -> None:
        pass


_SENT = _Sent()


class _Arrival:
    def __init__(self, stream: _Stream, message: memoryview) -> None:
        self._stream = stream
        self._message = message

    def wait(self) -> None:
        self._stream.receive(self._message)


class _SignalArrival:
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._message = bytearray(HEADER_BYTES)

    def wait(self) -> None:
        self._stream.receive(memoryview(self._message))

    @property
    def header(self) -> bytes:
        return bytes(self._message)


class _Stream:
    """The connection. Belongs to the link's owner thread, but for `abort`.

    Blocking, with the kernel's own timeouts: a message moves in one call, where Python's would poll before every part.
    """

    def __init__(self, connection: socket.socket, op_timeout_s: float) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds, rest = divmod(op_timeout_s, 1)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(rest * 1e6)))
        self._socket = connection
        self._op_timeout_s = op_timeout_s
        self._closing = threading.Lock()

    def send(self, message: memoryview) -> None:
        deadline = time.monotonic() + self._op_timeout_s
        with self._errors_named():
            while message:
                with contextlib.suppress(BlockingIOError):
                    message = message[self._socket.send(message) :]
                self._require_in_time(message, deadline)

    def receive(self, message: memoryview) -> None:
        """Fills `message`."""
        deadline = time.monotonic() + self._op_timeout_s
        with self._errors_named():
            while message:
                with contextlib.suppress(BlockingIOError):
                    num_bytes = self._socket.recv_into(message, 0, socket.MSG_WAITALL)
                    if num_bytes == 0:
                        raise TransferError("the tcp link is broken: the peer is gone, or the link was aborted")
                    message = message[num_bytes:]
                self._require_in_time(message, deadline)

    @staticmethod
    def _require_in_time(rest: memoryview, deadline: float) -> None:
        """The kernel's timeout begins anew with each call; a little before the deadline, the next would be too long.

        It may come early, too: it counts ticks, and a virtual processor that was held up gets all of them at once. Then
        the whole may take nearly twice as long.
        """
        if rest and time.monotonic() > deadline - _SLACK_S:
            raise TimeoutError

    def close(self) -> None:
        with self._closing:
            self._socket.close()

    def abort(self) -> None:
        with self._closing, contextlib.suppress(OSError):  # closed by now
            self._socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TransferTimeout(f"the message did not move within {self._op_timeout_s:g} s") from error
        except OSError as error:
            raise TransferError(f"the tcp link is broken: {error}") from error


def _accept(store: RendezvousStore, host: str, timeout_s: float) -> socket.socket:
    token = secrets.token_bytes(_TOKEN_BYTES)
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as listener:
        store.set(_ADDRESS, f"{token.hex()} {host} {listener.getsockname()[1]}")
        store.wait([_JOINED], timedelta(seconds=timeout_s))  # so that the end of the session ends the wait
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            listener.settimeout(left_s)
            connection, _ = listener.accept()
            if _says(connection, token, min(left_s, _TOKEN_S)):
                return connection
            connection.close()
            store.wait([_JOINED], timedelta(0))  # raises once the session has ended
        raise TimeoutError


def _says(connection: socket.socket, token: bytes, timeout_s: float) -> bool:
    """Whether the other end is the receiver: anybody may connect to a port. The token comes in one segment."""
    connection.settimeout(timeout_s)
    try:
        return secrets.compare_digest(connection.recv(_TOKEN_BYTES), token)
    except OSError:
        return False


def _connect(store: RendezvousStore, timeout_s: float) -> socket.socket:
    store.wait([_ADDRESS], timedelta(seconds=timeout_s))
    token, host, port = store.get(_ADDRESS).decode().split()
    connection = socket.create_connection((host, int(port)), timeout_s)
    with contextlib.ExitStack() as undo:
        undo.enter_context(connection)
        connection.sendall(bytes.fromhex(token))
        store.set(_JOINED, b"")
        undo.pop_all()
    return connection
