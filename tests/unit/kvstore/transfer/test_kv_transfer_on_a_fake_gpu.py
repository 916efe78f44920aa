"""The whole KV transfer between two GPUs that are none: real gRPC, real threads, NCCL as `tests.fakes` has it."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from baton.errors import BatonError
from engine.model.kv_cache import KVCache
from kvstore.transfer.connection.pool import LONGEST_PAUSE_S
from tests.fakes.gpu import FakeGpu, fake_gpus
from tests.fakes.nccl import Knobs
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    NUM_BLOCKS,
    SOON_S,
    SPEC,
    Prefill,
    decode_side,
    filled_cache,
    kv_transfer,
    prefill_side,
    scattered,
)

LINKS = dataclasses.replace(CONFIG, transports=("nccl", "tcp"))
SOURCE, TARGET = scattered(10, 1), scattered(10, 2)


def on_gpu(cache: KVCache, gpu: FakeGpu) -> KVCache:
    cache.device = gpu.device
    return cache


def good_kinds(prefill: Prefill) -> list[str]:
    return sorted(prefill.sender.open_kinds)


async def test_kv_goes_over_tcp_while_nccl_opens_and_over_nccl_from_then_on(knobs: Knobs) -> None:
    with fake_gpus(2) as (here, there):
        async with (
            decode_side(LINKS, caches=[on_gpu(KVCache(SPEC, NUM_BLOCKS, 8), there)]) as decode,
            prefill_side(LINKS, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
            await until(lambda: good_kinds(prefill) == ["nccl"], SOON_S)
            for number in range(3):
                await kv_transfer(prefill, decode, TARGET, SOURCE, name=f"t{number}")
            assert good_kinds(prefill) == ["nccl"]
            assert decode.num_pairs_ever == 2
        assert len(knobs.groups) == 2
        assert knobs.num_crashes == 0


async def test_a_pair_that_cannot_be_opened_costs_no_transfer_and_is_tried_again(
    knobs: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.transfer.connection.pool.FIRST_PAUSE_S", 0.05)
    config = dataclasses.replace(LINKS, op_timeout_s=6.0)  # on a busy machine a peer may be silent for two
    knobs.never_opens = True
    with fake_gpus(2) as (here, there):
        async with (
            decode_side(config, caches=[on_gpu(KVCache(SPEC, NUM_BLOCKS, 8), there)]) as decode,
            prefill_side(config, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            pool = prefill.sender._connections
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
            await until(lambda: pool.num_failed_openings == 1, SOON_S)
            assert good_kinds(prefill) == ["tcp"]
            knobs.never_opens = False
            async with asyncio.timeout(SOON_S):
                while good_kinds(prefill) != ["nccl"]:
                    await kv_transfer(prefill, decode, SOURCE, TARGET, name="again")
                    await asyncio.sleep(0.02)
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="last")


async def test_no_transfer_waits_for_the_choice_of_what_copies_its_chunks(
    knobs: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles and loads kernels, for seconds; it is made when a worker begins."""
    asked: list[object] = []

    def why_not(device: object) -> str:
        asked.append(device)
        return "it is none"

    monkeypatch.setattr("kvstore.transfer.copy.kernel_choice.why_not_kernels", why_not)
    with fake_gpus(2) as (here, there):
        async with (
            decode_side(LINKS, caches=[on_gpu(KVCache(SPEC, NUM_BLOCKS, 8), there)]) as decode,
            prefill_side(LINKS, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            assert asked == [there.device, here.device]
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
            await until(lambda: good_kinds(prefill) == ["nccl"], SOON_S)
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="second")
        assert asked == [there.device, here.device]


async def test_on_one_gpu_nccl_is_not_tried(knobs: Knobs) -> None:
    with fake_gpus(2, same=True) as (here, there):
        async with (
            decode_side(LINKS, caches=[on_gpu(KVCache(SPEC, NUM_BLOCKS, 8), there)]) as decode,
            prefill_side(LINKS, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            await kv_transfer(prefill, decode, SOURCE, TARGET, name="first")
            (route,) = prefill.sender._connections._routes.values()
            await until(lambda: route.pauses.pause_s == LONGEST_PAUSE_S, SOON_S)
            assert good_kinds(prefill) == ["tcp"]
            assert not knobs.groups
        config = dataclasses.replace(LINKS, transports=("nccl",))
        async with (
            decode_side(LINKS, caches=[on_gpu(KVCache(SPEC, NUM_BLOCKS, 8), there)]) as decode,
            prefill_side(config, caches=[on_gpu(filled_cache(1), here)]) as prefill,
        ):
            with pytest.raises(BatonError, match="offers the transports nccl, and is on the same GPU"):
                await kv_transfer(prefill, decode, SOURCE, TARGET, name="only")
