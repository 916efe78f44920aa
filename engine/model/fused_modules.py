"""Modules that replace those of a loaded transformers model, and compute the same with fewer kernels.

Projections of the same input are one matrix product, and the operations after it use `fused_kernels`. Imports Triton:
only `fused_model` decides whether to import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.model.adapters import NAME, joined_pieces
from engine.model.attention import paged_attention
from engine.model.fused_kernels import gated, norm_heads, normed, rotate_heads, sum_and_norm


class FusedNorm(nn.Module):
    """RMS norm of rows.

    Args:
        weight: `[length]`.
        eps: value added to the mean square.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the norm of each row, `[..., length]`."""
        return normed(hidden_states, self.weight, self.eps)


class Beside(nn.Module):
    """Projections of the same input with concatenated results; used to test the merged projection."""

    def __init__(self, projections: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.projections = nn.ModuleList(projections)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `[..., all of their features]`."""
        return torch.cat([projection(hidden_states) for projection in self.projections], dim=-1)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return one projection that replaces all of them, with weights of its own."""
        weights: list[torch.Tensor] = [projection.weight for projection in self._linear()]
        biases: list[torch.Tensor] = [one.bias for one in self._linear() if one.bias is not None]
        weight = torch.cat(weights)
        found = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
        found.weight = nn.Parameter(weight, requires_grad=False)
        if biases:
            found.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        if pieces := joined_pieces(self._linear()):
            setattr(found, NAME, pieces)
        return found

    def _linear(self) -> list[nn.Linear]:
        return [projection for projection in self.projections if isinstance(projection, nn.Linear)]


class AttentionShape(NamedTuple):
    """Shape of an attention between its projections."""

    layer: int
    num_heads: int
    num_kv_heads: int
    dim: int
    scaling: float | None
    sliding_window: int | None
    rotates: bool
    """True if queries and keys are rotated by their positions."""


class FusedAttention(nn.Module):
    """Attention of a layer.

    Args:
        shape: see `AttentionShape`.
        qkv: projection to queries, keys and values, concatenated head by head.
        output: projection of the results of all heads.
        norms: norms of each head of the queries and of the keys, if any.
    """

    def __init__(
        self, shape: AttentionShape, qkv: nn.Module, output: nn.Module, norms: tuple[FusedNorm, FusedNorm] | None
    ) -> None:
        super().__init__()
        self.shape, self.layer_idx = shape, shape.layer
        self.qkv_proj, self.o_proj = qkv, output
        self.q_norm: FusedNorm | None
        self.k_norm: FusedNorm | None
        self.q_norm, self.k_norm = norms or (None, None)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return `[1, T, hidden]`, and no attention weights."""
        shape, rows = self.shape, self.qkv_proj(hidden_states)
        if self.q_norm is not None and self.k_norm is not None:
            norm_heads(rows, self.q_norm.weight, self.q_norm.eps, 0, shape.num_heads)
            norm_heads(rows, self.k_norm.weight, self.k_norm.eps, shape.num_heads, shape.num_kv_heads)
        if shape.rotates:
            rotate_heads(rows, *position_embeddings, shape.dim, shape.num_heads + shape.num_kv_heads)
        heads = rows.view(*rows.shape[:2], -1, shape.dim).transpose(1, 2)
        query, key, value = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        found, _ = paged_attention(
            self, query, key, value, None, scaling=shape.scaling, sliding_window=shape.sliding_window
        )
        return self.o_proj(found.reshape(*rows.shape[:2], -1)), None


class FusedPerceptron(nn.Module):
    """Gated MLP with SiLU.

    Args:
        gate_up: projection to the gate and to the gated values, concatenated.
        down: projection back.
    """

    def __init__(self, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `[..., hidden]`."""
        found: torch.Tensor = self.down_proj(gated(self.gate_up_proj(hidden_states)))
        return found


class FusedLayer(nn.Module):
    """Layer with two residual additions, each preceded by a norm: attention, then MLP.

    Args:
        attention: module that returns a tuple, as `FusedAttention` does.
        perceptron: module that returns one tensor.
        norms: the norm before the attention, and the one before the MLP.
    """

    def __init__(self, attention: nn.Module, perceptron: nn.Module, norms: tuple[FusedNorm, FusedNorm]) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, perceptron
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return `[1, T, hidden]`; all other arguments go to the attention."""
        total, deeper = self.parts(hidden_states, self.input_layernorm(hidden_states), **kwargs)
        return total + deeper

    def parts(
        self, hidden_states: torch.Tensor, scaled: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two tensors whose sum is the layer's output.

        Args:
            hidden_states: `[1, T, hidden]`.
            scaled: the norm of `hidden_states`.
            **kwargs: arguments of the attention.
        """
        found, _ = self.self_attn(hidden_states=scaled, **kwargs)
        norm = self.post_attention_layernorm
        total, scaled = sum_and_norm(hidden_states, found, norm.weight, norm.eps)
        return total, self.mlp(scaled)


class FusedStack(nn.Module):
    """Consecutive layers computed as one: the last sum of each layer is computed together with the norm of the next.

    Args:
        layers: at least one.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._in_order = tuple(layers)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return `[1, T, hidden]`; all other arguments go to each attention."""
        first, *others = self._in_order
        total, deeper = first.parts(hidden_states, first.input_layernorm(hidden_states), **kwargs)
        for layer in others:
            norm = layer.input_layernorm
            total, scaled = sum_and_norm(total, deeper, norm.weight, norm.eps)
            total, deeper = layer.parts(total, scaled, **kwargs)
        return total + deeper
