"""The NCCL transport between two processes, as in production: what arrives, and what a dead peer costs."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from baton.errors import TransferError
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES
from kvstore.transfer.transport.base import SENDER, Operation
from kvstore.transfer.transport.nccl import num_nccl_stalls
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.select import open_receiver, open_sender
from kvstore.transfer.transport.staging import StagingPool
from tests.gpu.nccl_ends import MODES, NUM_BYTES, WINDOW, meet, run, taken, weighted_sum
from tests.unit.kvstore.transfer.transport.ends import header_of, transport_end

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 3
NUM_CYCLES = 200
OP_TIMEOUT_S = 5.0


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a CUDA build of torch")
def test_torch_still_has_the_private_names_that_the_transport_uses() -> None:
    nccl = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - a CPU build of torch has no such name
    assert {"send", "recv", "abort", "eager_connect_single_device"} <= set(dir(nccl))
    options = nccl.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    assert options.config.max_ctas == 4, "config is a copy"
    assert {"blocking", "min_ctas", "cga_cluster_size"} <= set(dir(options.config))


def exchange(rank: int, store: RendezvousStore, staging: StagingPool, results: Connection) -> None:
    results.send((send if rank == SENDER else receive)(rank, store, staging))


def send(rank: int, store: RendezvousStore, staging: StagingPool) -> list[int]:
    transport = open_sender("nccl", transport_end(store, staging, WINDOW, 60.0, 30.0))
    sums = []
    for value in range(NUM_ROUNDS):
        operations: list[Operation] = [transport.send_signal(bytes([value]) * HEADER_BYTES)]
        slots = [taken(transport.slots.acquire(0.0)) for _ in range(WINDOW)]
        for slot in slots:
            slot.buffer.random_(256)
            slot.write_header(header_of(NUM_BYTES))
            sums.append(weighted_sum(slot))
            operations.append(transport.send_chunk(slot, NUM_BYTES))
        for operation in operations:
            operation.wait()
        for slot in slots:
            transport.slots.release(slot)
    meet(rank, store, "received")  # what has left may still be on its way, and dies with the communicator
    transport.close()
    return sums


def receive(rank: int, store: RendezvousStore, staging: StagingPool) -> list[int]:
    transport = open_receiver("nccl", transport_end(store, staging, WINDOW, 60.0, 30.0))
    sums = []
    for value in range(NUM_ROUNDS):
        signal = transport.recv_signal()
        signal.wait()
        assert signal.header == bytes([value]) * HEADER_BYTES
        slots = [taken(transport.slots.acquire(0.0)) for _ in range(WINDOW)]
        for operation in [transport.recv_chunk(slot, NUM_BYTES) for slot in slots]:
            operation.wait()
        for slot in slots:
            sums.append(weighted_sum(slot))
            transport.slots.release(slot)
    meet(rank, store, "received")
    transport.close()
    return sums


def lose_the_sender(
    in_transfer: bool, rank: int, store: RendezvousStore, staging: StagingPool, results: Connection
) -> None:
    """The sender dies before its chunk is staged, or when the receiver's half is already on the GPU."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == SENDER:
        sender: Any = open_sender("nccl", transport_end(store, staging, WINDOW, 60.0, OP_TIMEOUT_S))
        meet(rank, store, "opened")
        results.send("about to die")
        if in_transfer:
            sender._launch = die
            slot = taken(sender.slots.acquire(0.0))
            slot.write_header(header_of(NUM_BYTES))
            sender.send_chunk(slot, NUM_BYTES)
        die()
    transport = open_receiver("nccl", transport_end(store, staging, WINDOW, 60.0, OP_TIMEOUT_S))
    meet(rank, store, "opened")
    began = time.monotonic()
    with pytest.raises(TransferError):  # of its start where the peer is dead by then, else of its end
        transport.recv_chunk(taken(transport.slots.acquire(0.0)), NUM_BYTES).wait()
    gave_up = time.monotonic()
    transport.close()
    closed = time.monotonic()
    still_computes = float(torch.ones(4, device=staging.device).sum().item()) == 4.0
    results.send((gave_up - began, closed - gave_up, num_nccl_stalls(), still_computes))


def forget(store: RendezvousStore, cycle: int) -> None:
    """Drops the keys of a transport that both ends have closed: a session's rendezvous holds those of one, and so has
    room for no more.
    """
    with store._changed:
        for key in [key for key in store._values if f"-{cycle}/" in key]:
            del store._values[key]


def come_and_go(rank: int, store: RendezvousStore, staging: StagingPool, results: Connection) -> None:
    """Links made and closed again: free device memory after the first ones and after the last."""
    free: list[int] = []
    for cycle in range(NUM_CYCLES):
        prefixed = PrefixStore(f"cycle-{cycle}", store)
        make = open_sender if rank == SENDER else open_receiver
        transport = make("nccl", transport_end(prefixed, staging, WINDOW, 60.0, 30.0))
        meet(rank, store, f"open-{cycle}")
        transport.close()
        meet(rank, store, f"closed-{cycle}")
        forget(store, cycle)
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info(staging.device)[0])
    results.send((free[2], free[-1]))


@pytest.mark.parametrize("mode", MODES)
def test_signals_and_chunks_arrive_whole_and_in_order(mode: str) -> None:
    sent, received = run(exchange, mode)
    assert sent == received
    assert len(set(sent)) == NUM_ROUNDS * WINDOW


@pytest.mark.parametrize("mode", MODES)
def test_a_peer_that_dies_before_its_chunk_is_staged_is_noticed_at_once(mode: str) -> None:
    _, (gave_up_s, close_s, num_stalls, still_computes) = run(partial(lose_the_sender, False), mode)
    print(f"given up {gave_up_s:.3f} s after its peer had died, closed in {close_s:.3f} s")
    assert gave_up_s < 1.0
    assert num_stalls == 0
    assert still_computes


@pytest.mark.parametrize("mode", MODES)
def test_a_peer_that_dies_in_a_transfer_costs_the_transport_and_not_the_gpu(mode: str) -> None:
    """Here nothing but the timeout tells; in a worker the session does, and aborts the transport."""
    _, (gave_up_s, close_s, num_stalls, still_computes) = run(partial(lose_the_sender, True), mode)
    print(f"given up {gave_up_s:.2f} s after its peer had died, closed in {close_s:.3f} s")
    assert gave_up_s < OP_TIMEOUT_S + 1.0
    assert close_s < 2.0
    assert num_stalls == 1
    assert still_computes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.timeout(600)
def test_transports_come_and_go_without_leaking(mode: str) -> None:
    for first, last in run(come_and_go, mode, timeout_s=540.0):
        print(
            f"free device memory after 3 transports {first / 2**20:.0f} MiB, after {NUM_CYCLES} {last / 2**20:.0f} MiB"
        )
        assert first - last < 64 * 2**20
