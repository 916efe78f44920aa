"""Services: each port of a cluster IP leads to ready pods in turn, over TCP. Without any, connections are refused."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping

Address = tuple[str, int]
CHUNK_BYTES = 1 << 16


class Proxy:
    """Lives on one event loop."""

    def __init__(self) -> None:
        self._ports: dict[Address, _Port] = {}

    def set_routes(self, routes: Mapping[Address, list[Address]]) -> None:
        """From now on, new connections to each address go to one of its targets. Those there are stay."""
        wanted = {address: targets for address, targets in routes.items() if targets}
        for address in self._ports.keys() - wanted.keys():
            self._ports[address].refuse()
        for address, targets in wanted.items():
            self._ports.setdefault(address, _Port(address)).lead_to(targets)

    async def close(self) -> None:
        """Ends all connections."""
        for port in self._ports.values():
            await port.close()


class _Port:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._targets: list[Address] = []
        self._num_connections = 0
        self._listening: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Connections."""

    def lead_to(self, targets: list[Address]) -> None:
        self._targets = targets
        if self._listening is None:
            try:
                self._listening = socket.create_server(self._address, backlog=128)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return  # a pod listens on all addresses, as Ray's do: it has this one's connections too
            self._listening.setblocking(False)
            asyncio.get_running_loop().add_reader(self._listening, self._accept, self._listening)

    def refuse(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    async def close(self) -> None:
        self.refuse()
        await asyncio.sleep(0)  # a task that has not begun could not close its connection
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection = listening.accept()[0]
        except OSError:
            return  # whoever came is gone
        target = self._targets[self._num_connections % len(self._targets)]
        self._num_connections += 1
        task = asyncio.create_task(_forward(connection, target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _forward(connection: socket.socket, target: Address) -> None:
    """One connection, until both sides have said all, or one breaks: then so does the other."""
    reader, writer = await asyncio.open_connection(sock=connection)
    writers = [writer]
    try:
        there, to_there = await asyncio.open_connection(*target)
        writers.append(to_there)
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, to_there))
            both.create_task(_copy(there, writer))
    except* OSError:
        for broken in writers:
            broken.transport.abort()
    finally:
        for done in writers:
            done.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
