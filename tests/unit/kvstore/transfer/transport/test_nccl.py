"""NCCL transports on a fake GPU: what a broken, slow or hanging communicator costs, and which streams are whose."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from baton.config.testing import NCCL_MODES
from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport import nccl
from kvstore.transfer.transport.nccl_counts import nccl_connections_by_carrier, num_stuck_aborts
from kvstore.transfer.transport.nccl_turns import Direction
from kvstore.transfer.transport.streams import num_shared_streams, own_stream, streams_of
from tests.fakes.gpu import NUM_STREAMS, FakeGpu, fake_gpus
from tests.fakes.nccl import Knobs
from tests.support.waiting import wait_until
from tests.unit.kvstore.transfer.transport.ends import header_of
from tests.unit.kvstore.transfer.transport.nccl_pairs import (
    LONG_S,
    SLOT_BYTES,
    cross,
    in_thread,
    opened,
    receive,
    send,
    taken,
    turn_of,
)

SOON_S = 5.0
"""A closed pair has no thread after it: torch's watchdog sleeps for a minute."""


EARLIER = set[threading.Thread]()
"""Threads of tests before this one: a communicator that is kept on purpose has one until the collector comes by."""


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    EARLIER.clear()
    EARLIER.update(threading.enumerate())


@pytest.fixture(params=["prompt", "late"])
def gpus(request: pytest.FixtureRequest, knobs: Knobs) -> Iterator[list[FakeGpu]]:
    with fake_gpus(3, late=request.param == "late") as gpus:
        yield gpus


def nccl_threads() -> list[str]:
    names = ("kv-nccl-abort", "fake-nccl-watchdog")
    return [thread.name for thread in threading.enumerate() if thread.name in names and thread not in EARLIER]


# -- a pair that is well ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", NCCL_MODES)
def test_signals_and_chunks_arrive_whole_and_in_order(mode: str, gpus: list[FakeGpu], knobs: Knobs) -> None:
    pair = opened(gpus[0], gpus[1], nccl_mode=mode)
    for value in range(3):
        signal = pair.receiver.recv_signal()
        pair.sender.send_signal(bytes([value]) * HEADER_BYTES).wait()
        signal.wait()
        assert signal.header == bytes([value]) * HEADER_BYTES
        cross(pair, gpus[0], gpus[1], value)
    options = [group.options for group in knobs.groups]
    assert [option.config.blocking for option in options] == [int(mode.startswith("blocking"))] * 2
    assert {(option.config.min_ctas, option.config.max_ctas, option.config.cga_cluster_size) for option in options} == {
        (1, nccl._MAX_CTAS, 1)
    }
    pair.close()
    wait_until(lambda: not nccl_threads(), SOON_S)


def test_pairs_are_counted_by_what_moves_their_bytes(
    gpus: list[FakeGpu],
) -> None:
    before = nccl_connections_by_carrier().get("unknown", 0)
    pair = opened(gpus[0], gpus[1])
    assert nccl_connections_by_carrier() == {"unknown": before + 2}
    pair.close()
    wait_until(lambda: nccl_connections_by_carrier().get("unknown", 0) == before, LONG_S)


def test_torchs_own_timeout_never_comes_first(gpus: list[FakeGpu], knobs: Knobs) -> None:
    pair = opened(gpus[0], gpus[1], op_timeout_s=7.0)
    assert {group.options._timeout.total_seconds() for group in knobs.groups} == {70.0}
    pair.close()


