"""A client of HTTP/2 that says what it is told to, so also what no honest one does. It speaks plain text.

It keeps to the windows that the server opens, so what it can send of a message is what the server takes in.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
from collections.abc import AsyncIterator, Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
HEADER_TABLE_SIZE, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 1, 3, 4
FIRST_WINDOW = 65_535
MAX_FRAME = 16_384


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Returns a frame's bytes."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(fields: Mapping[str, str | bytes]) -> bytes:
    """Returns a block of fields, none of which is compressed or remembered."""
    block = b""
    for name, value in fields.items():
        for text in (name.encode(), value if isinstance(value, bytes) else value.encode()):
            assert len(text) < 127 + 128
            length = bytes([len(text)]) if len(text) < 127 else bytes([127, len(text) - 127])
            block += (b"\0" if text == name.encode() else b"") + length + text
    return block


def message(length: int) -> bytes:
    """Returns a message of so many bytes, as gRPC frames it."""
    return b"\0" + struct.pack(">I", length) + bytes(length)


class Connection:
    """One connection.

    Attributes:
        goaways: the codes with which the server has asked it to end.
        num_pongs: answers to pings.
        settings: what the server has set, by the setting's number.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.goaways: list[int] = []
        self.num_pongs = 0
        self.settings: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self.is_closed = False
        self._statuses: dict[int, asyncio.Future[int]] = {}
        self._window, self._initial_window = FIRST_WINDOW, FIRST_WINDOW
        self._windows: dict[int, int] = {}
        self._more = asyncio.Condition()
        self._next_stream = 1

    def write(self, *frames: bytes) -> None:
        """Sends what it is given, at once."""
        self._writer.write(b"".join(frames))

    def pause_reading(self) -> None:
        """Reads nothing more of what the server says."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def drain(self) -> None:
        await self._writer.drain()

    def call(self, method: str, fields: Mapping[str, str | bytes] | None = None) -> int:
        """Begins a call, and returns its stream's number."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._windows[stream] = self._initial_window
        self._sent[stream] = 0
        self._statuses[stream] = asyncio.get_running_loop().create_future()
        begin = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x", "te": "trailers"}
        begin |= {"content-type": "application/grpc"}
        self.write(frame(HEADERS, END_HEADERS, stream, headers(begin | dict(fields or {}))))
        return stream

    async def send(self, stream: int, data: bytes, *, ends: bool = False) -> None:
        """Sends it as the windows allow; stops when the call has its status."""
        at = 0
        while at < len(data) and not self._statuses[stream].done():
            async with self._more:
                await self._more.wait_for(
                    lambda: min(self._window, self._windows[stream]) > 0 or self._statuses[stream].done()
                )
            num = max(min(self._window, self._windows[stream], MAX_FRAME, len(data) - at), 0)
            self._window -= num
            self._windows[stream] -= num
            is_last = ends and at + num == len(data)
            self.write(frame(DATA, END_STREAM * is_last, stream, data[at : at + num]))
            self._sent[stream] += num
            at += num
            await self.drain()

    async def status(self, stream: int) -> int:
        """Returns the code with which the call has ended; -1: it has none, since its stream or connection broke."""
        return await asyncio.shield(self._statuses[stream])

    @property
    def statuses(self) -> list[int]:
        """The codes of all calls that have ended."""
        return [each.result() for each in self._statuses.values() if each.done()]

    @property
    def num_sent(self) -> int:
        """Bytes of all messages that were sent."""
        return sum(self._sent.values())

    @property
    def num_held(self) -> int:
        """Bytes of the messages of calls that have not ended."""
        return sum(num for stream, num in self._sent.items() if not self._statuses[stream].done())

    @property
    def num_ended(self) -> int:
        return len(self.statuses)

    async def run(self) -> None:
        """Reads what the server says until it closes the connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(9)
                length, kind, flags, stream = int.from_bytes(head[:3], "big"), head[3], head[4], head[5:]
                payload = await self._reader.readexactly(length)
                async with self._more:
                    self._take(kind, flags, int.from_bytes(stream, "big"), payload)
                    self._more.notify_all()
        self.is_closed = True
        async with self._more:
            for each in self._statuses.values():
                if not each.done():
                    each.set_result(-1)
            self._more.notify_all()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.settings |= dict(struct.iter_unpack(">HI", payload))
            for key, value in struct.iter_unpack(">HI", payload):
                if key == INITIAL_WINDOW_SIZE:
                    self._windows = {
                        each: window + value - self._initial_window for each, window in self._windows.items()
                    }
                    self._initial_window = value
            self.write(frame(SETTINGS, ACK))
        elif kind == PING and not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))
        elif kind == PING:
            self.num_pongs += 1
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream:
                self._windows[stream] = self._windows.get(stream, 0) + more
            else:
                self._window += more
        elif kind == GOAWAY:
            self.goaways.append(int.from_bytes(payload[4:8], "big"))
        elif kind == RST_STREAM and stream in self._statuses:
            self._end(stream, -1)
        elif kind == HEADERS and flags & END_STREAM and (found := re.search(rb"grpc-status[\x01\x02](\d+)", payload)):
            self._end(stream, int(found[1]))

    def _end(self, stream: int, code: int) -> None:
        if not self._statuses[stream].done():
            self._statuses[stream].set_result(code)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Connection]:
    """Connects to host:port, says HTTP/2's first words, and closes the connection when the block is left."""
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    connection = Connection(reader, writer)
    connection.write(PREFACE, frame(SETTINGS, 0, 0, struct.pack(">HI", HEADER_TABLE_SIZE, 0)))
    running = asyncio.create_task(connection.run())
    try:
        yield connection
    finally:
        running.cancel()
        writer.transport.abort()
        await asyncio.wait([running])
