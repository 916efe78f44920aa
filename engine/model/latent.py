"""Multi-head latent attention (MLA; DeepSeek-AI, 2024, DeepSeek-V2) over latents that are never expanded.

A layer keeps a latent and one rotated part per token, and expands both to the keys and values of all heads. Expanding
is linear, so its matrices are moved to the other side: queries are multiplied by the matrix of the keys once, instead
of every key of the history, and results by the matrix of the values.

    key of head h   = A_h latent + B_h rotated      score  = query . key = (query A_h) . latent + (query B_h) . rotated
    value of head h = C_h latent                    result = sum of shares * value = C_h (sum of shares * latent)

The pages and the wire hold latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LATENT = "_baton_latent"
"""Attribute of an attention module with its `LatentHeads`."""
EXPAND = "expand_kv"
"""Method of transformers' MLA modules: `[1, 1, T, latent]` and `[1, 1, T, rotated]` to keys and values,
`[1, heads, T, dim]`."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Matrices by which one layer's queries and results are moved into its latent space and back."""

    keys: torch.Tensor
    """`[heads, k_dim, latent + rotated]`."""
    values: torch.Tensor
    """`[heads, latent, v_dim]`."""

    @classmethod
    @torch.no_grad()
    def of(cls, module: Any, num_latent: int, num_rotated: int) -> LatentHeads:
        """Return the matrices of a module, found by expanding unit vectors.

        Args:
            module: one with `expand_kv`.
            num_latent: width of a latent.
            num_rotated: width of the rotated part.
        """
        weight = next(module.parameters())
        units = torch.eye(num_latent + num_rotated, dtype=weight.dtype, device=weight.device)[None, None]
        keys, values = module.expand_kv(units[..., :num_latent], units[..., num_latent:])
        return cls(keys[0].transpose(1, 2).contiguous(), values[0, :, :num_latent].contiguous())

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries for latents, `[heads, T, latent + rotated]`, of queries for keys, `[heads, T, k_dim]`."""
        return query @ self.keys

    def restored(self, out: torch.Tensor) -> torch.Tensor:
        """Return results, `[T, heads, v_dim]`, of those in the latent space, `[T, heads, latent]`."""
        return (out.transpose(0, 1) @ self.values).transpose(0, 1)


def absorb(module: Any, num_latent: int, num_rotated: int) -> None:
    """Make a module pass its latents to the attention function unexpanded; see `LatentHeads.of` for the arguments."""
    setattr(module, LATENT, LatentHeads.of(module, num_latent, num_rotated))
    setattr(module, EXPAND, _unexpanded)


def release(module: Any) -> None:
    """Undo `absorb`."""
    delattr(module, LATENT)
    delattr(module, EXPAND)


def _unexpanded(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rotated
