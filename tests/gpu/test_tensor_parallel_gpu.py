"""A model over two GPUs, against transformers' own `generate` on one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.config import ModelConfig
from engine.core.engine import Engine
from engine.core.runner import Fence
from engine.core.sequence import Purpose
from engine.model.transformers_runner import TransformersRunner
from tests.integration.test_engine_models import (
    ENGINE,
    VOCAB_SIZE,
    answers,
    engine_of,
    load_reference,
    make_spec,
    refer,
    same_up_to_near_ties,
    save_tiny,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs and a CUDA build of torch"),
]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    save_tiny("llama", {}, tmp_path)
    config = replace(ENGINE, tensor_parallel=2)
    runner = TransformersRunner(ModelConfig(path=str(tmp_path), dtype="float32", device="cuda"), config)
    yield engine_of(runner, config)
    runner.close()


def test_tokens_equal_generate(engine: Engine, tmp_path: Path) -> None:
    assert [cache.device.index for cache in engine.runner.caches] == [0, 1]
    reference = load_reference(tmp_path)
    draw = random.Random(7)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 16, 130, 61)]
    specs = [make_spec(str(index), prompt, 12, ignore_eos=True) for index, prompt in enumerate(prompts)]
    got, _ = answers(engine, specs, steps_between=2)
    expected = [refer(reference, prompt, 12) for prompt in prompts]
    assert sum(map(same_up_to_near_ties, got, expected)) >= 4


def test_a_reader_that_waits_for_a_layers_fence_reads_both_ranks_final_rows(engine: Engine) -> None:
    """Rank 1's rows too, which another process writes: its fence is that of the sum that follows."""
    caches = engine.runner.caches
    sequence = engine.add(make_spec("read", list(range(48)), 1, ignore_eos=True), Purpose.PREFILL, now=0.0)
    batch, _ = engine.schedule(0.0)
    readers = [torch.cuda.Stream(cache.device) for cache in caches]  # type: ignore[no-untyped-call]
    copies: list[list[torch.Tensor]] = []

    def layer_done(layer: int, fence: Fence | None) -> None:
        assert layer == len(copies)
        copies.append([])
        for cache, reader in zip(caches, readers, strict=True):
            with torch.cuda.stream(reader):
                if fence is not None:  # the last layer's is told after the step
                    fence.wait(reader)
                copies[-1].append(cache.groups[0][layer, list(sequence.block_ids[0])])

    engine.runner.execute(batch, layer_done)
    for device in range(2):
        torch.cuda.synchronize(device)
    assert len(copies) == 4
    for layer, parts in enumerate(copies):
        for cache, copy in zip(caches, parts, strict=True):
            assert copy.equal(cache.groups[0][layer, list(sequence.block_ids[0])])
            assert copy.any()
