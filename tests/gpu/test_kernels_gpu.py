"""The kernels on a GPU, against torch's own attention there."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from engine.core.runner import KVSpec, LayerGroup, ignore_layer
from engine.model.attention_choice import (
    TOLERANCE,
    AttentionWish,
    TorchAttention,
    attention_of,
    why_not_flashinfer,
    why_not_kernels,
)
from engine.model.attention_probe import PROBE_ROOM, ProbedHeads, largest_difference, probe_cache
from engine.model.kv_cache import KVCache
from engine.model.rank_step import RankStep
from engine.model.transformers_runner import TransformersRunner
from tests.support.graphed import part_of
from tests.support.shapes import shape_of

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]


def spec_of(dim: int, dtype: torch.dtype) -> KVSpec:
    name = str(dtype).removeprefix("torch.")
    group = LayerGroup(name="all", layers=(0,), block_size=16, num_kv_heads=4, k_dim=dim, v_dim=dim, dtype=name)
    return KVSpec((group,))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("dim", "num_sharing"), [(64, 7), (80, 1), (96, 3), (128, 4), (128, 8), (192, 2), (256, 16)])
def test_attention_is_torchs(dim: int, num_sharing: int, dtype: torch.dtype) -> None:
    from engine.model.kernel_attention import KernelAttention

    spec = spec_of(dim, dtype)
    assert why_not_kernels(spec, shape_of(spec, num_sharing), dtype, CUDA) is None
    cache = probe_cache(spec, CUDA)
    ways = (TorchAttention(cache), KernelAttention(cache, (num_sharing,), dtype, PROBE_ROOM))
    difference = largest_difference(cache, ProbedHeads((num_sharing,)), dtype, ways)
    print(f"{torch.cuda.get_device_name()}: {dim} dimensions, {num_sharing} share, {dtype}: {difference:.2g}")
    assert difference <= TOLERANCE[dtype]


def test_the_kernels_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shape = shape_of(spec_of(128, torch.bfloat16), 4)
    cache = KVCache(spec_of(128, torch.bfloat16), 8, 1, CUDA)
    found = attention_of(cache, shape, torch.bfloat16, PROBE_ROOM, AttentionWish())
    assert not isinstance(found, TorchAttention), caplog.text


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs an NVIDIA GPU and flashinfer-python")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "num_sharing"), [(64, 1), (64, 7), (128, 4), (128, 8), (256, 2)])
def test_decodes_by_flashinfer_are_torchs(dim: int, num_sharing: int, dtype: torch.dtype) -> None:
    from engine.model.flashinfer_attention import FlashInferAttention

    spec = spec_of(dim, dtype)
    assert why_not_flashinfer(spec, shape_of(spec, num_sharing), dtype) is None
    cache = probe_cache(spec, CUDA)
    ways = (TorchAttention(cache), FlashInferAttention(cache, (num_sharing,), dtype, PROBE_ROOM))
    difference = largest_difference(cache, ProbedHeads((num_sharing,)), dtype, ways)
    print(f"{torch.cuda.get_device_name()}: {dim} dimensions, {num_sharing} share, {dtype}: {difference:.2g}")
    assert difference <= TOLERANCE[dtype]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs an NVIDIA GPU and flashinfer-python")
def test_graphs_that_flashinfer_decodes_give_the_kernels_logits(model_dir: Path) -> None:
    """Graphs of one, of many, and of many again: each replay has a plan of its own."""
    model = ModelConfig(path=str(model_dir), dtype="bfloat16", device="cuda")
    ranks = [
        TransformersRunner(model, EngineConfig(num_blocks=256, max_num_seqs=16, attention=attention)).rank
        for attention in ("auto", "flashinfer")
    ]
    before = ranks[0].cache.groups[0].normal_().clone()
    assert all(rank._graphs is not None for rank in ranks)
    found: list[list[torch.Tensor]] = [[], []]
    for rank, logits in zip(ranks, found, strict=True):
        rank.cache.groups[0].copy_(before)
        for num_parts in (1, 13, 2, 3, 13):  # nobody waits for one before the next is planned
            parts = [part_of(key, 7 + key, (17 * key + num_parts) % 60) for key in range(num_parts)]
            logits.append(rank.compute(RankStep(parts, range(num_parts)), ignore_layer).float())
    torch.testing.assert_close(*found, atol=0.1, rtol=0.1)


def test_decode_steps_are_graphs_and_give_the_same_logits(model_dir: Path) -> None:
    config = EngineConfig(num_blocks=256, max_num_seqs=16)
    runner = TransformersRunner(ModelConfig(path=str(model_dir), dtype="float32", device="cuda"), config)
    rank = runner.rank
    assert rank._graphs is not None
    before, graphs = rank.cache.groups[0].normal_().clone(), rank._graphs
    for num_parts in (1, 2, 3, 5, 13):
        parts = [part_of(key, 7 + key, (17 * key) % 60) for key in range(num_parts)]
        found = []
        for rank._graphs in (graphs, None):
            rank.cache.groups[0].copy_(before)
            found.append(rank.compute(RankStep(parts, range(num_parts)), ignore_layer).clone())
        torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)
