"""CUDA's calls to share GPU memory between processes, which torch does not offer. Tests use a fake of them.

CUDA shares memory in two ways. Memory of `cudaMalloc` has a *legacy handle* of 64 bytes, which other processes open.
Virtual memory (VMM) consists of *allocations* that are mapped into reserved addresses. Other processes import an
allocation from a file descriptor, and map it themselves:

    exporting process    | allocation 0 | allocation 1 | ...        importing process    | reserved addresses  ... |
                                `- descriptor --------------------------------------------> mapped one after another
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

import torch

HANDLE_BYTES: Final = 64
"""Length of a legacy handle."""
BY_DESCRIPTOR: Final = 1
"""Bit of `Placed.handle_types`, and CUDA's number of this type: a POSIX file descriptor."""


class Placed(NamedTuple):
    """Allocation that contains an address of a GPU."""

    has_legacy_handle: bool
    """True if a legacy handle can share it."""
    handle_types: int
    """Types of handles by which its VMM allocation can be shared; 0: none, or it is no VMM memory."""
    base: int
    """Start of the allocation. For a VMM allocation it is the address at which it is mapped."""
    num_bytes: int
    """Length of the allocation, or of its mapping."""


class GpuMemoryCalls(Protocol):
    """Calls of one GPU's driver. Each raises RuntimeError with the driver's reason."""

    @property
    def uuid(self) -> str:
        """UUID of the GPU, which is the same in all processes of a machine."""
        ...

    def placed(self, address: int) -> Placed:
        """Return the allocation that contains an address."""
        ...

    def legacy_handle(self, address: int) -> bytes:
        """Return the legacy handle of the whole allocation that contains the address."""
        ...

    def export(self, address: int) -> int:
        """Return a new descriptor of the VMM allocation that is mapped at the address."""
        ...

    def open_handle(self, handle: bytes) -> int:
        """Open another process's allocation. Return the address of its start here."""
        ...

    def close_handle(self, address: int) -> None:
        """Close what `open_handle` has opened."""

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses. Return the first one."""
        ...

    def unreserve(self, address: int, num_bytes: int) -> None:
        """Release reserved addresses."""

    def map_descriptor(self, address: int, num_bytes: int, descriptor: int) -> None:
        """Map another process's VMM allocation at a reserved address. The descriptor may be closed afterwards."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Undo `map_descriptor`."""

    def allow(self, address: int, num_bytes: int) -> None:
        """Let this GPU read and write mapped addresses."""

    def bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return the memory at an address as `uint8[num_bytes]`. The tensor does not keep the memory open."""
        ...

    def synchronize(self) -> None:
        """Wait until all work of this process on the GPU has run."""


class IpcHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t`."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`: type and number of the place that may access the memory, and how."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int))


_ENABLE_PEER_ACCESS: Final = ctypes.c_uint(1)
_ON_DEVICE: Final = 1
_READ_AND_WRITE: Final = 3
_HAS_LEGACY_HANDLE, _RANGE_START, _RANGE_SIZE, _HANDLE_TYPES, _MAPPING_SIZE, _MAPPING_START = 10, 11, 12, 14, 18, 19
"""Numbers of `CUpointer_attribute`."""


@cache
def _runtime() -> ctypes.CDLL:
    """Return the runtime that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"there is no CUDA driver: {error}") from error


def _function(library: ctypes.CDLL, name: str) -> Any:
    try:
        return getattr(library, name)
    except AttributeError as error:
        raise RuntimeError(f"this version of CUDA lacks {name}") from error


def call_runtime(name: str, *args: Any) -> None:
    """Call the runtime; raises RuntimeError with CUDA's reason."""
    runtime = _runtime()
    if code := _function(runtime, name)(*args):
        runtime.cudaGetLastError()  # otherwise torch takes it for an error of its next launch
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(code).decode()}")


def call_driver(name: str, *args: Any) -> None:
    """Call the driver; raises RuntimeError with CUDA's reason."""
    driver = _driver()
    if code := _function(driver, name)(*args):
        reason = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(reason))
        raise RuntimeError(f"CUDA's {name}: {(reason.value or b'unknown error').decode()}")


