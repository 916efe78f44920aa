"""Pairs of NCCL transports on fake GPUs, and the threads that use them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from baton.errors import TransferError
from kvstore.transfer.transport import nccl
from kvstore.transfer.transport.base import RECEIVER, SENDER
from kvstore.transfer.transport.nccl_turns import DeviceTurns
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.select import open_receiver, open_sender
from kvstore.transfer.transport.staging import Slot, StagingPool
from kvstore.transfer.transport.streams import own_stream
from tests.fakes.gpu import FakeGpu
from tests.fakes.races import Watching
from tests.unit.kvstore.transfer.transport.ends import header_of, transport_end

SLOT_BYTES = 1000
WINDOW = 2
LONG_S = 20.0


@dataclass
class Pair:
    sender: Any
    receiver: Any
    stores: list[RendezvousStore]
    """torch holds only their C++ halves."""

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def opened(
    source: FakeGpu,
    target: FakeGpu,
    *,
    kind: str = "nccl",
    window: int = WINDOW,
    op_timeout_s: float = 5.0,
    slot_bytes: int = SLOT_BYTES,
    **more: Any,
) -> Pair:
    stores: list[RendezvousStore] = []

    def publish_to(other: int) -> Callable[[str, bytes], None]:
        return lambda key, value: stores[other].deliver(key, value)

    stores += [RendezvousStore(publish_to(RECEIVER)), RendezvousStore(publish_to(SENDER))]

    def end(side: int, gpu: FakeGpu) -> Any:
        staging = StagingPool(2 * window, slot_bytes, gpu.device)
        return transport_end(stores[side], staging, window, op_timeout_s=op_timeout_s, **more)

    def run(make: Callable[[str, Any], Any], side: int, gpu: FakeGpu) -> Any:
        try:
            watching = Watching(gpu.races, gpu) if gpu.races is not None else contextlib.nullcontext()
            with own_stream(gpu.device), watching:
                return make(kind, end(side, gpu))
        except TransferError as error:
            failure = type(error)(str(error))  # without frames, which would keep everything alive
        for store in stores:  # as the end of the control stream does
            store.close()
        raise failure

    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(run, open_sender, SENDER, source)
        receiving = threads.submit(run, open_receiver, RECEIVER, target)
        for side, other in ((sending, receiving), (receiving, sending)):
            if side.exception(LONG_S) is not None and other.exception(LONG_S) is None:
                other.result().close()
        return Pair(sending.result(LONG_S), receiving.result(LONG_S), stores)


def in_thread(gpu: FakeGpu, job: Callable[[], Any]) -> Future[Any]:
    """A transport's thread, with a stream of its own."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            with own_stream(gpu.device):
                done.set_result(job())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def taken(slot: Slot | None) -> Slot:
    assert slot is not None
    return slot


def send(pair: Pair, gpu: FakeGpu, value: int) -> Future[Any]:
    slot = taken(pair.sender.slots.acquire(1.0))
    slot.write_header(header_of(SLOT_BYTES))
    slot.payload(SLOT_BYTES).fill_(value)
    return in_thread(gpu, lambda: (pair.sender.send_chunk(slot, SLOT_BYTES).wait(), pair.sender.slots.release(slot)))


def receive(pair: Pair, gpu: FakeGpu) -> Future[Any]:
    def job() -> set[int]:
        slot = taken(pair.receiver.slots.acquire(1.0))
        pair.receiver.recv_chunk(slot, SLOT_BYTES).wait()
        pair.receiver.slots.release(slot)
        assert slot.read_header() == header_of(SLOT_BYTES)
        return set(slot.payload(SLOT_BYTES).tolist())

    return in_thread(gpu, job)


def cross(pair: Pair, source: FakeGpu, target: FakeGpu, value: int) -> None:
    receiving, sending = receive(pair, target), send(pair, source, value)
    sending.result(LONG_S)
    assert receiving.result(LONG_S) == {value}


def turn_of(gpu: FakeGpu) -> Any:
    """Another transport's part in the turns of a GPU."""
    return nccl._TURNS.setdefault(gpu.device, DeviceTurns()).join()
