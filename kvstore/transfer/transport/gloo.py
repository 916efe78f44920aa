"""Links over torch.distributed: a process group of two, built directly on a store of our own.

The only file with names that torch calls private or experimental (`ProcessGroupGloo._Options`, its `_devices` and
`_threads`, backends constructed without `init_process_group`, `eager_connect_single_device`);
`tests/unit/kvstore/transfer/transport/test_transports.py` and `tests/gpu/test_nccl_link.py` guard them. Written against
torch 2.13.

Rendezvous rides the control session: the store's `set` becomes a message to the peer, and `get` waits for the peer's.
There is no TCPStore, no port and no world.
"""

from __future__ import annotations

import functools
import re
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import SENDER
from kvstore.transfer.transport.nccl_turns import DeviceTurns

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.staging import Slot, SlotSource

_SIGNALS, _CHUNKS = 0, 1
"""Tags, which gloo matches and NCCL ignores."""
_MAX_CTAS = 4
"""NCCL channels a pair: each costs about 6.5 MB of GPU memory, and blocks of the decode kernels."""
_STAGED, _POSTED = (word.ljust(HEADER_BYTES, b"\0") for word in (b"baton: staged", b"baton: posted"))
"""What the two sides of a chunk on NCCL say on the gloo pair."""
_MAX_KEYS, _MAX_KEY_BYTES, _MAX_VALUE_BYTES = 1024, 512, 1024
"""What a peer may say at a rendezvous, of whatever kind: more than any says."""
_GLOO_NAME = struct.Struct("@N")
_GLOO_ADDRESS = struct.Struct("@NHH124xnnn")
"""What gloo says of one side: the length of its host's name, the name; the length of the address, which is family, port
and the rest of a sockaddr_storage, and -1; and the numbers of its two ends, one of them to itself."""
_GLOO_ADDRESS_BYTES = 136
_MAX_NAME_BYTES = 255
_NCCL_ID_BYTES = 128
_NCCL_LAUNCHER = threading.Lock()
"""NCCL forbids issuing operations of several communicators of one device in parallel."""
_NCCL_TRAFFIC: dict[torch.device, DeviceTurns] = {}


class RendezvousStore(Store):
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
        self._is_well_formed: Callable[[str, bytes], bool] = _is_small
        self._failure = ""

    def expect(self, is_well_formed: Callable[[str, bytes], bool]) -> None:
        """Says what the peer may set, and may have set already.

        Where it sets anything else, whoever waits, now or later, gets a TransferError, and nobody gets the value: gloo
        ends the process over one that it cannot read.
        """
        with self._changed:
            self._is_well_formed = is_well_formed
            for key, value in self._values.items():
                self._fail_unless_well_formed(key, value)

    def deliver(self, key: str, value: bytes) -> None:
        """A key that the peer set."""
        with self._changed:
            self._fail_unless_well_formed(key, value)
            if not self._failure:
                self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits, now or later, gets a TransferError."""
        self._fail("the session ended while the link was being opened")

    # What gloo and NCCL call, from C++ and from threads of their own.

    def clone(self) -> RendezvousStore:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = data
            self._changed.notify_all()
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
                lambda: self._failure or all(key in self._values for key in keys), timeout.total_seconds()
            )
            if self._failure:
                raise TransferError(self._failure)
            if not arrived:
                raise TransferTimeout(f"the peer did not join the link within {timeout.total_seconds():g} s")

    def _fail_unless_well_formed(self, key: str, value: bytes) -> None:
        is_known = key in self._values or len(self._values) < _MAX_KEYS
        if not (is_known and _is_small(key, value) and self._is_well_formed(key, value)):
            self._fail(f"the peer said {len(value)} bytes as {key[:40]!r}, which no such link says while it is opened")

    def _fail(self, why: str) -> None:
        """The first reason stands."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()


def _is_small(key: str, value: bytes) -> bool:
    return len(key) <= _MAX_KEY_BYTES and len(value) <= _MAX_VALUE_BYTES


