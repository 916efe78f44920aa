"""Weights of 8-bit floats, with torch's own products on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from baton.config import EngineConfig
from baton.errors import ConfigError
from engine.model.fp8_linear import Fp8Linear, quantize, quantized_rows, refuse_fp8

GPU = torch.device("cuda")


def linear(num_inputs: int = 64, num_outputs: int = 48, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(num_inputs, num_outputs, bias).requires_grad_(False)


def exactly(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.double() * scale.double()


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_what_was_rounded(bias: bool) -> None:
    module, inputs = linear(bias=bias), torch.randn(2, 7, 64)
    before = module.weight.clone()
    found = Fp8Linear.of(module)(inputs)
    assert module.weight.equal(before)
    rows, weight = exactly(*quantized_rows(inputs.flatten(0, 1))), exactly(*quantized_rows(before))
    expected = (rows @ weight.t()).view(2, 7, 48) + (0 if module.bias is None else module.bias)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert 0 < (found - module(inputs)).abs().max() < 0.1


def test_a_large_matrix_is_made_smaller_piece_by_piece() -> None:
    module = linear(16, 2500, bias=False)
    found = Fp8Linear.of(module)
    weight, scale = quantized_rows(module.weight)
    assert found.weight.view(torch.uint8).equal(weight.view(torch.uint8))
    assert found.scale.equal(scale.view(1, -1))


def test_every_row_has_a_scale_of_its_own() -> None:
    """A large one spoils no other, and one of zeros is zeros."""
    sizes = torch.tensor([1e-20, 1.0, 1e20, 0.0])[:, None]
    rows = torch.randn(4, 64) * sizes
    codes, scale = quantized_rows(rows)
    assert scale.shape == (4, 1)
    assert codes.float().abs().amax(1).tolist() == [448, 448, 448, 0]
    error = (exactly(codes, scale) - rows).abs().amax(1)
    assert (error[:3] <= rows.abs().amax(1)[:3] / 16).all()
    assert not exactly(codes, scale)[3].any()
    weight = linear()
    weight.weight[5] *= 1e4
    one, other = (Fp8Linear.of(each)(rows[1:2]) for each in (weight, linear()))
    kept = [output for output in range(48) if output != 5]
    assert one[:, kept].equal(other[:, kept])


def test_the_layers_linear_modules_are_replaced_and_nothing_else() -> None:
    config = LlamaConfig(
        vocab_size=80, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    layers = model.model.layers
    layers[0].mlp.gate = linear(32, 16)  # as a router is called
    layers[1].mlp.up_proj = linear(layers[1].mlp.up_proj.in_features, 40, bias=False)
    layers[1].mlp.down_proj = linear(40, layers[1].mlp.down_proj.out_features, bias=False)
    left = {id(model.lm_head), id(layers[0].mlp.gate), id(layers[1].mlp.up_proj), id(layers[1].mlp.down_proj)}
    num_linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    head, embedding = model.lm_head.weight.clone(), model.model.embed_tokens.weight.clone()
    quantize(model)
    assert {id(module) for module in model.modules() if isinstance(module, nn.Linear)} == left
    assert sum(isinstance(module, Fp8Linear) for module in model.modules()) == num_linear - len(left)
    assert model.lm_head.weight.equal(head)
    assert model.model.embed_tokens.weight.equal(embedding)
    assert model.dtype is torch.float32
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            assert module.weight.dtype is torch.float8_e4m3fn
            assert not list(module.parameters())


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"model\.weights fp8 needs an NVIDIA GPU .* and this model is on a CPU"):
        refuse_fp8(torch.device("cpu"), "bfloat16", EngineConfig())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or more, and this one has 8\.6"):
        refuse_fp8(GPU, "bfloat16", EngineConfig())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    refuse_fp8(GPU, "bfloat16", EngineConfig())
    with pytest.raises(ConfigError, match=r"needs engine\.tensor_parallel 1"):
        refuse_fp8(GPU, "bfloat16", EngineConfig(tensor_parallel=2))
    with pytest.raises(ConfigError, match=r"needs model\.dtype bfloat16, and this model computes in float16"):
        refuse_fp8(GPU, "float16", EngineConfig())
