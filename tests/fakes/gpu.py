"""A GPU that is none: streams of work that is done in order by threads, and memory that is a CPU's.

A stream is a thread that does what was put into it, one after the other; as in torch there are 32 a priority, given out
in turn, so the thirty-third is the first again. What torch computes is computed at once, whatever the stream. What
waits is NCCL's (`tests.fakes.nccl`): a receive that spins keeps its stream, and all that is behind it. On a late GPU
(`tests.fakes.late`) nothing is done before somebody waits for it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.gpu_memory import HANDLE_BYTES
from kvstore.transfer import device
from kvstore.transfer.copy import blocks, kernel_choice
from kvstore.transfer.transport import exports, nccl, streams
from tests.fakes.late import Late, LateHardware, Memory
from tests.fakes.races import Races

NUM_STREAMS = 32
PRIORITIES = (0, -1, -2, -3)
PATIENCE_S = 60.0
_CURRENT = threading.local()


class Hardware:
    """One of the streams that the GPU has."""

    def __init__(self, gpu: FakeGpu, handle: int) -> None:
        self.gpu = gpu
        self.handle = handle
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], object]) -> None:
        with self.gpu.lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"fake-stream-{self.handle}", daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def put_until(self, happened: Callable[[], bool], then: Callable[[], object] = lambda: None) -> None:
        """Keeps the stream until something has happened."""

        def wait() -> None:
            self.gpu.until(happened)
            then()

        self.put(wait)

    def drive(self) -> None:
        """Works by itself."""

    def end(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class FakeStream:
    """As much of a `torch.cuda.Stream` as the KV transfer uses."""

    def __init__(self, hardware: Hardware | LateHardware) -> None:
        self.hardware = hardware

    @property
    def cuda_stream(self) -> int:
        return self.hardware.handle

    def wait_stream(self, stream: Any) -> None:
        place = FakeEvent()
        place.record(stream)
        place.wait(self)

    def synchronize(self) -> None:
        place = FakeEvent()
        place.record(self)
        place.happen(self.hardware.gpu)


class FakeEvent:
    """As much of a `torch.cuda.Event`. One that was not recorded is over, as there."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._done.set()
        self._hardware: Hardware | LateHardware | None = None
        self._races: Races | None = None
        self._place = 0

    def record(self, stream: Any) -> None:
        self._done = done = threading.Event()
        self._hardware = stream.hardware
        self._races = stream.hardware.gpu.races
        if self._races is not None:
            self._place = self._races.record(stream.cuda_stream)
        stream.hardware.put(done.set)

    def has_happened(self) -> bool:
        """What a query says, to one who does not ask the GPU."""
        return self._done.is_set()

    def query(self) -> bool:
        self._drive()
        is_done = self._done.is_set()
        if is_done and self._races is not None:
            self._races.happen(self._place)
        return is_done

    def synchronize(self) -> None:
        if self._hardware is not None:
            self.happen(self._hardware.gpu)

    def wait(self, stream: Any) -> None:
        if self._races is not None:
            self._races.wait(self._place, stream.cuda_stream)
        done, drive = self._done, self._drive
        stream.hardware.put_until(lambda: _driven(drive, done))

    def _drive(self) -> None:
        if self._hardware is not None:
            self._hardware.drive()

    def happen(self, gpu: FakeGpu) -> None:
        """Returns once the place is reached."""
        gpu.until(self.query)


def _driven(drive: Callable[[], None], done: threading.Event) -> bool:
    if not done.is_set():
        drive()
    return done.is_set()


class FakeExport:
    """A file in memory stands for the GPU's, which every process of the host can open by its name."""

    def __init__(self, num_bytes: int) -> None:
        number, name = tempfile.mkstemp(prefix="fake-gpu-")
        os.ftruncate(number, num_bytes)
        os.close(number)
        self.name = name
        self.handle = name.encode().ljust(HANDLE_BYTES, b"\0")
        self.memory = _mapped(name)


class FakeImport:
    def __init__(self, gpu: FakeGpu, handle: bytes) -> None:
        name = handle.rstrip(b"\0").decode()
        if not os.path.exists(name):  # noqa: PTH110
            raise RuntimeError("cudaIpcOpenMemHandle: invalid resource handle")
        self._gpu = gpu
        known = gpu.exported(name)
        self._memory: torch.Tensor | None = _mapped(name) if known is None else known
        gpu.num_open += 1
        gpu.num_ever_open += 1

    def read(self, start: int, into: torch.Tensor) -> None:
        """A copy of the copy engine's: it is put into the stream, and done when its turn comes. On a GPU that is not
        late that is waited for, as what torch computes afterwards is computed at once.
        """
        memory, stream = self._memory, self._gpu.current_stream()
        assert memory is not None, "the memory was closed"
        source = memory[start : start + len(into)]
        assert len(source) == len(into), "beyond the end: an error that no process survives"
        if self._gpu.races is not None:
            self._gpu.races.access("copy", stream.cuda_stream, [source], [into])
        stream.hardware.put(lambda: into.copy_(source))
        if self._gpu.memory is None:
            done = threading.Event()
            stream.hardware.put(done.set)
            self._gpu.until(done.is_set)

    def close(self) -> None:
        self._memory = None
        self._gpu.num_open -= 1


