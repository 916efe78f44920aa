"""ipc transports on a fake GPU: what of a peer is believed, and whose memory is read how long."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

from baton.errors import TransferError
from kvstore.transfer.transport import ipc
from kvstore.transfer.transport.exports import rings_of
from kvstore.transfer.transport.packets import accept
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.select import open_receiver, open_sender
from kvstore.transfer.transport.staging import StagingPool
from tests.fakes.gpu import FakeEvent, FakeGpu, fake_gpus
from tests.fakes.races import Races
from tests.support.waiting import wait_until
from tests.unit.kvstore.transfer.transport.ends import LOADED, header_of, transport_end
from tests.unit.kvstore.transfer.transport.nccl_pairs import Pair, cross, opened, send, taken

SLOT_BYTES = 1000
WINDOW = 2
LONG_S = 20.0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGpu]]:
    with tempfile.TemporaryDirectory() as directory, fake_gpus(2) as gpus:
        monkeypatch.setenv("TMPDIR", directory)
        yield gpus


def opened_on(gpus: list[FakeGpu], **more: Any) -> Pair:
    return opened(gpus[0], gpus[1], kind="ipc", **more)


def num_read_still(gpu: FakeGpu) -> int:
    return rings_of(gpu.device).num_read_still


# -- what of a peer is believed ----------------------------------------------------------------------------------------


RINGS = {
    "no slots": (0, 1024),
    "slots of nothing": (2, 0),
    "more slots than any sender has": (10**6, 1024),
    "slots larger than a GPU": (2, 2**40),
    "slots that begin anywhere": (2, 1001),
}


@pytest.mark.parametrize("what", [*RINGS, "no lifeline", "too little"])
def test_nothing_is_opened_before_what_the_sender_says_of_it_was_checked(what: str, gpus: list[FakeGpu]) -> None:
    store = RendezvousStore(lambda key, value: other.deliver(key, value))
    other = RendezvousStore(lambda key, value: store.deliver(key, value))
    export = gpus[0].export_buffer(8192)
    lifeline, theirs = os.pipe()
    said = ipc._RING.pack(*RINGS.get(what, (2, 1024)), export.handle)
    staging = StagingPool(4, SLOT_BYTES, gpus[1].device)

    def receive() -> None:
        open_receiver("ipc", transport_end(store, staging, WINDOW)).close()

    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(receive)
        connection = accept("ipc", other, 5.0)
        said = said[:-1] if what == "too little" else said
        socket.send_fds(connection, [said], [] if what == "no lifeline" else [theirs])
        os.close(theirs)
        failure = receiving.exception(LONG_S)
    is_let_go = os.read(lifeline, 1) == b""
    connection.close()
    os.close(lifeline)
    assert isinstance(failure, TransferError)
    assert "did not describe its ring" in str(failure) or "has a ring of" in str(failure)
    assert is_let_go
    assert gpus[1].num_ever_open == 0


def test_a_gpu_that_cannot_be_read_ends_the_opening_on_both_sides(gpus: list[FakeGpu]) -> None:
    gpus[1].is_deaf = True
    with pytest.raises(TransferError, match="cannot read this GPU's memory"):
        opened_on(gpus)
    wait_until(lambda: num_read_still(gpus[0]) == 0, LONG_S)
    gpus[1].is_deaf = False
    pair = opened_on(gpus)
    assert len(gpus[0].exports) == 1, "the ring of the one that failed is used again"
    pair.close()


def test_a_receiver_that_reads_something_else_is_no_peer(gpus: list[FakeGpu], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_start_of", lambda ring, gpu: bytes(32))
    with pytest.raises(TransferError, match="cannot read this GPU's memory"):
        opened_on(gpus)


@pytest.mark.parametrize(("number", "num_bytes"), [(WINDOW, 10), (0, 2000)])
def test_no_byte_beyond_the_ring_is_read(number: int, num_bytes: int, gpus: list[FakeGpu]) -> None:
    pair = opened_on(gpus)
    slot = taken(pair.sender.slots.acquire(0.0))
    pair.sender.slots._numbers[id(slot)] = number
    pair.sender.send_chunk(slot, num_bytes)
    arrival = pair.receiver.recv_chunk(taken(pair.receiver.slots.acquire(0.0)), num_bytes)
    failure = None
    try:
        arrival.wait()
    except Exception as error:
        failure = error
    pair.close()
    assert isinstance(failure, TransferError)
    assert "no such slot" in str(failure)


def test_rings_beyond_their_limit_are_refused_and_those_that_are_free_lent_again(gpus: list[FakeGpu]) -> None:
    limit = {"max_ring_bytes": 2 * WINDOW * 1024}
    with contextlib.ExitStack() as open_connections:
        first, second = (opened_on(gpus, **limit) for _ in range(2))
        open_connections.callback(first.close)
        open_connections.callback(second.close)
        with pytest.raises(TransferError, match=r"transfer\.gpu_rings_mib allows"):
            open_connections.callback(opened_on(gpus, **limit).close)
        second.close()
        wait_until(lambda: num_read_still(gpus[0]) == 0, LONG_S)
        open_connections.callback(opened_on(gpus, **limit).close)
        assert len(gpus[0].exports) == 2


# -- whose memory is read, and how long ------------------------------------------------------------------------------


def test_slots_of_the_two_sides_are_not_the_same_memory(gpus: list[FakeGpu]) -> None:
    """What a sender does once its slot came back spoils no chunk at the receiver."""
    pair = opened_on(gpus)
    for value in range(1, 5):
        cross(pair, gpus[0], gpus[1], value)
    inbox = taken(pair.receiver.slots.acquire(0.0))
    send(pair, gpus[0], 7).result(LONG_S)
    pair.receiver.recv_chunk(inbox, SLOT_BYTES).wait()
    gpus[0].exports[0].memory.fill_(9)
    assert set(inbox.payload(SLOT_BYTES).tolist()) == {7}
    pair.close()


@pytest.fixture
def late_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGpu]]:
    with tempfile.TemporaryDirectory() as directory, fake_gpus(2, late=True) as gpus:
        monkeypatch.setenv("TMPDIR", directory)
        yield gpus


def test_a_slot_is_given_back_once_it_is_copied_and_not_before(
    late_gpus: list[FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver goes on before that."""
    pair = opened_on(late_gpus, window=1)
    (outbox,) = pair.sender.slots._slots
    sent = taken(pair.sender.slots.acquire(0.0))
    sent.payload(SLOT_BYTES).fill_(7)
    sent.write_header(header_of(SLOT_BYTES))
    pair.sender.send_chunk(sent, SLOT_BYTES).wait()
    pair.sender.slots.release(sent)
    inbox = taken(pair.receiver.slots.acquire(0.0))
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "query", lambda event: False)
        pair.receiver.recv_chunk(inbox, SLOT_BYTES).wait()
    assert pair.sender.slots.acquire(0.05) is None
    assert set(inbox.payload(SLOT_BYTES).tolist()) == {0}
    pair.receiver.settle()
    assert set(inbox.payload(SLOT_BYTES).tolist()) == {7}
    assert pair.sender.slots.acquire(LONG_S) is outbox
    pair.sender.slots.release(outbox)
    pair.close()


