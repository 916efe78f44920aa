"""The HTTP server: APIs over the router's service, thin clients of the same path that gRPC takes.

`router.api.apis` has their endpoints. This file has what they share: authentication, limits, error responses, the page
and its data, and the probes. If tenants are configured, /metrics is served on a separate port only, without a key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.cluster import VERSION
from baton.config import Config, RouterConfig
from baton.errors import BatonError, ConfigError, Forbidden, Overloaded, QuotaExceeded, Unauthenticated
from baton.tls import Tls, endpoint_tls
from router.admission.tenants import TenantBook, api_key_of, require_operator
from router.api.answering import refusal_of
from router.api.apis import OPENAPI_PATH, add_apis, error_body
from router.api.browsers import ANY, FOR_OPERATORS, Hosts, Origins
from router.api.connections import CERTIFICATE_NAMES, BoundedProtocol
from router.api.delivery import ReadAhead
from router.api.exchange import REQUEST_ID, JsonAnswer, id_headers, limit_headers
from router.api.operations import RELEASE, Operations, add_operations, add_requests
from router.api.page import FILES, add_page
from router.api.parsing import BodyParser, PacedWork
from router.api.places import ConnectionLimits, OpenConnections, TlsListener
from router.api.routes import BodyRoute, LongText, Methods, answers
from router.api.unserved import why_unserved
from router.models.table import ModelTable
from router.request.resume import STOP_S

NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""Turns off FastAPI's own telemetry, which would read the environment with every request. The service has ours."""
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
MAX_REPORTS = 256
"""Maximum number of reports that wait to be written."""
SPARED = 5.0
"""Lifetime of the metrics text, as a multiple of the time that writing it takes (some ms)."""
PROBES = {"/health", "/healthz", "/readyz"}
"""Paths that are answered for every client, whatever host the request names."""
OPEN_PATHS = {*FILES, OPENAPI_PATH, *PROBES}
"""Paths that need no API key: probes have none, and the page's files and the OpenAPI document reveal nothing about this
cluster."""
UNSENT_BYTES = 16 * 2**10
"""Limit on the unsent bytes that the kernel buffers per connection. Without it, the kernel accepts megabytes for a
client that does not read, and only then do writes wait."""


