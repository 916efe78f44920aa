"""Staging slots: a fixed number, shared out fairly, and none lost."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.staging import Slot, SlotSource, StagingPool
from tests.support.waiting import wait_until

CPU = torch.device("cpu")
LONG_S = 10.0


def pool(num_slots: int) -> StagingPool:
    return StagingPool(num_slots, 100, CPU)


def taken(source: SlotSource, wait_s: float = 0.0) -> Slot:
    slot = source.acquire(wait_s)
    assert slot is not None
    return slot


def until_waiting(staging: StagingPool, num_waiting: int) -> None:
    wait_until(lambda: staging.num_waiting >= num_waiting, 5.0, every_s=0.001, seen=lambda: staging.num_waiting)


def test_a_slot_is_one_buffer_with_views() -> None:
    slot = taken(pool(1).share(1))
    slot.message(10).fill_(3)
    slot.write_header(bytes([1]) * HEADER_BYTES)
    assert slot.read_header() == bytes([1]) * HEADER_BYTES
    assert slot.buffer.tolist() == [1] * HEADER_BYTES + [3] * 10 + [0] * 90
    assert slot.payload(12).tolist() == [3] * 10 + [0] * 2


def test_slots_are_made_when_needed_and_counted() -> None:
    staging = pool(3)
    share = staging.share(3)
    assert (staging.num_slots, staging.in_use) == (3, 0)
    first, second = taken(share), taken(share)
    assert first is not second
    assert staging.in_use == 2
    share.release(first)
    assert staging.in_use == 1
    assert taken(share) is first  # and no third one is made


def test_a_share_is_a_limit_of_one_transport_and_the_pool_one_of_all() -> None:
    staging = pool(3)
    a, b = staging.share(2), staging.share(2)
    mine = [taken(a), taken(a)]
    start = time.monotonic()
    assert a.acquire(LONG_S) is None  # at once: only its own thread could change that
    assert time.monotonic() - start < LONG_S / 2
    taken(b)
    assert b.acquire(0.0) is None
    start = time.monotonic()
    assert b.acquire(0.05) is None
    assert time.monotonic() - start >= 0.05
    a.release(mine.pop())
    taken(b)


def test_who_waits_is_served_in_order_and_before_who_does_not() -> None:
    staging = pool(1)
    holder, passer_by = staging.share(1), staging.share(1)
    slot = taken(holder)
    with ThreadPoolExecutor(2) as threads:
        waiting: list[tuple[SlotSource, Future[Slot | None]]] = []
        for number in range(2):
            share = staging.share(1)
            waiting.append((share, threads.submit(share.acquire, LONG_S)))
            until_waiting(staging, number + 1)
        holder.release(slot)
        assert passer_by.acquire(0.0) is None
        (first, first_slot), (second, second_slot) = waiting
        assert first_slot.result(LONG_S) is slot
        assert not second_slot.done()
        first.release(slot)
        assert second_slot.result(LONG_S) is slot
        second.release(slot)
    assert taken(passer_by) is slot
    assert staging.in_use == 1


def test_who_gave_up_waiting_is_not_served() -> None:
    staging = pool(1)
    holder, impatient = staging.share(1), staging.share(1)
    slot = taken(holder)
    assert impatient.acquire(0.01) is None
    holder.release(slot)
    assert staging.in_use == 0
    assert taken(impatient) is slot


def test_a_discarded_slot_is_replaced_and_not_used_again() -> None:
    staging = pool(1)
    share, other = staging.share(1), staging.share(1)
    lost = taken(share)
    share.discard(lost)
    assert (staging.in_use, staging.num_discarded) == (0, 1)
    fresh = taken(share)
    assert fresh is not lost
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.acquire, LONG_S)
        until_waiting(staging, 1)
        share.discard(fresh)
        assert waiting.result(LONG_S) not in (None, lost, fresh)
    assert (staging.in_use, staging.num_discarded) == (1, 2)


def test_a_slot_that_cannot_be_made_takes_nothing_from_the_pool() -> None:
    staging = StagingPool(1, 2**60, CPU)
    with pytest.raises(RuntimeError):
        staging.share(1).acquire(0.0)
    staging.slot_bytes = 1
    assert taken(staging.share(1))


def test_many_threads_never_hold_more_than_there_are() -> None:
    staging = pool(3)
    held: set[int] = set()
    most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal most
        share = staging.share(2)
        for _ in range(200):
            slot = taken(share, LONG_S)
            with lock:
                assert id(slot) not in held
                held.add(id(slot))
                most = max(most, len(held))
            time.sleep(0)
            with lock:
                held.remove(id(slot))
            share.release(slot)

    with ThreadPoolExecutor(6) as threads:
        for job in [threads.submit(work) for _ in range(6)]:
            job.result(60.0)
    assert 1 <= most <= 3
    assert staging.in_use == 0
