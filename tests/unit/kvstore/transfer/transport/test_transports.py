"""One contract for every kind of link, between two threads, and a guard of the private names of torch below them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from baton.addresses import addresses_of
from baton.config import Faults
from baton.errors import ConfigError, TransferError, TransferTimeout
from baton.kv_layout import KvLayout
from baton.messages import Hello
from kvstore.transfer.device import CudaGpu, boot_id
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.testing import FaultyTransport
from kvstore.transfer.transport.base import (
    RECEIVER,
    SENDER,
    FarSide,
    Nearness,
    Operation,
    ReceivingTransport,
    SendingTransport,
)
from kvstore.transfer.transport.nccl import is_well_formed as is_of_nccl
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.select import (
    choose_transport,
    chunk_bytes,
    nearness,
    open_receiver,
    open_sender,
    staging_device,
    usable_transports,
)
from kvstore.transfer.transport.shm import host_id
from kvstore.transfer.transport.staging import Slot, StagingPool
from tests.fakes.gpu import FakeGpu, fake_gpus
from tests.support.waiting import wait_until
from tests.unit.kvstore.transfer.transport.ends import LOADED, transport_end

CPU = torch.device("cpu")
HOST = "127.0.0.1"
SLOT_BYTES = 1000
WINDOW = 4
KINDS = ("ipc", "shm", "tcp", "sealed tcp", "faulty ipc", "faulty shm", "faulty tcp")
T = TypeVar("T")


@dataclass(slots=True)
class Ends:
    sender: SendingTransport
    receiver: ReceivingTransport
    stores: list[RendezvousStore]
    """torch holds only their C++ halves."""


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGpu]]:
    """What a process that is killed leaves of its GPU's memory, it leaves in a directory of the test."""
    with tempfile.TemporaryDirectory() as directory, fake_gpus(2) as gpus:
        monkeypatch.setenv("TMPDIR", directory)
        for gpu in gpus:
            gpu.current_stream().synchronize()  # the thread of the stream is there before threads are counted
        yield gpus


def pool(kind: str = "", index: int = 0) -> StagingPool:
    return StagingPool(2 * WINDOW, SLOT_BYTES, torch.device("cuda", index) if kind == "ipc" else CPU)


@contextlib.contextmanager
def opened(kind: str, op_timeout_s: float = 5.0) -> Iterator[Ends]:
    """The faulty kinds inject nothing: what wraps a link must not change it."""
    stores: list[RendezvousStore] = []

    def publish_to(other: int) -> Callable[[str, bytes], None]:
        return lambda key, value: stores[other].deliver(key, value)

    stores += [RendezvousStore(publish_to(RECEIVER)), RendezvousStore(publish_to(SENDER))]
    *how, kind = kind.split()
    is_sealed = "sealed" in how
    with ThreadPoolExecutor(2) as threads:
        ends = [
            transport_end(stores[side], pool(kind, side), WINDOW, 5.0, op_timeout_s, is_sealed=is_sealed)
            for side in (SENDER, RECEIVER)
        ]
        sending = threads.submit(open_sender, kind, ends[SENDER])
        receiving = threads.submit(open_receiver, kind, ends[RECEIVER])
        sender, receiver = sending.result(), receiving.result()
    try:
        yield Ends(FaultyTransport(sender, Faults()) if "faulty" in how else sender, receiver, stores)
    finally:
        sender.close()
        receiver.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str) -> Iterator[Ends]:
    with opened(kind) as pair:
        yield pair


def header(value: int) -> bytes:
    return bytes([value]) * HEADER_BYTES


def some(slot: T | None) -> T:
    assert slot is not None
    return slot


def fill(slot: Slot, value: int, num_bytes: int) -> Slot:
    slot.write_header(header(value))
    slot.payload(num_bytes).fill_(value)
    return slot


def send(link: SendingTransport, value: int, num_bytes: int) -> tuple[Slot, Operation]:
    slot = fill(some(link.slots.acquire(1.0)), value, num_bytes)
    return slot, link.send_chunk(slot, num_bytes)


