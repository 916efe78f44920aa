"""One end of the hand-over benchmark: `python -m tests.bench.handover_peer prefill|decode`.

Each operation answers with the CPU seconds that this process spent on it, all threads included, and the sending end
with the seconds that passed as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import sys
import time
from collections import deque
from typing import Any, cast

import grpc
import torch
import torch.distributed as dist
import uvloop

from baton.config import TransferConfig
from baton.engine.kv_cache import KVCache, KVSpec, LayerGroup
from baton.messages import Ticket
from baton.rpc.server import SERVER_OPTIONS
from baton.v1 import kv_pb2_grpc
from kvstore.transfer.link import Operation
from kvstore.transfer.receiver import KvReceiver
from kvstore.transfer.sender import KvSender
from kvstore.transfer.torch_link import RECEIVER, SENDER, GlooLink
from tests.bench.peer import serve

HOST = "127.0.0.1"
SPEC = KVSpec(16, (LayerGroup("all", tuple(range(30)), 3, 64, 64, torch.float32),))
"""SmolLM2-135M's: 46,080 bytes a token."""
NUM_BLOCKS = 160
CHECKSUMS = ("full", "off")
WINDOW = 4
ACK = b"!"

Answer = dict[str, Any]


class _End:
    """The bytes that either end moves over the raw socket and over the bare link."""

    def __init__(self) -> None:
        self.cache = KVCache(SPEC, NUM_BLOCKS, max_num_seqs=1)
        self.raw: socket.socket | None = None
        self.link: GlooLink | None = None

    def block_ids(self, num_tokens: int) -> list[int]:
        """Scattered over the cache, as a pool that has been in use gives them out."""
        return random.Random(5).sample(range(NUM_BLOCKS), -(-num_tokens // SPEC.block_size))

    def open_link(self, path: str, rank: int) -> None:
        # Both ends are on this machine, so a file does for the rendezvous that a session does otherwise.
        store = cast("Any", dist).FileStore(path, 2)
        self.link = GlooLink(store, rank, HOST, open_timeout_s=10.0, op_timeout_s=10.0)


class Prefill(_End):
    def __init__(self) -> None:
        super().__init__()
        self.cache.groups[0].uniform_(-1.0, 1.0)
        self._senders = {
            mode: KvSender(f"prefill-{mode}", "1", self.cache, "bench", TransferConfig(checksum=mode), HOST)
            for mode in CHECKSUMS
        }

    async def hand_over(self, mode: str, num_tokens: int, ticket: Answer) -> Answer:
        wall, cpu = time.perf_counter(), time.process_time()
        done = await self._senders[mode].send(Ticket(**ticket), self.block_ids(num_tokens), 1)
        return {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "num_bytes": done.num_bytes,
        }

    async def open_raw(self, port: int) -> Answer:
        self.raw = socket.create_connection((HOST, port))
        self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {}

    async def raw_flat(self, num_bytes: int, chunk_bytes: int) -> Answer:
        return await asyncio.to_thread(self._raw_flat, num_bytes, chunk_bytes)

    def _raw_flat(self, num_bytes: int, chunk_bytes: int) -> Answer:
        assert self.raw
        view = memoryview(self.cache.groups[0].view(-1).view(torch.uint8).numpy().data)
        window = [view[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(max(1, len(view) // chunk_bytes))]
        wall, cpu = time.perf_counter(), time.process_time()
        for number in range(num_bytes // chunk_bytes):
            self.raw.sendall(window[number % min(len(window), WINDOW)])
        assert self.raw.recv(1) == ACK
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}

    async def open_gloo(self, path: str) -> Answer:
        await asyncio.to_thread(self.open_link, path, SENDER)
        return {}

    async def gloo(self, num_bytes: int, chunk_bytes: int) -> Answer:
        return await asyncio.to_thread(self._gloo, num_bytes, chunk_bytes)

    def _gloo(self, num_bytes: int, chunk_bytes: int) -> Answer:
        assert self.link
        assert self.raw
        buffers = self.cache.groups[0].view(-1).view(torch.uint8)[: WINDOW * chunk_bytes].view(WINDOW, -1)
        in_flight: deque[Operation] = deque()
        wall, cpu = time.perf_counter(), time.process_time()
        for number in range(num_bytes // chunk_bytes):
            if len(in_flight) == WINDOW:
                in_flight.popleft().wait()
            in_flight.append(self.link.send(buffers[number % WINDOW]))
        for operation in in_flight:
            operation.wait()
        assert self.raw.recv(1) == ACK
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}

    async def close(self) -> None:
        for sender in self._senders.values():
            await sender.close()


class Decode(_End):
    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[str, KvReceiver] = {}
        self._servers: list[grpc.aio.Server] = []
        self._expected: tuple[str, Ticket, float] | None = None
        self._buffer = memoryview(bytearray(0))

    async def start(self) -> None:
        for mode in CHECKSUMS:
            receiver = KvReceiver(f"decode-{mode}", "1", self.cache, "bench", TransferConfig(checksum=mode), HOST)
            server = grpc.aio.server(options=SERVER_OPTIONS)
            kv_pb2_grpc.add_KvControlServicer_to_server(receiver, server)
            receiver.kv_address = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
            await server.start()
            self._receivers[mode] = receiver
            self._servers.append(server)

    async def expect(self, mode: str, num_tokens: int) -> Answer:
        cpu = time.process_time()
        ticket = self._receivers[mode].expect("bench", num_tokens, 0, self.block_ids(num_tokens))
        self._expected = (mode, ticket, cpu)
        return dataclasses.asdict(ticket)

    async def settle(self) -> Answer:
        assert self._expected
        mode, ticket, cpu = self._expected
        await self._receivers[mode].wait_committed(ticket)
        await self._receivers[mode].release(ticket)
        return {"cpu_s": time.process_time() - cpu}

    async def listen(self) -> Answer:
        self._listener = socket.create_server((HOST, 0))
        return {"port": self._listener.getsockname()[1]}

    async def accept(self) -> Answer:
        self.raw, _ = await asyncio.to_thread(self._listener.accept)
        return {}

    async def raw_flat(self, num_bytes: int, chunk_bytes: int) -> Answer:
        return await asyncio.to_thread(self._raw_flat, num_bytes, chunk_bytes)

    def _raw_flat(self, num_bytes: int, chunk_bytes: int) -> Answer:
        assert self.raw
        window = min(WINDOW, num_bytes // chunk_bytes)
        if len(self._buffer) < window * chunk_bytes:
            self._buffer = memoryview(bytearray(window * chunk_bytes))
        cpu = time.process_time()
        for number in range(num_bytes // chunk_bytes):
            offset = number % window * chunk_bytes
            end = offset + chunk_bytes
            while offset < end:
                offset += self.raw.recv_into(self._buffer[offset:end])
        self.raw.sendall(ACK)
        return {"cpu_s": time.process_time() - cpu}

    async def open_gloo(self, path: str) -> Answer:
        await asyncio.to_thread(self.open_link, path, RECEIVER)
        return {}

    async def gloo(self, num_bytes: int, chunk_bytes: int) -> Answer:
        return await asyncio.to_thread(self._gloo, num_bytes, chunk_bytes)

    def _gloo(self, num_bytes: int, chunk_bytes: int) -> Answer:
        assert self.link
        assert self.raw
        buffers = self.cache.groups[0].view(-1).view(torch.uint8)[: WINDOW * chunk_bytes].view(WINDOW, -1)
        cpu = time.process_time()
        num_chunks = num_bytes // chunk_bytes
        posted = deque(self.link.recv(buffers[number]) for number in range(min(WINDOW, num_chunks)))
        for number in range(num_chunks):
            posted.popleft().wait()
            if number + WINDOW < num_chunks:
                posted.append(self.link.recv(buffers[number % WINDOW]))
        self.raw.sendall(ACK)
        return {"cpu_s": time.process_time() - cpu}

    async def close(self) -> None:
        for receiver, server in zip(self._receivers.values(), self._servers, strict=True):
            receiver.check()
            await receiver.close()
            await server.stop(1.0)


async def _main(role: str) -> None:
    torch.set_num_threads(1)
    end: Prefill | Decode = Prefill() if role == "prefill" else Decode()
    if isinstance(end, Decode):
        await end.start()
    names = ("hand_over", "expect", "settle", "listen", "accept", "open_raw", "raw_flat", "open_gloo", "gloo")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(end.close)
        await serve({name: getattr(end, name) for name in names if hasattr(end, name)})


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1]))