class CudaMemoryCalls:
    """`GpuMemoryCalls` of one of torch's devices.

    The KV transfer uses `legacy_handle`, `open_handle` and `bytes_at` for its own buffers (`kvstore.transfer.device`);
    they have run on GPUs for it. The calls for VMM memory have not been run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def placed(self, address: int) -> Placed:
        """See `GpuMemoryCalls.placed`."""
        with torch.cuda.device(self._device):
            has_handle = bool(_attribute(_HAS_LEGACY_HANDLE, address))
            types = 0 if has_handle else _attribute(_HANDLE_TYPES, address)
            start, size = (_RANGE_START, _RANGE_SIZE) if has_handle else (_MAPPING_START, _MAPPING_SIZE)
            if not (has_handle or types):
                return Placed(False, 0, address, 0)
            return Placed(has_handle, types, _attribute(start, address), _attribute(size, address))

    def legacy_handle(self, address: int) -> bytes:
        """See `GpuMemoryCalls.legacy_handle`."""
        handle = IpcHandle()
        with torch.cuda.device(self._device):
            call_runtime("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def export(self, address: int) -> int:
        """See `GpuMemoryCalls.export`."""
        allocation, descriptor = ctypes.c_ulonglong(), ctypes.c_int(-1)
        with torch.cuda.device(self._device):
            call_driver("cuMemRetainAllocationHandle", ctypes.byref(allocation), ctypes.c_void_p(address))
            try:
                call_driver(
                    "cuMemExportToShareableHandle",
                    ctypes.byref(descriptor),
                    allocation,
                    ctypes.c_int(BY_DESCRIPTOR),
                    ctypes.c_ulonglong(0),
                )
            finally:
                call_driver("cuMemRelease", allocation)
        return descriptor.value

    def open_handle(self, handle: bytes) -> int:
        """See `GpuMemoryCalls.open_handle`."""
        base = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            named = IpcHandle.from_buffer_copy(handle)
            call_runtime("cudaIpcOpenMemHandle", ctypes.byref(base), named, _ENABLE_PEER_ACCESS)
        return base.value or 0

    def close_handle(self, address: int) -> None:
        """See `GpuMemoryCalls.close_handle`."""
        with torch.cuda.device(self._device):
            call_runtime("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def reserve(self, num_bytes: int) -> int:
        """See `GpuMemoryCalls.reserve`."""
        torch.cuda.synchronize(self._device)  # the first use creates the context that the driver needs
        base, anywhere = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        size, alignment = ctypes.c_size_t(num_bytes), ctypes.c_size_t(0)
        call_driver("cuMemAddressReserve", ctypes.byref(base), size, alignment, anywhere, ctypes.c_ulonglong(0))
        return base.value

    def unreserve(self, address: int, num_bytes: int) -> None:
        """See `GpuMemoryCalls.unreserve`."""
        call_driver("cuMemAddressFree", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))

    def map_descriptor(self, address: int, num_bytes: int, descriptor: int) -> None:
        """See `GpuMemoryCalls.map_descriptor`."""
        allocation, at, size = ctypes.c_ulonglong(), ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes)
        with torch.cuda.device(self._device):
            call_driver(
                "cuMemImportFromShareableHandle",
                ctypes.byref(allocation),
                ctypes.c_void_p(descriptor),
                ctypes.c_int(BY_DESCRIPTOR),
            )
            try:
                call_driver("cuMemMap", at, size, ctypes.c_size_t(0), allocation, ctypes.c_ulonglong(0))
            finally:
                call_driver("cuMemRelease", allocation)  # the mapping keeps it

    def unmap(self, address: int, num_bytes: int) -> None:
        """See `GpuMemoryCalls.unmap`."""
        with torch.cuda.device(self._device):
            call_driver("cuMemUnmap", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))

    def allow(self, address: int, num_bytes: int) -> None:
        """See `GpuMemoryCalls.allow`."""
        access = _Access(_ON_DEVICE, self._device.index, _READ_AND_WRITE)
        at, size = ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes)
        with torch.cuda.device(self._device):
            call_driver("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))

    def bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """See `GpuMemoryCalls.bytes_at`."""
        return torch.as_tensor(_Bytes(address, num_bytes), device=self._device)

    def synchronize(self) -> None:
        """See `GpuMemoryCalls.synchronize`."""
        torch.cuda.synchronize(self._device)


class _Bytes:
    """Memory at an address, with the interface from which torch makes a tensor."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _attribute(number: int, address: int) -> int:
    value = ctypes.c_ulonglong(0)  # zero, because the driver writes only as many bytes as the attribute has
    call_driver("cuPointerGetAttribute", ctypes.byref(value), ctypes.c_int(number), ctypes.c_ulonglong(address))
    return value.value


def cuda_device_with(uuid: str) -> torch.device:
    """Return the GPU with this UUID.

    Raises:
        RuntimeError: this process has none.
    """
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == uuid:
                return torch.device("cuda", index)
    raise RuntimeError(f"this process's torch finds no GPU {uuid}")