def post(link: ReceivingTransport, num_bytes: int) -> tuple[Slot, Operation]:
    slot = some(link.slots.acquire(1.0))
    return slot, link.recv_chunk(slot, num_bytes)


def content(slot: Slot, num_bytes: int) -> set[int]:
    """What is in the header and the payload."""
    return {*slot.read_header(), *slot.payload(num_bytes).tolist()}


def receive(link: ReceivingTransport, what: str) -> None:
    operation = link.recv_signal() if what == "signal" else post(link, SLOT_BYTES)[1]
    operation.wait()


def send_chunks(link: SendingTransport, num_chunks: int) -> None:
    for value in range(num_chunks):
        slot, operation = send(link, value % 256, SLOT_BYTES)
        operation.wait()
        link.slots.release(slot)


def send_signals(link: SendingTransport, num_signals: int) -> None:
    for value in range(num_signals):
        link.send_signal(header(value)).wait()
        time.sleep(0.05)


def test_chunks_arrive_whole_and_in_order_with_several_posted(pair: Ends) -> None:
    assert not dist.is_initialized()
    sizes = (1, SLOT_BYTES, 64, 999)
    posted = [post(pair.receiver, size) for size in sizes]
    sent = [send(pair.sender, value, size) for value, size in enumerate(sizes, 1)]
    for _, operation in (*posted, *sent):
        operation.wait()
    for value, ((slot, _), size) in enumerate(zip(posted, sizes, strict=True), 1):
        assert content(slot, size) == {value}
        assert (len(slot.read_header()), len(slot.payload(size))) == (HEADER_BYTES, size)


def test_signals_and_chunks_keep_their_places(pair: Ends) -> None:
    """The order of the two kinds is agreed; each operation gets the message of its place."""
    first = pair.receiver.recv_signal()
    slot, chunk = post(pair.receiver, SLOT_BYTES)
    second = pair.receiver.recv_signal()
    sent = [pair.sender.send_signal(header(1)), send(pair.sender, 2, SLOT_BYTES)[1], pair.sender.send_signal(header(3))]
    for operation in (first, chunk, second, *sent):
        operation.wait()
    assert (first.header, second.header) == (header(1), header(3))
    assert content(slot, SLOT_BYTES) == {2}


def test_slots_are_used_again_once_both_sides_released_them(pair: Ends) -> None:
    for value in range(1, 6 * WINDOW):
        inbox, arrival = post(pair.receiver, SLOT_BYTES)
        outbox, departure = send(pair.sender, value % 256, SLOT_BYTES)
        arrival.wait()
        departure.wait()
        pair.sender.slots.release(outbox)
        assert content(inbox, SLOT_BYTES) == {value % 256}
        pair.receiver.slots.release(inbox)


def test_a_sender_holds_no_more_slots_than_its_share_and_gets_unsent_ones_back(pair: Ends) -> None:
    slots = [some(pair.sender.slots.acquire(0.0)) for _ in range(WINDOW)]
    assert pair.sender.slots.acquire(0.0) is None
    assert pair.sender.slots.acquire(0.05) is None
    pair.sender.slots.release(slots[1])
    assert pair.sender.slots.acquire(0.0) is slots[1]


def test_a_slot_that_only_the_receiver_released_is_still_the_senders(pair: Ends) -> None:
    inbox, arrival = post(pair.receiver, SLOT_BYTES)
    outbox, departure = send(pair.sender, 1, SLOT_BYTES)
    arrival.wait()
    departure.wait()
    pair.receiver.settle()
    pair.receiver.slots.release(inbox)
    others = [some(pair.sender.slots.acquire(0.0)) for _ in range(WINDOW - 1)]
    assert outbox not in others
    assert pair.sender.slots.acquire(0.05) is None
    pair.sender.slots.release(outbox)
    assert pair.sender.slots.acquire(1.0) is outbox


