"""In whatever way an HTTP connection ends, it gives its place back: on both ports, over TLS and without, on the loop of
a router.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from baton.config import ClusterConfig, Config, RouterConfig, TelemetryConfig
from router.admission.tenants import TenantBook
from router.api import connections
from router.api import http as http_server
from router.api.http import HttpServer, http_servers
from router.api.places import ConnectionLimits, OpenConnections
from tests.integration.cluster import free_port
from tests.support.bounded import PATIENCE_S
from tests.support.cases import some
from tests.support.certificates import Authority
from tests.support.waiting import until
from tests.unit.router.api.test_http import Service

pytestmark = pytest.mark.first  # waits in it take a minute, of which the processors do little

HOST = "127.0.0.1"
MOST = 4
GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 15\r\n"
PROMPT = b'{"prompt":"hi"}'
UPGRADE = b"connection: upgrade\r\nupgrade: %b\r\n"
WEBSOCKET = UPGRADE % b"websocket" + b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Endpoint:
    """A port of a router, and what a client does there."""

    def __init__(self, server: HttpServer, service: Service, port: int, tls: ssl.SSLContext | None) -> None:
        self.server, self.service, self.port, self.tls = server, service, port, tls

    @property
    def open(self) -> OpenConnections:
        return self.server.open_connections

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        name = "localhost" if self.tls else None
        reader, writer = await asyncio.open_connection(HOST, self.port, ssl=self.tls, server_hostname=name)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def plain(self) -> socket.socket:
        """A connection that says nothing of TLS."""
        opened = socket.create_connection((HOST, self.port))
        await until(lambda: self.open.num_of.total() > 0)
        return opened


def says(*pieces: bytes, reads: bool = True, half: bool = False) -> Callable[[Endpoint], Awaitable[None]]:
    """A client sends pieces, closes its half if it is to, reads until the other side closes, and leaves."""

    async def way(endpoint: Endpoint) -> None:
        async with endpoint.client() as (reader, writer):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.02)
            if half and writer.can_write_eof():
                writer.write_eof()
            if reads:
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    await reader.read()

    return way


def resets(said: bytes) -> Callable[[Endpoint], Awaitable[None]]:
    """A client sends something, and its machine drops the connection."""

    async def way(endpoint: Endpoint) -> None:
        async with endpoint.client() as (_, writer):
            opened: socket.socket = writer.get_extra_info("socket")
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.write(said)
            await asyncio.sleep(0.05)
            writer.transport.abort()

    return way


async def leaves_while_it_is_answered(endpoint: Endpoint) -> None:
    async with endpoint.client() as (_, writer):
        writer.write(POST + b"\r\n" + PROMPT)
        await until(lambda: bool(endpoint.service.asked) or not endpoint.open.num_of)


async def asks_for_a_websocket(endpoint: Endpoint) -> None:
    """It is answered as if it had not."""
    async with endpoint.client() as (reader, writer):
        writer.write(GET + WEBSOCKET)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def reads_nothing(endpoint: Endpoint) -> None:
    async with endpoint.client() as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write((b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n") * 200)
        await until(lambda: endpoint.open.num_of.total() > 0)
        await until(lambda: not endpoint.open.num_of)


async def is_one_of_too_many(endpoint: Endpoint) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(1, 3 * MOST):
            opened = stack.enter_context(await endpoint.plain())
            await until(lambda number=number: endpoint.open.num_of.total() >= min(number, MOST))  # type: ignore[misc]
            opened.setblocking(False)
        await until(lambda: 0 < endpoint.open.num_of.total() <= MOST)


async def hangs_in_its_handshake(endpoint: Endpoint) -> None:
    with await endpoint.plain() as opened:
        opened.sendall(b"\x16\x03\x01\x02\x00\x01")
        await until(lambda: not endpoint.open.num_of)


async def fails_in_its_handshake(endpoint: Endpoint) -> None:
    with await endpoint.plain() as opened:
        opened.sendall(b"\x16\x03\x01\x00\x05hello")
        await until(lambda: not endpoint.open.num_of)


async def leaves_its_handshake(endpoint: Endpoint) -> None:
    (await endpoint.plain()).close()


async def stays_when_the_router_ends(endpoint: Endpoint) -> None:
    """Idle, in a head, in a body, and with a request that is computed."""
    async with contextlib.AsyncExitStack() as stack:
        for said in (b"", b"GET", POST + b"\r\n{", POST + b"\r\n" + PROMPT)[:MOST]:
            _, writer = await stack.enter_async_context(endpoint.client())
            writer.write(said)
        await until(lambda: endpoint.open.num_of.total() == MOST)
        endpoint.server.should_exit = True
        await until(lambda: not endpoint.open.num_of)


WAYS: dict[str, Callable[[Endpoint], Awaitable[None]]] = {
    "reads its answer and closes": says(GET + b"\r\n", reads=False),
    "asks for the end": says(GET + b"connection: close\r\n\r\n"),
    "speaks HTTP/1.0": says(GET.replace(b"1.1", b"1.0") + b"\r\n"),
    "stays idle": says(GET + b"\r\n"),
    "says nothing": says(),
    "sends empty lines": says(GET + b"\r\n", b"\r\n", b"\r\n"),
    "closes its half": says(GET + b"\r\n", half=True),
    "closes its half in a head": says(GET, half=True),
    "closes its half in a body": says(POST + b"\r\n{", half=True),
    "closes its half of a request that is computed": says(POST + b"\r\n" + PROMPT, half=True, reads=False),
    "resets when idle": resets(GET + b"\r\n"),
    "resets at once": resets(b""),
    "resets in a head": resets(GET),
    "resets in a body": resets(POST + b"\r\n{"),
    "resets in a chunk": resets(POST.replace(b"content-length: 15", b"transfer-encoding: chunked") + b"\r\n9\r\n{"),
    "resets a request that is computed": resets(POST + b"\r\n" + PROMPT),
    "leaves while it is answered": leaves_while_it_is_answered,
    "asks for a WebSocket": asks_for_a_websocket,
    "asks for a WebSocket and leaves": says(GET + WEBSOCKET, reads=False),
    "asks for a WebSocket and resets": resets(GET + WEBSOCKET),
    "asks for a WebSocket that is none": says(GET + UPGRADE % b"websocket" + b"\r\n"),
    "asks for HTTP/2": says(GET + UPGRADE % b"h2c" + b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n" + H2_PREFACE),
    "asks for HTTP/2 with a body": says(POST + UPGRADE % b"h2c" + b"\r\n" + PROMPT),
    "speaks HTTP/2": says(H2_PREFACE),
    "wants a tunnel": says(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\n\r\n", b"\x16\x03\x01"),
    "speaks no HTTP": says(b"\0\1\2\3\r\n\r\n"),
    "has a long head": says(GET + b"a: " + b"x" * 70_000),
    "has a long URL": says(b"GET /" + b"x" * 9_000 + b" HTTP/1.1\r\n\r\n"),
    "has a late head": says(GET),
    "has a late body": says(POST + b"\r\n{"),
    "waits for leave to send its body": says(POST + b"expect: 100-continue\r\n\r\n"),
    "has long trailers": says(
        POST.replace(b"content-length: 15", b"transfer-encoding: chunked") + b"\r\n0\r\n" + b"a: b\r\n" * 20_000
    ),
    "has no key of a host": says(GET.replace(b"localhost", b"evil.example").replace(b"healthz", b"metrics") + b"\r\n"),
    "sends requests ahead": says((GET + b"\r\n") * 2_000),
    "reads nothing": reads_nothing,
    "is one of too many": is_one_of_too_many,
    "stays when the router ends": stays_when_the_router_ends,
}  # fmt: skip
HANDSHAKES = {
    "hangs in its handshake": hangs_in_its_handshake,
    "fails in its handshake": fails_in_its_handshake,
    "leaves its handshake": leaves_its_handshake,
}


@pytest.fixture
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ConnectionLimits", partial(ConnectionLimits, head_s=0.3, body_s=0.3))
    monkeypatch.setattr(uvicorn, "Config", partial(uvicorn.Config, timeout_keep_alive=0.2))  # type: ignore[arg-type]
    monkeypatch.setattr(connections, "LINGER_S", 0.1)


async def attempt(way: Callable[[Endpoint], Awaitable[None]], is_scraped: bool, authority: Authority | None) -> None:
    files = authority.sign("endpoint") if authority else None
    router = RouterConfig(
        max_connections_per_client=MOST,
        stall_s=0.5,
        drain_timeout_s=0.5,
        tls_certificate=files.certificate if files else "",
        tls_key=files.key if files else "",
    )
    ports = free_port(), free_port()
    config = Config(cluster=ClusterConfig(http_port=ports[0]), telemetry=TelemetryConfig(port=ports[1]), router=router)
    service: Any = Service()
    servers = http_servers(config, service, TenantBook.open_to_all(), lambda: "", lambda: b"figures")
    serving = [asyncio.create_task(server.serve_all()) for server in servers]
    tls = ssl.create_default_context(cafile=authority.path) if authority else None
    endpoint = Endpoint(servers[is_scraped], service, ports[is_scraped], tls)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: all(server.started for server in servers))
            await way(endpoint)
            await until(lambda: not endpoint.open.num_of, seen=lambda: endpoint.open.num_of)
            assert not endpoint.open.num_held
            if not endpoint.server.should_exit:
                async with endpoint.client() as (reader, writer):
                    writer.write(GET + b"connection: close\r\n\r\n")
                    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
    assert not endpoint.open.num_of
    assert not endpoint.open.num_held


@pytest.mark.usefixtures("_hurried")
@pytest.mark.parametrize("name", WAYS)
def test_a_client_gives_its_place_back_that(name: str) -> None:
    uvloop.run(attempt(WAYS[name], is_scraped=False, authority=None))


@pytest.mark.usefixtures("_hurried")
@pytest.mark.parametrize("name", some(WAYS, pytest.mark.slow, every=4))
def test_a_client_over_tls_gives_its_place_back_that(name: str, tmp_path: Path) -> None:
    uvloop.run(attempt(WAYS[name], is_scraped=False, authority=Authority.make(tmp_path)))


@pytest.mark.usefixtures("_hurried")
@pytest.mark.parametrize("name", HANDSHAKES)
def test_a_client_gives_its_place_back_before_it_is_one_that(name: str, tmp_path: Path) -> None:
    uvloop.run(attempt(HANDSHAKES[name], is_scraped=False, authority=Authority.make(tmp_path)))


@pytest.mark.usefixtures("_hurried")
@pytest.mark.parametrize("name", [name for name in WAYS if "WebSocket" in name or "HTTP/2" in name])
def test_a_client_of_the_metrics_gives_its_place_back_that(name: str) -> None:
    uvloop.run(attempt(WAYS[name], is_scraped=True, authority=None))
