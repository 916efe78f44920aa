"""Fused replacements of single transformers modules, checked by their structure and by probes. Imports Triton.

If a module cannot be replaced, the functions return the reason instead of a replacement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from engine.model.attention_choice import TOLERANCE
from engine.model.fused_kernels import LONGEST_ROW
from engine.model.fused_modules import (
    AttentionShape,
    Beside,
    FusedAttention,
    FusedLayer,
    FusedNorm,
    FusedPerceptron,
    FusedStack,
)
from engine.model.fused_probe import SIZES, Draw, heard, largest_ratio, other_weight, through

_Part = TypeVar("_Part", bound=nn.Module)
OTHER_PARTS = "it has other parts"


def norm_of(module: nn.Module, draw: Draw) -> FusedNorm | str:
    """Return a fused RMS norm that replaces a module, or the reason why there is none."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return OTHER_PARTS
    weight = module.get_parameter("weight")
    if weight.dim() != 1 or len(weight) > LONGEST_ROW or weight.dtype != draw.dtype:
        return OTHER_PARTS
    found, most = FusedNorm(weight, eps), 0.0
    with other_weight(module, (1.0 + draw.normal(len(weight), scale=0.3)).to(draw.dtype)):
        for num_tokens, scale in SIZES:
            hidden = draw.normal(1, num_tokens, len(weight), scale=scale) + scale
            most = max(most, largest_ratio(found(hidden), module(hidden)))
    return _unless_it_differs(found, most, draw)


