"""One end of the KV transfer benchmark: `python -m tests.bench.kv_transfer_peer prefill|decode FOLDER`.

FOLDER has the certificates of both.

Each operation answers with the CPU seconds that this process spent on it, all threads included, and the sending end
with the seconds that passed as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import torch
import uvloop

from baton import wire
from baton.config import TestingConfig, TransferConfig
from baton.messages import Ticket
from baton.rpc.server import SERVER_OPTIONS
from baton.tls import Tls
from baton.v1 import kv_pb2_grpc, worker_pb2
from engine.core.runner import KVSpec, LayerGroup
from engine.model.kv_cache import KVCache
from kvstore.transfer.copy.blocks import choose_copies
from kvstore.transfer.local_worker import LocalWorker
from kvstore.transfer.receiver import KvReceiver
from kvstore.transfer.sender import KvSender
from tests.bench.peer import serve
from tests.support.certificates import member_files

HOST = "127.0.0.1"
NUM_LAYERS = 30
SPEC = KVSpec(
    (
        LayerGroup(
            name="all",
            layers=tuple(range(NUM_LAYERS)),
            num_kv_heads=3,
            k_dim=64,
            v_dim=64,
            block_size=16,
            dtype="float32",
        ),
    ),
)
"""SmolLM2-135M's: 46,080 bytes a token."""
NUM_BLOCKS = 160
TLS = "tcp, TLS"
TRANSPORTS = {"tcp": "tcp", TLS: "tcp", "shm": "shm"}
MODES = {
    f"{name}, checksum {checksum}": TransferConfig(transports=(transport,), checksum=checksum)
    for name, transport in TRANSPORTS.items()
    for checksum in ("full", "off")
}
COMPUTE_S = 0.005
"""A processor that idled before a KV transfer would wake up too slowly to be compared with one that computed."""
WINDOW = 4
ACK = b"!"

Answer = dict[str, Any]


