"""The KV transfer out of a GPU's memory and into it, as production has it: real gRPC, real transports, real fences."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from engine.core.engine import Engine
from engine.core.runner import Fence
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.model.kv_cache import KVCache
from engine.model.transformers_runner import TransformersRunner
from kvstore.transfer.connection.reservations import Arrival
from kvstore.transfer.transport.nccl_env import PINNED
from tests.gpu.nccl_ends import environment
from tests.support.builders import sequence_spec
from tests.unit.kvstore.transfer.child import child
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    NUM_BLOCKS,
    SPEC,
    decode_side,
    filled_cache,
    kv_transfer,
    prefill_side,
    same_blocks,
    send,
    tables_of,
    with_link,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]

SOURCE, TARGET = list(range(20, 30)), list(range(30, 40))
ONE_GPU = "two hosts on one GPU"
OP_TIMEOUT_S = 30.0


@pytest.mark.parametrize("link", ["tcp"])
@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
async def test_blocks_arrive_bit_by_bit_whatever_the_devices(link: str, source: str, target: str) -> None:
    config = with_link(link)
    there = KVCache(SPEC, NUM_BLOCKS, 8, torch.device(target))
    async with (
        decode_side(config, caches=[there]) as decode,
        prefill_side(config, caches=[filled_cache(1, device=source)]) as prefill,
    ):
        ticket = decode.receiver.expect("t", 150, 0, tables_of(decode.receiver, TARGET, 3))
        await send(prefill, ticket, SOURCE)
        assert await decode.receiver.wait_committed(ticket) == Arrival(150, 1234)
        sent, arrived = (cache.groups for cache in (prefill.cache, decode.cache))
        for ours, theirs in zip(sent, arrived, strict=True):
            assert theirs[:, TARGET[:-1]].cpu().equal(ours[:, SOURCE[:-1]].cpu())
            assert theirs[:, TARGET].isfinite().all()
        for name, state in prefill.cache.states.items():
            assert decode.cache.states[name][3].cpu().equal(state[3].cpu())
        assert prefill.sender.stats.failed == 0


@pytest.mark.parametrize("checksum", ["full", "off"])
async def test_blocks_arrive_over_nccl_in_another_process(checksum: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_link("nccl", CONFIG, checksum=checksum, open_timeout_s=60.0, op_timeout_s=OP_TIMEOUT_S)
    for name, value in (PINNED | environment(ONE_GPU, 0)).items():
        monkeypatch.setenv(name, value)
    theirs = PINNED | environment(ONE_GPU, 1)
    cache = filled_cache(1, device="cuda")
    async with (
        child("decode", config, device="cuda", environment=theirs) as decode,
        prefill_side(config, caches=[cache]) as prefill,
    ):
        for number in range(3):
            ticket = await decode.expect(f"t{number}", 160, TARGET)
            await send(prefill, ticket, SOURCE, first_token=77)
            assert await decode.ask("outcome") == Arrival(160, 77)
            expected = [group[:, SOURCE].reshape(-1).float().tolist() for group in cache.groups]
            assert await decode.ask("blocks", TARGET) == expected
            assert (await decode.ask("release"))[0] == tuple(TARGET)
        assert prefill.sender.num_connections == 1


async def test_what_is_sent_while_a_step_goes_on_is_what_the_step_wrote(model_dir: Path) -> None:
    """A layer is offered as soon as the engine has launched it: only its fence keeps the reader from the old rows."""
    config = with_link("tcp", slot_bytes=2**20, num_slots=8)
    runner = TransformersRunner(ModelConfig(path=str(model_dir), device="cuda"), EngineConfig(num_blocks=512))
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=4096, output_reservation=512)
    engine = Engine(runner, limits)
    num_tokens = 3000
    prompt = torch.randint(3, 49000, (num_tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    sequence = engine.add(sequence_spec(prompt, "streamed"), Purpose.PREFILL, now=0.0)
    runner.cache.groups[0].fill_(float("nan"))
    batch, _ = engine.schedule(0.0)
    blocks = sequence.block_ids[0]
    there = KVCache(runner.spec, len(blocks), 8, torch.device("cuda"))
    async with decode_side(config, caches=[there]) as decode, prefill_side(config, caches=[runner.cache]) as prefill:
        await kv_transfer(prefill, decode, blocks[:1], [0], name="warm up")
        runner.cache.groups[0].fill_(float("nan"))
        ticket = decode.receiver.expect("streamed", num_tokens, 0, (tuple(range(len(blocks))),))
        async with prefill.sender.transfer(ticket) as transfer:
            transfer.extend((blocks,))

            def layer_done(layer: int, fence: Fence | None) -> None:
                transfer.advance(num_tokens, layer + 1, fence)

            await asyncio.to_thread(runner.execute, batch, layer_done)
            done = await transfer.finish(1)
        assert await decode.receiver.wait_committed(ticket) == Arrival(num_tokens, 1)
        assert there.groups[0].isfinite().all()
        assert same_blocks(runner.cache, blocks[:-1], there, range(len(blocks) - 1))
        print(f"{done.num_bytes / 1e6:.0f} MB in {done.transfer_s:.3f} s, {done.exposed_s * 1e3:.1f} ms after the step")