@pytest.mark.parametrize("awaited", ["signal", "chunk"])
def test_a_silent_peer_ends_in_a_timeout(kind: str, awaited: str) -> None:
    with opened(kind, op_timeout_s=0.2) as pair:
        start = time.monotonic()
        with pytest.raises(TransferTimeout):
            receive(pair.receiver, awaited)
        assert 0.15 < time.monotonic() - start < 5.0


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_kernel_that_gives_up_early_is_asked_again(side: str) -> None:
    with opened("tcp", op_timeout_s=0.5) as pair:
        early = socket.SO_SNDTIMEO if side == "sender" else socket.SO_RCVTIMEO
        getattr(pair, side)._socket.setsockopt(socket.SOL_SOCKET, early, struct.pack("@ll", 0, 10_000))
        start = time.monotonic()
        with pytest.raises(TransferTimeout):
            send_chunks(pair.sender, 100_000) if side == "sender" else receive(pair.receiver, "chunk")
        assert time.monotonic() - start > 0.4


def test_a_receiver_that_takes_nothing_ends_in_a_timeout_at_the_sender(kind: str) -> None:
    with opened(kind, op_timeout_s=0.2) as pair:
        start = time.monotonic()
        with pytest.raises(TransferTimeout):
            send_chunks(pair.sender, 100_000)  # more than a socket's buffer takes
        assert 0.15 < time.monotonic() - start < 5.0


@pytest.mark.parametrize("awaited", ["signal", "chunk"])
def test_a_sender_that_closes_ends_a_posted_receive_at_once(pair: Ends, awaited: str) -> None:
    threading.Timer(0.1, pair.sender.close).start()
    start = time.monotonic()
    with pytest.raises(TransferError) as error:
        receive(pair.receiver, awaited)
    assert not isinstance(error.value, TransferTimeout)
    assert time.monotonic() - start < 5.0


def test_a_receiver_that_closes_is_seen_by_the_sender(pair: Ends) -> None:
    pair.receiver.close()
    with pytest.raises(TransferError) as error:
        send_signals(pair.sender, 3)  # the kernel may take one before it knows
    assert not isinstance(error.value, TransferTimeout)


def test_closing_and_aborting_can_be_repeated(pair: Ends) -> None:
    for link in (pair.sender, pair.receiver):
        link.abort()
        link.close()
        link.abort()
        link.close()


@pytest.mark.parametrize("kind", ["ipc", "shm", "tcp"])
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_transport_is_aborted_by_another_thread(kind: str, side: str) -> None:
    with opened(kind, op_timeout_s=30.0) as pair:
        threading.Timer(0.1, pair.sender.abort if side == "sender" else pair.receiver.abort).start()
        start = time.monotonic()
        with pytest.raises(TransferError) as error:
            send_chunks(pair.sender, 100_000) if side == "sender" else receive(pair.receiver, "signal")
        assert not isinstance(error.value, TransferTimeout)
        assert time.monotonic() - start < 5.0


def test_an_shm_transport_tells_a_signal_from_a_chunk_and_a_chunk_from_another() -> None:
    with opened("shm") as pair:
        pair.sender.send_signal(header(1)).wait()
        with pytest.raises(TransferError, match="out of step"):
            receive(pair.receiver, "chunk")
        slot, _ = send(pair.sender, 1, SLOT_BYTES)
        slot.write_header(header(2))
        with pytest.raises(TransferError, match="not where its announcement says"):
            receive(pair.receiver, "chunk")