def _mapped(name: str) -> torch.Tensor:
    return torch.from_file(name, shared=True, size=os.stat(name).st_size, dtype=torch.uint8)  # noqa: PTH116


class FakeGpu:
    """A `kvstore.transfer.device.GpuDevice`.

    Attributes:
        num_taken: streams that were taken of each priority, since the start.
        exports: what other processes may read.
        num_open, num_ever_open: number of exports of other processes that are, and that were ever open here.
        unreachable: UUIDs of GPUs that it cannot read, as it says.
        is_deaf: it cannot open anything, and does not say so before.
    """

    def __init__(self, index: int, gpu_id: str = "", *, is_late: bool = False) -> None:
        self.device = torch.device("cuda", index)
        self.id = gpu_id or f"fake-{index}"
        self.uuid = self.id
        self.exports: list[FakeExport] = []
        self.num_open = 0
        self.num_ever_open = 0
        self.unreachable: set[str] = set()
        self.is_deaf = False
        self.highest_priority = PRIORITIES[-1]
        self.lock = threading.RLock()
        self.num_taken = dict.fromkeys(PRIORITIES, 0)
        self.is_over = False
        self.races: Races | None = None
        """Notes what is done on the streams, and finds what is done too early; None: nobody watches."""
        self.memory = Memory() if is_late else None
        """What is on a late GPU."""
        make: type[Hardware | LateHardware] = LateHardware if is_late else Hardware
        first = 10_000 * (index + 1)
        self._default = make(self, first)
        self._pools = {
            priority: [make(self, first + 1000 * number + place) for place in range(NUM_STREAMS)]
            for number, priority in enumerate(PRIORITIES, 1)
        }

    def stream(self, priority: int) -> FakeStream:
        with self.lock:
            place = self.num_taken[priority]
            self.num_taken[priority] += 1
            return FakeStream(self._pools[priority][place % NUM_STREAMS])

    def current_stream(self) -> FakeStream:
        found: FakeStream | None = getattr(_CURRENT, "stream", None)
        return found if found is not None and found.hardware.gpu is self else FakeStream(self._default)

    def set_stream(self, stream: Any) -> None:
        _CURRENT.stream = stream

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before = getattr(_CURRENT, "stream", None)
        self.set_stream(stream)
        late = Late(self.memory, stream.hardware) if self.memory is not None else contextlib.nullcontext()
        try:
            with late:
                yield
        finally:
            self.set_stream(before)

    def event(self) -> FakeEvent:
        return FakeEvent()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        made = torch.zeros(num_bytes, dtype=torch.uint8)
        return made if self.memory is None else self.memory.own(made)

    def pinned_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def may_read(self, uuid: str) -> bool:
        return uuid not in self.unreachable

    def export_buffer(self, num_bytes: int) -> FakeExport:
        self.exports.append(FakeExport(num_bytes))
        if self.memory is not None:
            self.memory.own(self.exports[-1].memory)
        return self.exports[-1]

    def open_buffer(self, handle: bytes) -> FakeImport:
        if self.is_deaf:
            raise RuntimeError("cudaIpcOpenMemHandle: peer access is not supported between these two devices")
        return FakeImport(self, handle)

    @staticmethod
    def exported(name: str) -> torch.Tensor | None:
        """The memory behind a name of this process's own: one storage, whose uses the sanitizer sees together."""
        known = [gpu for gpu in device.GPUS.values() if isinstance(gpu, FakeGpu)]
        return next((export.memory for gpu in known for export in gpu.exports if export.name == name), None)

    def until(self, happened: Callable[[], bool]) -> None:
        """Waits as a stream does, without an end of its own."""
        tick = threading.Event()
        while not happened() and not self.is_over:
            tick.wait(0.001)

    def end(self) -> None:
        """Ends every stream, whatever is in it."""
        self.is_over = True
        for hardware in (self._default, *(one for pool in self._pools.values() for one in pool)):
            hardware.end()


def current_gpu() -> FakeGpu:
    """The GPU whose stream is the calling thread's."""
    gpu: FakeGpu = _CURRENT.stream.hardware.gpu
    return gpu


@contextlib.contextmanager
def fake_gpus(num_gpus: int, *, same: bool = False, late: bool = False) -> Iterator[list[FakeGpu]]:
    """GPUs of this process, from `cuda:0` on. The same one several times: as two processes on one GPU see it."""
    if late:
        importlib.import_module("torch._dynamo")  # its first use, in a thread, would take seconds
    gpus = [FakeGpu(index, "the only one" if same else "", is_late=late) for index in range(num_gpus)]
    before = dict(device.GPUS)
    device.GPUS.update({gpu.device: gpu for gpu in gpus})
    try:
        yield gpus
    finally:
        device.GPUS.clear()
        device.GPUS.update(before)
        for gpu in gpus:
            nccl._TURNS.pop(gpu.device, None)
            streams._STREAMS.pop(gpu, None)
            blocks._BUFFERS.pop(gpu, None)
            kernel_choice.CHOSEN.pop(gpu.device, None)
            exports._RINGS.pop(gpu, None)
            gpu.end()
            for export in gpu.exports:
                os.unlink(export.name)  # noqa: PTH108
