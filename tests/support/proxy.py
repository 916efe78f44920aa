"""A TCP proxy that stands between two processes which live, and keeps them from hearing each other.

What is cut is held back, as a network does it: TCP sends again what was lost, so after healing everything arrives, in
order and late. Whoever connects or hangs up meanwhile is not heard either.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

import psutil

from baton.tasks import cancel_and_wait
from tests.integration.cluster import free_port

_READ_BYTES = 2**16


class Way(enum.Flag):
    """The directions in which a connection is heard."""

    TO_SERVER = enum.auto()
    TO_CLIENT = enum.auto()
    BOTH = TO_SERVER | TO_CLIENT


NOTHING = Way(0)


@dataclass(eq=False, slots=True)
class _Connection:
    port: int
    """Port of the client's end."""
    cut: Way = NOTHING
    pumps: dict[Way, asyncio.Task[None]] = field(default_factory=dict)


class Proxy:
    """Listens while the block is entered; safe to call from any thread.

    Args:
        port: of the server, at which nobody needs to listen yet; by default a free one.

    Attributes:
        port, target: where clients connect, and where they get to.
        delay_s: how much later everything arrives.
    """

    def __init__(self, port: int = 0) -> None:
        self.port = free_port()
        self.target = port or free_port()
        self.delay_s = 0.0
        self._cut = NOTHING
        self._cut_pid: int | None = None
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._healed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self, way: Way = Way.BOTH, pid: int | None = None) -> None:
        """Holds back what goes that way, of connections that are open or come.

        Args:
            pid: the client process that is cut off; by default all of them.
        """
        self._call(lambda: self._set_cut(way, pid))

    def forget(self) -> None:
        """Hangs up on the server and tells no client: every open connection stays half-open until the healing."""
        self._call(self._forget)

    def heal(self) -> None:
        """Lets everything through again, and what was held back first."""
        self._call(lambda: self._set_cut(NOTHING, None))

    def _set_cut(self, way: Way, pid: int | None) -> None:
        self._cut, self._cut_pid = way, pid
        for connection in self._connections:
            connection.cut = self._cut_of(connection)
        self._healed.set()
        self._healed = asyncio.Event()

    def _forget(self) -> None:
        self._set_cut(Way.BOTH, None)
        for connection in self._connections:
            for pump in connection.pumps.values():
                pump.cancel()

    def _cut_of(self, connection: _Connection) -> Way:
        is_meant = self._cut_pid is None or connection.port in _ports(self._cut_pid)
        return self._cut if is_meant else NOTHING

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer.get_extra_info("peername")[1])
        connection.cut = self._cut_of(connection)
        self._connections.add(connection)
        try:
            await self._until_heard(connection, Way.BOTH)
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
            with contextlib.closing(server_writer):
                connection.pumps = {
                    Way.TO_SERVER: asyncio.create_task(self._pump(connection, Way.TO_SERVER, reader, server_writer)),
                    Way.TO_CLIENT: asyncio.create_task(self._pump(connection, Way.TO_CLIENT, server_reader, writer)),
                }
                await asyncio.wait(connection.pumps.values(), return_when=asyncio.FIRST_COMPLETED)
                for pump in connection.pumps.values():
                    pump.cancel()
            await self._until_heard(connection, Way.TO_CLIENT)
        except OSError:
            pass  # nobody listens at the server, which the client learns as its connection is closed
        except asyncio.CancelledError:
            pass  # the proxy closes, and asyncio would print a stack for each connection
        finally:
            self._connections.discard(connection)
            writer.close()

    async def _pump(
        self, connection: _Connection, way: Way, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_READ_BYTES):
                await self._until_heard(connection, way)
                await asyncio.sleep(self.delay_s)
                sink.write(data)
                await sink.drain()
        await self._until_heard(connection, way)

    async def _until_heard(self, connection: _Connection, way: Way) -> None:
        while connection.cut & way:
            await self._healed.wait()

    async def _close(self) -> None:
        self._server.close()
        for _ in range(4):  # what was just accepted begins, and can close its connection
            await asyncio.sleep(0)
        await cancel_and_wait(asyncio.all_tasks() - {asyncio.current_task()})

    def _call(self, change: Callable[[], None]) -> None:
        async def call() -> None:
            change()

        self._run(call())

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)


def _ports(pid: int) -> set[int]:
    """Those of a process's own ends of its connections."""
    return {connection.laddr.port for connection in psutil.Process(pid).net_connections("tcp")}
