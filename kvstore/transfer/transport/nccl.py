"""NCCL transport: a communicator of two GPUs for chunks, and a TCP connection for signals."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import socket
import threading
import time
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
from kvstore.transfer.transport.nccl_counts import ABORTS, COMMUNICATORS
from kvstore.transfer.transport.nccl_env import require_environment
from kvstore.transfer.transport.nccl_log import UNKNOWN, carrier_since, length_of, nccl_log
from kvstore.transfer.transport.nccl_turns import HELD_SHARE, WORDS, DeviceTurns, OpeningLimits, Words
from kvstore.transfer.transport.socket_end import ip_in
from kvstore.transfer.transport.streams import streams_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.transfer.device import StreamEvent
    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.staging import Slot


_TAG = 1
"""NCCL ignores tags, but torch requires one."""
_WORK_TIMEOUTS = 10
"""torch's own limit for an operation, as a multiple of the transport's limits."""
_MAX_CTAS = 4
"""NCCL channels per communicator: each costs about 6.5 MB of GPU memory, and blocks of the decode kernels."""
_POSTED = b"baton: posted".ljust(HEADER_BYTES, b"\0")
"""The receiver's signal that its half of a chunk may start. The sender's is the chunk's header."""
_LATER = b"baton: later".ljust(HEADER_BYTES, b"\0")
"""Signal of a side that cannot yet give the expected one, because an opening delays it."""
_OUT_OF_STEP = "the nccl transport is out of step: another message came than the one announced"
_TURNS: dict[torch.device, DeviceTurns] = {}
_ID_BYTES = 128
_ADDRESS_AT = 8
"""A sockaddr follows a random number of eight bytes (`ncclBootstrapHandle`)."""
INTERFACES = "NCCL_SOCKET_IFNAME"


def is_well_formed(peer: FarSide, key: str, value: bytes) -> bool:
    """Return whether the peer may set this key to this value while it opens.

    torch parses its own entries in the store by length, except for the communicator's id.
    """
    where, _, rest = key.partition("/")
    if where == "signals":
        return tcp.is_well_formed(peer, rest, value)
    if where == "nccl":
        if rest == f"device/{peer.rank}":
            return re.fullmatch(rb"[0-9a-f]{32}", value) is not None
        is_word = re.fullmatch(rf"word/{peer.rank}/\d{{1,3}}", rest, re.ASCII) is not None
        return is_word and value in [word.encode() for word in WORDS]
    return key != "0" or (peer.rank == SENDER and is_id_of(peer, value))


