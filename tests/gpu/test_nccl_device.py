"""NCCL links and the rest of the GPU: the memory that a pair takes, several pairs at a time, and a decode loop."""

from __future__ import annotations

import contextlib
import statistics
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from kvstore.transfer.transport import nccl
from kvstore.transfer.transport.base import SENDER
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.select import open_receiver, open_sender
from kvstore.transfer.transport.staging import StagingPool
from kvstore.transfer.transport.streams import own_stream
from tests.gpu.decode_step import DecodeStep
from tests.gpu.nccl_ends import MODES, NUM_BYTES, WINDOW, meet, run, taken, weighted_sum
from tests.unit.kvstore.transfer.transport.ends import header_of, transport_end

pytestmark = pytest.mark.gpu

NUM_LINKS = 4
CHANNEL_BYTES = 6_500_000
"""Of a communicator of two ranks: 52 MB with 8 channels, 100 MB with 16 (vLLM's design document of P2pNccl)."""
FIXED_BYTES = 16 * 2**20
"""What it allocates whatever its channels, in pieces of 2 MiB at least. An allowance, not a measurement."""
NUM_CHUNKS = 50


def open_links(rank: int, store: RendezvousStore, staging: StagingPool, names: list[str]) -> list[Any]:
    make = open_sender if rank == SENDER else open_receiver
    stores = [PrefixStore(name, store) for name in names]
    return [make("nccl", transport_end(prefixed, staging, WINDOW, 60.0, 30.0)) for prefixed in stores]


def weigh(max_ctas: int, rank: int, store: RendezvousStore, staging: StagingPool, results: Connection) -> None:
    """Device memory of one more link, after a first one that pays for what all of them share."""
    nccl._MAX_CTAS = max_ctas
    free = []
    links = []
    for number, names in enumerate((["first"], [f"link-{n}" for n in range(NUM_LINKS)])):
        links += open_links(rank, store, staging, names)
        torch.cuda.synchronize()
        meet(rank, store, f"open-{number}")
        free.append(torch.cuda.mem_get_info(staging.device)[0])
        meet(rank, store, f"weighed-{number}")
    stats: dict[str, int] = {}
    with contextlib.suppress(AttributeError, RuntimeError):  # torch 2.11 has none, nor has NCCL before 2.29.7
        stats = links[-1]._group.memory_stats()
    results.send(((free[0] - free[1]) / NUM_LINKS, stats))
    meet(rank, store, "reported")
    for link in links:
        link.close()


def cross(rank: int, store: RendezvousStore, staging: StagingPool, results: Connection) -> None:
    """Pairs both ways between the two, each with threads of its own, opened and used all at once."""
    sums: dict[str, list[int]] = {}
    torch.cuda.manual_seed(rank)  # or both would send the same

    def work(name: str, sends: bool) -> None:
        with own_stream(staging.device):
            move(name, sends)

    def move(name: str, sends: bool) -> None:
        prefixed = PrefixStore(name, store)
        make = open_sender if sends else open_receiver
        link: Any = make("nccl", transport_end(prefixed, staging, 1, 60.0, 30.0))
        sums[name] = []
        for _ in range(NUM_CHUNKS):
            slot = taken(link.slots.acquire(30.0))
            if sends:
                slot.buffer.random_(256)
                slot.write_header(header_of(NUM_BYTES))
                sums[name].append(weighted_sum(slot))
            (link.send_chunk if sends else link.recv_chunk)(slot, NUM_BYTES).wait()
            if not sends:
                sums[name].append(weighted_sum(slot))
            link.slots.release(slot)
        meet(rank, prefixed, "received")
        link.close()

    ways = [(f"{sender}-{number}", sender == rank) for sender in (0, 1) for number in range(2)]
    threads = [threading.Thread(target=work, args=way) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.send(sums)


def decode_beside_it(rank: int, store: RendezvousStore, staging: StagingPool, results: Connection) -> None:
    """The receiver replays a graph all the while; its answers, the chunks, and its steps alone and beside them."""
    if rank == SENDER:
        results.send(_send_all(rank, store, staging))
        return
    step = DecodeStep(staging.device)
    alone_s = [step.run() for _ in range(200)]
    received: list[int] = []
    lane = threading.Thread(target=lambda: received.extend(_receive_all(rank, store, staging)))
    lane.start()
    beside_s = []
    num_wrong = 0
    while lane.is_alive():
        beside_s.append(step.run())
        num_wrong += not step.is_right()
    lane.join()
    results.send((received, num_wrong, statistics.median(alone_s), statistics.median(beside_s)))


def _send_all(rank: int, store: RendezvousStore, staging: StagingPool) -> list[int]:
    (link,) = open_links(rank, store, staging, ["pair"])
    sums = []
    for _ in range(NUM_CHUNKS):
        slot = taken(link.slots.acquire(0.0))
        slot.buffer.random_(256)
        slot.write_header(header_of(NUM_BYTES))
        sums.append(weighted_sum(slot))
        link.send_chunk(slot, NUM_BYTES).wait()
        link.slots.release(slot)
    meet(rank, store, "received")
    link.close()
    return sums


def _receive_all(rank: int, store: RendezvousStore, staging: StagingPool) -> list[int]:
    with own_stream(staging.device):
        return _receive_each(rank, store, staging)


def _receive_each(rank: int, store: RendezvousStore, staging: StagingPool) -> list[int]:
    (link,) = open_links(rank, store, staging, ["pair"])
    sums = []
    for _ in range(NUM_CHUNKS):
        slot = taken(link.slots.acquire(0.0))
        link.recv_chunk(slot, NUM_BYTES).wait()
        sums.append(weighted_sum(slot))
        link.slots.release(slot)
    meet(rank, store, "received")
    link.close()
    return sums


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_ctas", [2, 4, 8])
def test_a_pair_takes_no_more_memory_than_its_channels_explain(max_ctas: int, mode: str) -> None:
    ends_on_a_gpu = 1 if mode == "two GPUs" else 2
    for link_bytes, stats in run(partial(weigh, max_ctas), mode):
        print(f"at most {max_ctas} channels: {link_bytes / 2**20:.1f} MiB a pair on a GPU; {stats or 'no statistics'}")
        assert link_bytes <= ends_on_a_gpu * (max_ctas * CHANNEL_BYTES + FIXED_BYTES)


@pytest.mark.parametrize("mode", MODES)
def test_pairs_both_ways_are_opened_and_used_at_the_same_time(mode: str) -> None:
    ours, theirs = run(cross, mode)
    assert ours == theirs
    assert len({value for sums in ours.values() for value in sums}) == 4 * NUM_CHUNKS


@pytest.mark.parametrize("mode", MODES)
def test_chunks_and_a_cuda_graph_leave_each_other_right(mode: str) -> None:
    sent, (received, num_wrong, alone_s, beside_s) = run(decode_beside_it, mode)
    print(f"a step takes {alone_s * 1e3:.3f} ms alone, {beside_s * 1e3:.3f} ms beside transfers")
    assert sent == received
    assert num_wrong == 0
