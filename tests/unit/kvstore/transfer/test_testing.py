"""Faults on purpose happen where and as often as they are asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from baton.config import Faults, TestingConfig, parse_faults
from baton.errors import ConfigError, TransferError, TransferTimeout
from kvstore.transfer import testing as faults_module
from kvstore.transfer.protocol import chunk_header as h
from kvstore.transfer.testing import FaultInjector, FaultyTransport, rows_of
from tests.unit.kvstore.transfer.transport.test_transports import SLOT_BYTES, Ends, header, opened, post, send

NUM_ROWS = 4
"""Of 16 bytes each."""


def test_faults_are_parsed_and_off_by_default() -> None:
    assert parse_faults("") == Faults()
    assert parse_faults("corrupt_chunk=3, swap_blocks=1") == Faults(corrupt_chunk=3, swap_blocks=1)
    spec = "link_drop=10,link_flip=0.25,link_kill=.5,link_delay_ms=500"
    assert parse_faults(spec) == Faults(link_drop=10, link_flip=0.25, link_kill=0.5, link_delay_ms=500)


@pytest.mark.parametrize(
    "spec",
    ["corrupt_chunk", "corrupt_chunk=0", "corrupt_chunk=x", "burn=1", "corrupt_chunk=0.5", "link_delay_ms=0.5"]
    + [f"link_drop={rate}" for rate in ("0", "0.0", "1.5", "-1", "", "nan")],
)
def test_a_fault_that_does_not_exist_is_named(spec: str) -> None:
    with pytest.raises(ConfigError, match=spec):
        TestingConfig(faults=spec)


def test_a_header_tells_the_rows_of_its_chunk_unless_they_are_undefined() -> None:
    span: dict[str, Any] = {"layer_lo": 3, "layer_hi": 5, "unit_lo": 70_000, "unit_hi": 70_007}
    assert rows_of(h.Header(h.CHECKED, 1, 2, 3, **span).pack()) == 14
    assert rows_of(h.Header(h.VOID, 1, 2, 3, **span).pack()) == 0


def spoiled(faults: Faults, num_chunks: int) -> list[int]:
    """Which of a pair's chunks came out changed."""
    injector, changed = FaultInjector(faults), []
    for seq in range(1, num_chunks + 1):
        payload = torch.arange(64, dtype=torch.uint8)
        injector.spoil(NUM_ROWS, payload)
        if not torch.equal(payload, torch.arange(64, dtype=torch.uint8)):
            changed.append(seq)
    return changed


@pytest.mark.parametrize("fault", ["corrupt_chunk", "drop_chunk", "swap_blocks"])
def test_every_nth_chunk_is_spoiled(fault: str) -> None:
    assert spoiled(Faults(**{fault: 3}), 7) == [3, 6]
    assert spoiled(Faults(), 7) == []


def test_corruption_spoils_one_row_and_a_swap_exchanges_two() -> None:
    payload = torch.zeros(64, dtype=torch.uint8)
    FaultInjector(Faults(corrupt_chunk=1)).spoil(NUM_ROWS, payload)
    assert payload.tolist() == [0] * 32 + [0x80] * 16 + [0] * 16
    payload = torch.arange(64, dtype=torch.uint8)
    FaultInjector(Faults(swap_blocks=1)).spoil(NUM_ROWS, payload)
    assert payload.tolist() == [*range(48, 64), *range(16, 48), *range(16)]


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 5])
def test_the_smallest_payloads_can_be_spoiled(num_bytes: int) -> None:
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    FaultInjector(Faults(corrupt_chunk=1)).spoil(num_bytes, payload)
    assert payload.any()


@pytest.fixture
def kind() -> str:
    return "shm"


def arrivals(pair: Ends, faults: Faults, num_sent: int, num_received: int) -> tuple[list[str], FaultyTransport]:
    """What the receiver finds in each chunk: its number, or how many bytes are wrong."""
    link = FaultyTransport(pair.sender, faults)

    def send_all() -> None:
        for operation in [send(link, value, SLOT_BYTES)[1] for value in range(1, num_sent + 1)]:
            operation.wait()

    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send_all)
        posted = [post(pair.receiver, SLOT_BYTES) for _ in range(num_received)]
        for _, operation in posted:
            operation.wait()
        sending.result()
    found = []
    for slot, _ in posted:
        values, counts = torch.unique(slot.message(SLOT_BYTES), return_counts=True)
        found.append(str(values.item()) if len(values) == 1 else f"{int(counts.min())} wrong")
    return found, link


