"""NCCL: a communicator of two GPUs for chunks, and a TCP connection beside it for signals."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.device import gpu_of
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES, payload_bytes
from kvstore.transfer.transport import tcp
from kvstore.transfer.transport.base import RECEIVER, SENDER, FarSide, TransportEnd, TransportKind
from kvstore.transfer.transport.nccl_env import require_environment
from kvstore.transfer.transport.nccl_id import is_id_of
from kvstore.transfer.transport.nccl_log import UNKNOWN, carrier_since, length_of, nccl_log
from kvstore.transfer.transport.nccl_turns import DeviceTurns, OpeningLimits
from kvstore.transfer.transport.streams import streams_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.transfer.device import StreamEvent
    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.staging import Slot

_TAG = 1
"""NCCL ignores tags, but torch asks for one."""
_WORK_TIMEOUTS = 10
"""torch's own limit for an operation, in limits of the transport."""
_SLACK_S = 1.0
_MAX_CTAS = 4
"""NCCL channels a pair: each costs about 6.5 MB of GPU memory, and blocks of the decode kernels."""
_POSTED = b"baton: posted".ljust(HEADER_BYTES, b"\0")
"""The receiver's signal that its half of a chunk may begin. The sender's is the chunk's header."""
_OUT_OF_STEP = "the nccl transport is out of step: another message came than the one announced"
_TURNS: dict[torch.device, DeviceTurns] = {}


def is_well_formed(peer: FarSide, key: str, value: bytes) -> bool:
    """Whether the peer sets this key to this value while it opens.

    torch reads by length what it keeps in the store itself, except for the communicator's id.
    """
    where, _, rest = key.partition("/")
    if where == "signals":
        return tcp.is_well_formed(peer, rest, value)
    if where == "nccl":
        form = {f"device/{peer.rank}": rb"[0-9a-f]{32}", f"turn/{peer.rank}": b"taken"}.get(rest)
        return form is not None and re.fullmatch(form, value) is not None
    return key != "0" or (peer.rank == SENDER and is_id_of(peer, value))


