"""Links between two threads, and a guard of the private names of torch that they stand on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.link import Link, Slot
from kvstore.transfer.nccl_env import nccl_environment
from kvstore.transfer.staging import checksum_of
from kvstore.transfer.torch_link import RECEIVER, SENDER, SessionStore, open_link, usable_links

CPU = torch.device("cpu")


def open_pair(op_timeout_s: float = 5.0) -> tuple[Link, Link]:
    stores: list[SessionStore] = []

    def publish_to(other: int) -> Callable[[str, bytes], None]:
        return lambda key, value: stores[other].deliver(key, value)

    stores += [SessionStore(publish_to(RECEIVER)), SessionStore(publish_to(SENDER))]
    with ThreadPoolExecutor(2) as threads:
        sender, receiver = threads.map(
            lambda rank: open_link("gloo", stores[rank], rank, "127.0.0.1", CPU, 5.0, op_timeout_s), (SENDER, RECEIVER)
        )
    return sender, receiver


def test_torch_still_has_the_private_names_that_links_use() -> None:
    assert torch.__version__.startswith("2.13."), "read torch_link.py again for this version of torch"
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    assert {"_devices", "_threads", "_timeout"} <= set(dir(options))
    assert callable(dist.ProcessGroupGloo.create_device)


def test_messages_arrive_in_order_with_several_posted() -> None:
    sender, receiver = open_pair()
    assert not dist.is_initialized()
    inbox = [Slot(1000, CPU, pinned=False) for _ in range(3)]
    posted = [receiver.recv(slot.message(1000)) for slot in inbox]
    sent = [sender.send(torch.full((1064,), value, dtype=torch.uint8)) for value in (1, 2, 3)]
    for operation in (*posted, *sent):
        operation.wait()
    assert [int(slot.buffer.float().mean()) for slot in inbox] == [1, 2, 3]
    sender.close()
    receiver.close()


def test_a_silent_peer_ends_in_a_timeout() -> None:
    sender, receiver = open_pair(op_timeout_s=0.2)
    posted = receiver.recv(torch.zeros(10, dtype=torch.uint8))
    with pytest.raises(TransferTimeout):
        posted.wait()
    with pytest.raises(TransferError):
        receiver.recv(torch.zeros(10, dtype=torch.uint8)).wait()
    sender.close()


def test_a_peer_that_closes_ends_a_posted_receive_at_once() -> None:
    sender, receiver = open_pair()
    posted = receiver.recv(torch.zeros(10, dtype=torch.uint8))
    start = time.monotonic()
    sender.close()
    with pytest.raises(TransferError):
        posted.wait()
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize("close", [True, False])
def test_opening_ends_when_the_session_does_or_the_peer_does_not_join(close: bool) -> None:
    store = SessionStore(lambda key, value: None)
    if close:
        threading.Timer(0.1, store.close).start()
    with pytest.raises(TransferError, match="session ended" if close else "did not join"):
        open_link("gloo", store, SENDER, "127.0.0.1", CPU, 0.5, 1.0)


def test_pairs_share_one_device_and_leave_nothing_behind() -> None:
    def footprint() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208

    for link in open_pair():
        link.close()
    before = footprint()
    for _ in range(8):
        for link in open_pair():
            link.close()
    deadline = time.monotonic() + 2.0
    while footprint() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert footprint() == before


def test_nccl_is_chosen_only_for_a_cuda_cache() -> None:
    assert usable_links(CPU, ("nccl", "gloo")) == ("gloo",)
    assert usable_links(CPU, ("nccl",)) == ()


def test_nccl_environment_keeps_a_broken_pair_from_ending_the_process() -> None:
    assert nccl_environment()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_checksum_sees_a_bit_and_an_exchange() -> None:
    payload = torch.arange(64, dtype=torch.uint8)
    swapped, flipped = payload.roll(16), payload.clone()
    flipped[5] ^= 1
    assert len({checksum_of(p) for p in (payload, swapped, flipped)}) == 3
