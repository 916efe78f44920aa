"""gRPC servers and channels with Baton's settings: keepalive, health checking, reflection, errors."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.addresses import address_of, grpc_target
from baton.errors import ConfigError
from baton.rpc.arrivals import MESSAGE_S, Arrivals
from baton.rpc.errors import ErrorInterceptor, MalformedCount
from baton.tls import Tls

MAX_MESSAGE_BYTES = 64 * 2**20
PING_TIMEOUT_S = 3.0
"""A member that stops answering, without closing its socket, is disconnected after at most 8 seconds."""
CLIENTS_PING_TIMEOUT_S = 20.0
"""Ping timeout of clients.

A server that was stalled may find the timeout expired before it reads a client's earlier answer, and a disconnected
client loses its streams. A client that is gone only holds its requests a little longer.
"""


def _keepalive(ping_timeout_s: float) -> list[tuple[str, int]]:
    timeout_ms = round(ping_timeout_s * 1e3)
    return [
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # for every ping, also for bandwidth measurements
        ("grpc.http2.max_pings_without_data", 0),
    ]


UNREAD_BYTES = 16 * 2**10
"""Number of bytes of a message that a client can send before the server reads it."""
SERVER_OPTIONS = [
    *_keepalive(PING_TIMEOUT_S),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
    ("grpc.http2.bdp_probe", 0),  # otherwise the window grows to megabytes
    ("grpc.experimental.tcp_max_read_buffer_size", 2**18),  # otherwise 4 MiB per connection, also of pings
    # gRPC closes a connection with too many pings only when it has nothing left to write. Until then it records an
    # error for each further ping, in time that grows with their number: 5 MiB of pings took a core for seconds. Without
    # strikes a ping costs no more than another frame, and unread answers stop the connection.
    ("grpc.http2.max_ping_strikes", 0),
]
CHANNEL_OPTIONS = [
    *_keepalive(PING_TIMEOUT_S),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # Workers come back on other ports, so an address that refused once may work again soon.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
"""Options of a client's channel. It may know only one router, so an attempt to connect may take gRPC's 20 s."""
MEMBER_CHANNEL_OPTIONS = [
    *CHANNEL_OPTIONS,
    # Despite its name, this limits one attempt to connect: calls wait for it, and other members can serve them.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]
"""Options of a channel between members of a cluster."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of a server for its untrusted clients."""

    max_connections: int
    """Maximum number of connections.

    It is also limited to half of the files that the process may open; the server closes further ones.
    """
    max_streams: int
    """Calls on one connection; further ones wait at the client."""
    handshake_s: float = 10.0
    """Longest time from a connection's start to the client's settings."""

    @property
    def options(self) -> dict[str, int]:
        """Options of a gRPC server."""
        max_files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = self.max_connections if max_files == resource.RLIM_INFINITY else max_files // 2
        return {
            "grpc.max_allowed_incoming_connections": min(self.max_connections, most),
            "grpc.max_concurrent_streams": self.max_streams,
            "grpc.server_handshake_timeout_ms": round(self.handshake_s * 1e3),
        }


MEMBERS_LIMITS = ClientLimits(max_connections=4096, max_streams=1024)
"""Limits of a server for members, which other clients can reach: hundreds of workers have a few connections each."""


class ServerIdentity(Protocol):
    """Certificates of a server: a `Tls`, or one that it has made itself."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC server."""


class RpcServer:
    """An asyncio gRPC server with health checking, and for clients with reflection of the given services.

    Add servicers to `server`, then `start`.

    Attributes:
        malformed: counts messages that could not be read.

    Args:
        interceptors: further ones. They see a call before its handler does, and their handlers may raise typed errors.
        shares_port: other processes of this user may listen on the same port. The kernel gives each connection to one
            of them.
        max_connection_age_s: after this time a client is asked to reconnect. Calls on its old connection continue.
        max_message_bytes: a longer message ends its call, before it is parsed.
        clients: limits on clients.
        message_s: longest time until a message is complete, in seconds.
        ping_timeout_s: a connection whose other end does not answer a ping for this long is closed.
        describes_itself: whether it answers reflection, for clients that do not have the contract. Members have it.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        *,
        shares_port: bool = False,
        max_connection_age_s: float = math.inf,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        clients: ClientLimits = MEMBERS_LIMITS,
        message_s: float = MESSAGE_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
        describes_itself: bool = True,
    ) -> None:
        options = dict([*SERVER_OPTIONS, *_keepalive(ping_timeout_s)])
        options["grpc.so_reuseport"] = int(shares_port)
        options["grpc.max_receive_message_length"] = max_message_bytes
        options |= clients.options
        if max_connection_age_s < math.inf:
            options["grpc.max_connection_age_ms"] = round(max_connection_age_s * 1e3)
        self.malformed = MalformedCount()
        self.server = grpc.aio.server(
            interceptors=[
                ErrorInterceptor(self.malformed),
                *interceptors,
                Arrivals(max_message_bytes, message_s),
            ],
            options=list(options.items()),
        )
        self._health = health.aio.HealthServicer()
        self._service_names = service_names
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        if describes_itself:
            described = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(described, self.server)

    def bind(self, host: str, port: int, tls: ServerIdentity | None = None) -> int:
        """Bind and return the port (0 asks for a free one).

        Args:
            tls: certificates of the server; None: plain text.

        Raises:
            ConfigError: the port is in use or the host does not belong to this machine.
        """
        address = address_of(host, port)
        try:
            if tls is not None:
                return self.server.add_secure_port(address, tls.server_credentials())
            return self.server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}; is another program using the port?") from error

    async def start(self) -> None:
        await self.server.start()

    async def set_serving(self, serving: bool, names: Sequence[str] | None = None) -> None:
        """Set what health checks report.

        Args:
            names: services that it concerns; None: those of the server, and the server as a whole.
        """
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._service_names) if names is None else names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, give running calls `grace_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def channel(
    address: str, tls: Tls | None = None, options: Sequence[tuple[str, int | str]] = MEMBER_CHANNEL_OPTIONS
) -> grpc.aio.Channel:
    """Open a channel, by default from one member of a cluster to another.

    Args:
        address: host:port.
        tls: certificates that this side presents and trusts, from the current files; None: plain text.
    """
    target = grpc_target(address)
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options=[*options, *tls.channel_options()])
