"""GPU interface of the KV transfer: streams, events, and memory for slots. Tests substitute a fake one."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from engine.core.faults import Fault, fault_of
from engine.gpu_memory import CudaMemoryCalls, call_runtime

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Stream(Protocol):
    """Ordered queue of work on a GPU. A `torch.cuda.Stream` is one."""

    @property
    def cuda_stream(self) -> int:
        """Handle of the hardware's stream; torch returns the same one several times."""
        ...

    def wait_stream(self, stream: Any) -> None:
        """Make later work on this stream wait for the work that is now in another stream."""

    def synchronize(self) -> None:
        """Wait until all work that is now in the stream has run."""


class StreamEvent(Protocol):
    """Marked position in a stream. A `torch.cuda.Event` is one."""

    def record(self, stream: Any) -> None:
        """Mark the end of the work that is now in the stream."""

    def query(self) -> bool:
        """Return whether the work before the mark has run."""

    def synchronize(self) -> None:
        """Wait until the work before the mark has run."""


def boot_id() -> str:
    """Return an id of this boot of the machine's kernel: equal in all its processes and containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class GpuExport(Protocol):
    """GPU memory of this process that other processes of the host may read.

    It is never freed: CUDA leaves undefined what a process reads if it still has the memory open.
    """

    @property
    def handle(self) -> bytes:
        """Handle of HANDLE_BYTES with which another process opens the memory."""
        ...

    @property
    def memory(self) -> torch.Tensor:
        """The memory, `uint8[num_bytes]`."""
        ...


class GpuImport(Protocol):
    """GPU memory of another process, which this process reads."""

    def read(self, start: int, into: torch.Tensor) -> None:
        """Copy the bytes from `start` on in the calling thread's stream; `into` is `uint8` on this GPU."""

    def close(self) -> None:
        """Close the memory; no copy may read it any more."""


class GpuDevice(Protocol):
    """A GPU in this process. Thread-safe."""

    @property
    def id(self) -> str:
        """Id that is equal if two processes use the same GPU and NCCL detects it; empty if unknown."""
        ...

    @property
    def uuid(self) -> str:
        """UUID of the GPU in the driver: equal in all processes of the host, and unique."""
        ...

    @property
    def highest_priority(self) -> int:
        """Priority of the streams that are scheduled first: 0 or less."""
        ...

    def may_read(self, uuid: str) -> bool:
        """Return whether memory on the GPU with this UUID may be readable from here.

        This is unknown for a GPU that is not visible to this process; opening the memory decides.
        """

    def stream(self, priority: int) -> Stream:
        """Return the next of the few streams of a priority, which are returned round robin."""

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream."""

    def set_stream(self, stream: Any) -> None:
        """Set the calling thread's current stream."""

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Context manager: set the calling thread's current stream."""

    def event(self) -> StreamEvent:
        """Create an event."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate zeros on the GPU, `uint8[num_bytes]`."""

    def pinned_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate zeros in pinned main memory, which the GPU accesses directly, `uint8[num_bytes]`."""

    def export_buffer(self, num_bytes: int) -> GpuExport:
        """Allocate zeros on the GPU that other processes may read.

        Raises:
            RuntimeError: the GPU is out of memory, or CUDA cannot share memory here.
        """

    def open_buffer(self, handle: bytes) -> GpuImport:
        """Open memory that another process of the host exports.

        Raises:
            RuntimeError: it cannot be read from here.
        """


class CudaGpu:
    """One of torch's devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def id(self) -> str:
        """Id by which NCCL recognizes the GPU: it uses the PCI bus id.

        NCCL rejects two ranks of one PCI bus id, unless it is configured to accept them or takes them for ranks of two
        hosts. The instances of one GPU (MIG) share the bus id, and have separate UUIDs.
        """
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "1":
            return ""
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        call_runtime("cudaDeviceGetPCIBusId", bus_id, _BUS_ID_BYTES, self._device.index)
        return f"{boot_id()} {bus_id.value.decode()} {os.environ.get('NCCL_HOSTID', '')}".strip()

    @property
    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self._device).uuid)

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

    def may_read(self, uuid: str) -> bool:
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == uuid:
                return index == self._device.index or torch.cuda.can_device_access_peer(self._device, index)
        return True

    def export_buffer(self, num_bytes: int) -> GpuExport:
        with torch.cuda.device(self._device):
            return _CudaExport(num_bytes, self._device)

    def open_buffer(self, handle: bytes) -> GpuImport:
        with torch.cuda.device(self._device):
            return _CudaImport(handle, self._device)


# -- CUDA calls without a torch binding: `engine.gpu_memory` ----------------------------------------------------------


_WHOLE_PAGES: Final = 2**21
"""CUDA shares whole pages of this size: a smaller allocation would be shared together with other memory."""
_ANY_TO_ANY: Final = 4
_BUS_ID_BYTES: Final = 32


class _CudaExport:
    """Memory of CUDA's own allocator. torch's memory is part of larger blocks, which would be shared whole."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        calls, pointer = CudaMemoryCalls(device), ctypes.c_void_p()
        call_runtime("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(-(-num_bytes // _WHOLE_PAGES) * _WHOLE_PAGES))
        try:
            self.handle = calls.legacy_handle(pointer.value or 0)
        except RuntimeError:
            call_runtime("cudaFree", pointer)
            raise
        self.memory = calls.bytes_at(pointer.value or 0, num_bytes).zero_()


class _CudaImport:
    def __init__(self, handle: bytes, device: torch.device) -> None:
        self._device = device
        self._calls = CudaMemoryCalls(device)
        self._base = self._calls.open_handle(handle)

    def read(self, start: int, into: torch.Tensor) -> None:
        source, target = ctypes.c_void_p(self._base + start), ctypes.c_void_p(into.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with torch.cuda.device(self._device):
            call_runtime("cudaMemcpyAsync", target, source, ctypes.c_size_t(into.numel()), _ANY_TO_ANY, stream)

    def close(self) -> None:
        self._calls.close_handle(self._base)


class DeviceLosses:
    """Permanent device failures that transfer threads of this process have detected. Thread-safe.

    Attributes:
        found: the error after which a device no longer computes in this process; empty: none occurred.
    """

    def __init__(self) -> None:
        self.found = ""

    def note(self, error: BaseException) -> None:
        """Record an error if it, or its cause, means that a device no longer computes."""
        if fault_of(error) is Fault.DEVICE_LOST:
            self.found = self.found or str(error)


LOSSES: Final = DeviceLosses()
GPUS: dict[torch.device, GpuDevice] = {}
"""GPUs that this process has used. Tests put theirs here."""
_LOCK = threading.Lock()


def gpu_of(device: torch.device) -> GpuDevice | None:
    """Return the GPU behind a device of torch; None for a CPU."""
    if device.type == "cpu":
        return None
    known = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    with _LOCK:
        return GPUS.setdefault(known, CudaGpu(known))
