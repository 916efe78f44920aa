"""The whole KV transfer between GPUs of one host that are none: when KV goes over ipc, and what takes its place."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Iterator

import pytest

from baton.errors import TransferError
from engine.model.kv_cache import KVCache
from kvstore.transfer.protocol.plan import layout_of, rank_spec
from tests.fakes.gpu import FakeGpu, fake_gpus
from tests.fakes.nccl import Knobs, fake_nccl
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    NUM_BLOCKS,
    SOON_S,
    SPEC,
    Decode,
    Prefill,
    decode_side,
    filled_cache,
    kv_transfer,
    prefill_side,
    same_blocks,
    scattered,
    send,
    tables_of,
)

LINKS = dataclasses.replace(CONFIG, transports=("ipc", "nccl", "tcp"), window=4, gpu_slot_bytes=16384)
SOURCE, TARGET = scattered(10, 1), scattered(10, 2)


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Knobs]:
    with tempfile.TemporaryDirectory() as directory, fake_nccl(monkeypatch) as knobs:
        monkeypatch.setenv("TMPDIR", directory)
        yield knobs


def on_gpu(cache: KVCache, gpu: FakeGpu) -> KVCache:
    cache.device = gpu.device
    return cache


def empty(gpu: FakeGpu) -> KVCache:
    return on_gpu(KVCache(SPEC, NUM_BLOCKS, 8), gpu)


def kinds(prefill: Prefill) -> list[str]:
    return sorted(prefill.sender.open_kinds)


async def kv_transfer_until(kind: str, prefill: Prefill, decode: Decode) -> None:
    async with asyncio.timeout(SOON_S):
        while kinds(prefill) != [kind]:
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="again")
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("same", [False, True])
async def test_on_one_host_kv_goes_over_ipc(same: bool, knobs: Knobs) -> None:
    """From one GPU to another, and on one GPU."""
    with fake_gpus(2, same=same) as (here, there):
        async with (
            decode_side(LINKS, caches=[empty(there)]) as decode,
            prefill_side(LINKS, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            chunks = [
                (await kv_transfer(prefill, decode, SOURCE, TARGET, name=f"t{number}")).num_chunks
                for number in range(4)
            ]
            assert chunks[0] > chunks[1] == chunks[3], "chunks are larger once it is known that they stay on GPUs"
            assert kinds(prefill) == ["ipc"]
            assert decode.num_pairs_ever == 1
            assert there.num_open == 1
        assert there.num_open == 0
        assert not knobs.groups


async def test_a_first_transfer_has_large_chunks_where_every_kind_has(knobs: Knobs) -> None:
    config = dataclasses.replace(LINKS, transports=("ipc", "nccl"))
    with fake_gpus(2) as (here, there):
        async with (
            decode_side(config, caches=[empty(there)]) as decode,
            prefill_side(config, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            first = await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
            second = await kv_transfer(prefill, decode, SOURCE, TARGET, name="second")
            assert first.num_chunks == second.num_chunks


async def test_several_ranks_use_it_too(knobs: Knobs) -> None:
    """Nothing of it waits on a GPU, so it needs no order beside the sums of the ranks."""
    both = layout_of(dataclasses.replace(SPEC, groups=SPEC.groups[:1], states=()), 2)
    halves = rank_spec(both, 0)
    with fake_gpus(4) as gpus:
        sources = [on_gpu(filled_cache(seed, halves), gpu) for seed, gpu in enumerate(gpus[:2])]
        targets = [on_gpu(KVCache(halves, NUM_BLOCKS, 8), gpu) for gpu in gpus[2:]]
        async with decode_side(LINKS, caches=targets) as decode, prefill_side(LINKS, caches=sources) as prefill:
            ticket = decode.receiver.expect("t", 160, 0, tables_of(decode.receiver, TARGET))
            await send(prefill, ticket, SOURCE)
            await decode.receiver.wait_committed(ticket)
            assert kinds(prefill) == ["ipc", "ipc"]
            for source, target in zip(sources, targets, strict=True):
                assert same_blocks(source, SOURCE, target, TARGET)
            await decode.receiver.release(ticket)


async def test_a_gpu_that_cannot_be_read_after_all_costs_no_transfer_and_is_tried_again(
    knobs: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.transfer.connection.pool.FIRST_PAUSE_S", 0.05)
    config = dataclasses.replace(LINKS, transports=("ipc", "tcp"))
    with fake_gpus(2) as (here, there):
        there.is_deaf = True
        async with (
            decode_side(config, caches=[empty(there)]) as decode,
            prefill_side(config, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
            assert kinds(prefill) == ["tcp"]
            assert prefill.sender.num_failed_openings >= 1
            there.is_deaf = False
            await kv_transfer_until("ipc", prefill, decode)
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="last")


async def test_between_gpus_that_do_not_reach_each_other_nccl_takes_its_place(knobs: Knobs) -> None:
    with fake_gpus(2) as (here, there):
        there.unreachable.add(here.uuid)
        async with (
            decode_side(LINKS, caches=[empty(there)]) as decode,
            prefill_side(LINKS, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
            await until(lambda: kinds(prefill) == ["nccl"], SOON_S)
            assert (prefill.sender.num_failed_openings, there.num_ever_open) == (0, 0)
            (route,) = prefill.sender._connections._routes.values()
            assert route.missed == (), "and nothing better is tried again and again"


async def test_beside_ipc_no_communicator_is_made(knobs: Knobs) -> None:
    """NCCL opens slowly, and is what is worse here."""
    with fake_gpus(2) as (here, there):
        async with (
            decode_side(LINKS, caches=[empty(there)]) as decode,
            prefill_side(LINKS, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
            (route,) = prefill.sender._connections._routes.values()
            assert (route.missed, route.improving) == ((), None)


async def test_a_transfer_that_was_planned_for_larger_slots_fails_in_words(knobs: Knobs) -> None:
    """Its connection has ended, and the next one is over another kind."""
    with fake_gpus(2) as (here, there):
        async with (
            decode_side(LINKS, caches=[empty(there)]) as decode,
            prefill_side(LINKS, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
            pool = prefill.sender._connections
            (route,) = pool._routes.values()
            assert route.connection is not None
            ticket = decode.receiver.expect("t", 160, 0, tables_of(decode.receiver, TARGET, 3))
            async with prefill.sender.transfer(ticket) as transfer:
                route.connection.transport_kind = "tcp"
                transfer.extend(tables_of(transfer, SOURCE, 3))
                with pytest.raises(TransferError, match="chunks of 16384 bytes do not fit the slots of 4096 bytes"):
                    await transfer.finish(1)
            await decode.receiver.release(ticket)
