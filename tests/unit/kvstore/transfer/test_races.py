"""Each wait on the way from one GPU's cache into another one's: without it torch's sanitizer finds a race.

`tools/mutants.yaml` takes each of them away.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.protocol.plan import WireOptions, plan
from kvstore.transfer.transport.streams import own_stream
from tests.fakes.gpu import FakeEvent, FakeGpu, fake_gpus
from tests.fakes.nccl import Knobs
from tests.fakes.races import Races, Watching
from tests.unit.kvstore.transfer.copy.test_blocks import Side, layout, make_side
from tests.unit.kvstore.transfer.transport.ends import header_of
from tests.unit.kvstore.transfer.transport.nccl_pairs import opened, taken

NUM_TOKENS = 40
SLOT_BYTES = 8192
LONG_S = 30.0


@pytest.fixture
def gpus(knobs: Knobs) -> Iterator[list[FakeGpu]]:
    with fake_gpus(2) as gpus:
        yield gpus


def side_on(gpu: FakeGpu, name: str, races: Races) -> Side:
    side = make_side(layout(), 0, NUM_TOKENS, seed=1)
    side.cache.device = gpu.device
    for group in side.cache.groups:
        races.watch(f"the cache of the {name}", group)
    return side


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_nothing_is_read_or_written_before_what_it_needs(kind: str, gpus: list[FakeGpu]) -> None:
    """An engine computes; each chunk is gathered, sent, received and scattered; another engine reads. Twice."""
    here, there = gpus
    races = Races()
    source, target = side_on(here, "source", races), side_on(there, "target", races)
    planned = plan(layout(), 0, layout(), 0, NUM_TOKENS, (0, 0, 0), WireOptions(SLOT_BYTES, 96, "auto"))
    assert len(planned.chunks) > 3
    pair = opened(here, there, kind=kind, window=1, slot_bytes=SLOT_BYTES)
    for end in (pair.sender, pair.receiver):
        for slot in [taken(end.slots.acquire(0.0)) for _ in range(1)]:
            races.watch("a slot", slot.buffer)
            end.slots.release(slot)
    here.races = there.races = races
    engines = [gpu.stream(0) for gpu in gpus]

    def send(fence: FakeEvent) -> None:
        copier = BlockCopier(source.cache, planned, layout(), 0, source.tables)
        with own_stream(here.device), Watching(races, here):
            for chunk in planned.chunks:
                slot = taken(pair.sender.slots.acquire(LONG_S))
                copier.begin_gather(chunk, slot.payload(chunk.num_bytes), fence, checked=True).end()
                slot.write_header(header_of(chunk.num_bytes))
                pair.sender.send_chunk(slot, chunk.num_bytes).wait()
                pair.sender.slots.release(slot)

    def receive() -> None:
        copier = BlockCopier(target.cache, planned, layout(), 0, target.tables)
        with own_stream(there.device), Watching(races, there):
            for chunk in planned.chunks:
                slot = taken(pair.receiver.slots.acquire(0.0))
                pair.receiver.recv_chunk(slot, chunk.num_bytes).wait()
                copier.begin_scatter(chunk, slot.payload(chunk.num_bytes), checked=True).end()
                pair.receiver.slots.release(slot)

    with ThreadPoolExecutor(2) as threads:
        for value in (1.0, 2.0):
            fence = FakeEvent()
            with here.on_stream(engines[0]), Watching(races, here):
                for group in source.cache.groups:
                    group.fill_(value)
            fence.record(engines[0])
            moves: list[Any] = [threads.submit(send, fence), threads.submit(receive)]
            for move in moves:
                move.result(LONG_S)
            with there.on_stream(engines[1]), Watching(races, there):
                sums = [torch.nan_to_num(group).max() for group in target.cache.groups]
            assert {float(found) for found in sums} == {value}
            for engine in engines:
                engine.synchronize()
    pair.close()
    assert races.found == []
