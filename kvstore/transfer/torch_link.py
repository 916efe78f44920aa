"""Links over torch.distributed: a process group of two, built directly on a store of our own.

The only file with names that torch calls private or experimental (`ProcessGroupGloo._Options`, its `_devices` and
`_threads`, backends constructed without `init_process_group`, `_group_start`); `tests/unit/test_transfer_link.py`
guards them. Written against torch 2.13.

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
from torch._C._distributed_c10d import Store

from baton.errors import TransferError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.transfer.link import Link, Operation

SENDER, RECEIVER = 0, 1
_TAG = 0
_MAX_CTAS = 4
"""NCCL channels a pair: each costs about 6.5 MB of GPU memory, and blocks of the decode kernels."""
_NCCL_LAUNCHER = threading.Lock()
"""NCCL forbids issuing operations of several communicators of one device in parallel."""


class SessionStore(Store):
    """One pair's rendezvous. The owner keeps it alive as long as the link: torch holds only the C++ half."""

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._publish = publish
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
        self.wait([key], timedelta(seconds=300))
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


def usable_links(device: torch.device, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Of the link kinds wanted, those that a cache on `device` can use here, in order."""
    nccl = device.type == "cuda" and dist.is_nccl_available()
    return tuple(kind for kind in wanted if kind == "gloo" or (kind == "nccl" and nccl))


def open_link(
    kind: str,
    store: SessionStore,
    rank: int,
    host: str,
    device: torch.device,
    open_timeout_s: float,
    op_timeout_s: float,
) -> Link:
    """Blocks until the peer has joined. For the thread that will own the link.

    Raises:
        TransferTimeout: the peer did not join.
        TransferError: the link could not be built.
    """
    try:
        if kind == "nccl":
            return NcclLink(store, rank, device, open_timeout_s, op_timeout_s)
        return GlooLink(store, rank, host, open_timeout_s, op_timeout_s)
    except RuntimeError as error:
        raise TransferError(f"the {kind} link could not be opened: {error}") from error


class GlooLink:
    """A gloo pair over TCP. Its send returns once the peer has posted the receive: natural back-pressure."""

    device = torch.device("cpu")

    def __init__(self, store: SessionStore, rank: int, host: str, open_timeout_s: float, op_timeout_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_gloo_device(host)]
        options._threads = 1
        options._timeout = timedelta(seconds=open_timeout_s)
        self._op_timeout = timedelta(seconds=op_timeout_s)
        self._peer = 1 - rank
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, buffer: torch.Tensor) -> Operation:
        return _GlooOperation(self._start(lambda group: group.send([buffer], self._peer, _TAG)), self._op_timeout)

    def recv(self, buffer: torch.Tensor) -> Operation:
        return _GlooOperation(self._start(lambda group: group.recv([buffer], self._peer, _TAG)), self._op_timeout)

    def close(self) -> None:
        self._group = None

    def abort(self) -> None:
        """Nothing: a waiting gloo operation ends at its timeout or when the peer closes, and by no call (measured)."""

    def _start(self, start: Callable[[Any], Any]) -> Any:
        try:
            return start(self._group)
        except RuntimeError as error:
            raise TransferError(f"the gloo link is broken: {error}") from error


class _GlooOperation:
    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work = work
        self._timeout = timeout

    def wait(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise TransferTimeout(f"no bytes moved within {self._timeout.total_seconds():g} s") from error
            raise TransferError(f"the gloo link is broken: {error}") from error


@functools.cache
def _gloo_device(host: str) -> Any:
    """One listening socket and one thread for all pairs of this process: 8 KiB a pair instead of 59."""
    return dist.ProcessGroupGloo.create_device(hostname=host)


class NcclLink:
    """A communicator of two GPUs, on a stream of its own.

    Eager and nonblocking: eager, because a lazy one makes another communicator at the first send; nonblocking, so
    that another thread can abort it. `WorkNCCL.wait()` would only make the current stream wait, so completion is an
    event on the own stream that the owner thread polls.
    """

    def __init__(
        self, store: SessionStore, rank: int, device: torch.device, open_timeout_s: float, op_timeout_s: float
    ) -> None:
        nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - a CPU build of torch has no such name
        options = nccl.Options(is_high_priority_stream=False)
        options._timeout = timedelta(seconds=open_timeout_s)
        options.config.blocking = 0
        options.config.min_ctas = 1
        options.config.max_ctas = _MAX_CTAS
        self.device = device
        self._peer = 1 - rank
        self._op_timeout_s = op_timeout_s
        self._aborted = threading.Event()
        with _NCCL_LAUNCHER:  # a communicator must not be made while another one's transfer is launched
            self._group: Any = nccl(store, rank, 2, options)
            self._group.eager_connect_single_device(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, buffer: torch.Tensor) -> Operation:
        return self._launch(lambda group: group.send([buffer], self._peer, _TAG))

    def recv(self, buffer: torch.Tensor) -> Operation:
        return self._launch(lambda group: group.recv([buffer], self._peer, _TAG))

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def abort(self) -> None:
        self._aborted.set()
        if (group := self._group) is not None:
            group.abort()

    def _launch(self, start: Callable[[Any], Any]) -> Operation:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            with _NCCL_LAUNCHER, torch.cuda.stream(self._stream):
                self._stream.wait_stream(torch.cuda.default_stream(self.device))
                start(self._group).wait()  # the own stream waits for NCCL's
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
