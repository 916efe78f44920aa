"""Modules that stand in a loaded transformers model for its own, and compute the same with fewer kernels.

Projections of the same input are one matrix product, and what follows is by `fused_kernels`. Imports Triton:
`fused_model` says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.model.attention import paged_attention
from engine.model.fused_kernels import gated, norm_heads, normed, rotate_heads, sum_and_norm


class FusedNorm(nn.Module):
    """A norm over the root mean square of rows.

    Args:
        weight: `[length]`.
        eps: is added to the mean square.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the norm of each row, `[..., length]`."""
        return normed(hidden_states, self.weight, self.eps)


class Beside(nn.Module):
    """Projections of the same input, whose results stand one behind the other in a row: what `merged` is tried by."""

    def __init__(self, projections: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.projections = nn.ModuleList(projections)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns `[..., all of their features]`."""
        return torch.cat([projection(hidden_states) for projection in self.projections], dim=-1)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Returns one projection in place of all of them, with weights of its own."""
        weights: list[torch.Tensor] = [projection.weight for projection in self._linear()]
        biases: list[torch.Tensor] = [one.bias for one in self._linear() if one.bias is not None]
        weight = torch.cat(weights)
        found = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
        found.weight = nn.Parameter(weight, requires_grad=False)
        if biases:
            found.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        return found

    def _linear(self) -> list[nn.Linear]:
        return [projection for projection in self.projections if isinstance(projection, nn.Linear)]


class AttentionShape(NamedTuple):
    """What an attention does between its projections."""

    layer: int
    num_heads: int
    num_kv_heads: int
    dim: int
    scaling: float | None
    sliding_window: int | None
    rotates: bool
    """Whether queries and keys are turned by their positions."""


class FusedAttention(nn.Module):
    """The attention of a layer.

    Args:
        shape: see `AttentionShape`.
        qkv: projects to queries, keys and values, head by head, one behind the other.
        output: projects what all heads have found.
        norms: those of each head of the queries and of the keys, if it has any.
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
        """Returns `[1, T, hidden]`, and no attention weights."""
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
    """A gated perceptron with SiLU.

    Args:
        gate_up: projects to the gate and to what passes it, one behind the other.
        down: projects back.
    """

    def __init__(self, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns `[..., hidden]`."""
        found: torch.Tensor = self.down_proj(gated(self.gate_up_proj(hidden_states)))
        return found


class FusedLayer(nn.Module):
    """A layer that adds to what goes through it: what attention finds, then what the perceptron does, each of a norm.

    Args:
        attention: a module that returns a tuple, as `FusedAttention` does.
        perceptron: a module of one tensor.
        norms: the one before the attention, and the one before the perceptron.
    """

    def __init__(self, attention: nn.Module, perceptron: nn.Module, norms: tuple[FusedNorm, FusedNorm]) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, perceptron
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Returns `[1, T, hidden]`; all but the hidden states is the attention's."""
        total, deeper = self.parts(hidden_states, self.input_layernorm(hidden_states), **kwargs)
        return total + deeper

    def parts(
        self, hidden_states: torch.Tensor, scaled: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the two tensors whose sum is what comes out.

        Args:
            hidden_states: `[1, T, hidden]`.
            scaled: the norm of it.
            **kwargs: the attention's.
        """
        found, _ = self.self_attn(hidden_states=scaled, **kwargs)
        norm = self.post_attention_layernorm
        total, scaled = sum_and_norm(hidden_states, found, norm.weight, norm.eps)
        return total, self.mlp(scaled)


class FusedStack(nn.Module):
    """Layers one after the other, as if they were one: the last sum of each is computed with the norm of the next.

    Args:
        layers: at least one.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._in_order = tuple(layers)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Returns `[1, T, hidden]`; all but the hidden states is each attention's."""
        first, *others = self._in_order
        total, deeper = first.parts(hidden_states, first.input_layernorm(hidden_states), **kwargs)
        for layer in others:
            norm = layer.input_layernorm
            total, scaled = sum_and_norm(total, deeper, norm.weight, norm.eps)
            total, deeper = layer.parts(total, scaled, **kwargs)
        return total + deeper
