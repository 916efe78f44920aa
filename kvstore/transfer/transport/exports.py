"""Rings of a GPU's ipc transports: memory that peers read is lent again only after they have closed it.

A peer that reads a ring holds one end of a pipe, its lifeline, for as long as it has the ring open. The end of the pipe
shows that the peer has closed the ring or that its process is gone. Until then, a ring whose transport has ended waits
here, however long a stopped peer takes. Rings are kept for later transports, since CUDA waits for all of a GPU's work
when memory is freed, and other transports may wait for their peers in that work.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

from baton.errors import TransferError
from kvstore.transfer.device import gpu_of

if TYPE_CHECKING:
    import torch

    from kvstore.transfer.device import GpuDevice, GpuExport


class LentRing:
    """A ring that one transport uses.

    Attributes:
        memory: the slots, `uint8`.
        handle: opens the ring in the peer.
        theirs: the peer's end of the lifeline, a file descriptor to pass on; `passed_on` closes it here.
    """

    def __init__(self, rings: GpuRings, export: GpuExport) -> None:
        self.memory = export.memory
        self.handle = export.handle
        self.export = export
        self._rings = rings
        self.lifeline, self.theirs = os.pipe()

    def passed_on(self) -> None:
        """Close the peer's end of the lifeline in this process. Idempotent."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def give_back(self) -> None:
        """End the use of the ring; called once."""
        self.passed_on()
        self._rings.take(self)


class GpuRings:
    """Rings of one GPU. Thread-safe."""

    def __init__(self, gpu: GpuDevice) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._num_bytes = 0
        """Memory of all rings, lent or not."""
        self._free: list[GpuExport] = []
        self._read_still: list[LentRing] = []
        """Rings of ended transports that their peers have not closed."""

    def lend(self, num_bytes: int, most_bytes: int) -> LentRing:
        """Lend a ring of this size.

        Raises:
            TransferError: it would make the rings of this GPU, which are never freed, larger than `most_bytes`.
            RuntimeError: the GPU is out of memory.
        """
        with self._lock:
            self._take_back()
            fitting = [export for export in self._free if len(export.memory) == num_bytes]
            if not fitting and self._num_bytes + num_bytes > most_bytes:
                raise TransferError(
                    f"{self._num_bytes / 2**20:.0f} MiB of this GPU are rings of ipc transports, of which one more "
                    f"would take {num_bytes / 2**20:.0f}: transfer.gpu_rings_mib allows {most_bytes / 2**20:.0f}"
                )
            export = fitting[0] if fitting else self._gpu.export_buffer(num_bytes)
            self._num_bytes += 0 if fitting else num_bytes
            ring = LentRing(self, export)
            if fitting:
                self._free.remove(export)
            return ring

    def take(self, ring: LentRing) -> None:
        """Take back a ring whose transport has ended."""
        with self._lock:
            self._read_still.append(ring)
            self._take_back()

    @property
    def num_read_still(self) -> int:
        """Number of rings that no transport uses but a peer may still read."""
        with self._lock:
            self._take_back()
            return len(self._read_still)

    def _take_back(self) -> None:
        waiting, self._read_still = self._read_still, []
        for ring in waiting:
            if _is_at_its_end(ring.lifeline):
                os.close(ring.lifeline)
                self._free.append(ring.export)
            else:
                self._read_still.append(ring)


def _is_at_its_end(lifeline: int) -> bool:
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    return bool(poll.poll(0))


_RINGS: dict[GpuDevice, GpuRings] = {}
_LOCK = threading.Lock()


def rings_of(device: torch.device) -> GpuRings:
    """Return the rings of a GPU."""
    gpu = gpu_of(device)
    assert gpu is not None
    with _LOCK:
        return _RINGS.setdefault(gpu, GpuRings(gpu))