class NcclTransport:
    """Communicator on a separate stream for chunks, and a TCP connection for signals.

    Half a transfer is a kernel that spins until the other half comes, and a GPU has few locks ("turns") for them (see
    `nccl_turns`). So a chunk starts on the connection, in its place among the signals. The sender signals that the
    chunk is staged with the chunk's header, which does not travel over the GPUs. The receiver, once it has its lock,
    signals that its half is posted. An idle connection therefore keeps no GPU busy, the death of its peer is noticed on
    the TCP connection, and `abort` ends a wait for a signal at once. `send_chunk` returns when the chunk has been sent;
    a receive is posted in its `wait`.

    The communicator is eager, because the first message would create a lazy one, and nonblocking, so that another
    thread can abort it (`TransferConfig.nccl_mode` has the other modes). `WorkNCCL.wait()` would only make the current
    stream wait, so completion is an event on the transport's stream that the owner thread polls.

    Only the thread that aborts the communicator drops its reference: the destructor waits for torch's watchdog.
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
        """NCCL's name of the path that carries the bytes."""
        self._group: Any = None
        self._is_open = False
        """True after one message has crossed."""
        beside = dataclasses.replace(end, rendezvous=PrefixStore("signals", end.rendezvous))
        self._signals = tcp.TcpSender(beside) if rank == SENDER else tcp.TcpReceiver(beside)
        self._turns = _TURNS.setdefault(self._device, DeviceTurns()).join()
        self._streams = streams_of(gpu)
        self._lent = contextlib.ExitStack()
        """Returns the streams, once this transport has no work on them."""
        self._stream = self._streams.launches.lend()
        self._lent.callback(self._streams.launches.give_back, self._stream)
        try:
            self._open(end, rank)
            self._lent.enter_context(COMMUNICATORS.counted(self.carrier))
        except BaseException:
            self.close()
            raise

    def _open(self, end: TransportEnd, rank: int) -> None:
        """Create the communicator and send one byte across, which proves that the two sides can reach each other."""
        store, timeout_s = end.rendezvous, end.open_timeout_s
        id_of, word_of = "nccl/device/{}".format, "nccl/word/{}/{}".format
        said, number = itertools.count(), 0
        store.set(id_of(rank), self._turns.device.id)
        goes_first = self._turns.device.id < store.get(id_of(self._peer)).decode()

        def say(word: str) -> None:
            store.set(word_of(rank, next(said)), word)

        def hear(limit_s: float) -> str:
            nonlocal number
            store.wait([word_of(self._peer, number)], timedelta(seconds=limit_s))
            number += 1
            return store.get(word_of(self._peer, number - 1)).decode()

        limits = OpeningLimits(timeout_s, self._op_timeout_s * HELD_SHARE)
        with self._turns.opening(goes_first, Words(say, hear), limits):
            self._make_communicator(end, rank)

    def _make_communicator(self, end: TransportEnd, rank: int) -> None:
        """Create the communicator while holding both locks; abort it if that takes too long, since others wait."""
        nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - a CPU build of torch has no such name
        options = nccl.Options(is_high_priority_stream=True)
        # After its own timeout torch ends an operation in its own way; the transport ends it earlier.
        options._timeout = timedelta(seconds=_WORK_TIMEOUTS * max(end.open_timeout_s, self._op_timeout_s))
        options.config.blocking = int(not end.nccl_mode.startswith("nonblocking"))
        options.config.min_ctas = 1
        options.config.max_ctas = _MAX_CTAS
        options.config.cga_cluster_size = 1  # otherwise all its blocks wait for space side by side on a busy GPU
        stream = self._streams.communicators.lend_next()
        self._lent.callback(self._streams.communicators.give_back, stream)
        log = nccl_log()
        log_start = length_of(log)
        too_long = threading.Timer(self._op_timeout_s, self.abort)
        too_long.daemon = True
        too_long.start()
        try:
            with self._streams.making_communicator(stream):
                self._group = nccl(end.rendezvous, rank, 2, options)
                if end.nccl_mode.endswith("eager"):
                    self._group.eager_connect_single_device(self._device)
                byte = self._gpu.buffer(1)
                self._launch("send" if rank == SENDER else "recv", byte).wait()
            self._is_open = True
            self.carrier = carrier_since(log, log_start)
        finally:
            too_long.cancel()

    def send_signal(self, header: bytes) -> Operation:
        return self._signals.send_signal(header)

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        posted = self._signals.recv_signal()
        staged = slot.read_header()

        def wait() -> None:
            if self._awaited(posted) != _POSTED:
                raise TransferError(_OUT_OF_STEP)

        with self._turns.sending(lambda: self._signal(staged), wait, self._tell_later, self._op_timeout_s):
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
        """Return at once: a receive has ended when its `wait` returns."""

    def receive(self, slot: Slot, num_bytes: int, staged: SignalOperation) -> None:
        """Receive a chunk whose staging the peer announces in `staged`; called by `_NcclReceive.wait`."""
        payload = slot.payload(num_bytes)
        header = b""

        def wait() -> None:
            nonlocal header
            header = self._awaited(staged)
            if payload_bytes(header) != num_bytes:  # NCCL would wait for the rest, or write beyond the end
                raise TransferError(_OUT_OF_STEP)

        with self._turns.receiving(wait, lambda: self._signal(_POSTED), self._tell_later, self._op_timeout_s):
            self._launch("recv", payload).wait()
        slot.write_header(header)

    def close(self) -> None:
        """Close the transport; wait for the communicator's end for at most the timeout of a message."""
        self._signals.close()
        self._end().join(self._op_timeout_s)

    def abort(self) -> None:
        """Abort in a separate thread: the communicator's abort may wait for the device, and the caller must not."""
        self._aborted.set()
        self._turns.abort()
        self._signals.abort()
        self._end()

    def stall(self) -> None:
        """Count an operation that did not end in time, and abort."""
        self._turns.stall()
        self.abort()

    @property
    def is_aborted(self) -> bool:
        """True after `abort` was called."""
        return self._aborted.is_set()

    def _end(self) -> threading.Thread:
        """Start to end the communicator, once, and return the thread that does it."""
        with self._ending:
            if self._ender is None:
                self._ender = threading.Thread(target=self._end_group, name="kv-nccl-abort", daemon=True)
                self._ender.start()
            return self._ender

    def _end_group(self) -> None:
        with ABORTS.under_way(self._op_timeout_s):
            # A call that does not return keeps the communicator: a parallel abort may end the process. A call that
            # still creates the communicator, as the first one of a lazy communicator does, may be aborted, and nothing
            # else ends it.
            is_free = self._launching.acquire(timeout=self._op_timeout_s)
            if not is_free and self._is_open:
                ABORTS.abandon()
                return
            group, self._group = self._group, None
            if is_free:
                self._launching.release()
            if group is not None:
                group.abort()
                del group
            self._lent.close()

    def _awaited(self, signal: SignalOperation) -> bytes:
        """Wait for the signal that the peer owes, as long as an opening delays it."""
        signal.wait()
        while signal.header == _LATER:
            signal = self._signals.recv_signal()
            signal.wait()
        return signal.header

    def _tell_later(self) -> None:
        self._signal(_LATER)

    def _signal(self, word: bytes) -> None:
        self._signals.send_signal(word).wait()

    def _launch(self, move: str, message: torch.Tensor) -> _NcclOperation:
        """Start a `send` or `recv` of `message`; the caller holds the lock."""
        done = self._gpu.event()
        staged = self._gpu.current_stream()  # the thread's own: it does not wait for the engine's steps
        with self._launching:
            if self._group is None or self.is_aborted:
                raise TransferError("the nccl transport was aborted")
            try:
                with self._streams.launcher, self._gpu.on_stream(self._stream):
                    if move == "recv":  # a send was staged before; later gathers may have to wait for long
                        self._stream.wait_stream(staged)
                    getattr(self._group, move)([message], self._peer, _TAG).wait()  # makes our stream wait for NCCL's
                    done.record(self._stream)
            except RuntimeError as error:
                raise TransferError(f"the nccl transport is broken: {error}") from error
        return _NcclOperation(self, done, self._op_timeout_s)


