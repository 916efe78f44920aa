"""A driver of a GPU that is none: its memory is files in memory, which descriptors name as they name a real one's.

Two of them stand for the drivers of two processes. What is opened, mapped or reserved is recorded in `held`, so that a
test sees what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from engine.gpu_memory import BY_DESCRIPTOR, HANDLE_BYTES, Placed

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NONE, _READ_AND_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 0x01, 0x02, 0x10, 0x20


def _mapped(address: int, num_bytes: int, access: int, flags: int, descriptor: int = -1) -> int:
    found = _LIBC.mmap(address or None, num_bytes, access, flags, descriptor, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(found)


@dataclass
class Allocation:
    """Memory of the fake GPU, where its owner has it."""

    address: int
    num_bytes: int
    descriptor: int
    is_legacy: bool
    handle_types: int = 0


@dataclass
class FakeMemoryCalls:
    """`engine.gpu_memory.GpuMemoryCalls`.

    Attributes:
        fails: name of a call that fails -> how often it succeeds before.
        held: what is open, mapped or reserved here, as (kind, address).
    """

    uuid: str = "GPU-fake"
    allocations: list[Allocation] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)
    held: set[tuple[str, int]] = field(default_factory=set)
    is_allowed: bool = False
    num_waits: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)

    # -- what a test makes -----------------------------------------------------------------------------------------

    def allocate(self, *sizes: int, legacy: bool = False, types: int = BY_DESCRIPTOR, gap: int = 0) -> torch.Tensor:
        """Allocates memory of these pages, one after another in one range. Returns it, `uint8`, zeroed."""
        whole = sum(sizes) * PAGE
        at = base = _mapped(0, whole + gap * PAGE, _NONE, _PRIVATE | _ANONYMOUS)
        for pages in sizes:
            descriptor = os.memfd_create("fake-gpu-memory")
            os.ftruncate(descriptor, pages * PAGE)
            _mapped(at, pages * PAGE, _READ_AND_WRITE, _SHARED | _FIXED, descriptor)
            self.allocations.append(Allocation(at, pages * PAGE, descriptor, legacy, 0 if legacy else types))
            at += pages * PAGE
        return self._bytes(base, whole)

    def end(self) -> None:
        """Frees all memory."""
        for each in self.allocations:
            os.close(each.descriptor)
            _LIBC.munmap(each.address, each.num_bytes)
        self.allocations = []

    # -- exporting -------------------------------------------------------------------------------------------------

    def placed(self, address: int) -> Placed:
        self._call("placed")
        each = self._at(address)
        return Placed(each.is_legacy, each.handle_types, each.address, each.num_bytes)

    def legacy_handle(self, address: int) -> bytes:
        self._call("legacy_handle")
        each = self._at(address)
        assert each.is_legacy, "cudaIpcGetMemHandle fails for VMM memory"
        return f"{os.getpid()} {each.descriptor}".encode().ljust(HANDLE_BYTES)

    def export(self, address: int) -> int:
        self._call("export")
        each = self._at(address)
        assert each.handle_types & BY_DESCRIPTOR
        assert address == each.address
        return os.dup(each.descriptor)

    # -- importing -------------------------------------------------------------------------------------------------

    def open_handle(self, handle: bytes) -> int:
        self._call("open_handle")
        pid, descriptor = handle.split()
        opened = os.open(f"/proc/{int(pid)}/fd/{int(descriptor)}", os.O_RDWR)
        try:
            size = os.fstat(opened).st_size
            address = _mapped(0, size, _READ_AND_WRITE, _SHARED, opened)
        finally:
            os.close(opened)
        self._sizes[address] = size
        self.held.add(("handle", address))
        return address

    def close_handle(self, address: int) -> None:
        self.held.remove(("handle", address))
        _LIBC.munmap(address, self._sizes.pop(address))

    def reserve(self, num_bytes: int) -> int:
        self._call("reserve")
        address = _mapped(0, num_bytes, _NONE, _PRIVATE | _ANONYMOUS)
        self.held.add(("range", address))
        return address

    def unreserve(self, address: int, num_bytes: int) -> None:
        assert not [kind for kind, _ in self.held if kind == "mapping"], "CUDA refuses to free a range with mappings"
        self.held.remove(("range", address))
        _LIBC.munmap(address, num_bytes)

    def map_descriptor(self, address: int, num_bytes: int, descriptor: int) -> None:
        self._call("map_descriptor")
        assert os.fstat(descriptor).st_size == num_bytes
        _mapped(address, num_bytes, _READ_AND_WRITE, _SHARED | _FIXED, descriptor)
        self.held.add(("mapping", address))

    def unmap(self, address: int, num_bytes: int) -> None:
        self.held.remove(("mapping", address))
        _mapped(address, num_bytes, _NONE, _PRIVATE | _FIXED | _ANONYMOUS)

    def allow(self, address: int, num_bytes: int) -> None:
        self._call("allow")
        self.is_allowed = True

    def bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        self._call("bytes_at")
        is_open = any(base <= address and address + num_bytes <= base + size for base, size in self._sizes.items())
        assert self.is_allowed or is_open, "an access fault"
        return self._bytes(address, num_bytes)

    def synchronize(self) -> None:
        self.num_waits += 1

    def _bytes(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)

    def _at(self, address: int) -> Allocation:
        for each in self.allocations:
            if each.address <= address < each.address + each.num_bytes:
                return each
        raise RuntimeError("CUDA's cuPointerGetAttribute: invalid argument")

    def _call(self, name: str) -> None:
        if name in self.fails:
            self.fails[name] -= 1
            if self.fails[name] < 0:
                raise RuntimeError(f"CUDA's {name}: operation not supported")


@contextlib.contextmanager
def no_descriptor_is_left() -> Iterator[None]:
    """Fails if descriptors of this process are open afterwards that were not before."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