def test_a_process_that_was_not_started_for_nccl_opens_none(
    gpus: list[FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_DESYNC_DEBUG", "1")
    with pytest.raises(TransferError, match="TORCH_NCCL_DESYNC_DEBUG must be set"):
        opened(gpus[0], gpus[1])


# -- a pair that breaks ----------------------------------------------------------------------------------------------


def test_a_pair_that_broke_in_a_transfer_is_gone_at_once_whatever_torchs_watchdog_does(
    gpus: list[FakeGpu], knobs: Knobs
) -> None:
    """Its failed operation makes the watchdog sleep for a minute, by default, and the end of the group wait for it."""
    pair = opened(gpus[0], gpus[1], op_timeout_s=0.5)
    pair.sender._launch = die
    receiving, sending = receive(pair, gpus[1]), send(pair, gpus[0], 1)
    with pytest.raises(TransferError, match="killed"):
        sending.result(LONG_S)
    with pytest.raises(TransferTimeout):
        receiving.result(LONG_S)
    began = time.monotonic()
    pair.close()
    wait_until(lambda: not nccl_threads(), SOON_S)
    assert time.monotonic() - began < SOON_S
    assert nccl.num_nccl_stalls() == 1


def die(*_: Any) -> Any:
    raise TransferError("killed")


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_abort_ends_a_wait_for_a_signal_of_a_stopped_peer(side: str, gpus: list[FakeGpu]) -> None:
    pair = opened(gpus[0], gpus[1], op_timeout_s=10 * LONG_S)
    if side == "sender":  # waits for the receiver's half to be posted
        waiting = send(pair, gpus[0], 1)
    else:
        waiting = in_thread(gpus[1], lambda: pair.receiver.recv_signal().wait())
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    getattr(pair, side).abort()
    with pytest.raises(TransferError, match="gone, or the transport was aborted"):
        waiting.result(LONG_S)
    pair.close()


def test_an_abort_waits_for_the_launch_of_its_own_pair(gpus: list[FakeGpu], knobs: Knobs) -> None:
    """In the middle of a call the communicator's handle would be gone under it."""
    pair = opened(gpus[0], gpus[1])
    knobs.let_launch.clear()
    knobs.launching.clear()
    receiving, sending = receive(pair, gpus[1]), send(pair, gpus[0], 1)
    assert knobs.launching.wait(LONG_S)
    pair.receiver.abort()
    pair.sender.abort()
    time.sleep(0.1)
    assert "kv-nccl-abort" in nccl_threads()
    knobs.let_launch.set()
    for ending in (receiving, sending):
        with pytest.raises(TransferError):
            ending.result(LONG_S)
    pair.close()
    wait_until(lambda: not nccl_threads(), SOON_S)
    assert knobs.num_crashes == 0


def test_aborts_that_do_not_end_are_counted_and_nobody_waits_for_them(gpus: list[FakeGpu], knobs: Knobs) -> None:
    before = num_stuck_aborts()
    pair = opened(gpus[0], gpus[1], op_timeout_s=0.2)
    knobs.let_abort.clear()
    pair.close()
    wait_until(lambda: num_stuck_aborts() == before + 2, LONG_S)
    knobs.let_abort.set()
    wait_until(lambda: not nccl_threads(), LONG_S)
    assert num_stuck_aborts() == before + 2, "one that ends late was stuck, too"


def test_a_call_that_does_not_return_keeps_its_communicator_and_counts(gpus: list[FakeGpu], knobs: Knobs) -> None:
    before = num_stuck_aborts()
    pair = opened(gpus[0], gpus[1], op_timeout_s=1.5)
    knobs.let_launch.clear()
    knobs.launching.clear()
    receiving = receive(pair, gpus[1])
    sending = send(pair, gpus[0], 1)
    wait_until(pair.receiver._launching.locked, LONG_S)
    pair.receiver.abort()
    wait_until(lambda: num_stuck_aborts() == before + 1, LONG_S)
    assert knobs.num_crashes == 0
    knobs.let_launch.set()
    for ending in (receiving, sending):
        with contextlib.suppress(TransferError):
            ending.result(LONG_S)
    pair.close()


@pytest.mark.parametrize("mode", NCCL_MODES[:2])
def test_an_opening_that_hangs_ends_and_gives_its_turns_back(mode: str, gpus: list[FakeGpu], knobs: Knobs) -> None:
    knobs.never_opens = True
    with pytest.raises(TransferError):
        opened(gpus[0], gpus[1], op_timeout_s=0.3, nccl_mode=mode)
    wait_until(lambda: not nccl_threads(), LONG_S)
    knobs.never_opens = False
    pair = opened(gpus[0], gpus[1], nccl_mode=mode)
    cross(pair, gpus[0], gpus[1], 3)
    pair.close()


# -- streams ---------------------------------------------------------------------------------------------------------


def test_no_two_pairs_have_a_stream_in_common_however_many_came_and_went(gpus: list[FakeGpu], knobs: Knobs) -> None:
    before = num_shared_streams()
    kept = opened(gpus[0], gpus[1])
    taken_by_kept = {group.stream.cuda_stream for group in knobs.groups} | {kept.sender._stream.cuda_stream}
    for _ in range(NUM_STREAMS + 8):
        knobs.groups.clear()
        pair = opened(gpus[0], gpus[2])
        (stream,) = (group.stream for group in knobs.groups if group.stream.hardware.gpu is gpus[0])
        with own_stream(gpus[0].device):
            copies = gpus[0].current_stream()
        handles = {stream.cuda_stream, pair.sender._stream.cuda_stream, copies.cuda_stream}
        assert len(handles) == 3
        assert not handles & taken_by_kept
        pair.close()
    kept.close()
    assert num_shared_streams() == before


def test_a_receive_that_spins_holds_up_nothing_else_after_any_number_of_pairs(
    gpus: list[FakeGpu], knobs: Knobs
) -> None:
    """A waits for the send turn of its peer. B sends from the GPU on which A's half spins: the peer waits for that."""
    a = opened(gpus[1], gpus[0])
    for _ in range(NUM_STREAMS):  # with the streams that torch gives out in turn, b would now have those of a
        opened(gpus[0], gpus[2]).close()
    b = opened(gpus[0], gpus[2])
    turn = turn_of(gpus[1])
    turn.device.take(turn, Direction.SEND, LONG_S)
    receiving, sending = receive(a, gpus[0]), send(a, gpus[1], 1)
    wait_until(lambda: bool(a.receiver._turns.device._queues[Direction.RECEIVE]), LONG_S)
    cross(b, gpus[0], gpus[2], 2)
    assert not receiving.done()
    turn.device.leave(turn, Direction.SEND)
    sending.result(LONG_S)
    assert receiving.result(LONG_S) == {1}
    a.close()
    b.close()


def test_a_gpu_has_as_many_pairs_as_streams_and_refuses_one_more(gpus: list[FakeGpu], knobs: Knobs) -> None:
    pool = streams_of(gpus[0]).communicators
    lent = [pool.lend_next() for _ in range(NUM_STREAMS)]
    with pytest.raises(TransferError, match="has 32 nccl transports already"):
        opened(gpus[0], gpus[1], op_timeout_s=0.5)
    pool.give_back(lent[7])
    pair = opened(gpus[0], gpus[1])
    assert knobs.groups[-1].stream.hardware.gpu in gpus
    (stream,) = (group.stream for group in knobs.groups[-2:] if group.stream.hardware.gpu is gpus[0])
    assert stream.cuda_stream == lent[7].cuda_stream
    pair.close()


def test_a_stream_that_another_library_took_in_between_is_counted(gpus: list[FakeGpu], knobs: Knobs) -> None:
    before = num_shared_streams()
    pool = streams_of(gpus[0])
    stream = pool.communicators.lend_next()
    with pool.making_communicator(stream):
        gpus[0].stream(gpus[0].highest_priority)
    assert num_shared_streams() == before
    other = pool.communicators.lend_next()
    with pool.making_communicator(other):
        gpus[0].stream(gpus[0].highest_priority)
        gpus[0].stream(gpus[0].highest_priority)
    assert num_shared_streams() == before + 1


def test_a_chunk_of_another_length_than_the_announced_one_is_not_received(gpus: list[FakeGpu]) -> None:
    """NCCL itself would wait for the rest, or write beyond the end."""
    pair = opened(gpus[0], gpus[1])
    slot = taken(pair.sender.slots.acquire(0.0))
    slot.write_header(header_of(SLOT_BYTES - 1))
    sending = in_thread(gpus[0], lambda: pair.sender.send_chunk(slot, SLOT_BYTES - 1))
    with pytest.raises(TransferError, match="out of step"):
        receive(pair, gpus[1]).result(LONG_S)
    pair.receiver.abort()
    pair.receiver.close()
    with pytest.raises(TransferError):
        sending.result(LONG_S)
    pair.close()
