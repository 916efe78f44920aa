"""Two processes with an NCCL link between them, as tests of it need them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kvstore.transfer.transport.base import RECEIVER, SENDER
from kvstore.transfer.transport.nccl_env import PINNED
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.staging import Slot, StagingPool

NUM_BYTES = 2**20
WINDOW = 4
MODES = ("two hosts on one GPU", "two ranks on one GPU", "two GPUs")
Job = Callable[[int, RendezvousStore, StagingPool, Connection], None]


def environment(mode: str, rank: int) -> dict[str, str]:
    """NCCL refuses two ranks on one device of one host.

    Told apart by host, they talk over a socket: it shows that the path works, not how fast it is. From 2.30 on it can
    be asked to accept them; then all their kernels must fit on the one GPU.
    """
    if mode == "two hosts on one GPU":
        return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if mode == "two ranks on one GPU":
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    return {}


def skip_unless_possible(mode: str) -> None:
    num_gpus = 2 if mode == "two GPUs" else 1
    if torch.cuda.device_count() < num_gpus or not dist.is_nccl_available():
        pytest.skip(f"needs {'two NVIDIA GPUs' if num_gpus == 2 else 'an NVIDIA GPU'} and a CUDA build of torch")
    version = getattr(dist, "ProcessGroupNCCL").get_runtime_nccl_version()  # noqa: B009 - not in a CPU build of torch
    if mode == "two ranks on one GPU" and tuple(version) < (2, 30):
        found = ".".join(map(str, version))
        pytest.skip(f"needs NCCL 2.30 (pip install --no-deps nvidia-nccl-cu13==2.32.3); torch runs on {found}")


def run(job: Job, mode: str, timeout_s: float = 180.0) -> list[Any]:
    """What the two ends reported, the sender's first. Raises EOFError where an end has failed; its error is above."""
    skip_unless_possible(mode)
    os.environ.update(PINNED)
    spawn = multiprocessing.get_context("spawn")
    pipes = spawn.Pipe()
    outcomes = [spawn.Pipe(duplex=False) for _ in range(2)]
    processes = [
        spawn.Process(target=_side, args=(job, rank, mode, pipes[rank], outcomes[rank][1]))
        for rank in (SENDER, RECEIVER)
    ]
    for process in processes:
        process.start()
    for _, writer in outcomes:
        writer.close()  # so that an end that fails is noticed at once
    try:
        assert all(reader.poll(timeout_s) for reader, _ in outcomes)
        return [reader.recv() for reader, _ in outcomes]
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def _side(job: Job, rank: int, mode: str, pipe: Connection, results: Connection) -> None:
    """Runs one end; the pipe carries the rendezvous, as the session does."""
    os.environ.update(environment(mode, rank))
    device = torch.device("cuda", rank if mode == "two GPUs" else 0)
    torch.cuda.set_device(device)
    store = RendezvousStore(lambda key, value: pipe.send((key, value)))

    def deliver() -> None:
        while True:
            try:
                store.deliver(*pipe.recv())
            except (EOFError, OSError):
                return

    threading.Thread(target=deliver, daemon=True).start()
    job(rank, store, StagingPool(WINDOW, NUM_BYTES, device), results)


def meet(rank: int, store: Store, where: str) -> None:
    """Returns once both ends have come."""
    store.set(f"test/{where}/{rank}", "here")
    store.wait([f"test/{where}/{1 - rank}"])


def taken(slot: Slot | None) -> Slot:
    assert slot is not None
    return slot


def weighted_sum(slot: Slot) -> int:
    """Sees an exchange of bytes, and is exact."""
    weights = torch.arange(len(slot.buffer), device=slot.buffer.device, dtype=torch.int64) + 1
    return int((slot.buffer.to(torch.int64) * weights).sum().item())