class _End:
    """The cache of either end, and the raw socket between them."""

    def __init__(self, tls: Tls) -> None:
        self.cache = KVCache(SPEC, NUM_BLOCKS, max_num_seqs=1)
        self.raw: socket.socket | None = None
        self._tls = tls

    def tls(self, mode: str) -> Tls | None:
        return self._tls if mode.startswith(TLS) else None

    def local(self, worker_id: str, mode: str) -> LocalWorker:
        choose_copies((self.cache,))
        return LocalWorker(
            worker_id=f"{worker_id}-{mode}",
            incarnation="1",
            caches=(self.cache,),
            wire_compat="bench",
            host=HOST,
            tls=self.tls(mode),
            testing=TestingConfig(),
        )

    def block_ids(self, num_tokens: int) -> list[int]:
        """Scattered over the cache, as a pool that has been in use gives them out."""
        return random.Random(5).sample(range(NUM_BLOCKS), -(-num_tokens // SPEC.block_size))


class Prefill(_End):
    def __init__(self, tls: Tls) -> None:
        super().__init__(tls)
        self.cache.groups[0].uniform_(-1.0, 1.0)
        self._senders = {mode: KvSender(self.local("prefill", mode), config) for mode, config in MODES.items()}

    async def kv_transfer(self, mode: str, num_tokens: int, ticket: str) -> Answer:
        """Everything is computed already, and the receiver has said yes meanwhile."""
        async with self._senders[mode].transfer(_ticket(ticket)) as transfer:
            computed_s = time.perf_counter() + COMPUTE_S
            while time.perf_counter() < computed_s:  # noqa: ASYNC110 - busy on purpose
                await asyncio.sleep(0)
            wall, cpu = time.perf_counter(), time.process_time()
            transfer.extend((tuple(self.block_ids(num_tokens)),))
            done = await transfer.finish(1)
            wall = time.perf_counter() - wall
        return {"wall_s": wall, "cpu_s": time.process_time() - cpu, "num_bytes": done.num_bytes}

    async def kv_transfer_layers(
        self, mode: str, num_tokens: int, ticket: str, layer_s: float, streamed: bool
    ) -> Answer:
        """A layer is computed every `layer_s`; what is exposed is the time from the last one to the commit."""
        async with self._senders[mode].transfer(_ticket(ticket)) as transfer:
            transfer.extend((tuple(self.block_ids(num_tokens)),))
            for layer in range(NUM_LAYERS):
                await asyncio.sleep(layer_s)
                if streamed:
                    transfer.advance(num_tokens, layer + 1)
            cpu = time.process_time()
            done = await transfer.finish(1)
        return {"wall_s": done.exposed_s, "cpu_s": time.process_time() - cpu, "num_bytes": done.num_bytes}

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

    async def close(self) -> None:
        for sender in self._senders.values():
            await sender.close()


class Decode(_End):
    def __init__(self, tls: Tls) -> None:
        super().__init__(tls)
        self._endpoints: dict[str, _Endpoint] = {}
        self._servers: list[grpc.aio.Server] = []
        self._expected: tuple[str, Ticket, float] | None = None
        self._buffer = memoryview(bytearray(0))

    async def start(self) -> None:
        for mode, config in MODES.items():
            endpoint = _Endpoint(KvReceiver(self.local("decode", mode), config))
            server = grpc.aio.server(options=SERVER_OPTIONS)
            kv_pb2_grpc.add_KvControlServicer_to_server(endpoint, server)
            endpoint.receiver.kv_address = f"{HOST}:{_port(server, self.tls(mode))}"
            await server.start()
            self._endpoints[mode] = endpoint
            self._servers.append(server)

    async def expect(self, mode: str, num_tokens: int) -> Answer:
        cpu = time.process_time()
        ticket = self._endpoints[mode].receiver.expect("bench", num_tokens, 0, (tuple(self.block_ids(num_tokens)),))
        self._expected = (mode, ticket, cpu)
        return {"ticket": wire.ticket_to_pb(ticket).SerializeToString().hex()}

    async def settle(self) -> Answer:
        assert self._expected
        mode, ticket, cpu = self._expected
        endpoint = self._endpoints[mode]
        await endpoint.receiver.wait_committed(ticket)
        await endpoint.receiver.release(ticket)
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

    async def close(self) -> None:
        for endpoint, server in zip(self._endpoints.values(), self._servers, strict=True):
            endpoint.receiver.check()
            await endpoint.receiver.close()
            await server.stop(1.0)


class _Endpoint(kv_pb2_grpc.KvControlServicer):
    """Receives, and is not asked for anything."""

    def __init__(self, receiver: KvReceiver) -> None:
        self.receiver = receiver

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        await self.receiver.session(request_iterator, context)

    async def Pull(self, request: Any, context: Any) -> Any:  # noqa: N802 - the generated name
        raise NotImplementedError


def _port(server: grpc.aio.Server, tls: Tls | None) -> int:
    any_port = f"{HOST}:0"
    return (
        server.add_insecure_port(any_port)
        if tls is None
        else server.add_secure_port(any_port, tls.server_credentials())
    )


def _ticket(text: str) -> Ticket:
    return wire.ticket_from_pb(worker_pb2.Ticket.FromString(bytes.fromhex(text)))


async def _main(role: str, folder: Path) -> None:
    torch.set_num_threads(1)
    tls = Tls(member_files(folder), name="baton", clients="required")
    end: Prefill | Decode = Prefill(tls) if role == "prefill" else Decode(tls)
    if isinstance(end, Decode):
        await end.start()
    names = ("kv_transfer", "kv_transfer_layers", "expect", "settle", "listen", "accept", "open_raw", "raw_flat")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(end.close)
        await serve({name: getattr(end, name) for name in names if hasattr(end, name)})


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], Path(sys.argv[2])))
