"""Weights and pages of 8-bit floats on a GPU that multiplies them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from baton.config import EngineConfig, ModelConfig
from engine.core.runner import ignore_layer
from engine.model.attention_choice import TOLERANCE, TorchAttention, why_not_kernels
from engine.model.attention_probe import PROBE_ROOM, ProbedHeads, largest_difference, probe_cache
from engine.model.fp8_linear import Fp8Linear, quantized_rows
from engine.model.rank_step import RankStep
from engine.model.transformers_runner import TransformersRunner
from tests.gpu.test_kernels_gpu import CUDA, spec_of
from tests.support.graphed import part_of
from tests.support.shapes import shape_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs an NVIDIA GPU with compute capability 8.9 or more",
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dim", "num_sharing"), [(64, 3), (128, 4), (256, 2)])
def test_attention_over_8_bit_floats_is_torchs(dim: int, num_sharing: int, dtype: torch.dtype) -> None:
    from engine.model.kernel_attention import KernelAttention

    spec = spec_of(dim, torch.float8_e4m3fn)
    assert why_not_kernels(spec, shape_of(spec, num_sharing), dtype, CUDA) is None
    cache = probe_cache(spec, CUDA)
    ways = (TorchAttention(cache), KernelAttention(cache, (num_sharing,), dtype, PROBE_ROOM))
    assert largest_difference(cache, ProbedHeads((num_sharing,)), dtype, ways) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [(1, 4096, 6144), (64, 576, 1536), (300, 1536, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_what_was_rounded(num_rows: int, num_inputs: int, num_outputs: int, bias: bool) -> None:
    linear = nn.Linear(num_inputs, num_outputs, bias, CUDA, torch.bfloat16).requires_grad_(False)
    rows = torch.randn(num_rows, num_inputs, device=CUDA).bfloat16()
    rows[-1] *= 1e4
    module = Fp8Linear.of(linear).to(CUDA)
    codes, scale = quantized_rows(rows)
    by_kernel = module.quantized(rows)
    assert by_kernel[0].view(torch.uint8).equal(codes.view(torch.uint8))
    assert by_kernel[1].equal(scale)
    expected = (codes.double() * scale) @ (module.weight.double() * module.scale.t()).t()
    expected += 0 if module.bias is None else module.bias
    found = module(rows[None])[0]
    assert found.dtype is torch.bfloat16
    error = (found - expected).abs().amax(1) / expected.abs().amax(1)
    assert error.max() < 1e-2


def test_the_default_models_next_token_is_nearly_as_likely(model_dir: Path) -> None:
    """Its steps are graphs, and its weights take little more than half of the memory."""
    config = EngineConfig(num_blocks=64, max_num_seqs=4)
    model = ModelConfig(path=str(model_dir), dtype="bfloat16", device="cuda")
    found, held = [], []
    for weights, kv_dtype in (("exact", "auto"), ("exact", "fp8"), ("fp8", "fp8")):
        runner = TransformersRunner(replace(model, weights=weights), replace(config, kv_dtype=kv_dtype))
        assert runner.rank._graphs is not None
        parts = [part_of(0, 11, 0)]
        logits = runner.rank.compute(RankStep(parts, [0]), ignore_layer)
        found.append(logits.float().log_softmax(-1).cpu())
        layers = runner.rank.model.model.layers
        held.append(sum(each.nbytes for each in (*layers.parameters(), *layers.buffers())))
        del runner, layers
        torch.cuda.empty_cache()
    divergences = [float((found[0].exp() * (found[0] - each)).sum(-1).max()) for each in found[1:]]
    print(f"KL divergences: {divergences}")
    assert max(divergences) < 0.3
    assert held[0] == held[1] > 1.8 * held[2]
