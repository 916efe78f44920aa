"""The router's HTTP servers: uvicorn with limits on connections, on sockets that the router binds."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from baton.config import Config, RouterConfig
from baton.errors import ConfigError
from baton.tls import Tls, endpoint_tls
from router.admission.tenants import TenantBook
from router.api.browsers import Hosts
from router.api.connections import BoundedProtocol
from router.api.http import StreamLimit, create_app, create_scraped_app, require_certificates
from router.api.operations import Operations
from router.api.places import ConnectionLimits, OpenConnections, TlsListener
from router.service import RouterService

UNSENT_BYTES = 16 * 2**10
"""Limit on the unsent bytes that the kernel buffers per connection. Without it, the kernel accepts megabytes for a
client that does not read, and only then do writes wait."""


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers, which `router.process` owns, and with sockets that are already bound.

    Args:
        sockets: bound sockets.
        open_connections: the counter of connections that the protocol of `config` updates.
        tls: certificates of the endpoints; None: plain HTTP.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        sockets: list[socket.socket],
        open_connections: OpenConnections,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(config)
        self._sockets, self.open_connections, self._tls = sockets, open_connections, tls

    async def serve_all(self) -> None:
        """Serve on all sockets until `should_exit` is set."""
        await self.serve(self._sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
            return
        await super().startup([])
        context, config = self._tls.server_context(), self.config
        protocol: Any = config.http_protocol_class
        make_protocol = partial(
            protocol,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        listeners = [TlsListener(each, context, make_protocol, self.open_connections) for each in self._sockets]
        for listener in listeners:
            listener.start(config.backlog)
        self.servers: Any = listeners

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def http_servers(
    config: Config,
    service: RouterService,
    tenants: TenantBook,
    is_ready: Callable[[], str],
    metrics: Callable[[], bytes],
    *,
    operations: Operations | None = None,
) -> tuple[HttpServer, ...]:
    """Create the server of the APIs and, if `telemetry.port` is set, a second one for the metrics.

    Args:
        is_ready, metrics, operations: see `create_app`.

    Raises:
        ConfigError: a port is taken, a host is not an address of this machine, or the certificates are invalid.
    """
    hosts = Hosts.configured(config, not tenants.is_open)
    tls = endpoint_tls(config)
    app = create_app(
        service,
        tenants,
        is_ready,
        metrics,
        hosts,
        operations=operations,
        is_strict=config.router.strict,
        cors_origins=config.router.cors_origins,
    )
    if tls is not None and tls.clients == "required":
        require_certificates(app)
    app.add_middleware(StreamLimit, most=config.router.max_streams_per_client)
    connections = operations.connections if operations else OpenConnections(limits=connection_limits(config.router))
    servers = (_server(config, app, config.cluster.host, config.cluster.http_port, tls, open_connections=connections),)
    if not config.telemetry.port:
        return servers
    scraped = create_scraped_app(is_ready, metrics, dataclasses.replace(hosts, needs_key=False))
    connections = OpenConnections(limits=connection_limits(config.router))
    return (
        *servers,
        _server(config, scraped, config.telemetry.host, config.telemetry.port, tls, open_connections=connections),
    )


def connection_limits(router: RouterConfig) -> ConnectionLimits:
    """Return the connection limits of one server."""
    return ConnectionLimits(
        max_connections=router.max_connections,
        max_per_client=router.max_connections_per_client,
        stall_s=router.stall_s,
    )


def _server(
    config: Config, app: FastAPI, host: str, port: int, tls: Tls | None, *, open_connections: OpenConnections
) -> HttpServer:
    protocol: Any = partial(BoundedProtocol, open_connections)
    return HttpServer(
        uvicorn.Config(
            app=app,
            http=protocol,
            ws="none",  # a protocol that takes over an upgraded connection would never release its slot
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=config.router.keep_alive_s,  # type: ignore[arg-type]  # it is passed to call_later
            timeout_graceful_shutdown=math.ceil(config.router.drain_timeout_s),
        ),
        bound(host, port, config.cluster.routers > 1),
        open_connections,
        tls,
    )


def bound(host: str, port: int, shares_port: bool) -> list[socket.socket]:
    """Bind a socket to every address of `host`, without listening.

    Raises:
        ConfigError: the port is taken, or the host is not an address of this machine.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            sockets.append(opened := socket.socket(family, kind, protocol))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":  # accepted connections inherit it
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            if shares_port:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                # `::` alone stands for the addresses of both families; a name has a socket for each.
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(len(found) > 1))
            opened.bind(address)
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise ConfigError(f"cannot listen on {host}:{port}; is another program using the port?") from error
    return sockets
