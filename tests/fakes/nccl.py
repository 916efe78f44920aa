"""`ProcessGroupNCCL` over a socket, on a fake GPU: what torch 2.13 and NCCL do at the places where transports may hang.

a communicator         takes the next stream of its priority, once, and is made in a time of its own
send and recv          are put into that stream, behind what is in the caller's, and move bytes once both halves run
a half without peer    spins in its stream until the communicator is aborted; a dead peer is no error
an aborted operation   has failed, and then the watchdog sleeps 4 x TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC with the lock
                       that every launch takes; the destructor waits for the watchdog
abort in a launch      uses a communicator that is gone: a crash, which is noted here
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kvstore.transfer.device import GPUS
from kvstore.transfer.transport.nccl_env import PINNED
from tests.fakes.gpu import FakeEvent, FakeGpu, FakeStream, current_gpu

if TYPE_CHECKING:
    import pytest

WATCHDOG_TICK_S = 0.01
DUMP_MILSEC = 15_000
NONBLOCKING_TIMEOUT_S = 1800.0
"""torch's defaults."""


@dataclass
class Knobs:
    """What a test sets, and what it sees. New for each test."""

    opening_s: float = 0.0
    never_opens: bool = False
    launch_s: float = 0.0
    """A call into the communicator takes so long."""
    let_abort: threading.Event = field(default_factory=threading.Event)
    """Aborts wait for it; set by default."""
    let_launch: threading.Event = field(default_factory=threading.Event)
    """Calls into the communicator wait for it; set by default."""
    launching: threading.Event = field(default_factory=threading.Event)
    """A call has begun."""
    num_crashes: int = 0
    groups: list[Any] = field(default_factory=list)
    """Those that have their stream: the stream and the options of each, which is let go."""


class FakeOptions:
    """These options have the fields that the product sets, and no others: a name that torch lacks is an error."""

    class Config:
        __slots__ = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas")
        blocking: int
        cga_cluster_size: int
        max_ctas: int
        min_ctas: int

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = FakeOptions.Config()
        self._timeout = timedelta(minutes=10)


