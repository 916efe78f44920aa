"""Connections in their TLS handshake, over real sockets: each is counted, and has no longer than a head has."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from baton.tls import Tls
from router.api import places as handshake
from router.api.connections import BoundedProtocol
from router.api.http import HttpServer, bound
from router.api.places import ConnectionLimits, OpenConnections
from tests.support.certificates import Authority
from tests.support.objects import only_new_objects_are_collected
from tests.support.waiting import until

PATIENCE_S = 30.0
ASK = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
HOST = "127.0.0.1"
CLIENT = {HOST: 1}


async def _scheme(scope: Any, receive: Any, send: Any) -> None:
    body = scope["scheme"].encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True, slots=True)
class Endpoint:
    port: int
    open: OpenConnections
    client: ssl.SSLContext

    async def says(self) -> bytes:
        """What it answers to a request over TLS."""
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(
                HOST, self.port, ssl=self.client, server_hostname="localhost"
            )
            writer.write(ASK)
            answer = await reader.read()
            writer.close()
            return answer

    async def silent(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.port)


@pytest.fixture
def endpoint(tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(**limits: Any) -> AsyncIterator[Endpoint]:
        authority = Authority.make(tmp_path)
        most = {"max_connections": 100, "max_per_client": 100}
        open_connections = OpenConnections(limits=ConnectionLimits(**(most | limits)))
        protocol: Any = partial(BoundedProtocol, open_connections)
        sockets = bound(HOST, 0, shares_port=False)
        config = uvicorn.Config(_scheme, http=protocol, interface="asgi3", log_config=None, lifespan="off")
        server = HttpServer(config, sockets, open_connections, Tls(authority.sign("endpoint")))
        serving = asyncio.create_task(server.serve_all())
        await until(lambda: server.started)
        client = ssl.create_default_context(cafile=authority.path)
        try:
            yield Endpoint(sockets[0].getsockname()[1], open_connections, client)
        finally:
            server.should_exit = True
            await serving

    return opened


async def test_who_says_nothing_is_counted_and_closed_in_the_time_of_a_head(endpoint: Callable[..., Any]) -> None:
    async with endpoint(head_s=0.3) as it, asyncio.timeout(PATIENCE_S):
        reader, writer = await it.silent()
        await until(lambda: it.open.num_of == CLIENT)
        assert await reader.read() == b""
        await until(lambda: not it.open.num_of)
        writer.close()
        assert (await it.says()).endswith(b"https"), "others are served"
        await until(lambda: not it.open.num_of)


def test_it_is_the_same_on_the_loop_of_a_router(endpoint: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with endpoint(max_per_client=1, head_s=0.5) as it, asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                assert (await it.says()).endswith(b"https")
                await until(lambda: not it.open.num_of)
            reader, writer = await it.silent()
            await until(lambda: it.open.num_of == CLIENT)
            assert await reader.read() == b""
            writer.close()
            await until(lambda: not it.open.num_of)

    uvloop.run(scenario())


async def test_one_too_many_is_closed_before_its_handshake(endpoint: Callable[..., Any]) -> None:
    async with endpoint(max_per_client=2, head_s=PATIENCE_S) as it, asyncio.timeout(PATIENCE_S):
        _, first = await it.silent()
        await until(lambda: it.open.num_of == CLIENT)
        assert (await it.says()).endswith(b"https"), "the last place is one: nothing is counted twice"
        await until(lambda: it.open.num_of == CLIENT)
        _, second = await it.silent()
        await until(lambda: it.open.num_of == {HOST: 2})
        reader, third = await it.silent()
        assert await reader.read() == b""
        for writer in (first, second, third):
            writer.close()
        await until(lambda: not it.open.num_of)


@pytest.mark.parametrize("sent", [ASK, b"\x16\x03\x01\xff\xff" + b"x" * 100, b""], ids=["plain", "broken", "gone"])
async def test_what_is_no_handshake_leaves_nothing(endpoint: Callable[..., Any], sent: bytes) -> None:
    async with endpoint(head_s=PATIENCE_S) as it, asyncio.timeout(PATIENCE_S):
        with only_new_objects_are_collected():
            num_open = _num_descriptors()
            for _ in range(20):
                reader, writer = await it.silent()
                if sent:
                    writer.write(sent)
                    assert b"HTTP" not in await reader.read()
                writer.close()
                await writer.wait_closed()
            await until(lambda: not it.open.num_of)
            await until(lambda: _num_descriptors() <= num_open)


async def test_a_server_that_ends_ends_the_handshakes(endpoint: Callable[..., Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with endpoint(head_s=600.0) as it:
            reader, writer = await it.silent()
            await until(lambda: it.open.num_of == CLIENT)
        assert await reader.read() == b""
        writer.close()
        assert not it.open.num_of


async def test_it_goes_on_after_it_could_not_accept(
    endpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no descriptor left, for a moment."""
    monkeypatch.setattr(handshake, "PAUSE_S", 0.01)
    loop_type = type(asyncio.get_running_loop())
    accept, failures = loop_type.sock_accept, [OSError(24, "Too many open files")] * 2

    async def sock_accept(self: Any, listening: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(self, listening)

    monkeypatch.setattr(loop_type, "sock_accept", sock_accept)
    async with endpoint() as it:
        assert (await it.says()).endswith(b"https")
    assert not failures


def _num_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))
