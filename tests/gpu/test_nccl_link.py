"""The NCCL link between two GPUs of this machine, one process each, as in production."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch

from kvstore.transfer.link import Slot
from kvstore.transfer.nccl_env import nccl_environment
from kvstore.transfer.staging import checksum_of, read_header, write_header
from kvstore.transfer.torch_link import RECEIVER, SENDER, SessionStore, open_link

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs and a CUDA build of torch"),
]

NUM_BYTES = 2**20
WINDOW = 4


def side(rank: int, pipe: Connection, results: Connection) -> None:
    """Runs one end; the pipe carries the rendezvous, as the session does."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = SessionStore(lambda key, value: pipe.send((key, value)))
    if rank == RECEIVER:
        store.deliver(*pipe.recv())  # the sender's unique id; NCCL sets no other key
    link = open_link("nccl", store, rank, "127.0.0.1", device, 60.0, 30.0)
    slots = [Slot(NUM_BYTES, device, pinned=False) for _ in range(WINDOW)]
    sums: list[int] = []
    for _ in range(3):
        if rank == SENDER:
            for value, slot in enumerate(slots):
                slot.payload(NUM_BYTES).copy_(torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8))
                write_header(slot, bytes([value]) * 64)
        operations = [(link.send if rank == SENDER else link.recv)(s.message(NUM_BYTES)) for s in slots]
        for operation in operations:
            operation.wait()
        assert [read_header(slot)[0] for slot in slots] == list(range(WINDOW))
        sums += [checksum_of(slot.payload(NUM_BYTES)) for slot in slots]
    results.send(sums)
    link.close()


def test_messages_arrive_whole_and_in_order() -> None:
    os.environ.update(nccl_environment())
    spawn = multiprocessing.get_context("spawn")
    a, b = spawn.Pipe()
    outcomes = [spawn.Pipe(duplex=False) for _ in range(2)]
    processes = [
        spawn.Process(target=side, args=(rank, pipe, outcomes[rank][1])) for rank, pipe in ((SENDER, a), (RECEIVER, b))
    ]
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
    assert len(set(sent)) == 3 * WINDOW