def num_nccl_stalls() -> int:
    """Return the number of NCCL operations of this process that did not end in time, since the start."""
    return sum(turns.num_stalled for turns in _TURNS.values())


class _NcclReceive:
    def __init__(self, transport: NcclTransport, slot: Slot, num_bytes: int, staged: SignalOperation) -> None:
        self._transport = transport
        self._slot = slot
        self._num_bytes = num_bytes
        self._staged = staged

    def wait(self) -> None:
        self._transport.receive(self._slot, self._num_bytes, self._staged)


class _NcclOperation:
    def __init__(self, transport: NcclTransport, done: StreamEvent, timeout_s: float) -> None:
        self._transport = transport
        self._done = done
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._failure: TransferError | None = None

    def settle(self) -> None:
        """Wait until the operation has ended, in any way: until then the slot is in use. `wait` raises the error."""
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
        if self._transport.is_aborted:  # which also ends the operation, with half of its bytes transferred
            raise TransferError("the nccl transport was aborted")


def _is_usable(devices: Sequence[torch.device]) -> bool:
    """Return whether NCCL can be used: not by several ranks, whose collectives need an agreed order with transfers."""
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


def is_id_of(peer: FarSide, value: bytes) -> bool:
    """Return whether a peer may have created this id of a communicator: it names an address of the peer's host.

    The id is 128 bytes with the address at which its creator listens, and to which NCCL connects. NCCL chooses the
    interface by itself. Between processes of one machine it may be any address of the machine. An operator may name
    interfaces (`NCCL_SOCKET_IFNAME`) that Baton does not use; then any address is accepted.
    """
    if len(value) != _ID_BYTES or not (ip := ip_in(value, _ADDRESS_AT)):
        return False
    is_here = any(_is_own(str(address)) for address in peer.addresses)
    return peer.is_at(ip) or INTERFACES in os.environ or (is_here and _is_own(ip))


def _is_own(ip: str) -> bool:
    """Return whether an IP address belongs to this machine."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True
