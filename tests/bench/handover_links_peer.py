"""One end of the links benchmark: `python -m tests.bench.handover_links_peer sender|receiver`.

Each operation answers with the CPU seconds that this process spent on it, all threads included, and the sending end
with the seconds that passed as well.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import psutil
import torch
import uvloop

from kvstore.transfer.transport.base import Operation, ReceivingTransport, SendingTransport
from kvstore.transfer.transport.gloo import RendezvousStore
from kvstore.transfer.transport.select import open_receiver, open_sender
from kvstore.transfer.transport.staging import Slot, StagingPool
from tests.bench.peer import serve

HOST = "127.0.0.1"
MIN_WINDOW, MAX_WINDOW = 4, 16
IN_FLIGHT_BYTES = 16 * 2**20
MAX_CHUNK_BYTES = 16 * 2**20
TIMEOUT_S = 30.0
ACK = b"!"

Answer = dict[str, Any]


def window(chunk_bytes: int) -> int:
    """Chunks in flight: 16 MiB, and 4 at least. As many buffers are used in turn, as in a real transfer, whose bytes do
    not lie in the processor's cache; with four of 1 MiB the socket would run from there."""
    return max(MIN_WINDOW, min(MAX_WINDOW, IN_FLIGHT_BYTES // chunk_bytes))


class _Rendezvous:
    """The stores of all pairs, over one connection, as over their sessions otherwise."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stores: dict[str, RendezvousStore] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._deliver, daemon=True).start()

    def store(self, pair: str) -> RendezvousStore:
        with self._lock:
            if pair not in self._stores:
                self._stores[pair] = RendezvousStore(lambda key, value: self._publish(pair, key, value))
            return self._stores[pair]

    def _publish(self, pair: str, key: str, value: bytes) -> None:
        self._connection.sendall(json.dumps([pair, key, value.hex()]).encode() + b"\n")

    def _deliver(self) -> None:
        with self._connection.makefile("rb") as lines:
            for line in lines:
                pair, key, value = json.loads(line)
                self.store(pair).deliver(key, bytes.fromhex(value))


class _Idle:
    """A pair that does nothing but cost: its owner thread waits."""

    def __init__(self, open_link: Callable[[], SendingTransport | ReceivingTransport]) -> None:
        self.open_s: Future[float] = Future()
        self._open_link = open_link
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        start = time.perf_counter()
        link = self._open_link()
        self.open_s.set_result(time.perf_counter() - start)
        self._closing.wait()
        link.close()


class _End:
    def __init__(self) -> None:
        self._staging = StagingPool(4 * MAX_WINDOW, MAX_CHUNK_BYTES, torch.device("cpu"), pinned=False)
        self.memory = torch.zeros(MAX_WINDOW, MAX_CHUNK_BYTES, dtype=torch.uint8)
        """Where the bytes come from, or go."""
        self._idle: list[_Idle] = []

    def connected(self, data: socket.socket, control: socket.socket) -> None:
        for connection in (data, control):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = data
        self.rendezvous = _Rendezvous(control)

    def views(self, chunk_bytes: int) -> list[memoryview]:
        return [memoryview(row[:chunk_bytes].numpy().data) for row in self.memory[: window(chunk_bytes)]]

    def open_link(self, kind: str, pair: str, num_slots: int = MIN_WINDOW) -> SendingTransport | ReceivingTransport:
        raise NotImplementedError

    async def open_many(self, kind: str, names: list[str]) -> Answer:
        """One pair after the other: how long each took to open, and what all of them cost this process."""
        before = _footprint()
        open_s = []
        for name in names:
            self._idle.append(_Idle(partial(self.open_link, kind, name)))
            open_s.append(await asyncio.wrap_future(self._idle[-1].open_s))
        return {"open_s": open_s, "cost": [now - then for now, then in zip(_footprint(), before, strict=True)]}

    async def close_many(self) -> Answer:
        for idle in self._idle:
            idle.close()
        self._idle.clear()
        return {}


class Sender(_End):
    def __init__(self) -> None:
        super().__init__()
        self.memory.random_(256)
        self._links: dict[str, SendingTransport] = {}

    async def connect(self, port: int) -> Answer:
        self.connected(socket.create_connection((HOST, port)), socket.create_connection((HOST, port)))
        return {}

    def open_link(self, kind: str, pair: str, num_slots: int = MIN_WINDOW) -> SendingTransport:
        store = self.rendezvous.store(pair)
        return open_sender(kind, store, HOST, self._staging, num_slots, TIMEOUT_S, TIMEOUT_S)

    async def open(self, kind: str, num_slots: int) -> Answer:
        pair = f"{kind}/{num_slots}"
        self._links[pair] = await asyncio.to_thread(self.open_link, kind, pair, num_slots)
        return {}

    async def raw(self, num_chunks: int, chunk_bytes: int) -> Answer:
        return await asyncio.to_thread(self._timed, partial(self._raw, num_chunks, chunk_bytes))

    async def link(self, kind: str, num_chunks: int, chunk_bytes: int) -> Answer:
        source = self.memory if kind == "shm" else None
        send = partial(_send, self._links[f"{kind}/{window(chunk_bytes)}"], num_chunks, chunk_bytes, source)
        return await asyncio.to_thread(self._timed, send)

    def _raw(self, num_chunks: int, chunk_bytes: int) -> None:
        views = self.views(chunk_bytes)
        for number in range(num_chunks):
            self.data.sendall(views[number % len(views)])

    def _timed(self, send: Callable[[], None]) -> Answer:
        wall, cpu = time.perf_counter(), time.process_time()
        send()
        assert self.data.recv(1) == ACK
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


class Receiver(_End):
    def __init__(self) -> None:
        super().__init__()
        self._links: dict[str, ReceivingTransport] = {}

    async def listen(self) -> Answer:
        self._listener = socket.create_server((HOST, 0))
        return {"port": self._listener.getsockname()[1]}

    async def accept(self) -> Answer:
        self.connected(*(self._listener.accept()[0] for _ in range(2)))
        return {}

    def open_link(self, kind: str, pair: str, num_slots: int = MIN_WINDOW) -> ReceivingTransport:
        store = self.rendezvous.store(pair)
        return open_receiver(kind, store, HOST, self._staging, num_slots, TIMEOUT_S, TIMEOUT_S)

    async def open(self, kind: str, num_slots: int) -> Answer:
        pair = f"{kind}/{num_slots}"
        self._links[pair] = await asyncio.to_thread(self.open_link, kind, pair, num_slots)
        return {}

    async def raw(self, num_chunks: int, chunk_bytes: int) -> Answer:
        return await asyncio.to_thread(self._timed, partial(self._raw, num_chunks, chunk_bytes))

    async def link(self, kind: str, num_chunks: int, chunk_bytes: int) -> Answer:
        target = self.memory if kind == "shm" else None
        receive = partial(_receive, self._links[f"{kind}/{window(chunk_bytes)}"], num_chunks, chunk_bytes, target)
        return await asyncio.to_thread(self._timed, receive)

    def _raw(self, num_chunks: int, chunk_bytes: int) -> None:
        views = self.views(chunk_bytes)
        for number in range(num_chunks):
            view = views[number % len(views)]
            while view:
                view = view[self.data.recv_into(view) :]

    def _timed(self, receive: Callable[[], None]) -> Answer:
        cpu = time.process_time()
        receive()
        self.data.sendall(ACK)
        return {"cpu_s": time.process_time() - cpu}


def _send(link: SendingTransport, num_chunks: int, chunk_bytes: int, source: torch.Tensor | None) -> None:
    """From `source`, or whatever lies in the slots."""
    in_flight: deque[tuple[Slot, Operation]] = deque()
    for number in range(num_chunks):
        while (slot := link.slots.acquire(0.0)) is None and in_flight:
            _complete(link, in_flight)
        slot = slot or link.slots.acquire(TIMEOUT_S)
        assert slot
        if source is not None:
            slot.payload(chunk_bytes).copy_(source[number % window(chunk_bytes), :chunk_bytes])
        in_flight.append((slot, link.send_chunk(slot, chunk_bytes)))
    while in_flight:
        _complete(link, in_flight)


def _receive(link: ReceivingTransport, num_chunks: int, chunk_bytes: int, target: torch.Tensor | None) -> None:
    posted: deque[tuple[Slot, Operation]] = deque()
    for number in range(num_chunks):
        while len(posted) < min(window(chunk_bytes), num_chunks - number):
            slot = link.slots.acquire(TIMEOUT_S)
            assert slot
            posted.append((slot, link.recv_chunk(slot, chunk_bytes)))
        slot, operation = posted.popleft()
        operation.wait()
        if target is not None:
            target[number % window(chunk_bytes), :chunk_bytes].copy_(slot.payload(chunk_bytes))
        link.slots.release(slot)


def _complete(link: SendingTransport, in_flight: deque[tuple[Slot, Operation]]) -> None:
    slot, operation = in_flight.popleft()
    operation.wait()
    link.slots.release(slot)


def _footprint() -> tuple[int, int, int]:
    """Threads, file descriptors, bytes of resident memory."""
    process = psutil.Process()
    return process.num_threads(), process.num_fds(), process.memory_info().rss


async def _main(role: str) -> None:
    torch.set_num_threads(1)
    end: Sender | Receiver = Sender() if role == "sender" else Receiver()
    names = ("listen", "accept", "connect", "open", "raw", "link", "open_many", "close_many")
    await serve({name: getattr(end, name) for name in names if hasattr(end, name)})


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1]))
