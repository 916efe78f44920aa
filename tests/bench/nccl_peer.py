"""One end of the NCCL benchmark: `python -m tests.bench.nccl_peer sender|receiver`.

What both ends do alike is in `_End`; a sender's seconds are until the receiver has said that everything is there.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import statistics
import sys
import threading
import time
from collections import deque
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import torch
import torch.multiprocessing.reductions  # tensors on a GPU are pickled as CUDA IPC handles
import uvloop
from torch._C._distributed_c10d import FileStore, PrefixStore

from kvstore.transfer.pipeline.thread import use_own_stream
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import RECEIVER, SENDER
from kvstore.transfer.transport.gloo import RendezvousStore
from kvstore.transfer.transport.nccl_env import nccl_environment
from kvstore.transfer.transport.select import open_receiver, open_sender
from kvstore.transfer.transport.staging import StagingPool
from tests.bench.peer import serve
from tests.gpu.decode_step import DecodeStep
from tests.gpu.nccl_ends import environment

WINDOW = 4
MAX_CHUNK_BYTES = 64 * 2**20
TIMEOUT_S = 60.0
ARMS = ("NCCL link", "bare NCCL", "CUDA IPC")
NUM_STEPS = 300
WORD = bytes(HEADER_BYTES)

Answer = dict[str, Any]


class _End:
    """Attributes beside the obvious: `_bare` is a communicator, `_told` a gloo pair on which both ends speak."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._peer = 1 - rank

    async def open(self, mode: str, folder: str) -> Answer:
        await asyncio.to_thread(self._open, mode, folder)
        return {}

    async def move(self, arm: str, num_chunks: int, chunk_bytes: int) -> Answer:
        return {"wall_s": await asyncio.to_thread(self._move, arm, num_chunks, chunk_bytes)}

    async def blocks(self, arm: str, num_blocks: int, block_bytes: int) -> Answer:
        return {"wall_s": await asyncio.to_thread(self._timed, partial(self._blocks, arm, num_blocks, block_bytes))}

    def _open(self, mode: str, folder: str) -> None:
        os.environ.update(environment(mode, self._rank))
        self._device = torch.device("cuda", self._rank if mode == "two GPUs" else 0)
        torch.cuda.set_device(self._device)
        if self._rank == RECEIVER:
            self._step = DecodeStep(self._device)
        self._ring = torch.zeros(WINDOW, MAX_CHUNK_BYTES, dtype=torch.uint8, device=self._device)
        """What is sent, or where it goes."""
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        store = FileStore(str(Path(folder) / "store"), 2)
        make: Any = open_sender if self._rank == SENDER else open_receiver
        staging = StagingPool(WINDOW, MAX_CHUNK_BYTES, self._device, pinned=False)
        self._link, bare, self._told = (
            make(
                kind, cast("RendezvousStore", PrefixStore(name, store)), "127.0.0.1", staging, WINDOW, *[TIMEOUT_S] * 2
            )
            for name, kind in (("link", "nccl"), ("bare", "nccl"), ("told", "gloo"))
        )
        self._bare_link = bare
        self._bare = bare._group

    def _move(self, arm: str, num_chunks: int, chunk_bytes: int) -> float:
        use_own_stream(self._device)
        move = {"NCCL link": self._by_link, "bare NCCL": self._by_bare, "CUDA IPC": self._by_ipc}[arm]
        return self._timed(lambda: move(num_chunks, chunk_bytes))

    def _timed(self, move: Any) -> float:
        use_own_stream(self._device)
        start = time.perf_counter()
        move()
        torch.cuda.current_stream(self._device).synchronize()
        self._stream.synchronize()
        if self._rank == RECEIVER:
            self._told.send_signal(WORD).wait()
        else:
            self._told.recv_signal().wait()
        return time.perf_counter() - start

    def _by_bare(self, num_chunks: int, chunk_bytes: int) -> None:
        under_way: deque[torch.cuda.Event] = deque()
        move = self._bare.send if self._rank == SENDER else self._bare.recv
        with torch.cuda.stream(self._stream):
            for number in range(num_chunks):
                if len(under_way) == WINDOW:
                    under_way.popleft().synchronize()
                move([self._ring[number % WINDOW, :chunk_bytes]], self._peer, 0).wait()
                under_way.append(self._stream.record_event())

    def _blocks(self, arm: str, num_blocks: int, block_bytes: int) -> None:
        """Blocks lie in the first half of the ring, in random order; the second half stages."""
        memory = self._ring.view(-1)
        half = memory.numel() // 2
        blocks = memory[:half].view(-1, block_bytes)
        staged = memory[half : half + num_blocks * block_bytes].view(num_blocks, block_bytes)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(self._rank))[:num_blocks]
        move = self._bare.send if self._rank == SENDER else self._bare.recv
        with torch.cuda.stream(self._stream):
            if arm == "grouped":
                self._bare._start_coalescing()
                for block in order.tolist():
                    move([blocks[block]], self._peer, 0)
                self._bare._end_coalescing().wait()
                return
            chosen = order.to(self._device)
            if self._rank == SENDER:
                torch.index_select(blocks, 0, chosen, out=staged)
            move([staged], self._peer, 0).wait()
            if self._rank == RECEIVER:
                blocks.index_copy_(0, chosen, staged)

    def _by_link(self, num_chunks: int, chunk_bytes: int) -> None:
        raise NotImplementedError

    def _by_ipc(self, num_chunks: int, chunk_bytes: int) -> None:
        raise NotImplementedError