@pytest.mark.parametrize("flaw", ["may shrink", "is shorter", "is a file"])
def test_an_shm_receiver_maps_no_memory_that_may_end_under_it(flaw: str, tmp_path: Path) -> None:
    """Reading behind the end of what it maps would end the process."""
    name, num_bytes = b"\0baton-kv-" + secrets.token_hex(16).encode(), 4 * 4096
    memory = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if flaw == "is a file":
        os.close(memory)
        memory = os.open(tmp_path / "ring", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(memory, num_bytes)
    if flaw == "is shorter":
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    before, store = footprint(), RendezvousStore(lambda key, value: None)
    store.deliver("shm", name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, ThreadPoolExecutor(1) as thread:
        listener.bind(name)
        listener.listen(1)
        opening = thread.submit(open_receiver, "shm", transport_end(store, pool(), WINDOW))
        connection, _ = listener.accept()
        says = struct.pack("<IQ", 5 if flaw == "is shorter" else 4, 4096)
        socket.send_fds(connection, [says], [memory])
        with connection, pytest.raises(TransferError, match=r"may become shorter|could not be opened"):
            opening.result().close()
    wait_until_settled(before)
    os.close(memory)


def test_what_an_shm_receiver_writes_stays_its_own() -> None:
    with opened("shm") as pair:
        inbox, arrival = post(pair.receiver, SLOT_BYTES)
        outbox, _ = send(pair.sender, 7, SLOT_BYTES)
        arrival.wait()
        inbox.payload(SLOT_BYTES).fill_(9)
        assert content(outbox, SLOT_BYTES) == {7}


@pytest.mark.parametrize("kind", ["ipc", "shm", "tcp"])
@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
@pytest.mark.parametrize("close", [True, False])
def test_opening_ends_when_the_session_does_or_the_peer_does_not_join(kind: str, rank: int, close: bool) -> None:
    before = footprint()
    store = RendezvousStore(lambda key, value: None)
    if close:
        threading.Timer(0.1, store.close).start()
    opens = open_sender if rank == SENDER else open_receiver
    start = time.monotonic()
    with pytest.raises(TransferError, match="session ended" if close else "did not join") as error:
        opens(kind, transport_end(store, pool(kind), WINDOW, 0.5, 1.0))
    assert isinstance(error.value, TransferTimeout) or close
    assert time.monotonic() - start < 5.0
    wait_until_settled(before)


def test_an_shm_sender_that_leaves_while_the_transport_is_opened_leaves_nothing() -> None:
    """It publishes an address behind which nobody listens any more, or nobody answers."""
    before = footprint()
    store = RendezvousStore(lambda key, value: None)
    store.deliver("shm", b"\0baton-kv-" + b"0" * 32)
    with pytest.raises(TransferError, match="could not be opened"):
        open_receiver("shm", transport_end(store, pool(), WINDOW, 0.5, 1.0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        silent = b"\0baton-kv-" + secrets.token_hex(16).encode()
        listener.bind(silent)
        listener.listen(1)
        store.deliver("shm", silent)
        with pytest.raises(TransferTimeout):
            open_receiver("shm", transport_end(store, pool(), WINDOW, 0.2, 1.0))
        threading.Timer(0.1, listener.close).start()
        with pytest.raises(TransferError) as error:
            open_receiver("shm", transport_end(store, pool(), WINDOW, 10.0, 1.0))
        assert not isinstance(error.value, TransferTimeout)
    wait_until_settled(before)


def test_an_shm_transport_is_for_processes_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    before, user = footprint(), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(TransferError, match=f"user {user}'s"), opened("shm"):
        pass
    wait_until_settled(before)


def test_a_tcp_sender_takes_only_the_receiver_that_its_session_knows() -> None:
    """Others may find the port: one that says something else, one that says nothing, and one that is gone at once."""
    before = footprint()
    addresses: list[str] = []
    store = RendezvousStore(lambda key, value: addresses.append(value.decode()))
    with ThreadPoolExecutor(1) as thread:
        opening = thread.submit(open_sender, "tcp", transport_end(store, pool(), WINDOW, 10.0, 1.0))
        wait_until(lambda: bool(addresses), 10.0)
        token, host, port = addresses[0].split()
        liar, mute, gone, receiver = (socket.create_connection((host, int(port))) for _ in range(4))
        liar.sendall(bytes(len(bytes.fromhex(token))))
        gone.close()
        receiver.sendall(bytes.fromhex(token))
        store.deliver("tcp/joined", b"")
        link = opening.result()
    link.send_signal(header(1)).wait()
    assert receiver.recv(HEADER_BYTES, socket.MSG_WAITALL) == header(1)
    link.close()
    for connection in (liar, mute, receiver):
        connection.close()
    wait_until_settled(before)


@pytest.mark.parametrize("ends", ["timeout", "session"])
def test_strangers_do_not_keep_a_tcp_sender_waiting(ends: str) -> None:
    """Each connects and says nothing, one after the other, for as long as it listens."""
    before = footprint()
    addresses: list[str] = []
    store = RendezvousStore(lambda key, value: addresses.append(value.decode()))
    strangers: list[socket.socket] = []
    start = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        timeout_s = 1.5 if ends == "timeout" else 30.0
        opening = thread.submit(open_sender, "tcp", transport_end(store, pool(), WINDOW, timeout_s, 1.0))
        wait_until(lambda: bool(addresses), 10.0)
        _, host, port = addresses[0].split()
        store.deliver("tcp/joined", b"")
        while not opening.done() and time.monotonic() < start + 20.0:
            with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
                strangers.append(socket.create_connection((host, int(port))))
            if ends == "session" and time.monotonic() > start + 0.5:
                store.close()
            time.sleep(0.2)
        with pytest.raises(TransferError):
            opening.result()
    assert time.monotonic() - start < 10.0
    for stranger in strangers:
        stranger.close()
    wait_until_settled(before)


def test_a_thousand_strangers_keep_no_receiver_from_its_tcp_sender() -> None:
    """They find the port before the receiver does, and say nothing; half of them hang up."""
    before = footprint()
    said: list[tuple[str, bytes]] = []
    sending = RendezvousStore(lambda key, value: said.append((key, value)))
    receiving = RendezvousStore(sending.deliver)
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as strangers:
        opening = threads.submit(open_sender, "tcp", transport_end(sending, pool(), WINDOW, 30.0))
        wait_until(lambda: bool(said), 10.0)
        _, host, port = said[0][1].decode().split()
        for number in range(1000):
            stranger = strangers.enter_context(socket.create_connection((host, int(port)), 10.0))
            if number % 2:
                stranger.close()
        wait_until(lambda: footprint()[0] - before[0] < 600, 10.0)  # ours are 500 of them, its own are few
        receiving.deliver(*said[0])
        receiver = threads.submit(open_receiver, "tcp", transport_end(receiving, pool(), WINDOW)).result()
        sender = opening.result()
    sender.send_signal(header(1)).wait()
    receive(receiver, "signal")
    sender.close()
    receiver.close()
    wait_until_settled(before)


def test_a_tcp_receiver_that_finds_nobody_leaves_nothing() -> None:
    before = footprint()
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    store = RendezvousStore(lambda key, value: None)
    store.deliver("tcp", f"{bytes(16).hex()} {HOST} {port}".encode())
    with pytest.raises(TransferError, match="could not be opened"):
        open_receiver("tcp", transport_end(store, pool(), WINDOW, 0.5, 1.0))
    wait_until_settled(before)


@pytest.mark.parametrize("kind", ["ipc", "shm", "tcp"])
@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
@pytest.mark.parametrize("early", [True, False])
def test_a_peer_that_says_what_no_such_transport_says_ends_the_opening_at_once(
    kind: str, rank: int, early: bool
) -> None:
    """Before it begins or while it waits."""
    before = footprint()
    keys = {kind: (f"{kind}/joined", kind)[rank] for kind in ("ipc", "shm", "tcp")}
    store = RendezvousStore(lambda key, value: None)
    opens = open_sender if rank == SENDER else open_receiver
    speaking = threading.Timer(0.0 if early else 0.1, store.deliver, (keys[kind], b"\x01"))
    speaking.start()
    if early:
        speaking.join()
    start = time.monotonic()
    with pytest.raises(TransferError, match=f"1 bytes as '{keys[kind]}', which no such transport sends") as error:
        opens(kind, transport_end(store, pool(kind), WINDOW, 30.0, 30.0))
    assert not isinstance(error.value, TransferTimeout)
    assert time.monotonic() - start < 5.0
    wait_until_settled(before)


def test_what_a_peer_says_is_kept_as_far_as_any_transport_would_say_it() -> None:
    """A link need not have begun to open yet."""
    for values in (
        {f"0/{number}": b"" for number in range(10_000)}, {"0/0": bytes(4096)}, {"0" * 4096: b""}
    ):  # fmt: skip
        store = RendezvousStore(lambda key, value: None)
        for key, value in values.items():
            store.deliver(key, value)
        assert len(store._values) <= 1024
        with pytest.raises(TransferError, match="which no such transport sends"):
            store.get("0/0")


def test_both_sides_of_a_communicator_say_what_nccl_wants_to_hear() -> None:
    own, address = uuid.uuid4().hex.encode(), uuid.uuid4().hex.encode() + b" 10.0.0.1 65535"
    sender, receiver = (FarSide(rank, addresses_of("10.0.0.1")) for rank in (SENDER, RECEIVER))
    said = {"0": nccl_id("10.0.0.1"), "nccl/device/0": own, "nccl/word/0/7": b"next", "else": b"1"}
    for key, value in said.items():
        assert is_of_nccl(sender, key, value)
        theirs = key.replace("/0", "/1")
        assert is_of_nccl(receiver, theirs, value) == (key != "0"), "the sender makes the id"
        assert key == "else" or not any(is_of_nccl(sender, key, bad) for bad in (b"", value + b"1", value[:-1]))
    assert not any(is_of_nccl(sender, f"nccl/word/{place}", b"next") for place in ("1/7", "0/", "0/1000", "0/7/"))
    assert is_of_nccl(sender, "signals/tcp", address)
    assert is_of_nccl(receiver, "signals/tcp/joined", b"")
    assert not is_of_nccl(receiver, "signals/tcp", address)
    assert not is_of_nccl(sender, "signals/tcp", address + b"0")


def nccl_id(ip: str, port: int = 4711, family: int = socket.AF_INET) -> bytes:
    packed = socket.inet_pton(family, ip)
    places = "4x16s" if family == socket.AF_INET6 else "4s"
    return struct.pack(f"@QHH{places}", 7, family, socket.htons(port), packed).ljust(128, b"\0")


def test_an_id_of_nccl_names_the_peers_host_unless_an_operator_names_interfaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    far, here = (FarSide(SENDER, addresses_of(host)) for host in ("10.0.0.1", "127.0.0.1"))
    assert is_of_nccl(FarSide(SENDER, addresses_of("fd00::1")), "0", nccl_id("fd00::1", family=socket.AF_INET6))
    assert not is_of_nccl(far, "0", nccl_id("fd00::1", family=socket.AF_INET6))
    assert not is_of_nccl(far, "0", nccl_id("10.0.0.2"))
    assert not is_of_nccl(far, "0", nccl_id("127.0.0.1")), "of this machine, where the peer is not"
    assert is_of_nccl(here, "0", nccl_id("127.0.0.9")), "one machine has many addresses"
    assert not is_of_nccl(here, "0", nccl_id("192.0.2.1"))
    assert not any(is_of_nccl(far, "0", bad) for bad in (bytes(128), nccl_id("10.0.0.1", port=0)))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert is_of_nccl(far, "0", nccl_id("10.0.0.2"))
    assert not is_of_nccl(far, "0", bytes(128))


def footprint() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208


def wait_until_settled(before: tuple[int, int]) -> None:
    """Until there are no more file descriptors and threads than before; those that ended need a moment to go."""
    wait_until(
        lambda: all(now <= then for now, then in zip(footprint(), before, strict=True)),
        10.0,
        every_s=0.05,
        seen=lambda: f"{footprint()}, and {before} before",
    )


@pytest.mark.parametrize(("kind", "num_files"), [("ipc", 2), ("shm", 1), ("tcp", 1)])
def test_pairs_cost_little_and_leave_nothing_behind(kind: str, num_files: int) -> None:
    """Beside the thread that owns it, a side has one file descriptor, or two where it needs to know who reads a GPU."""
    with opened(kind):
        pass  # what all pairs share is made by now
    before, num_sides = footprint(), 2 * 8
    with contextlib.ExitStack() as pairs:
        for _ in range(8):
            pairs.enter_context(opened(kind))
        wait_until_settled((before[0] + num_files * num_sides, before[1]))
    wait_until_settled(before)


def send_and_stay(kind: str, pipe: Connection) -> None:
    """A sender in a process of its own, until it is killed."""
    store = RendezvousStore(lambda key, value: pipe.send((key, value)))

    def deliver() -> None:
        while True:
            store.deliver(*pipe.recv())

    threading.Thread(target=deliver, daemon=True).start()
    with fake_gpus(1):
        link = open_sender(kind, transport_end(store, pool(kind), WINDOW, 10.0, 30.0))
        send(link, 5, SLOT_BYTES)[1].wait()
        pipe.send(("ready", b""))
        time.sleep(60.0)


@pytest.mark.parametrize("kind", ["ipc", "shm", "tcp"])
def test_a_killed_sender_ends_a_posted_signal_at_once(kind: str) -> None:
    """And what it had sent is there, from another process."""
    here, there = LOADED.Pipe()
    process = LOADED.Process(target=send_and_stay, args=(kind, there), daemon=True)
    process.start()
    store = RendezvousStore(lambda key, value: here.send((key, value)))
    ready = threading.Event()

    def deliver() -> None:
        while not ready.is_set():
            key, value = here.recv()
            ready.set() if key == "ready" else store.deliver(key, value)

    threading.Thread(target=deliver, daemon=True).start()
    link = open_receiver(kind, transport_end(store, pool(kind, 1), WINDOW, 30.0, 30.0))
    slot, chunk = post(link, SLOT_BYTES)
    chunk.wait()
    assert content(slot, SLOT_BYTES) == {5}
    assert ready.wait(10.0)
    sentinel = link.recv_signal()
    start = time.monotonic()
    process.kill()
    with pytest.raises(TransferError):
        sentinel.wait()
    assert time.monotonic() - start < 5.0
    process.join()
    link.close()


def test_kinds_are_chosen_for_the_cache_and_the_wish() -> None:
    assert usable_transports([CPU], ("ipc", "shm", "nccl", "tcp")) == ("shm", "tcp")
    assert usable_transports([torch.device("cuda")], ("ipc", "shm", "tcp")) == ("ipc", "tcp")
    gpus = [torch.device("cuda", rank) for rank in range(2)]
    assert usable_transports(gpus, ("nccl", "ipc", "tcp")) == ("ipc", "tcp"), "no kernels beside the sums of two ranks"
    with pytest.raises(ConfigError, match=r"none of transfer.transports \(nccl\) works for a KV cache on cpu"):
        usable_transports([CPU], ("nccl",))
    assert staging_device("nccl", torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert staging_device("ipc", torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert staging_device("tcp", torch.device("cuda", 1)) == CPU


def test_the_best_kind_is_chosen_that_fits_two_ranks() -> None:
    kinds = ("ipc", "nccl", "shm", "tcp")
    here, one_gpu = Nearness(is_same_host=True), Nearness(is_same_host=True, is_same_gpu=True)
    assert choose_transport(kinds, kinds, here) == "nccl"
    assert choose_transport(kinds, kinds, one_gpu) == "shm", "NCCL refuses one GPU"
    assert choose_transport(kinds, kinds, Nearness(is_same_gpu=True)) == "tcp", "this cannot be, and is no error"
    assert choose_transport(kinds, kinds, Nearness(is_same_host=True, may_read_gpu=True)) == "ipc"
    assert choose_transport(kinds, kinds, Nearness(may_read_gpu=True)) == "nccl", "another host's GPU is not seen here"
    assert choose_transport(("nccl",), kinds, one_gpu) is None
    assert choose_transport(("unheard of",), kinds, here) is None


def test_how_near_two_ranks_are_follows_from_what_the_sender_says(gpus: list[FakeGpu]) -> None:
    near, own, other = gpus[0].device, gpus[0].uuid, gpus[1].uuid

    def seen(host: str, gpu: str, device: torch.device = near) -> Nearness:
        return nearness(hello_of(host, gpu, gpu), device, is_sealed=False, plaintext_transports=())

    assert seen(host_id(), own) == Nearness(is_same_host=True, is_same_gpu=True, may_read_gpu=True)
    assert seen(host_id(), other) == Nearness(is_same_host=True, may_read_gpu=True)
    gpus[0].unreachable.add(other)
    assert seen("else", other) == Nearness()
    assert seen(host_id(), "") == seen(host_id(), own, CPU) == Nearness(is_same_host=True)


def test_instances_of_one_gpu_are_one_gpu_for_nccl_and_two_for_ipc(gpus: list[FakeGpu]) -> None:
    here, instance = gpus
    here.id = instance.id = "one bus id"
    near = nearness(
        hello_of(host_id(), instance.id, instance.uuid), here.device, is_sealed=False, plaintext_transports=()
    )
    assert near == Nearness(is_same_host=True, is_same_gpu=True)
    kinds = ("ipc", "nccl", "tcp")
    assert choose_transport(kinds, kinds, near) == "tcp"


def test_a_gpu_is_named_by_its_machine_and_place_so_that_its_instances_have_one_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bus_id_of(buffer: Any, num_bytes: int, index: int) -> int:
        buffer.value = (b"0000:65:00.0", b"0000:65:00.0", b"0000:b3:00.0")[index][: num_bytes - 1]
        return 0

    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.setattr("engine.gpu_memory._runtime", lambda: SimpleNamespace(cudaDeviceGetPCIBusId=bus_id_of))
    ids = [CudaGpu(torch.device("cuda", number)).id for number in range(3)]
    assert ids == [f"{boot_id()} 0000:65:00.0"] * 2 + [f"{boot_id()} 0000:b3:00.0"]
    monkeypatch.setenv("NCCL_HOSTID", "a pod")
    assert CudaGpu(torch.device("cuda", 0)).id == f"{boot_id()} 0000:65:00.0 a pod"


def test_a_kind_is_plain_where_both_sides_say_so() -> None:
    hello = dataclasses.replace(hello_of("else"), plaintext_transports=("nccl",))
    assert nearness(hello, CPU, is_sealed=True, plaintext_transports=("nccl",)).plaintext_transports == ("nccl",)
    assert nearness(hello, CPU, is_sealed=True, plaintext_transports=()).plaintext_transports == ()
    assert nearness(hello_of("else"), CPU, is_sealed=True, plaintext_transports=("nccl",)).plaintext_transports == ()


def hello_of(host: str, gpu_id: str = "", gpu_uuid: str = "") -> Hello:
    return Hello(
        protocol_version=1,
        worker_id="prefill-0",
        incarnation="1",
        wire_compat="kind-a",
        transports=("nccl", "tcp"),
        layout=KvLayout(16, 1, ()),
        rank=0,
        peer_rank=0,
        host_id=host,
        gpu_id=gpu_id,
        gpu_uuid=gpu_uuid,
    )


def test_chunks_of_a_tcp_transport_stay_in_the_cache_and_hold_a_unit_at_least() -> None:
    assert {kind: chunk_bytes(kind, 2**22, 24_576, CPU) for kind in ("", "shm", "nccl", "tcp")} == {
        "": 2**22, "shm": 2**22, "nccl": 2**22, "tcp": 2**20
    }  # fmt: skip
    assert chunk_bytes("tcp", 2**18, 24_576, CPU) == 2**18
    assert chunk_bytes("tcp", 2**22, 2**21, CPU) == 2**21
    assert chunk_bytes("tcp", 2**22, 24_576, torch.device("cuda")) == 2**22, "out of a GPU's memory nothing is warm"


def test_the_host_id_is_that_of_every_process_of_this_user_here() -> None:
    with ProcessPoolExecutor(1, LOADED) as processes:
        assert processes.submit(host_id).result() == host_id()
