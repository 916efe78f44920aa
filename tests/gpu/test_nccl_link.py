"""The NCCL link between two GPUs of this machine, one process each, as in production."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from kvstore.transfer.header import HEADER_BYTES
from kvstore.transfer.link import RECEIVER, SENDER, Operation
from kvstore.transfer.links import open_receiver, open_sender
from kvstore.transfer.nccl_env import nccl_environment
from kvstore.transfer.slots import Slot, StagingPool
from kvstore.transfer.torch_link import SessionStore

pytestmark = pytest.mark.gpu

NUM_BYTES = 2**20
WINDOW = 4
NUM_ROUNDS = 3


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a CUDA build of torch")
def test_torch_still_has_the_private_names_that_the_link_uses() -> None:
    nccl = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - a CPU build of torch has no such name
    assert {"_group_start", "_group_end", "abort", "eager_connect_single_device"} <= set(dir(nccl))
    config = nccl.Options(is_high_priority_stream=False).config
    assert {"blocking", "min_ctas", "max_ctas"} <= set(dir(config))


def side(rank: int, pipe: Connection, results: Connection) -> None:
    """Runs one end; the pipe carries the rendezvous, as the session does."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = SessionStore(lambda key, value: pipe.send((key, value)))

    def deliver() -> None:
        while True:
            try:
                store.deliver(*pipe.recv())
            except EOFError:
                return

    threading.Thread(target=deliver, daemon=True).start()
    staging = StagingPool(WINDOW, NUM_BYTES, device, pinned=False)
    timeouts = (60.0, 30.0)
    if rank == SENDER:
        results.send(send(store, staging, timeouts))
    else:
        results.send(receive(store, staging, timeouts))


def send(store: SessionStore, staging: StagingPool, timeouts: tuple[float, float]) -> list[int]:
    link = open_sender("nccl", store, "127.0.0.1", staging, WINDOW, *timeouts)
    sums = []
    for value in range(NUM_ROUNDS):
        operations: list[Operation] = [link.send_signal(bytes([value]) * HEADER_BYTES)]
        slots = [taken(link.slots.acquire(0.0)) for _ in range(WINDOW)]
        for slot in slots:
            slot.buffer.random_(256)
            sums.append(weighted_sum(slot))
            operations.append(link.send_chunk(slot, NUM_BYTES))
        for operation in operations:
            operation.wait()
        for slot in slots:
            link.slots.release(slot)
    link.close()
    return sums


def receive(store: SessionStore, staging: StagingPool, timeouts: tuple[float, float]) -> list[int]:
    link = open_receiver("nccl", store, "127.0.0.1", staging, WINDOW, *timeouts)
    sums = []
    for value in range(NUM_ROUNDS):
        signal = link.recv_signal()
        signal.wait()
        assert signal.header == bytes([value]) * HEADER_BYTES
        slots = [taken(link.slots.acquire(0.0)) for _ in range(WINDOW)]
        for operation in [link.recv_chunk(slot, NUM_BYTES) for slot in slots]:
            operation.wait()
        for slot in slots:
            sums.append(weighted_sum(slot))
            link.slots.release(slot)
    link.close()
    return sums


def taken(slot: Slot | None) -> Slot:
    assert slot is not None
    return slot


def weighted_sum(slot: Slot) -> int:
    """Sees an exchange of bytes, and is exact."""
    weights = torch.arange(len(slot.buffer), device=slot.buffer.device, dtype=torch.int64) + 1
    return int((slot.buffer.to(torch.int64) * weights).sum().item())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs and a CUDA build of torch")
def test_signals_and_chunks_arrive_whole_and_in_order() -> None:
    os.environ.update(nccl_environment())
    spawn = multiprocessing.get_context("spawn")
    pipes = spawn.Pipe()
    outcomes = [spawn.Pipe(duplex=False) for _ in range(2)]
    processes = [spawn.Process(target=side, args=(rank, pipes[rank], outcomes[rank][1])) for rank in (SENDER, RECEIVER)]
    for process in processes:
        process.start()
    try:
        assert all(reader.poll(120) for reader, _ in outcomes)
        sent, received = (reader.recv() for reader, _ in outcomes)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    assert sent == received
    assert len(set(sent)) == NUM_ROUNDS * WINDOW