def create_app(
    models: ModelTable,
    tenants: TenantBook,
    is_ready: Callable[[], str],
    metrics: Callable[[], bytes],
    hosts: Hosts = ANY,
    *,
    operations: Operations | None = None,
    is_strict: bool = False,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """Return the HTTP application.

    Args:
        is_ready: returns "" if requests can be served, else the reason why not.
        metrics: returns the Prometheus text.
        hosts: the hosts that requests may name.
        is_strict, cors_origins: `router.strict` and `router.cors_origins`.
        operations: the data sources of the page; None: the page shows nothing of the cluster.
    """
    app = _app()
    app.state.is_strict = is_strict
    app.state.ahead = ReadAhead(is_crowded=lambda: models.is_crowded())
    spared = _Spared(metrics)
    app.add_middleware(_HttpAuthentication, tenants=tenants)
    app.add_middleware(Methods)
    if cors_origins:
        app.add_middleware(Origins, allowed=cors_origins)
    app.add_middleware(_HostCheck, hosts=hosts)  # added last, so it runs first

    add_apis(app, models)
    add_page(app)
    _add_figures(app, spared)
    add_requests(app, models)
    if operations is not None:
        add_operations(app, operations, tenants, is_ready)
    _add_probes(app, is_ready)
    _add_metrics(app, spared if tenants.is_open else None)
    return app


def create_scraped_app(is_ready: Callable[[], str], metrics: Callable[[], bytes], hosts: Hosts) -> FastAPI:
    """Return the application of `telemetry.port`: metrics and probes. See `create_app`."""
    app = _app()
    app.add_middleware(Methods)
    app.add_middleware(_HostCheck, hosts=hosts)
    _add_metrics(app, _Spared(metrics))
    _add_probes(app, is_ready)
    return app


def _app() -> FastAPI:
    app = FastAPI(openapi_url=None, telemetry=NO_TELEMETRY)
    app.router.route_class = BodyRoute
    app.state.parser = BodyParser()
    app.state.reports = PacedWork(MAX_REPORTS)
    app.add_exception_handler(BatonError, _on_baton_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
    return app


def _add_figures(app: FastAPI, metrics: Callable[[], LongText]) -> None:
    @app.get("/version", responses=answers(RELEASE))  # vLLM's
    async def version() -> dict[str, str]:
        """Return the router's release."""
        return {"version": VERSION}

    @app.get(f"{FOR_OPERATORS}metrics", response_class=PlainTextResponse)
    async def figures() -> Response:
        """Return the router's metrics, as Prometheus text."""
        return Response(metrics().text, media_type=PROMETHEUS, headers={"Cache-Control": "no-store"})


def _add_metrics(app: FastAPI, metrics: Callable[[], LongText] | None) -> None:
    @app.get("/metrics", include_in_schema=False)
    async def prometheus(request: Request) -> Response:
        if metrics is None:
            raise HTTPException(404, "tenants are configured, so /metrics is served on telemetry.port only")
        return metrics().answer(request, PROMETHEUS)


def _add_probes(app: FastAPI, is_ready: Callable[[], str]) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health", include_in_schema=False)  # vLLM's name, which load generators request
    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        reason = is_ready()
        return JSONResponse({"status": reason or "ok"}, status_code=503 if reason else 200)


class _Spared:
    """Cache of a text that any client may request often: rewritten only after a multiple of the time that it takes."""

    def __init__(self, write: Callable[[], bytes]) -> None:
        self._write = write
        self._text = LongText(b"")
        self._until_s = 0.0
        """Time until which the text is valid, on the monotonic clock."""

    def __call__(self) -> LongText:
        if time.monotonic() >= self._until_s:
            began_s = time.thread_time()
            self._text = LongText(self._write())
            self._until_s = time.monotonic() + SPARED * (time.thread_time() - began_s)
        return self._text


class _HostCheck:
    """Middleware that refuses requests for a host that is not this router's. Probes are exempt."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_checked = scope["type"] == "http" and scope["path"] not in PROBES
        host = self._hosts.refused(scope) if is_checked else None
        if host is None:
            await self._app(scope, receive, send)
            return
        sentence = f"this router does not answer for the host {host!r:.100}; see router.allowed_hosts"
        error = HTTPException(HTTPStatus.MISDIRECTED_REQUEST, sentence)
        response = await _on_http_exception(Request(scope), error)
        await response(scope, receive, send)


def require_certificates(app: FastAPI) -> None:
    """Make the application refuse clients without a certificate, except on paths that need no API key."""
    app.add_middleware(_CertificateCheck)


class _CertificateCheck:
    """Middleware that refuses a request without a client certificate, before its body is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and CERTIFICATE_NAMES not in scope["state"]:
            error = Unauthenticated("a client certificate is required (router.tls_client_certificates)")
            response = await _on_baton_error(Request(scope), error)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _HttpAuthentication:
    """Middleware that sets `request.state.tenant`, or refuses a request before its body is read."""

    def __init__(self, app: ASGIApp, tenants: TenantBook) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                state = scope.setdefault("state", {})
                tenant = self._tenants.identify(api_key_of(scope["headers"]), state.get(CERTIFICATE_NAMES, ()))
                if scope["path"].startswith(FOR_OPERATORS):
                    require_operator(tenant)
                state["tenant"] = tenant
            except (Unauthenticated, Forbidden) as error:
                response = await _on_baton_error(Request(scope), error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class StreamLimit:
    """Middleware that limits the concurrent requests of an address.

    Args:
        most: maximum number of requests of one address that are in progress.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._num_of: Counter[str] = Counter()
        """Requests in progress, by the client's address."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        client = (scope.get("client") or ("", 0))[0]
        if self._num_of[client] >= self._most:
            error = Overloaded(f"this client has {self._most} requests in progress; wait until one has ended")
            response = await _on_baton_error(Request(scope), error)
            await response(scope, receive, send)
            return
        self._num_of[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_of[client] -= 1
            if not self._num_of[client]:
                del self._num_of[client]


def _refused(
    request: Request, error: BatonError | HTTPException, status: int, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    named = id_headers(request)
    written: Mapping[str, str] | None = request.scope.get("state", {}).get("written")
    body = error_body(request.scope["path"], error, named[REQUEST_ID], written)
    return JsonAnswer(body, status, {**named, **(headers or {})})


async def _on_baton_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BatonError)
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, QuotaExceeded):
        headers |= limit_headers(error.quota)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return _refused(request, error, error.http, headers)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _on_baton_error(request, refusal_of(error))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405) and (found := why_unserved(request.scope["path"])):
        error = HTTPException(404, f"{request.method} {found[0]} is not served: {found[1]}")
    return _refused(request, error, error.status_code, error.headers)


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    """Return the response to a bug of ours; uvicorn logs the traceback."""
    return await _on_baton_error(request, BatonError("internal error; the server's log says more"))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never sent: the client has disconnected


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
    models: ModelTable,
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
        models,
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
            timeout_graceful_shutdown=math.ceil(config.router.drain_timeout_s + STOP_S),
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
