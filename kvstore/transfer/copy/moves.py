"""Copies in progress on a GPU. The host waits for their completion and reads the checksum.

    thread   launch copy n   launch copy n + 1   end copy n   launch copy n + 2   end copy n + 1
    stream   | fence | copy n, sums -> main memory | event | copy n + 1 ... | event |

No copy waits for the host, and the host waits for one event, not for all work in the stream.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import torch

from kvstore.transfer.copy.checksum import digest_of

if TYPE_CHECKING:
    from kvstore.transfer.device import GpuDevice, StreamEvent

MAX_SUMS = 1024
"""Maximum number of partial sums in which a GPU leaves the checksum of one chunk."""


class Move(Protocol):
    """A started copy between blocks and a payload. Call `end` once."""

    def end(self) -> int:
        """Wait until the bytes are copied, and return the checksum of the payload; 0 if none was requested."""


class DoneMove:
    """A copy that was complete when it was requested."""

    def __init__(self, checksum: int) -> None:
        self._checksum = checksum

    def end(self) -> int:
        """See `Move.end`."""
        return self._checksum


class SumBuffers:
    """Main memory that a GPU accesses directly, for the sums of chunks in progress. Thread-safe."""

    def __init__(self, gpu: GpuDevice) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """Return a buffer, `int64[MAX_SUMS]`, with undefined contents."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._gpu.pinned_buffer(8 * MAX_SUMS).view(torch.int64)

    def give(self, sums: torch.Tensor) -> None:
        """Take back a buffer that the GPU no longer writes."""
        with self._lock:
            self._free.append(sums)


class GpuMove:
    """A copy that is in a stream.

    Args:
        done: is recorded after the copy and its sums.
        sums: has `num_sums` sums then, 0 if no checksum was requested; it is returned to `buffers`.
    """

    def __init__(self, done: StreamEvent, buffers: SumBuffers, sums: torch.Tensor, num_sums: int) -> None:
        self._done = done
        self._buffers = buffers
        self._sums = sums
        self._num_sums = num_sums

    def end(self) -> int:
        """See `Move.end`."""
        self._done.synchronize()
        checksum = digest_of(self._sums[: self._num_sums].numpy())
        self._buffers.give(self._sums)
        return checksum


_BUFFERS: dict[GpuDevice, SumBuffers] = {}
_LOCK = threading.Lock()


def sum_buffers_of(gpu: GpuDevice) -> SumBuffers:
    """Return the buffers of a GPU."""
    with _LOCK:
        if gpu not in _BUFFERS:
            _BUFFERS[gpu] = SumBuffers(gpu)
        return _BUFFERS[gpu]