def attention_of_layer(module: nn.Module, rotary: nn.Module, draw: Draw) -> FusedAttention | str:
    """Return a fused attention that replaces a module, or the reason why there is none.

    Args:
        module: transformers' attention, whose norms have been replaced.
        rotary: the model's rotary embedding.
        draw: random numbers.
    """
    parts = dict(module.named_children())
    norms = (parts.pop("q_norm", None), parts.pop("k_norm", None))
    output, qkv = parts.pop("o_proj", None), _joined(parts, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"), draw)
    if output is None or qkv is None or not _is_plain(output, draw) or _has_own(module):
        return OTHER_PARTS
    both = (norms[0], norms[1]) if isinstance(norms[0], FusedNorm) and isinstance(norms[1], FusedNorm) else None
    if both is None and norms != (None, None):
        return OTHER_PARTS
    width, least = _width_of(qkv), 0.0
    for rotates in (True, False):
        first = heard(module, *_rotated(width[0], 1, 1.0, rotary, draw))
        query, key, value = first.given
        shape = AttentionShape(
            first.layer, len(query), len(key), query.shape[-1], first.terms.scaling, first.terms.sliding_window, rotates
        )
        if not first.terms.is_plain or first.terms.is_latent:
            return "its attention has terms that the replacement does not pass on"
        if value.shape != key.shape or (len(query) + 2 * len(key)) * shape.dim != width[1]:
            return OTHER_PARTS
        if both is not None and {len(norm.weight) for norm in both} != {shape.dim}:
            return OTHER_PARTS
        found = FusedAttention(shape, qkv, output, both)
        least = _attention_difference(module, found, rotary, draw)
        if least <= TOLERANCE[draw.dtype]:
            break
    return _unless_it_differs(found, least, draw)


def perceptron_of(module: nn.Module, draw: Draw) -> FusedPerceptron | str:
    """Return a fused gated MLP with SiLU that replaces a module, or the reason why there is none."""
    parts = dict(module.named_children())
    down, activation = parts.pop("down_proj", None), parts.pop("act_fn", parts.pop("activation_fn", None))
    joined = _joined(parts, ("gate_up_proj",), ("gate_proj", "up_proj"), draw)
    if down is None or joined is None or not _is_plain(down, draw) or _has_own(module) or activation is None:
        return OTHER_PARTS
    line = torch.linspace(-8.0, 8.0, 101, device=draw.device)
    if largest_ratio(activation(line), nn.functional.silu(line)) > 1e-5:
        return "its activation is not SiLU"
    found, most = FusedPerceptron(joined, down), 0.0
    for num_tokens, scale in SIZES:
        hidden = draw.normal(1, num_tokens, _width_of(joined)[0], scale=scale)
        most = max(most, largest_ratio(found(hidden), module(hidden)))
    return _unless_it_differs(found, most, draw)


def layer_of(module: nn.Module, draw: Draw) -> FusedLayer | str:
    """Return a fused layer for a layer whose parts have been replaced, or the reason why there is none."""
    parts = {
        name: part for name, part in module.named_children() if type(part) is not nn.Dropout
    }  # no model is trained
    names = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if set(parts) != names or _has_own(module):
        return OTHER_PARTS
    norms = (parts["input_layernorm"], parts["post_attention_layernorm"])
    if not (isinstance(norms[0], FusedNorm) and isinstance(norms[1], FusedNorm)):
        return OTHER_PARTS
    length, most = len(norms[0].weight), 0.0
    if not isinstance(parts["mlp"](draw.normal(1, 1, length)), torch.Tensor):
        return OTHER_PARTS
    found = FusedLayer(parts["self_attn"], parts["mlp"], (norms[0], norms[1]))
    for num_tokens, scale in SIZES:
        given = [draw.normal(1, num_tokens, length, scale=scale) for _ in range(3)]
        for one, other in zip(through(found, *given), through(module, *given), strict=True):
            most = max(most, largest_ratio(one, other))
    return _unless_it_differs(found, most, draw)


def stack_of(layers: nn.ModuleList) -> FusedStack | None:
    """Return all layers of a model as one stack, if each has been replaced and its attention uses no mask."""
    fused = [layer for layer in layers if isinstance(layer, FusedLayer) and isinstance(layer.self_attn, FusedAttention)]
    return FusedStack(fused) if fused and len(fused) == len(layers) else None


def _unless_it_differs(found: _Part, difference: float, draw: Draw) -> _Part | str:
    return found if difference <= TOLERANCE[draw.dtype] else f"the replacement differs by {difference:.2g}"


def _attention_difference(module: nn.Module, found: FusedAttention, rotary: nn.Module, draw: Draw) -> float:
    most = 0.0
    for num_tokens, scale in SIZES:
        given = _rotated(_width_of(found.qkv_proj)[0], num_tokens, scale, rotary, draw)
        one, other = heard(found, *given), heard(module, *given)
        if one[1:3] != other[1:3]:
            return float("inf")
        pairs = zip((one.found, *one.given), (other.found, *other.given), strict=True)
        most = max(most, *(largest_ratio(*pair) for pair in pairs))
    return most


def _rotated(
    width: int, num_tokens: int, scale: float, rotary: nn.Module, draw: Draw
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return hidden states, and random numbers instead of cosines and sines of positions, so that no two are alike."""
    hidden = draw.normal(1, num_tokens, width, scale=scale)
    cos, _ = rotary(hidden, torch.arange(num_tokens, device=draw.device)[None])
    turns = [draw.normal(*cos.shape, dtype=cos.dtype) for _ in range(2)]
    return hidden, (turns[0], turns[1])


def _joined(
    parts: dict[str, nn.Module], one: tuple[str, ...], several: tuple[str, ...], draw: Draw
) -> nn.Linear | Beside | None:
    """Return the merged projections of the same input, if the module has no other parts."""
    names = one if set(parts) == set(one) else several
    found = [part for part in map(parts.get, names) if part is not None and _is_plain(part, draw)]
    linear = [part for part in found if isinstance(part, nn.Linear)]
    if set(parts) != set(names) or len(linear) < len(names) or len({part.bias is None for part in linear}) > 1:
        return None
    return linear[0] if len(linear) == 1 else Beside(linear)


def _is_plain(part: nn.Module, draw: Draw) -> bool:
    """Return whether a module is a plain torch linear module of the model's type: not sharded, and not quantized."""
    return type(part) is nn.Linear and part.weight.dtype == draw.dtype


def _has_own(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers in addition to those of its children."""
    return any(True for _ in _own(module))


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _width_of(projection: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features."""
    linear = [part for part in projection.modules() if isinstance(part, nn.Linear)]
    return linear[0].in_features, sum(part.out_features for part in linear)
