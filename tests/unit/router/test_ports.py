"""Ports are exclusive, unless several routers are to stand behind one address; what each answers, and to whom."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.config import ClusterConfig, Config, TelemetryConfig
from baton.errors import ConfigError
from baton.rpc import RpcServer
from router.admission.tenants import TenantBook
from router.api.delivery import HTTP
from router.api.http import bound, http_servers
from tests.integration.cluster import free_port
from tests.support.waiting import until
from tests.unit.router.api.test_http import Service

HOST = "127.0.0.1"


def port_of(sockets: list[socket.socket]) -> int:
    port: int = sockets[0].getsockname()[1]
    return port


@pytest.mark.parametrize("shares_port", [True, False])
def test_http_ports_are_shared_only_if_asked(shares_port: bool) -> None:
    with ExitStack() as stack:
        first = bound(HOST, 0, shares_port)
        stack.enter_context(closing(first[0]))
        first[0].listen()
        if shares_port:
            stack.enter_context(closing(bound(HOST, port_of(first), True)[0]))
        with pytest.raises(ConfigError, match="is another program using the port"):
            bound(HOST, port_of(first), False)


@pytest.mark.parametrize("shares_port", [True, False])
async def test_grpc_ports_are_shared_only_if_asked(shares_port: bool) -> None:
    servers = [RpcServer((), shares_port=shares_port) for _ in range(2)]
    port = servers[0].bind(HOST, 0)
    await servers[0].start()
    if shares_port:
        assert servers[1].bind(HOST, port) == port
    else:
        with pytest.raises(ConfigError, match="is another program using the port"):
            servers[1].bind(HOST, port)
    exclusive = RpcServer(())
    with pytest.raises(ConfigError):
        exclusive.bind(HOST, port)
    for server in (*servers, exclusive):
        await server.stop(0)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
async def test_two_colons_stand_for_the_addresses_of_both_families() -> None:
    """As the pods of a cluster with IPv6 listen."""
    rpc = RpcServer(())
    port = rpc.bind("::", 0)
    await rpc.start()
    (http,) = bound("::", 0, False)
    http.listen()
    with closing(http):
        for host in (HOST, "::1"):
            for each in (port, port_of([http])):
                socket.create_connection((host, each), timeout=5).close()
    await rpc.stop(0)


def test_a_program_that_shares_nothing_keeps_its_port() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is another program using the port"):
            bound(HOST, taken.getsockname()[1], True)
        with pytest.raises(ConfigError):
            bound("host.invalid", 0, False)


OPEN = {"", "acme", "operations"}
"""Keys with which a path is answered, where everybody may."""
WITH_TENANTS = {
    "/metrics": (set[str](), OPEN),
    "/api/metrics": ({"operations"}, set[str]()),
    "/api/requests": ({"operations"}, set[str]()),
    "/healthz": (OPEN, OPEN),
    "/readyz": (OPEN, OPEN),
    "/": (OPEN, set[str]()),
    "/page/app.js": (OPEN, set[str]()),
    "/version": ({"acme", "operations"}, set[str]()),
}
"""Path -> the keys with which the HTTP port answers it, and those with which the port of the metrics does."""


@pytest.mark.parametrize("has_tenants", [True, False])
async def test_metrics_are_on_their_own_port_alone_where_there_are_tenants(has_tenants: bool, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    hashes = [hashlib.sha256(key.encode()).hexdigest() for key in ("acme", "operations")]
    path.write_text(f"acme: {{key_sha256: [{hashes[0]}]}}\noperations: {{key_sha256: [{hashes[1]}], operator: true}}\n")
    book = TenantBook.configured(str(path) if has_tenants else "")
    ports = free_port(), free_port()
    config = Config(cluster=ClusterConfig(http_port=ports[0]), telemetry=TelemetryConfig(port=ports[1]))
    service: Any = Service()
    servers = http_servers(config, service, book, lambda: "", lambda: b"figures")
    running = [asyncio.create_task(server.serve_all()) for server in servers]
    try:
        async with httpx2.AsyncClient() as client:

            async def answered(port: int, path: str) -> set[str]:
                found = set()
                for key in OPEN:
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    response = await client.get(f"http://{HOST}:{port}{path}", headers=headers)
                    assert response.status_code == 200 or b"figures" not in response.content
                    found |= {key} if response.status_code == 200 else set()
                return found

            await until(lambda: all(server.started for server in servers))
            for path_, (on_http, on_own) in WITH_TENANTS.items():
                assert await answered(ports[0], path_) == (on_http if has_tenants else OPEN), path_
                assert await answered(ports[1], path_) == on_own, path_
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)


def test_metrics_have_no_port_of_their_own_unless_it_is_named() -> None:
    service: Any = Service()
    config = Config(cluster=ClusterConfig(http_port=free_port()))
    (server,) = http_servers(config, service, TenantBook.open_to_all(), lambda: "", lambda: b"")
    for opened in server._sockets:
        opened.close()


@pytest.mark.skipif(sys.platform != "linux", reason="what a socket of ours takes is bounded on Linux alone")
async def test_little_is_taken_of_an_answer_that_nobody_reads() -> None:
    num_taken = 0

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_taken
        with contextlib.suppress(ConnectionError):
            while num_taken < 20 * HTTP.num_bytes:
                writer.write(bytes(1024))
                await writer.drain()
                num_taken += 1024
        writer.close()

    (listening,) = bound(HOST, 0, False)
    async with await asyncio.start_server(answer, sock=listening):
        with socket.create_connection((HOST, port_of([listening]))):
            await until(lambda: num_taken > 0)
            before = -1
            while num_taken > before:
                before = num_taken
                await asyncio.sleep(0.3)
    assert num_taken <= HTTP.num_bytes
