"""The NCCL link between two GPUs of this machine, one process each, as in production."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from baton.errors import TransferError
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
NUM_CYCLES = 50
Job = Callable[[int, SessionStore, StagingPool, Connection], None]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a CUDA build of torch")
def test_torch_still_has_the_private_names_that_the_link_uses() -> None:
    nccl = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - a CPU build of torch has no such name
    assert {"_group_start", "_group_end", "abort", "eager_connect_single_device"} <= set(dir(nccl))
    config = nccl.Options(is_high_priority_stream=False).config
    assert {"blocking", "min_ctas", "max_ctas"} <= set(dir(config))


def side(job: Job, rank: int, one_gpu: bool, pipe: Connection, results: Connection) -> None:
    """Runs one end; the pipe carries the rendezvous, as the session does."""
    if one_gpu:
        # NCCL refuses two ranks on one device of one host; told apart by host, they talk over a socket. It shows that
        # the path works, not how fast it is.
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = torch.device("cuda", 0 if one_gpu else rank)
    torch.cuda.set_device(device)
    store = SessionStore(lambda key, value: pipe.send((key, value)))

    def deliver() -> None:
        while True:
            try:
                store.deliver(*pipe.recv())
            except EOFError:
                return

    threading.Thread(target=deliver, daemon=True).start()
    job(rank, store, StagingPool(WINDOW, NUM_BYTES, device, pinned=False), results)


def exchange(rank: int, store: SessionStore, staging: StagingPool, results: Connection) -> None:
    results.send((send if rank == SENDER else receive)(store, staging, (60.0, 30.0)))


def lose_the_sender(rank: int, store: SessionStore, staging: StagingPool, results: Connection) -> None:
    """The sender dies with a receive posted; the receiver must end its link in time, and its GPU must go on."""
    timeouts = (60.0, 5.0)
    if rank == SENDER:
        open_sender("nccl", store, "127.0.0.1", staging, WINDOW, *timeouts)
        results.send("ready")
        os.kill(os.getpid(), signal.SIGKILL)
    link = open_receiver("nccl", store, "127.0.0.1", staging, WINDOW, *timeouts)
    began = time.monotonic()
    with contextlib.suppress(TransferError):
        link.recv_chunk(taken(link.slots.acquire(0.0)), NUM_BYTES).wait()
    link.abort()
    link.close()
    still_computes = float(torch.ones(4, device=staging.device).sum().item()) == 4.0
    results.send((time.monotonic() - began, still_computes))


def come_and_go(rank: int, store: SessionStore, staging: StagingPool, results: Connection) -> None:
    """Links made and closed again: free device memory after the first and after the last."""
    free: list[int] = []
    for cycle in range(NUM_CYCLES):
        prefixed = cast("SessionStore", PrefixStore(f"cycle-{cycle}", store))
        make = open_sender if rank == SENDER else open_receiver
        link = make("nccl", prefixed, "127.0.0.1", staging, WINDOW, 60.0, 30.0)
        link.close()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info(staging.device)[0])
    results.send((free[0], free[-1]))


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


def run(job: Job, one_gpu: bool) -> list[Any]:
    """What the two ends reported, the sender's first."""
    if torch.cuda.device_count() < (1 if one_gpu else 2):
        pytest.skip(f"needs {'an NVIDIA GPU' if one_gpu else 'two NVIDIA GPUs'} and a CUDA build of torch")
    os.environ.update(nccl_environment())
    spawn = multiprocessing.get_context("spawn")
    pipes = spawn.Pipe()
    outcomes = [spawn.Pipe(duplex=False) for _ in range(2)]
    processes = [
        spawn.Process(target=side, args=(job, rank, one_gpu, pipes[rank], outcomes[rank][1]))
        for rank in (SENDER, RECEIVER)
    ]
    for process in processes:
        process.start()
    try:
        assert all(reader.poll(180) for reader, _ in outcomes)
        return [reader.recv() for reader, _ in outcomes]
    finally:
        for process in processes:
            process.join(30)
            process.kill()


@pytest.mark.parametrize("one_gpu", [True, False], ids=["one GPU", "two GPUs"])
def test_signals_and_chunks_arrive_whole_and_in_order(one_gpu: bool) -> None:
    sent, received = run(exchange, one_gpu)
    assert sent == received
    assert len(set(sent)) == NUM_ROUNDS * WINDOW


@pytest.mark.parametrize("one_gpu", [True, False], ids=["one GPU", "two GPUs"])
def test_a_peer_that_dies_costs_the_link_and_not_the_gpu(one_gpu: bool) -> None:
    _, (took_s, still_computes) = run(lose_the_sender, one_gpu)
    print(f"the link was given up {took_s:.2f} s after its peer had died")
    assert took_s < 6.0
    assert still_computes


@pytest.mark.parametrize("one_gpu", [True, False], ids=["one GPU", "two GPUs"])
def test_links_come_and_go_without_leaking(one_gpu: bool) -> None:
    for first, last in run(come_and_go, one_gpu):
        print(f"free device memory after 1 link {first / 2**20:.0f} MiB, after {NUM_CYCLES} {last / 2**20:.0f} MiB")
        assert first - last < 64 * 2**20