class Sender(_End):
    async def share_ring(self) -> Answer:
        return {"handle": bytes(ForkingPickler.dumps(self._ring)).hex()}

    async def move_beside_decode(self, arm: str, num_chunks: int, chunk_bytes: int) -> Answer:
        return await self.move(arm, num_chunks, chunk_bytes)

    def _by_link(self, num_chunks: int, chunk_bytes: int) -> None:
        for _ in range(num_chunks):
            slot = self._link.slots.acquire(TIMEOUT_S)
            self._link.send_chunk(slot, chunk_bytes).wait()
            self._link.slots.release(slot)

    def _by_ipc(self, num_chunks: int, chunk_bytes: int) -> None:
        said = []
        for number in range(num_chunks):
            if number >= WINDOW:
                self._told.recv_signal().wait()  # a slot of the ring is free again
            said.append(self._told.send_signal(WORD))
        for _ in range(min(WINDOW, num_chunks)):
            self._told.recv_signal().wait()
        for operation in said:
            operation.wait()


class Receiver(_End):
    async def map_ring(self, handle: str) -> Answer:
        self._senders_ring = pickle.loads(bytes.fromhex(handle))
        return {}

    async def decode(self) -> Answer:
        return await asyncio.to_thread(lambda: _summary([self._step.run() for _ in range(NUM_STEPS)]))

    async def move_beside_decode(self, arm: str, num_chunks: int, chunk_bytes: int) -> Answer:
        return await asyncio.to_thread(self._move_beside_decode, arm, num_chunks, chunk_bytes)

    def _move_beside_decode(self, arm: str, num_chunks: int, chunk_bytes: int) -> Answer:
        lane = threading.Thread(target=self._move, args=(arm, num_chunks, chunk_bytes))
        lane.start()
        steps = [self._step.run()]
        while lane.is_alive():
            steps.append(self._step.run())
        return _summary(steps)

    def _by_link(self, num_chunks: int, chunk_bytes: int) -> None:
        posted: deque[tuple[Any, Any]] = deque()
        for number in range(num_chunks):
            while len(posted) < min(WINDOW, num_chunks - number):
                slot = self._link.slots.acquire(TIMEOUT_S)
                posted.append((slot, self._link.recv_chunk(slot, chunk_bytes)))
            slot, operation = posted.popleft()
            operation.wait()
            self._link.slots.release(slot)

    def _by_ipc(self, num_chunks: int, chunk_bytes: int) -> None:
        said = []
        for number in range(num_chunks):
            self._told.recv_signal().wait()
            slot = number % WINDOW
            self._ring[slot, :chunk_bytes].copy_(self._senders_ring[slot, :chunk_bytes], non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
            said.append(self._told.send_signal(WORD))
        for operation in said:
            operation.wait()


def _summary(steps_s: list[float]) -> Answer:
    return {"median_s": statistics.median(steps_s), "p99_s": sorted(steps_s)[int(0.99 * len(steps_s))]}


async def _main(role: str) -> None:
    os.environ.update(nccl_environment())
    end: Sender | Receiver = Sender(SENDER) if role == "sender" else Receiver(RECEIVER)
    names = ("open", "share_ring", "map_ring", "move", "blocks", "decode", "move_beside_decode")
    await serve({name: getattr(end, name) for name in names if hasattr(end, name)})


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1]))
