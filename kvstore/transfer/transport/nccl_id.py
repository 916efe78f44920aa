"""Id of an NCCL communicator: 128 bytes with the address at which its creator listens, and to which NCCL connects."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from kvstore.transfer.transport.socket_end import ip_in

if TYPE_CHECKING:
    from kvstore.transfer.transport.base import FarSide

_ID_BYTES = 128
_ADDRESS_AT = 8
"""A sockaddr follows a random number of eight bytes (`ncclBootstrapHandle`)."""
INTERFACES = "NCCL_SOCKET_IFNAME"


def is_id_of(peer: FarSide, value: bytes) -> bool:
    """Return whether a peer may have created this id: it names an address of the peer's host.

    NCCL chooses the interface by itself. Between processes of one machine it may be any address of the machine. An
    operator may name interfaces (`NCCL_SOCKET_IFNAME`) that Baton does not use; then any address is accepted.
    """
    if len(value) != _ID_BYTES or not (ip := ip_in(value, _ADDRESS_AT)):
        return False
    is_here = any(_is_own(str(address)) for address in peer.addresses)
    return peer.is_at(ip) or INTERFACES in os.environ or (is_here and _is_own(ip))


def _is_own(ip: str) -> bool:
    """Return whether an IP address belongs to this machine."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True
