"""Links over torch.distributed: a process group of two, built directly on a store of our own.

The only file with names that torch calls private or experimental (`ProcessGroupGloo._Options`, its `_devices` and
`_threads`, backends constructed without `init_process_group`, `_group_start`); `tests/unit/test_transfer_link.py` and
`tests/gpu/test_nccl_link.py` guard them. Written against torch 2.13.

Rendezvous rides the control session: the store's `set` becomes a message to the peer, and `get` waits for the peer's.
There is no TCPStore, no port and no world.
"""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.header import HEADER_BYTES
from kvstore.transfer.link import RECEIVER, SENDER

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.transfer.link import Operation, SignalOperation
    from kvstore.transfer.slots import Slot, SlotSource

_SIGNALS, _CHUNKS = 0, 1
"""Tags, which gloo matches and NCCL ignores."""
_MAX_CTAS = 4
"""NCCL channels a pair: each costs about 6.5 MB of GPU memory, and blocks of the decode kernels."""
_RECEIVER_READY = "nccl/receiver-ready"
_NCCL_LAUNCHER = threading.Lock()
"""NCCL forbids issuing operations of several communicators of one device in parallel."""


class SessionStore(Store):
    """One pair's rendezvous. The owner keeps it alive as long as the link: torch holds only the C++ half.

    Args:
        timeout_s: longest wait for a key of the peer's.
    """

    def __init__(self, publish: Callable[[str, bytes], None], timeout_s: float = 300.0) -> None:
        super().__init__()
        self._publish = publish
        self._longest_wait = timedelta(seconds=timeout_s)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def deliver(self, key: str, value: bytes) -> None:
        """A key that the peer set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits, now or later, gets a TransferError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # What gloo and NCCL call, from C++ and from threads of their own.

    def clone(self) -> SessionStore:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.deliver(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key], self._longest_wait)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._closed or all(key in self._values for key in keys), timeout.total_seconds()
            )
            if self._closed:
                raise TransferError("the session ended while the link was being opened")
            if not arrived:
                raise TransferTimeout(f"the peer did not join the link within {timeout.total_seconds():g} s")


class GlooLink:
    """A gloo pair over TCP. Its send returns once the peer has posted the receive: natural back-pressure.

    Signals and chunks have a tag each. A chunk's receive is posted with the whole slot, because gloo ends the process
    that receives more than it posted; less is no error to it.
    """

    def __init__(
        self, store: Store, rank: int, host: str, slots: SlotSource, open_timeout_s: float, op_timeout_s: float
    ) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_gloo_device(host)]
        options._threads = 0  # they run collectives only
        options._timeout = timedelta(seconds=open_timeout_s)
        self.slots = slots
        self._op_timeout = timedelta(seconds=op_timeout_s)
        self._peer = 1 - rank
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, options)

    def send_signal(self, header: bytes) -> Operation:
        message = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        message.copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        return self._start(message, lambda group: group.send([message], self._peer, _SIGNALS))

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        message = slot.message(num_bytes)
        return self._start(message, lambda group: group.send([message], self._peer, _CHUNKS))

    def recv_signal(self) -> SignalOperation:
        message = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        return self._start(message, lambda group: group.recv([message], self._peer, _SIGNALS))

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return self._start(slot.buffer, lambda group: group.recv([slot.buffer], self._peer, _CHUNKS))

    def close(self) -> None:
        self._group = None

    def abort(self) -> None:
        """Nothing: a waiting gloo operation ends at its timeout or when the peer closes, and by no call (measured)."""

    def _start(self, message: torch.Tensor, start: Callable[[Any], Any]) -> _GlooOperation:
        try:
            return _GlooOperation(start(self._group), message, self._op_timeout)
        except RuntimeError as error:
            raise TransferError(f"the gloo link is broken: {error}") from error


class _GlooOperation:
    def __init__(self, work: Any, message: torch.Tensor, timeout: timedelta) -> None:
        self._work = work
        self._message = message
        self._timeout = timeout

    def wait(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise TransferTimeout(f"no bytes moved within {self._timeout.total_seconds():g} s") from error
            raise TransferError(f"the gloo link is broken: {error}") from error

    @property
    def header(self) -> bytes:
        return self._message[:HEADER_BYTES].numpy().tobytes()


@functools.cache
def _gloo_device(host: str) -> Any:
    """One listening socket and one thread for all pairs of this process, which then need one descriptor each."""
    return dist.ProcessGroupGloo.create_device(hostname=host)


class NcclLink:
    """A communicator of two GPUs, on a stream of its own, for chunks; a gloo pair beside it for signals.

    The receive of a chunk is a kernel that spins until the chunk comes. It starts only once a signal or a chunk has
    announced the size, so an idle pair keeps no GPU busy, and the death of its peer is seen on the gloo pair.

    Eager and nonblocking: eager, because a lazy one makes another communicator at the first send; nonblocking, so
    that another thread can abort it. `WorkNCCL.wait()` would only make the current stream wait, so completion is an
    event on the own stream that the owner thread polls.
    """

    def __init__(
        self,
        store: SessionStore,
        rank: int,
        host: str,
        device: torch.device,
        slots: SlotSource,
        open_timeout_s: float,
        op_timeout_s: float,
    ) -> None:
        signals = PrefixStore("signals", store)
        self._signals = GlooLink(signals, rank, host, slots, open_timeout_s, op_timeout_s)
        nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - a CPU build of torch has no such name
        options = nccl.Options(is_high_priority_stream=False)
        options._timeout = timedelta(seconds=open_timeout_s)
        options.config.blocking = 0
        options.config.min_ctas = 1
        options.config.max_ctas = _MAX_CTAS
        self.slots = slots
        self._device = device
        self._peer = 1 - rank
        self._op_timeout_s = op_timeout_s
        self._aborted = threading.Event()
        self._ending = threading.Lock()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A communicator must not be made while another one's transfer is launched, and making one waits for the peer.
        # So the receiver takes its launcher first; the sender, who takes its own only then, waits for nobody that
        # waits for somebody else.
        if rank == SENDER:
            store.wait([_RECEIVER_READY], options._timeout)
        if not _NCCL_LAUNCHER.acquire(timeout=open_timeout_s):
            raise TransferTimeout(f"other NCCL links were being made for {open_timeout_s:g} s")
        try:
            if rank == RECEIVER:
                store.set(_RECEIVER_READY, b"1")
            self._group: Any = nccl(store, rank, 2, options)
            self._group.eager_connect_single_device(device)
            self._connect(rank, open_timeout_s)
        finally:
            _NCCL_LAUNCHER.release()

    def _connect(self, rank: int, timeout_s: float) -> None:
        """Lets one byte cross: only then it is known that the two can reach each other."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            move = self._group.send if rank == SENDER else self._group.recv
            move([byte], self._peer, _CHUNKS).wait()
            done.record(self._stream)
        _NcclOperation(self, done, time.monotonic() + timeout_s).wait()

    def send_signal(self, header: bytes) -> Operation:
        return self._signals.send_signal(header)

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return self._launch(lambda group: group.send([slot.message(num_bytes)], self._peer, _CHUNKS))

    def recv_signal(self) -> SignalOperation:
        return self._signals.recv_signal()

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return self._launch(lambda group: group.recv([slot.message(num_bytes)], self._peer, _CHUNKS))

    def close(self) -> None:
        self._signals.close()
        self._abort_group()

    def abort(self) -> None:
        """The communicator's own abort may wait for the device, and who calls this may be an event loop."""
        self._aborted.set()
        threading.Thread(target=self._abort_group, name="kv-nccl-abort", daemon=True).start()

    def _abort_group(self) -> None:
        with self._ending:
            group, self._group = self._group, None
            if group is not None:
                group._group_start()  # as torch aborts its own: one after the other, they can wait on the device
                group.abort()
                group._group_end()

    def _launch(self, start: Callable[[Any], Any]) -> Operation:
        group = self._group
        if group is None:
            raise TransferError("the nccl link was aborted")
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        staged = torch.cuda.current_stream(self._device)  # the lane's own: the engine's steps are not waited for
        try:
            with _NCCL_LAUNCHER, torch.cuda.stream(self._stream):
                self._stream.wait_stream(staged)
                start(group).wait()  # the own stream waits for NCCL's
                done.record(self._stream)
        except RuntimeError as error:
            raise TransferError(f"the nccl link is broken: {error}") from error
        return _NcclOperation(self, done, time.monotonic() + self._op_timeout_s)

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()


class _NcclOperation:
    def __init__(self, link: NcclLink, done: torch.cuda.Event, deadline: float) -> None:
        self._link = link
        self._done = done
        self._deadline = deadline

    def wait(self) -> None:
        while not self._done.query():  # type: ignore[no-untyped-call]
            if self._link.aborted:
                raise TransferError("the nccl link was aborted")
            if time.monotonic() > self._deadline:
                self._link.abort()
                raise TransferTimeout("no bytes moved within the operation timeout")
            time.sleep(50e-6)
