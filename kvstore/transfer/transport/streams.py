"""Streams of one GPU: the assignment of copy streams to threads, and of streams to communicators.

torch has few streams of each priority (32), and returns them round robin: the thirty-third is the first again. Work of
two users of the same stream waits for each other. Suppose that one of them has the receive of a transport, which spins
until its peer sends, and the other the gather or the send of another transport: the peer may wait for just that. The
locks of `nccl_turns` order kernels, and guarantee nothing about streams. So the streams of a GPU are taken once and
lent:

    priority       to
    0              the thread of each transport, for its copies; two threads may have the same one
    next           each NCCL transport, for the waits of its operations
    highest        NCCL, which takes one itself for each communicator: the next in order, which is advanced first

A communicator never has a stream of another one, and there are only as many communicators as there are streams.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from baton.errors import TransferError
from kvstore.transfer.device import gpu_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from kvstore.transfer.device import GpuDevice, Stream

logger = logging.getLogger(__name__)


class StreamPool:
    """Streams of one priority of a GPU. Thread-safe."""

    def __init__(self, gpu: GpuDevice, priority: int) -> None:
        self._gpu = gpu
        self._priority = priority
        self._lock = threading.Lock()
        first = gpu.stream(priority)
        self.streams = [first]
        """Streams in the order in which torch returns them."""
        while (stream := gpu.stream(priority)).cuda_stream != first.cuda_stream:
            self.streams.append(stream)
        self._handles = [stream.cuda_stream for stream in self.streams]
        self._num_users = [0] * len(self.streams)

    def lend(self) -> Stream:
        """Lend the stream that has the fewest users."""
        with self._lock:
            place = self._num_users.index(min(self._num_users))
            self._num_users[place] += 1
            return self.streams[place]

    def lend_next(self) -> Stream:
        """Lend a stream without users, and make torch return it next.

        Raises:
            TransferError: every stream has a user.
        """
        with self._lock:
            if 0 not in self._num_users:
                raise TransferError(f"this GPU has {len(self.streams)} nccl transports already")
            place = self._next()
            while self._num_users[place]:
                place = self._next()
            self._num_users[place] += 1
            return self.streams[place]

    def was_next(self, stream: Stream) -> bool:
        """Return whether this stream is the only one that torch has returned since `lend_next`."""
        with self._lock:
            return self._next() == (self._handles.index(stream.cuda_stream) + 2) % len(self.streams)

    def give_back(self, stream: Stream) -> None:
        """Take back a stream that was lent once."""
        with self._lock:
            self._num_users[self._handles.index(stream.cuda_stream)] -= 1

    def _next(self) -> int:
        """Take a stream, and return the index of the one after it."""
        return (self._handles.index(self._gpu.stream(self._priority).cuda_stream) + 1) % len(self.streams)


class GpuStreams:
    """Streams of a GPU.

    Attributes:
        launcher: held while an operation of a communicator is put into a stream; NCCL forbids to do that for several
            communicators of one device in parallel.
        num_shared: communicators that may have the stream of another one, since the start.
    """

    def __init__(self, gpu: GpuDevice) -> None:
        highest = gpu.highest_priority
        self.launcher = threading.Lock()
        self.num_shared = 0
        self.copies = StreamPool(gpu, 0)
        self.launches = StreamPool(gpu, max(highest, -1)) if highest < -1 else self.copies
        self.communicators = StreamPool(gpu, highest)

    @contextlib.contextmanager
    def making_communicator(self, stream: Stream) -> Iterator[None]:
        """Context manager: the communicator created inside it runs on the stream that was lent for it."""
        yield
        if not self.communicators.was_next(stream):
            self.num_shared += 1
            logger.warning("another library takes streams of this GPU: nccl transports may wait for each other")


_STREAMS: dict[GpuDevice, GpuStreams] = {}
_LOCK = threading.Lock()


def streams_of(gpu: GpuDevice) -> GpuStreams:
    """Return the streams of a GPU, taken at the first call."""
    with _LOCK:
        if gpu not in _STREAMS:
            _STREAMS[gpu] = GpuStreams(gpu)
        return _STREAMS[gpu]


def num_shared_streams() -> int:
    """Return the number of communicators of this process that may have the stream of another one, since the start."""
    return sum(streams.num_shared for streams in _STREAMS.values())


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Context manager: give the calling thread a GPU stream, so its copies do not queue behind the engine's steps."""
    gpu = gpu_of(device)
    if gpu is None:
        yield
        return
    copies = streams_of(gpu).copies
    stream = copies.lend()
    try:
        with gpu.on_stream(stream):
            yield
    finally:
        copies.give_back(stream)