class FakeNccl:
    """The name `torch.distributed.ProcessGroupNCCL` in tests."""

    Options = FakeOptions
    knobs: ClassVar[Knobs] = Knobs()

    def __init__(self, store: Store, rank: int, size: int, options: FakeOptions) -> None:
        assert size == 2
        self.options = options
        self._knobs = FakeNccl.knobs
        self._rank = rank
        self._store = store
        self._state = _State(options._timeout.total_seconds())
        self._wire: Wire | None = None
        self._stream: FakeStream | None = None
        self._num_launching = 0
        self._watchdog = threading.Thread(target=self._state.watch, name="fake-nccl-watchdog", daemon=True)
        self._watchdog.start()

    def __del__(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._state.destroyed.set()
        self._watchdog.join()

    def eager_connect_single_device(self, device: torch.device) -> None:
        gpu = GPUS[device]
        assert isinstance(gpu, FakeGpu)
        self._connect(gpu)

    def _connect(self, gpu: FakeGpu) -> None:
        self._stream = gpu.stream(gpu.highest_priority if self.options.is_high_priority_stream else 0)
        self._knobs.groups.append(SimpleNamespace(stream=self._stream, options=self.options, state=self._state))
        deadline = time.monotonic() + NONBLOCKING_TIMEOUT_S
        time.sleep(self._knobs.opening_s)
        while self._knobs.never_opens and not self._state.aborted.is_set():
            if not self.options.config.blocking and time.monotonic() > deadline:
                raise RuntimeError("NCCL timeout when waiting for nonblocking call to become successful.")
            time.sleep(WATCHDOG_TICK_S)
        if self._state.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        self._wire = Wire(self._store, self._rank)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        return self._launch("send", tensors[0])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        return self._launch("recv", tensors[0])

    def _launch(self, move: str, message: torch.Tensor) -> FakeWork:
        self._num_launching += 1
        try:
            if self._stream is None:  # lazy
                self._connect(current_gpu())
            assert self._stream is not None
            self._knobs.launching.set()
            time.sleep(self._knobs.launch_s)
            while not self._knobs.let_launch.wait(WATCHDOG_TICK_S):
                pass
            work = FakeWork(time.monotonic() + self._state.work_timeout_s)
            with self._state.lock:  # workMetaListMutex_
                if self._state.aborted.is_set():
                    raise RuntimeError("NCCL communicator was aborted")
                self._state.works.append(work)
            self._stream.wait_stream(self._stream.hardware.gpu.current_stream())
            if (races := self._stream.hardware.gpu.races) is not None:
                reads, writes = ([message], []) if move == "send" else ([], [message])
                races.access(f"nccl {move}", self._stream.cuda_stream, reads, writes)
            wire, state = self._wire, self._state
            assert wire is not None
            self._stream.hardware.put_until(*_kernel(work, wire, move, message, state))
            work.end.record(self._stream)
            return work
        finally:
            self._num_launching -= 1

    def abort(self) -> None:
        if self._num_launching and self._wire is not None:
            self._knobs.num_crashes += 1
        self._knobs.let_abort.wait()
        self._state.aborted.set()
        if self._wire is not None:
            self._wire.close()


class _State:
    """What the watchdog and the streams share with a group, which they do not keep alive."""

    def __init__(self, work_timeout_s: float) -> None:
        self.work_timeout_s = work_timeout_s
        self.aborted = threading.Event()
        self.destroyed = threading.Event()
        self.lock = threading.Lock()
        self.works: list[FakeWork] = []

    def watch(self) -> None:
        while not self.destroyed.wait(WATCHDOG_TICK_S):
            with self.lock:
                now = time.monotonic()
                self.works = [work for work in self.works if work.failed or not work.end.has_happened()]
                if any(work.failed or now > work.deadline for work in self.works):
                    time.sleep(4 * int(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", DUMP_MILSEC)) / 1e3)
                    self.works.clear()


class FakeWork:
    """One operation."""

    def __init__(self, deadline: float) -> None:
        self.end = FakeEvent()
        self.deadline = deadline
        self.failed = False

    def wait(self) -> None:
        """Makes the caller's stream wait, as on a GPU."""
        self.end.wait(current_gpu().current_stream())


class Wire:
    """What connects two ends: a half moves bytes only while the other half runs."""

    def __init__(self, store: Store, rank: int) -> None:
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                store.set("fake/port", str(listener.getsockname()[1]))
                listener.settimeout(10.0)
                self._socket, _ = listener.accept()
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(store.get("fake/port"))), 10.0)
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def move(self, move: str, message: torch.Tensor) -> Iterator[None]:
        """Yields whenever it would have to wait."""
        data = message.numpy().data.cast("B")
        if move == "recv":
            yield from self._repeat(self._socket.send, memoryview(b"r"))
            yield from self._repeat(self._socket.recv_into, data)
        else:
            yield from self._repeat(self._socket.recv_into, memoryview(bytearray(1)))
            yield from self._repeat(self._socket.send, data)

    @staticmethod
    def _repeat(call: Callable[[memoryview], int], data: memoryview) -> Iterator[None]:
        while data:
            try:
                num_bytes = call(data)
            except BlockingIOError:
                num_bytes = 0
                yield
            except OSError:  # the peer is gone, which no kernel notices
                while True:
                    yield
            else:
                while num_bytes == 0:
                    yield
            data = data[num_bytes:]


def _kernel(
    work: FakeWork, wire: Wire, move: str, message: torch.Tensor, state: _State
) -> tuple[Callable[[], bool], Callable[[], None]]:
    """The kernel of one half: whether it is through, and what follows then."""
    moving = wire.move(move, message)

    def is_through() -> bool:
        return state.aborted.is_set() or next(moving, wire) is wire

    def end() -> None:
        work.failed = state.aborted.is_set()

    return is_through, end


@contextlib.contextmanager
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Knobs]:
    """torch with NCCL, in a process that was started for it."""
    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)
    knobs = FakeNccl.knobs = Knobs()
    knobs.let_abort.set()
    knobs.let_launch.set()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    try:
        yield knobs
    finally:
        knobs.let_abort.set()
        knobs.let_launch.set()