class NcclTransport:
    """A communicator on a stream of its own for chunks, and a TCP connection for signals.

    Half a transfer is a kernel that spins until the other half comes, and a GPU has few turns for them (see
    `nccl_turns`). So a chunk begins on the connection, in its place among the signals: the sender signals that the
    chunk is staged, by its header, which does not travel over the GPUs; the receiver, once it has its turn, that its
    half is posted. An idle pair therefore keeps no GPU busy, the death of its peer is noticed on the connection, and
    `abort` ends a wait for a signal at once. `send_chunk` returns when the chunk has left; a receive is posted in its
    `wait`.

    The communicator is eager, because a lazy one is made by the first message, and nonblocking, so that another thread
    can abort it (`TransferConfig.nccl_mode` has the other ways). `WorkNCCL.wait()` would only make the current stream
    wait, so completion is an event on the transport's own stream that the owner thread polls.

    Only the thread that aborts the communicator lets go of it: its destructor waits for torch's watchdog.
    """

    def __init__(self, end: TransportEnd, rank: int) -> None:
        require_environment()
        device = end.staging.device
        self.slots = end.staging.share(end.max_slots)
        # torch finds an eager communicator by the index of its device, and a tensor's device always has one.
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        gpu = gpu_of(self._device)
        assert gpu is not None
        self._gpu = gpu
        self._peer = 1 - rank
        self._op_timeout_s = end.op_timeout_s
        self._aborted = threading.Event()
        self._ending = threading.Lock()
        self._launching = threading.Lock()
        """Held during a call into the communicator, which must not be aborted in the middle of it."""
        self._ender: threading.Thread | None = None
        self.carrier = UNKNOWN
        """What moves the bytes, in NCCL's words."""
        self._group: Any = None
        beside = dataclasses.replace(end, rendezvous=PrefixStore("signals", end.rendezvous))
        self._signals = tcp.TcpSender(beside) if rank == SENDER else tcp.TcpReceiver(beside)
        self._turns = _TURNS.setdefault(self._device, DeviceTurns()).join()
        self._streams = streams_of(gpu)
        self._lent = contextlib.ExitStack()
        """Gives the streams back, once nothing of this transport is on them."""
        self._stream = self._streams.launches.lend()
        self._lent.callback(self._streams.launches.give_back, self._stream)
        try:
            self._open(end, rank)
            self._lent.enter_context(_PAIRS.counted(self.carrier))
        except BaseException:
            self.close()
            raise

    def _open(self, end: TransportEnd, rank: int) -> None:
        """Makes the communicator and lets one byte cross: only then it is known that the two can reach each other."""
        store, timeout_s = end.rendezvous, end.open_timeout_s
        id_of, turn_of = "nccl/device/{}".format, "nccl/turn/{}".format
        store.set(id_of(rank), self._turns.device.id)
        goes_first = self._turns.device.id < store.get(id_of(self._peer)).decode()

        def signal() -> None:
            store.set(turn_of(rank), "taken")

        def wait(limit_s: float) -> None:
            store.wait([turn_of(self._peer)], timedelta(seconds=limit_s))

        with self._turns.opening(goes_first, signal, wait, OpeningLimits(timeout_s, self._op_timeout_s)):
            self._make_communicator(end, rank)

    def _make_communicator(self, end: TransportEnd, rank: int) -> None:
        """Makes it while this transport has both turns, for which others wait: it is aborted if that takes too long."""
        nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - a CPU build of torch has no such name
        options = nccl.Options(is_high_priority_stream=True)
        # Beyond its own timeout torch ends an operation in ways of its own; here the transport does it before.
        options._timeout = timedelta(seconds=_WORK_TIMEOUTS * max(end.open_timeout_s, self._op_timeout_s))
        options.config.blocking = int(not end.nccl_mode.startswith("nonblocking"))
        options.config.min_ctas = 1
        options.config.max_ctas = _MAX_CTAS
        options.config.cga_cluster_size = 1  # else all its blocks wait for room side by side on a busy GPU
        stream = self._streams.communicators.lend_next()
        self._lent.callback(self._streams.communicators.give_back, stream)
        log = nccl_log()
        log_start = length_of(log)
        too_long = threading.Timer(self._op_timeout_s + 1, self.abort)
        too_long.daemon = True
        too_long.start()
        try:
            with self._streams.making_communicator(stream):
                self._group = nccl(end.rendezvous, rank, 2, options)
                if end.nccl_mode.endswith("eager"):
                    self._group.eager_connect_single_device(self._device)
                byte = self._gpu.buffer(1)
                self._launch("send" if rank == SENDER else "recv", byte).wait()
            self.carrier = carrier_since(log, log_start)
        finally:
            too_long.cancel()

    def send_signal(self, header: bytes) -> Operation:
        return self._signals.send_signal(header)

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        posted = self._signals.recv_signal()
        staged = slot.read_header()
        with self._turns.sending(lambda: self._signal(staged), lambda: _expect(_POSTED, posted), self._op_timeout_s):
            operation = self._launch("send", slot.payload(num_bytes))
            operation.settle()
        return operation

    def recv_signal(self) -> SignalOperation:
        return self._signals.recv_signal()

    def recv_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        return _NcclReceive(self, slot, num_bytes, self._signals.recv_signal())

    def has_next(self) -> bool:
        return False

    def settle(self) -> None:
        """Has nothing to wait for: a receive has ended when its `wait` returns."""

    def receive(self, payload: torch.Tensor, staged: SignalOperation) -> None:
        """Receives a chunk whose staging the peer announces in `staged`; called by `_NcclReceive.wait`."""

        def wait() -> None:
            staged.wait()
            if payload_bytes(staged.header) != len(payload):  # NCCL would wait for the rest, or write beyond the end
                raise TransferError(_OUT_OF_STEP)

        with self._turns.receiving(wait, lambda: self._signal(_POSTED), self._op_timeout_s):
            self._launch("recv", payload).wait()

    def close(self) -> None:
        """Waits for the end of the communicator no longer than for a message."""
        self._signals.close()
        self._end().join(self._op_timeout_s)

    def abort(self) -> None:
        """Aborts in a thread of its own: the communicator's abort may wait for the device, the caller must not."""
        self._aborted.set()
        self._turns.abort()
        self._signals.abort()
        self._end()

    def stall(self) -> None:
        """Counts an operation that did not end in time, and aborts."""
        self._turns.stall()
        self.abort()

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted.is_set()

    def _end(self) -> threading.Thread:
        """Begins to end the communicator, once, and returns the thread that does it."""
        with self._ending:
            if self._ender is None:
                self._ender = threading.Thread(target=self._end_group, name="kv-nccl-abort", daemon=True)
                self._ender.start()
            return self._ender

    def _end_group(self) -> None:
        with _ABORTS.under_way(self._op_timeout_s):
            # A call that does not return keeps the communicator: to abort beside it may end the process.
            if not self._launching.acquire(timeout=self._op_timeout_s):
                _ABORTS.abandon()
                return
            group, self._group = self._group, None
            self._launching.release()
            if group is not None:
                group.abort()
                del group
            self._lent.close()

    def _signal(self, word: bytes) -> None:
        self._signals.send_signal(word).wait()

    def _launch(self, move: str, message: torch.Tensor) -> _NcclOperation:
        """Starts a `send` or `recv` of `message`; the caller has the turn."""
        done = self._gpu.event()
        staged = self._gpu.current_stream()  # the thread's own: it does not wait for the engine's steps
        with self._launching:
            if self._group is None or self.is_aborted:
                raise TransferError("the nccl transport was aborted")
            try:
                with self._streams.launcher, self._gpu.on_stream(self._stream):
                    if move == "recv":  # a send was staged before; what is gathered for later may have to wait long
                        self._stream.wait_stream(staged)
                    getattr(self._group, move)([message], self._peer, _TAG).wait()  # makes our stream wait for NCCL's
                    done.record(self._stream)
            except RuntimeError as error:
                raise TransferError(f"the nccl transport is broken: {error}") from error
        return _NcclOperation(self, done, self._op_timeout_s)


