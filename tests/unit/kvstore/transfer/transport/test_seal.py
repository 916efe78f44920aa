"""Sealed connections: who may open what, and what is on the wire."""

from __future__ import annotations

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch

from baton.errors import TransferCorrupted, TransferError
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport import seal, tcp
from kvstore.transfer.transport.base import RECEIVER, SENDER, FarSide, Nearness
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.seal import RECORD_BYTES, TAG_BYTES, RecordSeal
from kvstore.transfer.transport.select import choose_transport, open_sender
from kvstore.transfer.transport.staging import StagingPool
from tests.unit.kvstore.transfer.transport.ends import transport_end

SECRET = secrets.token_bytes(tcp.SECRET_BYTES)
SIZES = (0, 1, HEADER_BYTES, RECORD_BYTES, RECORD_BYTES + 1, 3 * RECORD_BYTES - 7)


def _records(by: RecordSeal, message: bytes) -> list[bytes]:
    return [bytes(record) for record in by.sealed(memoryview(message))]


def _second_record(by: RecordSeal) -> bytes:
    return [_records(by, bytes([1]) * 100) for _ in range(2)][1][0]


def _message(by: RecordSeal, records: list[bytes], num_bytes: int) -> bytes:
    into = bytearray(num_bytes)
    for room, record in zip(by.opened(memoryview(into)), records, strict=True):
        room[:] = record
    return bytes(into)


def test_messages_arrive_as_they_were_and_cost_a_tag_a_record() -> None:
    sender, receiver = RecordSeal(SECRET, 0), RecordSeal(SECRET, 0)
    for size in SIZES:
        message = secrets.token_bytes(size)
        records = _records(sender, message)
        assert sum(map(len, records)) == size + TAG_BYTES * -(-size // RECORD_BYTES)
        assert _message(receiver, records, size) == message


def test_no_record_is_like_another_though_the_message_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "RECORDS_A_KEY", 3)
    sender, receiver, back = RecordSeal(SECRET, 0), RecordSeal(SECRET, 0), RecordSeal(SECRET, 1)
    message = bytes(64)
    seen = set()
    for _ in range(10):
        (record,) = _records(sender, message)
        assert _message(receiver, [record], 64) == message
        seen |= {record, *_records(back, message)}
    assert len(seen) == 20


@pytest.mark.parametrize("harm", ["changed", "repeated", "left out", "sent back", "of another connection"])
def test_a_record_that_is_not_the_next_one_is_refused(harm: str) -> None:
    sender, receiver = RecordSeal(SECRET, 0), RecordSeal(SECRET, 0)
    records = [_records(sender, bytes([number]) * 100)[0] for number in range(3)]
    assert _message(receiver, records[:1], 100) == bytes(100)
    wrong = {
        "changed": bytes([records[1][0] ^ 1]) + records[1][1:],
        "repeated": records[0],
        "left out": records[2],
        "sent back": _second_record(RecordSeal(SECRET, 1)),
        "of another connection": _second_record(RecordSeal(secrets.token_bytes(32), 0)),
    }[harm]
    with pytest.raises(TransferCorrupted, match="not the one that the peer encrypted"):
        _message(receiver, [wrong], 100)


def test_what_is_on_the_wire_is_no_plain_text_and_only_the_rendezvous_can_read_it() -> None:
    published: dict[str, bytes] = {}
    store = RendezvousStore(published.__setitem__)
    end = transport_end(store, StagingPool(1, 1000, torch.device("cpu")), 1, is_sealed=True)
    with ThreadPoolExecutor(1) as thread:
        opening = thread.submit(open_sender, "tcp", end)
        store.wait(["tcp"], timedelta(seconds=30))
        token, host, port = published["tcp"].decode().split()
        with socket.create_connection((host, int(port)), 30) as peer:
            peer.sendall(bytes.fromhex(token))
            store.deliver("tcp/joined", b"")
            sender = opening.result()
            sender.send_signal(b"A" * HEADER_BYTES)
            on_the_wire = peer.recv(HEADER_BYTES + TAG_BYTES, socket.MSG_WAITALL)
            sender.close()
            assert peer.recv(1) == b""
    assert b"AAAA" not in on_the_wire
    by = RecordSeal(bytes.fromhex(published["tcp/secret"].decode()), SENDER)
    assert _message(by, [on_the_wire], HEADER_BYTES) == b"A" * HEADER_BYTES


def test_each_connection_has_a_secret_of_its_own() -> None:
    stores: list[dict[str, bytes]] = [{}, {}]
    for published in stores:
        assert tcp._publish_secret(RendezvousStore(published.__setitem__)).hex() == published["tcp/secret"].decode()
    assert stores[0] != stores[1]


def test_a_secret_of_another_form_ends_the_rendezvous() -> None:
    sent = partial(tcp.is_well_formed, FarSide(SENDER, frozenset()), "tcp/secret")
    assert sent(b"0f" * 32)
    assert not any(map(sent, (b"", b"0f" * 31, b"0F" * 32, b"0f" * 33, b"zz" * 32)))
    assert not tcp.is_well_formed(FarSide(RECEIVER, frozenset()), "tcp/secret", b"0f" * 32)
    store = RendezvousStore(lambda key, value: None, 0.1)
    end = transport_end(store, StagingPool(1, 1000, torch.device("cpu")), 1, open_timeout_s=0.1, is_sealed=True)
    store.deliver("tcp", b"00" * 16 + b" 127.0.0.1 1")
    with pytest.raises(TransferError, match="did not join"):  # no secret, no plain text instead
        tcp.TcpReceiver(end)


def test_what_cannot_encrypt_stays_on_its_host() -> None:
    kinds = ("nccl", "tcp")
    for is_same_host in (False, True):
        near = Nearness(is_same_host=is_same_host, must_be_sealed=True)
        assert choose_transport(kinds, kinds, near) == ("nccl" if is_same_host else "tcp")
    assert choose_transport(kinds, kinds, Nearness()) == "nccl"
    trusted = Nearness(must_be_sealed=True, plaintext_transports=("nccl",))
    assert choose_transport(kinds, kinds, trusted) == "nccl"
