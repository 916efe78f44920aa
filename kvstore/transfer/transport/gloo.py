"""gloo: a process group of two over TCP, built directly on a rendezvous store.

This file and `nccl` use names that torch calls private or experimental (`ProcessGroupGloo._Options`, its `_devices` and
`_threads`, backends constructed without `init_process_group`, `eager_connect_single_device`);
`tests/unit/kvstore/transfer/transport/test_transports.py` and `tests/gpu/test_nccl_link.py` guard them. Written against
torch 2.13.
"""

from __future__ import annotations

import struct
import threading
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import RECEIVER, SENDER, FarSide, TransportEnd, TransportKind
from kvstore.transfer.transport.socket_end import is_of_peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.transfer.transport.base import Operation, SignalOperation
    from kvstore.transfer.transport.staging import Slot

_SIGNALS, _CHUNKS = 0, 1
"""Tags of the two kinds of messages."""
_NAME = struct.Struct("@N")
_ADDRESS = struct.Struct("@N128xnnn")
"""What gloo publishes of one side: the length of its host's name, the name; the length of the address, which is a
sockaddr_storage, and -1; and the numbers of its two ends, one of them to itself."""
_ADDRESS_BYTES = 136
_MAX_NAME_BYTES = 255


def is_well_formed(peer: FarSide, key: str, value: bytes) -> bool:
    """Whether the peer sets this key to this value while it opens; gloo trusts every length in it, and the address."""
    if key != f"0/{peer.rank}" or len(value) < _NAME.size:
        return False
    (num_name_bytes,) = _NAME.unpack_from(value)
    if num_name_bytes > _MAX_NAME_BYTES or len(value) != _NAME.size + num_name_bytes + _ADDRESS.size:
        return False
    size, none, *ends = _ADDRESS.unpack_from(value, _NAME.size + num_name_bytes)
    is_address = size == _ADDRESS_BYTES and none == -1 and min(ends) >= 0
    return is_address and is_of_peer(peer, value, _NAME.size + num_name_bytes + _NAME.size)


class GlooTransport:
    """A gloo pair. A send completes once the peer has posted the receive: natural back-pressure.

    Signals and chunks have a tag each. A chunk's receive is posted with the whole slot, because gloo ends the process
    that receives more than it posted; less is no error to it.
    """

    def __init__(self, end: TransportEnd, rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        self._device = _device(end.host)
        options._devices = [self._device]
        options._threads = 0  # they run collectives only
        options._timeout = timedelta(seconds=end.open_timeout_s)
        self.slots = end.staging.share(end.max_slots)
        self._op_timeout = timedelta(seconds=end.op_timeout_s)
        self._peer = 1 - rank
        self._group: Any = dist.ProcessGroupGloo(end.rendezvous, rank, 2, options)

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

    def has_next(self) -> bool:
        return False

    def settle(self) -> None:
        """Has nothing to wait for."""

    def close(self) -> None:
        self._group = None
        self._device = None

    def abort(self) -> None:
        """Does nothing: a waiting operation ends at its timeout or when the peer closes, and by no call (measured)."""

    def _start(self, message: torch.Tensor, start: Callable[[Any], Any]) -> _GlooOperation:
        try:
            return _GlooOperation(start(self._group), message, self._op_timeout)
        except RuntimeError as error:
            raise TransferError(f"the gloo transport is broken: {error}") from error


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
            raise TransferError(f"the gloo transport is broken: {error}") from error

    @property
    def header(self) -> bytes:
        return self._message[:HEADER_BYTES].numpy().tobytes()


_DEVICES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_MAKING = threading.Lock()


def _device(host: str) -> Any:
    """The listening socket and the thread of all open pairs of this process, which then need one descriptor each.

    It accepts every connection, and lets go of strangers' when the last pair is closed, and not before.
    """
    with _MAKING:
        device = _DEVICES.get(host)
        if device is None:
            device = _DEVICES[host] = dist.ProcessGroupGloo.create_device(hostname=host.strip("[]"))
        return device


KIND = TransportKind(
    open_sender=lambda end: GlooTransport(end, SENDER),
    open_receiver=lambda end: GlooTransport(end, RECEIVER),
    is_well_formed=is_well_formed,
    is_usable=lambda devices: True,
    is_plain=True,
)