@pytest.mark.parametrize(
    ("fault", "num_sent", "expected", "num_injected"),
    [
        ("link_drop", 4, ["1", "3"], 2),
        ("link_duplicate", 3, ["1", "2", "2", "3"], 1),
        ("link_reorder", 4, ["1", "3", "2", "4"], 1),
        ("link_truncate", 4, ["1", "500 wrong", "3", "500 wrong"], 2),
        ("link_flip", 4, ["1", "1 wrong", "3", "1 wrong"], 2),
    ],
)
def test_every_second_chunk_goes_wrong_on_the_transport(
    kind: str, fault: str, num_sent: int, expected: list[str], num_injected: int
) -> None:
    """A reordering holds back the last chunk too; none comes after it, so it is sent when it is waited for."""
    with opened(kind) as pair:
        found, link = arrivals(pair, Faults(**{fault: 2}), num_sent, len(expected))
        assert found == expected
        assert link.injected == {fault: num_injected}


def test_a_chunk_held_back_is_sent_before_a_signal(kind: str) -> None:
    with opened(kind) as pair:
        link = FaultyTransport(pair.sender, Faults(link_reorder=1))
        slot, chunk = post(pair.receiver, SLOT_BYTES)
        signal = pair.receiver.recv_signal()
        sent = [send(link, 1, SLOT_BYTES)[1], link.send_signal(header(2))]
        for operation in (chunk, signal, *sent):
            operation.wait()
        assert slot.buffer[0] == 1
        assert signal.header == header(2)
        assert not link.injected


def test_chance_is_repeatable_and_about_as_often_as_asked() -> None:
    def flipped(seed: int) -> list[int]:
        with opened("shm") as pair:
            link, wrong = FaultyTransport(pair.sender, Faults(link_flip=0.3), seed), []
            for number in range(100):
                inbox, arrival = post(pair.receiver, SLOT_BYTES)
                outbox, _ = send(link, 1, SLOT_BYTES)
                arrival.wait()
                if not bool((inbox.message(SLOT_BYTES) == 1).all()):
                    wrong.append(number)
                link.slots.release(outbox)
                pair.receiver.slots.release(inbox)
            assert link.injected["link_flip"] == len(wrong)
            return wrong

    assert flipped(1) == flipped(1) != flipped(2)
    assert 15 <= len(flipped(1)) <= 45


def test_a_delay_is_before_every_chunk_and_no_signal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []

    class Clock:
        """In place of the module `time`: it notes for how long it is asked to sleep."""

        @staticmethod
        def sleep(seconds: float) -> None:
            happened.append(seconds)

    monkeypatch.setattr(faults_module, "time", Clock)
    with opened(kind) as pair:
        kind_of_sender = type(pair.sender)
        for name in ("send_chunk", "send_signal"):
            original = getattr(kind_of_sender, name)

            def noted(self: Any, *args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
                happened.append(name)
                return original(self, *args)

            monkeypatch.setattr(kind_of_sender, name, noted)
        found, link = arrivals(pair, Faults(link_delay_ms=50), 3, 3)
        posted = pair.receiver.recv_signal()
        link.send_signal(header(1)).wait()
        posted.wait()
    assert found == ["1", "2", "3"]
    assert happened == [0.05, "send_chunk"] * 3 + ["send_signal"]


def test_a_stalled_sender_is_silent_until_it_is_aborted(kind: str) -> None:
    with opened(kind, op_timeout_s=0.3) as pair:
        link = FaultyTransport(pair.sender, Faults(link_stall=2))
        first, second = post(pair.receiver, SLOT_BYTES)[1], pair.receiver.recv_signal()
        send(link, 1, SLOT_BYTES)[1].wait()
        send(link, 2, SLOT_BYTES)
        stalled = link.send_signal(header(3))
        threading.Timer(0.6, link.abort).start()
        first.wait()
        with pytest.raises(TransferTimeout):
            second.wait()
        start = time.monotonic()
        with pytest.raises(TransferError, match="aborted"):
            stalled.wait()
        assert 0.1 < time.monotonic() - start < 5.0
        assert link.injected == {"link_stall": 1}


def test_a_killed_transport_is_gone_for_both_sides(kind: str) -> None:
    with opened(kind) as pair:
        link = FaultyTransport(pair.sender, Faults(link_kill=2))
        first, sentinel = post(pair.receiver, SLOT_BYTES)[1], pair.receiver.recv_signal()
        send(link, 1, SLOT_BYTES)[1].wait()
        with pytest.raises(TransferError, match="killed on purpose"):
            send(link, 2, SLOT_BYTES)
        first.wait()
        start = time.monotonic()
        with pytest.raises(TransferError):
            sentinel.wait()
        assert time.monotonic() - start < 5.0
        link.close()
