"""A server within the bounds of connections, over real sockets and uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from router.api.connections import BoundedProtocol
from router.api.places import ConnectionLimits, OpenConnections
from tests.support.waiting import until

PATIENCE_S = 30.0
REQUEST = b"POST /it HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n"
CHUNKED = b"POST /it HTTP/1.1\r\nhost: here\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """A server that answers with the length of what it was sent."""

    def __init__(self, **limits: Any) -> None:
        most = {"max_connections": 100, "max_per_client": 100}
        self.open = OpenConnections(limits=ConnectionLimits(**(most | limits)))
        self.num_left = 0
        self.port = 0
        self.pieces: list[bytes] = []
        """Of the answer; empty: it is the length of what was sent."""
        self.num_asked, self.num_ended = 0, 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.answers_before_the_body = False
        self.protocol: type[BoundedProtocol] = BoundedProtocol

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        length = 0
        while not self.answers_before_the_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_left += 1
                return
            length += len(message["body"])
            if not message["more_body"]:
                break
        self.num_asked += 1
        await self.may_answer.wait()
        pieces = self.pieces or [str(length).encode()]
        headers = [(b"content-length", str(sum(map(len, pieces))).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, piece in enumerate(pieces, 1):
            await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})
        self.num_ended += 1

    @asynccontextmanager
    async def runs(self) -> AsyncIterator[Server]:
        protocol: Any = partial(self.protocol, self.open)
        config = uvicorn.Config(
            self.app, port=0, http=protocol, ws="none", interface="asgi3", log_config=None, lifespan="off"
        )
        server = uvicorn.Server(config)
        server.config.load()
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        self.port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.should_exit = True
            await task

    @asynccontextmanager
    async def client(
        self, address: str = "127.0.0.1"
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        try:
            yield reader, writer
        finally:
            writer.close()

    async def says(self, data: bytes) -> bytes:
        """Sends something on a connection of its own, and returns all that comes until it is closed."""
        async with self.client() as (reader, writer), asyncio.timeout(PATIENCE_S):
            writer.write(data)
            return await reader.read()

    async def until_empty(self) -> None:
        await until(lambda: not self.open.num_of)


def request(body: bytes, head: bytes = b"connection: close\r\n") -> bytes:
    return REQUEST % len(body) + head + b"\r\n" + body


class Roomy(BoundedProtocol):
    """A connection that takes whole answers, so that nothing waits to be written."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=10**9)


class Wire(asyncio.Transport):
    """A transport whose other end says nothing."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.9", 1), "sockname": ("10.0.0.1", 80)})
        self.reads, self.is_aborted, self.num_unread = True, False, 0

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def abort(self) -> None:
        self.is_aborted = True


def wired(**limits: Any) -> tuple[BoundedProtocol, Wire]:
    """A connection over such a transport."""
    config = uvicorn.Config(Server().app, ws="none", interface="asgi3", log_config=None, lifespan="off")
    config.load()
    open_connections = OpenConnections(limits=ConnectionLimits(max_connections=9, max_per_client=9, **limits))
    protocol = BoundedProtocol(open_connections, config=config, server_state=ServerState(), app_state={})
    wire = Wire()
    protocol.connection_made(wire)
    return protocol, wire
