"""The KV transfer on GPUs that are late: a wait that is missing gives wrong bytes.

`tools/mutants.yaml` takes each of them away: in copies, in the loops of sender and receiver, and in the NCCL transport.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest
import torch

from baton.errors import TransferCorrupted
from engine.model.kv_cache import KVCache
from kvstore.transfer.connection.reservations import Arrival
from kvstore.transfer.sender import OutgoingTransfer
from kvstore.transfer.transport.streams import own_stream
from tests.fakes.gpu import FakeEvent, FakeGpu, FakeStream, fake_gpus
from tests.fakes.late import JUNK
from tests.fakes.nccl import Knobs
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    NUM_BLOCKS,
    SOON_S,
    SPEC,
    decode_side,
    filled_cache,
    kv_transfer,
    prefill_side,
    same_blocks,
    scattered,
    tables_of,
)

SOURCE, TARGET = scattered(10, 1), scattered(10, 2)
NUM_TOKENS = 160


@pytest.fixture
def gpus(knobs: Knobs) -> Iterator[list[FakeGpu]]:
    with fake_gpus(2, late=True) as gpus:
        yield gpus


def on_gpu(cache: KVCache, gpu: FakeGpu) -> KVCache:
    cache.device = gpu.device
    assert gpu.memory is not None
    for tensor in (*cache.groups, *cache.states.values()):
        gpu.memory.own(tensor)
    return cache


def compute(gpu: FakeGpu, engine: FakeStream, cache: KVCache, transfer: OutgoingTransfer, layer: int) -> None:
    """One layer of a step; the last one writes the state, too, and the engine waits for the step then."""
    with gpu.on_stream(engine):
        for group, spec in zip(cache.groups, SPEC.groups, strict=True):
            if layer in spec.layers:
                place = spec.layers.index(layer)
                group[place, SOURCE] = torch.full_like(group[place, SOURCE], float(layer + 1))
        if layer == SPEC.num_layers - 1:
            for state in cache.states.values():
                state.add_(1.0)
    fence = FakeEvent()
    fence.record(engine)
    transfer.advance(NUM_TOKENS, layer + 1, fence)


def test_nothing_is_done_before_somebody_waits(gpus: list[FakeGpu]) -> None:
    gpu = gpus[0]
    here = gpu.buffer(64)
    with gpu.on_stream(stream := gpu.stream(0)):
        doubled = here.fill_(3) * 2
        assert set(here.numpy()) == {0}
        assert set(doubled.numpy()) == {JUNK}
    with gpu.on_stream(other := gpu.stream(0)):
        other.wait_stream(stream)
        copy = doubled.clone()
    assert set(copy.numpy()) == {JUNK}
    other.synchronize()
    assert (set(here.numpy()), set(doubled.numpy()), set(copy.numpy())) == ({3}, {6}, {6})


@pytest.mark.parametrize("link", ["ipc", "nccl", "tcp"])
async def test_what_a_step_writes_arrives_while_it_goes_on(link: str, gpus: list[FakeGpu]) -> None:
    """Layer by layer, over blocks that hold something else: only its fence holds a chunk back."""
    config = dataclasses.replace(CONFIG, transports=(link,), nccl_open_timeout_s=10.0)
    here, there = gpus
    source, target = on_gpu(filled_cache(1), here), on_gpu(KVCache(SPEC, NUM_BLOCKS, 8), there)
    async with (
        decode_side(config, caches=[target]) as decode,
        prefill_side(config, caches=[source]) as prefill,
    ):
        engine = here.stream(0)
        for number in range(2):
            for group in target.groups:
                group.fill_(-7.0)
            for group in source.groups:
                group.fill_(-1.0)
            ticket = decode.receiver.expect(f"t{number}", NUM_TOKENS, 0, tables_of(decode.receiver, TARGET, 3))
            async with prefill.sender.transfer(ticket) as transfer:
                transfer.extend(tables_of(transfer, SOURCE, 3))
                for layer in range(SPEC.num_layers):
                    compute(here, engine, source, transfer, layer)
                    await asyncio.sleep(0)
                await until(lambda: prefill.sender.unsent_bytes == 0, SOON_S)  # all that fences alone hold back
                engine.synchronize()
                await transfer.finish(1234)
            assert await decode.receiver.wait_committed(ticket) == Arrival(NUM_TOKENS, 1234)
            await decode.receiver.release(ticket)
            assert same_blocks(source, SOURCE, target, TARGET)
            assert all(torch.equal(state[3], target.states[name][3]) for name, state in source.states.items())
            assert set(source.groups[0][:, SOURCE].flatten().tolist()) == {1.0, 2.0, 3.0}
        assert prefill.sender.stats.failed == 0


async def test_whole_transfers_over_both_kinds_one_after_the_other(gpus: list[FakeGpu]) -> None:
    config = dataclasses.replace(CONFIG, transports=("nccl", "tcp"))
    here, there = gpus
    async with (
        decode_side(config, caches=[on_gpu(KVCache(SPEC, NUM_BLOCKS, 8), there)]) as decode,
        prefill_side(config, caches=[on_gpu(filled_cache(1), here)]) as prefill,
    ):
        await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
        await until(lambda: prefill.sender.open_kinds == ["nccl"], SOON_S)
        for number in range(3):
            await kv_transfer(prefill, decode, TARGET, SOURCE, name=f"t{number}")
            with own_stream(here.device):
                prefill.cache.groups[0].mul_(-2.0)
                here.current_stream().synchronize()
        assert prefill.sender.stats.failed == 0


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        *((link, fault) for link in ("ipc", "nccl") for fault in ("corrupt_chunk", "drop_chunk", "swap_blocks")),
        ("ipc", "link_truncate"),
    ],
)
async def test_a_chunk_that_is_spoiled_on_its_way_is_found(link: str, fault: str, gpus: list[FakeGpu]) -> None:
    config = dataclasses.replace(CONFIG, transports=(link,), nccl_open_timeout_s=10.0)
    here, there = gpus
    async with (
        decode_side(config, caches=[on_gpu(KVCache(SPEC, NUM_BLOCKS, 8), there)]) as decode,
        prefill_side(config, f"{fault}=2", caches=[on_gpu(filled_cache(1), here)]) as prefill,
    ):
        with pytest.raises(TransferCorrupted, match="its checksum"):
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="spoiled")
