"""gRPC servers and channels with Baton's settings: keepalive, health checking, reflection, errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.errors import ConfigError
from baton.rpc.errors import ErrorInterceptor

MAX_MESSAGE_BYTES = 64 * 2**20
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # grpc's core waits this long, and a minute by default
    ("grpc.http2.max_pings_without_data", 0),
]
"""A peer that stops answering, without closing its socket, is given up after 8 seconds at most."""
SERVER_OPTIONS = [
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
CHANNEL_OPTIONS = [
    *KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # Workers come back on other ports, so an address that refused once is worth another try soon.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class RpcServer:
    """An asyncio gRPC server with health checking and reflection of the given services.

    Add servicers to `server`, then `start`.

    Args:
        interceptors: further ones. They see a call before its handler does, and their handlers may raise typed errors.
        shares_port: other processes of this user may listen on the same port. The kernel gives each connection to one
            of them.
        max_connection_age_s: a client is asked to connect anew after so long. What runs on its old connection goes on.
        max_message_bytes: a longer message ends its call, before it is parsed.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        *,
        shares_port: bool = False,
        max_connection_age_s: float = math.inf,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        options = dict(SERVER_OPTIONS)
        options["grpc.so_reuseport"] = int(shares_port)
        options["grpc.max_receive_message_length"] = max_message_bytes
        if max_connection_age_s < math.inf:
            options["grpc.max_connection_age_ms"] = round(max_connection_age_s * 1e3)
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor(), *interceptors], options=list(options.items()))
        self._health = health.aio.HealthServicer()
        self._service_names = service_names
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)

    def bind(self, host: str, port: int) -> int:
        """Binds and returns the port (0 asks for a free one).

        Raises:
            ConfigError: the port is taken or the host is not one of this machine's.
        """
        try:
            return self.server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port}; is another program using the port?") from error

    async def start(self) -> None:
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, gives running calls `grace_s` seconds, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