def is_of_gloo(peer: int, key: str, value: bytes) -> bool:
    """Whether a gloo link's side of rank `peer` says this while it is opened: gloo believes every length in it."""
    if key != f"0/{peer}" or len(value) < _GLOO_NAME.size:
        return False
    (num_name_bytes,) = _GLOO_NAME.unpack_from(value)
    if num_name_bytes > _MAX_NAME_BYTES or len(value) != _GLOO_NAME.size + num_name_bytes + _GLOO_ADDRESS.size:
        return False
    size, family, port, none, *ends = _GLOO_ADDRESS.unpack_from(value, _GLOO_NAME.size + num_name_bytes)
    is_address = size == _GLOO_ADDRESS_BYTES and family in (socket.AF_INET, socket.AF_INET6) and port and none == -1
    return bool(is_address and min(ends) >= 0)


def is_of_nccl(peer: int, key: str, value: bytes) -> bool:
    """Whether an NCCL link's side of rank `peer` says this while it is opened. What torch itself keeps in the store
    beside the communicator's id, it reads by length.
    """
    where, _, rest = key.partition("/")
    if where == "signals":
        return is_of_gloo(peer, rest, value)
    if where == "nccl":
        form = {f"device/{peer}": rb"[0-9a-f]{32}", f"turn/{peer}": b"taken"}.get(rest)
        return form is not None and re.fullmatch(form, value) is not None
    return key != "0" or (peer == SENDER and len(value) == _NCCL_ID_BYTES)


class GlooTransport:
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


