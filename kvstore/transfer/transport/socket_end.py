"""What the transports over a connected socket share: one end of it, which any thread may abort."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

from baton.errors import TransferError, TransferTimeout

_SOCKADDR = struct.Struct("@H2s4s16s")
"""The family, the port, and where an IPv4 address is, and an IPv6 one, in a sockaddr of the kernel."""


def ip_in(value: bytes, offset: int) -> str:
    """Returns the IP address in a sockaddr that lies in `value` from `offset` on; "" if it is none, or has no port."""
    family, port, ipv4, ipv6 = _SOCKADDR.unpack_from(value, offset)
    packed = {socket.AF_INET: ipv4, socket.AF_INET6: ipv6}.get(family)
    return socket.inet_ntop(family, packed) if packed is not None and port != bytes(2) else ""


class SocketEnd:
    """One end of a connected socket. One thread owns it, and alone may use it, except for `abort`.

    Args:
        kind: the transport's kind, named in its errors.
    """

    def __init__(self, kind: str, connection: socket.socket, op_timeout_s: float) -> None:
        self._kind = kind
        self._socket = connection
        self._op_timeout_s = op_timeout_s
        self._closing = threading.Lock()

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        with self._closing:
            self._socket.close()

    def abort(self) -> None:
        """Ends what the owner waits for, at once. Idempotent, and harmless on a closed socket."""
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _peer_is_gone(self) -> TransferError:
        return TransferError(f"the {self._kind} transport is broken: the peer is gone, or the transport was aborted")

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Raises what the socket reports as TransferTimeout or TransferError."""
        try:
            yield
        except TimeoutError as error:
            raise TransferTimeout(f"the message was not sent or received within {self._op_timeout_s:g} s") from error
        except OSError as error:
            raise TransferError(f"the {self._kind} transport is broken: {error}") from error


class _Sent:
    def wait(self) -> None:
        """Returns at once: the kernel has the message."""


SENT = _Sent()
"""The operation of a message that was handed to the kernel before the call returned."""
