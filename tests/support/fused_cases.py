"""The fused kernels, and parts of a model that look like others: see `interpreted`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name the field uses
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engine.model.kv_cache import torch_dtype
from tests.support.fused import logits_of, model_of
from tests.support.fusing import fuse_here
from tests.support.graphed import SHAPE

EPS = 1e-5


def kernel_difference(name: str, size: tuple[int, ...], dtype: str) -> float:
    """Returns by how much a kernel's result differs from torch's, over the largest number of that."""
    torch.manual_seed(0)
    found, expected = globals()[f"_{name}"](size, torch_dtype(dtype))
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        difference = (one.float() - other.float()).abs().max() / other.float().abs().max()
        worst = max(worst, float(difference.nan_to_num(torch.inf)))
    return worst


def _by_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    module = LlamaRMSNorm(len(weight), EPS)
    module.weight.data = weight
    found: torch.Tensor = module(x).detach()
    return found


def _norm(size: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from engine.model.fused_kernels import normed

    x, weight = (torch.randn(*size) + 0.5).to(dtype), torch.randn(size[-1]).to(dtype)
    tiny, apart = 1e-3 * x, x.transpose(0, 1)
    given = [x, tiny, apart]
    return [normed(one, weight, EPS) for one in given], [_by_torch(one, weight) for one in given]


def _heads(size: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Some heads of rows, from the second on; the others stay what they are."""
    from engine.model.fused_kernels import norm_heads

    num_tokens, num_heads, dim = size
    rows, weight = torch.randn(1, num_tokens, num_heads * dim).to(dtype), torch.randn(dim).to(dtype)
    expected = rows.clone().view(num_tokens, num_heads, dim)
    expected[:, 1:-1] = _by_torch(expected[:, 1:-1], weight)
    norm_heads(rows, weight, EPS, 1, num_heads - 2)
    return [rows], [expected.view_as(rows)]


def _sum_and_norm(size: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from engine.model.fused_kernels import sum_and_norm

    x, more, weight = torch.randn(*size).to(dtype), torch.randn(*size).to(dtype), torch.randn(size[-1]).to(dtype)
    total = x + more
    return list(sum_and_norm(x, more, weight, EPS)), [total, _by_torch(total, weight)]


def _rotate(size: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The last two heads, and what is beyond the turned dimensions, stay what they are."""
    from engine.model.fused_kernels import rotate_heads

    num_tokens, num_heads, dim, turned = size
    rows = torch.randn(1, num_tokens, num_heads * dim).to(dtype)
    cos, sin = (torch.randn(1, num_tokens, turned).to(dtype) for _ in range(2))
    expected = rows.clone().view(1, num_tokens, num_heads, dim)
    by_head = expected[:, :, :-2, :turned].transpose(1, 2)
    expected[:, :, :-2, :turned] = apply_rotary_pos_emb(by_head, by_head, cos, sin)[0].transpose(1, 2)
    rotate_heads(rows, cos, sin, dim, num_heads - 2)
    return [rows], [expected.view_as(rows)]


def _gate(size: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from engine.model.fused_kernels import gated

    joined = (3 * torch.randn(*size)).to(dtype)
    gate, up = joined.chunk(2, dim=-1)
    return [gated(joined)], [F.silu(gate) * up]


def rows_are_their_own() -> bool:
    """Whether rows come out the same to the last bit, whatever is computed beside them."""
    from engine.model import fused_kernels as kernels

    torch.manual_seed(0)
    x, more, weight = torch.randn(1, 5, 96), torch.randn(1, 5, 96), torch.randn(96)
    cos, sin = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    jobs: tuple[Callable[[slice], torch.Tensor], ...] = (
        lambda at: kernels.normed(x[:, at], weight, EPS),
        lambda at: kernels.sum_and_norm(x[:, at], more[:, at], weight, EPS)[1],
        lambda at: kernels.gated(x[:, at]),
        lambda at: _turned(x[:, at], cos[:, at], sin[:, at]),
    )
    rows = [slice(row, row + 1) for row in range(5)]
    return all(job(row).equal(job(slice(0, 5))[:, row]) for row in rows for job in jobs)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    from engine.model.fused_kernels import rotate_heads

    rows = x.clone()
    rotate_heads(rows, cos, sin, 12, 8)
    return rows


class _LimitedSiLU(nn.Module):
    def forward(self, opening: torch.Tensor) -> torch.Tensor:
        return F.silu(opening.clamp(max=7.0))


def left_alone(case: str) -> tuple[list[str], bool]:
    """What the log says of a model one part of which is not what it seems, and whether all else is fused."""
    model = model_of(LlamaConfig(**SHAPE | {"rms_norm_eps": EPS}))
    layer = model.model.layers[1]
    if case == "tied":
        layer.self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    elif case == "quantized":
        layer.self_attn.k_proj = type("Quantized", (nn.Linear,), {})(32, 16, bias=False)
    elif case == "one bias":
        layer.self_attn.v_proj = nn.Linear(32, 16)
    elif case == "limited gate":
        layer.mlp.act_fn = _LimitedSiLU()
        layer.mlp.gate_proj.weight.data *= 1e-3  # so that no probe reaches the limit
    elif case == "other type":
        model.model.norm.to(torch.bfloat16)
    else:
        layer.self_attn.register_parameter("sinks", nn.Parameter(torch.zeros(4)))
    words = fuse_here(model)
    return words[1:], "FusedLayer" in words[0]


def another_model_is_untouched() -> bool:
    """Whether a model computes the same to the last bit after another one of its type was fused."""
    one, other = model_of(LlamaConfig(**SHAPE)), model_of(LlamaConfig(**SHAPE))
    before = logits_of(one, "float32")
    fuse_here(other)
    return before.equal(logits_of(one, "float32"))


def weights_have_moved() -> dict[str, Any]:
    """Where the weights of a fused model with biases are."""
    from transformers import Qwen2Config

    model = model_of(Qwen2Config(**SHAPE))
    projections = model.model.layers[0].self_attn
    expected = torch.cat([getattr(projections, name).bias.detach() for name in ("q_proj", "k_proj", "v_proj")])
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    fuse_here(model)
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    return {
        "bias": model.model.layers[0].layers[0].self_attn.qkv_proj.bias.equal(expected),
        "bytes": (num_bytes, sum(weight.nbytes for weight in model.parameters()), sum(storages.values())),
        "names": sorted(name for name, _ in model.model.layers[0].layers[1].named_parameters()),
    }