def test_what_is_copied_when_a_receiver_closes_is_waited_for(
    late_gpus: list[FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = opened_on(late_gpus)
    sent, inbox = taken(pair.sender.slots.acquire(0.0)), taken(pair.receiver.slots.acquire(0.0))
    sent.payload(SLOT_BYTES).fill_(7)
    sent.write_header(header_of(SLOT_BYTES))
    pair.sender.send_chunk(sent, SLOT_BYTES).wait()
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "query", lambda event: False)
        pair.receiver.recv_chunk(inbox, SLOT_BYTES).wait()
    pair.close()
    assert set(inbox.payload(SLOT_BYTES).tolist()) == {7}


def test_a_ring_is_lent_again_only_once_its_peer_has_closed_it(gpus: list[FakeGpu]) -> None:
    first = opened_on(gpus)
    first.sender.close()
    assert num_read_still(gpus[0]) == 1, "the receiver may be in the middle of a copy"
    second = opened_on(gpus)
    assert len(gpus[0].exports) == 2
    first.receiver.close()
    assert num_read_still(gpus[0]) == 0
    second.close()
    third = opened_on(gpus)
    assert len(gpus[0].exports) == 2
    cross(third, gpus[0], gpus[1], 3)
    third.close()
    assert gpus[1].num_open == 0


def test_the_rings_start_is_written_before_the_receiver_reads_it(gpus: list[FakeGpu]) -> None:
    before = opened_on(gpus)
    before.close()
    races = gpus[0].races = gpus[1].races = Races()
    races.watch("the ring", gpus[0].exports[0].memory)
    pair = opened_on(gpus, open_timeout_s=60.0)
    assert len(gpus[0].exports) == 1
    assert races.found == []
    pair.close()


def receive_and_stay(pipe: Connection) -> None:
    """A receiver in a process of its own, until it is killed."""
    store = RendezvousStore(lambda key, value: pipe.send((key, value)))

    def deliver() -> None:
        while True:
            store.deliver(*pipe.recv())

    threading.Thread(target=deliver, daemon=True).start()
    with fake_gpus(1) as (gpu,):
        open_receiver("ipc", transport_end(store, StagingPool(4, SLOT_BYTES, gpu.device), WINDOW, 10.0, 30.0))
        time.sleep(60.0)


def test_a_dead_peers_ring_is_lent_again(gpus: list[FakeGpu]) -> None:
    here, there = LOADED.Pipe()
    process = LOADED.Process(target=receive_and_stay, args=(there,), daemon=True)
    process.start()
    store = RendezvousStore(lambda key, value: here.send((key, value)))

    def deliver() -> None:
        while True:
            try:
                store.deliver(*here.recv())
            except (EOFError, OSError):
                return

    threading.Thread(target=deliver, daemon=True).start()
    sender = open_sender("ipc", transport_end(store, StagingPool(4, SLOT_BYTES, gpus[0].device), WINDOW, 30.0, 30.0))
    sender.close()
    assert num_read_still(gpus[0]) == 1, "it is alive, and has not closed it"
    process.kill()
    wait_until(lambda: num_read_still(gpus[0]) == 0, LONG_S)
    process.join()
    here.close()
