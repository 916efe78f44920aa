"""One end of a connected socket, which any thread may abort; shared by the transports over sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

from baton.errors import TransferError, TransferTimeout

_SOCKADDR = struct.Struct("@H2s4s16s")
"""Family, port, and the positions of an IPv4 and an IPv6 address in a sockaddr of the kernel."""


def ip_in(value: bytes, offset: int) -> str:
    """Return the IP address in a sockaddr at `offset` in `value`; "" if it is none, or has no port."""
    family, port, ipv4, ipv6 = _SOCKADDR.unpack_from(value, offset)
    packed = {socket.AF_INET: ipv4, socket.AF_INET6: ipv6}.get(family)
    return socket.inet_ntop(family, packed) if packed is not None and port != bytes(2) else ""


class SocketEnd:
    """One end of a connected socket. Only the thread that owns it may use it, except for `abort`.

    Args:
        kind: the transport's kind, named in its errors.
    """

    def __init__(self, kind: str, connection: socket.socket, op_timeout_s: float) -> None:
        self._kind = kind
        self._socket = connection
        self._op_timeout_s = op_timeout_s
        self._closing = threading.Lock()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        with self._closing:
            self._socket.close()

    def abort(self) -> None:
        """End the owner's waits at once. Idempotent, and harmless on a closed socket."""
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _peer_is_gone(self) -> TransferError:
        return TransferError(f"the {self._kind} transport is broken: the peer is gone, or the transport was aborted")

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Context manager: raise the socket's errors as TransferTimeout or TransferError."""
        try:
            yield
        except TimeoutError as error:
            raise TransferTimeout(f"the message was not sent or received within {self._op_timeout_s:g} s") from error
        except OSError as error:
            raise TransferError(f"the {self._kind} transport is broken: {error}") from error


class _Sent:
    def wait(self) -> None:
        """Return at once: the kernel has the message."""


SENT = _Sent()
"""Operation of a message that was passed to the kernel before the call returned."""
