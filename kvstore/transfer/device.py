"""A GPU as the hand-over uses it: streams, events, and memory for slots. Tests put one in its place that is none."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Stream(Protocol):
    """An order of work on a GPU. A `torch.cuda.Stream` is one."""

    @property
    def cuda_stream(self) -> int:
        """The handle of the hardware's stream; torch gives out the same one several times."""
        ...

    def wait_stream(self, stream: Any) -> None:
        """Lets what comes later here wait for what is in another stream by now."""

    def synchronize(self) -> None:
        """Waits until all that is in the stream by now has run."""


class StreamEvent(Protocol):
    """A place in a stream. A `torch.cuda.Event` is one."""

    def record(self, stream: Any) -> None:
        """Makes the end of what is in the stream by now the place."""

    def query(self) -> bool:
        """Returns whether the work before the place has run."""


class GpuDevice(Protocol):
    """A GPU in this process. Any thread may use it."""

    @property
    def id(self) -> str:
        """Equal where two processes use the same GPU, and NCCL knows it; empty: not known."""
        ...

    @property
    def highest_priority(self) -> int:
        """The priority of the streams that go first: 0 or less."""
        ...

    def stream(self, priority: int) -> Stream:
        """Takes the next stream of a priority's few, which are given out in turn, again and again."""

    def current_stream(self) -> Stream:
        """Returns the calling thread's own stream."""

    def set_stream(self, stream: Any) -> None:
        """Makes a stream the calling thread's own."""

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Makes a stream the calling thread's own within a block."""

    def event(self) -> StreamEvent:
        """Makes an event."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocates zeros on the GPU, `uint8[num_bytes]`."""

    def pinned_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocates zeros in main memory that the GPU reaches by itself, `uint8[num_bytes]`."""


class CudaGpu:
    """One of torch's devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def id(self) -> str:
        """NCCL refuses two ranks on one GPU, unless it is asked to, or takes them for ranks of two hosts."""
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "1":
            return ""
        uuid = torch.cuda.get_device_properties(self._device).uuid
        return f"{uuid} {os.environ.get('NCCL_HOSTID', '')}".strip()

    @property
    def highest_priority(self) -> int:
        _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        return int(highest)

    def stream(self, priority: int) -> Stream:
        made: Stream = torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]
        return made

    def current_stream(self) -> Stream:
        found: Stream = torch.cuda.current_stream(self._device)
        return found

    def set_stream(self, stream: Any) -> None:
        torch.cuda.set_stream(stream)

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def event(self) -> StreamEvent:
        made: StreamEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return made

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def pinned_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


GPUS: dict[torch.device, GpuDevice] = {}
"""The GPUs that this process has used. Tests put theirs here."""
_LOCK = threading.Lock()


def gpu_of(device: torch.device) -> GpuDevice | None:
    """Returns the GPU behind a device of torch; None for a CPU."""
    if device.type == "cpu":
        return None
    known = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    with _LOCK:
        return GPUS.setdefault(known, CudaGpu(known))
