"""What KV takes over a GPU's memory between two processes: gather, copy and scatter, each alone, and all of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig

from engine.model.asking import ask
from engine.model.kv_cache import KVCache
from kvstore.transfer.copy.blocks import BlockCopier, RankCache
from kvstore.transfer.pipeline.receive_loop import ChunkWriter, ReceiveLoop
from kvstore.transfer.pipeline.send_loop import ChunkQueue, SendLoop
from kvstore.transfer.protocol.plan import Chunk
from kvstore.transfer.transport.streams import own_stream
from tests.gpu.hour.checks import Found, is_rehearsal, judged, report_part
from tests.gpu.hour.ends import Side, header_of, taken, two
from tests.gpu.hour.kv_transfer import EPOCH, KV_OF_8B, Always, Setting, dtype, in_thread, seen_by
from tests.gpu.hour.models import SMALL, device_name, synchronize

KIND = "ipc"
NUM_TOKENS, SLOT_BYTES = (256, 2**16) if is_rehearsal() else (8192, 32 * 2**20)
NUM_ROUNDS = 4
"""Of each stage, of which the first warms up."""
LEAST_GB_S = 100.0
STAGES = ("gather", "copy", "scatter", "all")


class Stages:
    """One side: a cache, and the blocks of one sequence in it."""

    def __init__(self, side: Side) -> None:
        fields = SMALL if is_rehearsal() else {**SMALL, **KV_OF_8B}
        spec = ask(LlamaConfig(**fields)).shape.cache_spec(16, dtype(), 1)
        num_blocks = NUM_TOKENS // 16
        cache = KVCache(spec, num_blocks, 1, torch.device(device_name()))
        for group in cache.groups:
            group.normal_()
        self._side = side
        self._setting = Setting(spec, SLOT_BYTES, NUM_TOKENS)
        self._chunks = self._setting.plan.chunks
        self._cache: RankCache = seen_by(side, cache)
        self._blocks = (tuple(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(side.rank)).tolist()),)
        self._errors: list[BaseException] = []

    def run(self) -> dict[str, float]:
        """Returns what each stage took, in seconds; of one that this side has no part in nothing."""
        synchronize()
        found = {}
        with own_stream(self._side.device):
            for name, runs_here in (("gather", self._side.sends), ("scatter", not self._side.sends)):
                self._side.meet(f"before-{name}")
                if runs_here:
                    found[name] = self._moves(name)
            self._side.meet("before-copy")
            found["copy"] = self._copies()
        self._side.meet("before-all")
        found["all"] = self._whole()
        self._side.meet("end")
        return found

    def _copier(self) -> BlockCopier:
        return BlockCopier(self._cache, self._setting.plan, self._setting.layout, 0, self._blocks)

    def _moves(self, name: str) -> float:
        """Gathers into, or scatters out of, two buffers of this process in turn."""
        copier = self._copier()
        size = max(chunk.num_bytes for chunk in self._chunks)
        buffers = [torch.zeros(size, dtype=torch.uint8, device=device_name()) for _ in range(2)]
        begin: Callable[[Chunk, torch.Tensor], Any] = partial(copier.begin_scatter, checked=True)
        if name == "gather":
            begin = partial(copier.begin_gather, fence=None, checked=True)

        def once() -> None:
            moves: deque[Any] = deque()
            for number, chunk in enumerate(self._chunks):
                if len(moves) == len(buffers):
                    moves.popleft().end()
                moves.append(begin(chunk, buffers[number % 2][: chunk.num_bytes]))
            while moves:
                moves.popleft().end()

        return _least_s(once)

    def _copies(self) -> float:
        """Chunks through a connection, of which nobody gathers or scatters anything."""
        link = self._side.open(KIND, "copies", slot_bytes=SLOT_BYTES, op_timeout_s=20.0)
        rounds = []
        for _ in range(NUM_ROUNDS):
            began = time.monotonic()
            for chunk in self._chunks:
                slot = taken(link.slots.acquire(10.0))
                if self._side.sends:
                    slot.write_header(header_of(chunk.num_bytes))
                    link.send_chunk(slot, chunk.num_bytes).wait()
                else:
                    link.recv_chunk(slot, chunk.num_bytes).wait()
                link.slots.release(slot)
            if not self._side.sends:
                link.settle()
            rounds.append(time.monotonic() - began)
        self._side.meet("copied")
        link.close()
        return min(rounds[1:])

    def _whole(self) -> float:
        """What a worker does, by its own loops, of a prompt that is computed already."""
        return (self._sent if self._side.sends else self._received)()

    def _sent(self) -> float:
        machine = Always()
        opened: list[Any] = []
        loop = SendLoop(EPOCH, machine, 2.0)  # type: ignore[arg-type]

        def run() -> None:
            opened.append(self._side.open(KIND, "whole", slot_bytes=SLOT_BYTES, op_timeout_s=20.0))
            loop.run(opened[0])

        thread = in_thread(self._side, run, self._errors)
        began = []
        for number in range(NUM_ROUNDS):
            queue = ChunkQueue(self._setting.ticket(number), self._copier(), True)
            queue.finish()
            self._side.meet(f"round-{number}")
            began.append(time.monotonic())
            loop.add(queue)
            machine.until((number + 1) * len(self._chunks), 30.0)
            self._side.put(f"began-{number}", repr(began[-1]).encode())
            self._side.meet(f"through-{number}")
        loop.stop()
        thread.join(5)
        opened[0].close()
        assert not self._errors, self._errors
        return 0.0

    def _received(self) -> float:
        machine = Always()
        writers: dict[int, ChunkWriter] = {}
        loop = ReceiveLoop(EPOCH, writers, SLOT_BYTES, 10.0)

        def run() -> None:
            loop.run(self._side.open(KIND, "whole", slot_bytes=SLOT_BYTES, op_timeout_s=20.0))

        in_thread(self._side, run, self._errors)
        rounds = []
        for number in range(NUM_ROUNDS):
            ticket = self._setting.ticket(number)
            writers[ticket.generation] = ChunkWriter(ticket, 1, self._copier(), machine, True)  # type: ignore[arg-type]
            self._side.meet(f"round-{number}")
            machine.until((number + 1) * len(self._chunks), 30.0)
            began_s = float(self._side.get(f"began-{number}"))  # both processes read one clock
            rounds.append(machine.last_s - began_s)
            self._side.meet(f"through-{number}")
        loop.stop()
        return min(rounds[1:])


def _least_s(job: Callable[[], None]) -> float:
    rounds = []
    for _ in range(NUM_ROUNDS):
        began = time.monotonic()
        job()
        rounds.append(time.monotonic() - began)
    return min(rounds[1:])


def _run(side: Side) -> tuple[dict[str, float], int]:
    stages = Stages(side)
    return stages.run(), stages._setting.plan.num_bytes


def stages() -> Found:
    """Rates of the KV of 8,192 tokens of an 8B Llama, in chunks of 32 MiB, with checksums where a worker has them."""
    (sender, num_bytes), (receiver, _) = two(_run, 90.0)
    seconds = {"gather": sender["gather"], **{name: receiver[name] for name in STAGES[1:]}}
    found = [report_part(f"ipc-{name}", partial(_rated, name, num_bytes, seconds[name])) for name in STAGES]
    return judged(all(part.status == "pass" for part in found), "a stage is too slow", mib=num_bytes >> 20)


def _rated(name: str, num_bytes: int, seconds: float) -> Found:
    rate = num_bytes / seconds / 1e9
    is_right = is_rehearsal() or name != "all" or rate >= LEAST_GB_S
    return judged(is_right, f"less than {LEAST_GB_S:g} GB/s", gb_s=round(rate, 2), ms=round(seconds * 1e3, 2))