class _Aborts:
    """The ends of communicators in this process, and how many are stuck: each may keep a thread and memory for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        self._num_begun = 0
        self._num_late = 0
        """Number of those that took too long and have ended, or were given up."""

    @property
    def num_stuck(self) -> int:
        """Number of those that did not end in time, since the start."""
        now = time.monotonic()
        with self._lock:
            return self._num_late + sum(deadline < now for deadline in self._deadlines.values())

    @contextlib.contextmanager
    def under_way(self, timeout_s: float) -> Iterator[None]:
        """Counts an end that takes place within the block, if it takes too long."""
        with self._lock:
            self._num_begun += 1
            number = self._num_begun
            self._deadlines[number] = time.monotonic() + timeout_s + _SLACK_S
        try:
            yield
        finally:
            with self._lock:
                self._num_late += self._deadlines.pop(number) < time.monotonic()

    def abandon(self) -> None:
        """Counts an end that was given up."""
        with self._lock:
            self._num_late += 1


_ABORTS = _Aborts()


class _OpenPairs:
    """The communicators of this process, by what moves their bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num: Counter[str] = Counter()

    @contextlib.contextmanager
    def counted(self, carrier: str) -> Iterator[None]:
        """Counts a communicator while the block is entered."""
        with self._lock:
            self._num[carrier] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num[carrier] -= 1

    def by_carrier(self) -> dict[str, int]:
        """Returns the number of communicators now."""
        with self._lock:
            return {carrier: number for carrier, number in self._num.items() if number}


_PAIRS = _OpenPairs()


def nccl_pairs_by_carrier() -> dict[str, int]:
    """Counts the NCCL transports of this process that are open, by what moves their bytes."""
    return _PAIRS.by_carrier()


def num_stuck_aborts() -> int:
    """Counts the communicators of this process that could not be ended in time, since the start."""
    return _ABORTS.num_stuck


def num_nccl_stalls() -> int:
    """Counts the NCCL operations of this process that did not end in time, since the start."""
    return sum(turns.num_stalled for turns in _TURNS.values())


def _expect(word: bytes, operation: SignalOperation) -> None:
    operation.wait()
    if operation.header != word:
        raise TransferError(_OUT_OF_STEP)


class _NcclReceive:
    def __init__(self, transport: NcclTransport, slot: Slot, num_bytes: int, staged: SignalOperation) -> None:
        self._transport = transport
        self._slot = slot
        self._num_bytes = num_bytes
        self._staged = staged

    def wait(self) -> None:
        self._transport.receive(self._slot.payload(self._num_bytes), self._staged)
        self._slot.write_header(self._staged.header)


class _NcclOperation:
    def __init__(self, transport: NcclTransport, done: StreamEvent, timeout_s: float) -> None:
        self._transport = transport
        self._done = done
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._failure: TransferError | None = None

    def settle(self) -> None:
        """Waits until the operation has ended, well or not: until then the slot is in use. `wait` raises the error."""
        try:
            self.wait()
        except TransferError as error:
            self._failure = error

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        while not self._done.query():
            if self._transport.is_aborted:
                break
            if time.monotonic() > self._deadline:
                self._transport.stall()
                raise TransferTimeout(f"no bytes moved within {self._timeout_s:g} s")
            time.sleep(50e-6)
        if self._transport.is_aborted:  # which also ends the operation, with half of its bytes moved
            raise TransferError("the nccl transport was aborted")


def _is_usable(devices: Sequence[torch.device]) -> bool:
    """NCCL forbids transfers beside the collectives of several ranks in an order that not all agree on."""
    return devices[0].type == "cuda" and len(devices) == 1 and dist.is_nccl_available()


KIND = TransportKind(
    open_sender=lambda end: NcclTransport(end, SENDER),
    open_receiver=lambda end: NcclTransport(end, RECEIVER),
    is_well_formed=is_well_formed,
    is_usable=_is_usable,
    needs_two_gpus=True,
    opens_slowly=True,
    stages_on_gpu=True,
    is_plain=True,
)
