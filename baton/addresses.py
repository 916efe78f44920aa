"""Addresses of members: only `host:port`, as in leases, tickets and permits.

gRPC also connects to `unix:/run/x`, `ipv4:10.0.0.1:1` or `dns://server/name`; a value of another process must not
choose among those.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import TypeAlias

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
MAX_PORT = 65_535
DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Router that client commands call if no address is given."""
_FORM = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,15})?\]|\w[\w.-]{0,252}):([1-9][0-9]{0,4})", re.ASCII)
_LOOPBACK = {ipaddress.ip_address("::1"): ipaddress.ip_address("127.0.0.1")}


def is_address(text: str) -> bool:
    """Return whether this is `host:port`: a name, IPv4 address or IPv6 one in brackets, and a port up to 65535."""
    found = _FORM.fullmatch(text)
    return found is not None and int(found[2]) <= MAX_PORT


def has_no_port(address: str) -> bool:
    """Return whether the address ends with a number that is not a port; the system would take it modulo 65536."""
    number = re.search(r":(-?\d+)(/\d*)?$", address)
    return number is not None and not 0 <= int(number[1]) <= MAX_PORT


def host_of(address: str) -> str:
    """Return the host of `host:port`, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def address_of(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def grpc_target(address: str) -> str:
    """Return `host:port` as gRPC's target, which gRPC always resolves as a name and a port."""
    return "dns:///" + address.replace("%", "%25")


def addresses_of(host: str) -> frozenset[IpAddress]:
    """Look up a host; returns no addresses for "". Blocks if it is a name.

    Raises:
        OSError: there is no such host.
    """
    if not host:
        return frozenset()
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return frozenset(ip_address(str(address[0])) for *_, address in found)


def ip_address(text: str) -> IpAddress:
    """Return the canonical form of an address: without a scope, not mapped, and 127.0.0.1 for ::1.

    Raises:
        ValueError: it is not an IP address.
    """
    found = ipaddress.ip_address(text.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or _LOOPBACK.get(found, found)