class NcclTransport:
    """A communicator of two GPUs, on a stream of its own, for chunks; a gloo pair beside it for signals.

    Half a transfer is a kernel that spins until the other half comes, and a GPU has few turns for them (see
    `device_traffic`). So a chunk begins on the gloo pair, in its place among the signals: the sender says that it is
    staged, the receiver, when it has its turn, that its half is posted. An idle pair therefore keeps no GPU busy, and
    the death of its peer is seen on the gloo pair. `send_chunk` returns when the chunk has left; a receive is posted
    in its `wait`.

    Eager and nonblocking: eager, because a lazy one makes another communicator at the first send; nonblocking, so
    that another thread can abort it. `WorkNCCL.wait()` would only make the current stream wait, so completion is an
    event on the own stream that the owner thread polls.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        host: str,
        device: torch.device,
        slots: SlotSource,
        open_timeout_s: float,
        op_timeout_s: float,
    ) -> None:
        self.slots = slots
        # torch finds an eager communicator by the index of its device, and a tensor's device always has one.
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._peer = 1 - rank
        self._op_timeout_s = op_timeout_s
        self._aborted = threading.Event()
        self._ending = threading.Lock()
        self._group: Any = None
        self._told: Operation | None = None
        self._turns = _NCCL_TRAFFIC.setdefault(self._device, DeviceTurns()).join()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        signals = PrefixStore("signals", store)
        self._signals = GlooTransport(signals, rank, host, slots, open_timeout_s, op_timeout_s)
        try:
            self._open(store, rank, open_timeout_s)
        except BaseException:
            self.close()
            raise

    def _open(self, store: Store, rank: int, timeout_s: float) -> None:
        """Makes the communicator and lets one byte cross: only then it is known that the two can reach each other."""
        nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - a CPU build of torch has no such name
        options = nccl.Options(is_high_priority_stream=False)
        options._timeout = timedelta(seconds=max(timeout_s, self._op_timeout_s))
        options.config.blocking = 0
        options.config.min_ctas = 1
        options.config.max_ctas = _MAX_CTAS
        id_of, turn_of = "nccl/device/{}".format, "nccl/turn/{}".format
        store.set(id_of(rank), self._turns.device.id)
        goes_first = self._turns.device.id < store.get(id_of(self._peer)).decode()

        def tell() -> None:
            store.set(turn_of(rank), "taken")

        def hear() -> None:
            store.wait([turn_of(self._peer)], timedelta(seconds=timeout_s))

        with self._turns.opening(goes_first, tell, hear, timeout_s):
            self._group = nccl(store, rank, 2, options)
            self._group.eager_connect_single_device(self._device)
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._launch("send" if rank == SENDER else "recv", byte, timeout_s).wait()

    def send_signal(self, header: bytes) -> Operation:
        return self._signals.send_signal(header)

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        posted = self._signals.recv_signal()
        with self._turns.sending(lambda: self._tell(_STAGED), lambda: _hear(_POSTED, posted), self._op_timeout_s):
            operation = self._launch("send", slot.message(num_bytes), self._op_timeout_s)
            operation.settle()
        return operation

    def recv_signal(self) -> SignalOperation:
        return self._signals.recv_signal()

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return _NcclReceive(self, slot.message(num_bytes), self._signals.recv_signal())

    def receive(self, message: torch.Tensor, staged: SignalOperation) -> None:
        """For `_NcclReceive`."""
        with self._turns.receiving(lambda: _hear(_STAGED, staged), lambda: self._tell(_POSTED), self._op_timeout_s):
            self._launch("recv", message, self._op_timeout_s).wait()

    def close(self) -> None:
        self._signals.close()
        self._abort_group()

    def abort(self) -> None:
        """The communicator's own abort may wait for the device, and who calls this may be an event loop."""
        self._aborted.set()
        self._turns.abort()
        threading.Thread(target=self._abort_group, name="kv-nccl-abort", daemon=True).start()

    def stall(self) -> None:
        """An operation did not end in time."""
        self._turns.stall()
        self.abort()

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def _abort_group(self) -> None:
        with self._ending:
            group, self._group = self._group, None
            if group is not None:
                group.abort()

    def _tell(self, word: bytes) -> None:
        if self._told is not None:
            self._told.wait()  # heard long ago: the peer has answered since
        self._told = self._signals.send_signal(word)

    def _launch(self, move: str, message: torch.Tensor, timeout_s: float) -> _NcclOperation:
        """`send` or `recv`. For whoever has the turn."""
        group = self._group
        if group is None:
            raise TransferError("the nccl link was aborted")
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        staged = torch.cuda.current_stream(self._device)  # the lane's own: the engine's steps are not waited for
        try:
            with _NCCL_LAUNCHER, torch.cuda.stream(self._stream):
                self._stream.wait_stream(staged)
                getattr(group, move)([message], self._peer, _CHUNKS).wait()  # the own stream waits for NCCL's
                done.record(self._stream)
        except RuntimeError as error:
            raise TransferError(f"the nccl link is broken: {error}") from error
        return _NcclOperation(self, done, timeout_s)


def num_nccl_stalls() -> int:
    """Operations of NCCL links of this process that did not end in time, since the start."""
    return sum(traffic.num_stalled for traffic in _NCCL_TRAFFIC.values())


def _hear(word: bytes, operation: SignalOperation) -> None:
    operation.wait()
    if operation.header != word:
        raise TransferError("the nccl link is out of step: another message came than the one announced")


class _NcclReceive:
    def __init__(self, link: NcclTransport, message: torch.Tensor, staged: SignalOperation) -> None:
        self._link = link
        self._message = message
        self._staged = staged

    def wait(self) -> None:
        self._link.receive(self._message, self._staged)


class _NcclOperation:
    def __init__(self, link: NcclTransport, done: torch.cuda.Event, timeout_s: float) -> None:
        self._link = link
        self._done = done
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._failure: TransferError | None = None

    def settle(self) -> None:
        """Until it has ended, well or not; `wait` says which. The slot is the link's until then."""
        try:
            self.wait()
        except TransferError as error:
            self._failure = error

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        while not self._done.query():  # type: ignore[no-untyped-call]
            if self._link.aborted:
                break
            if time.monotonic() > self._deadline:
                self._link.stall()
                raise TransferTimeout(f"no bytes moved within {self._timeout_s:g} s")
            time.sleep(50e-6)
        if self._link.aborted:  # which also ends the operation, with half of its bytes moved
            raise TransferError("the nccl link was aborted")
