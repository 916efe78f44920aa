"""How a worker's KV cache lies, as plain values: what its tickets and greetings say of it.

The transfer plan of two workers follows from their two layouts (`kvstore.transfer.protocol`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """A layer group of a cache: of the model, not of one rank."""

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    """As torch names it, without `torch.`."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A recurrent state of a cache: one tensor for each sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of a worker's KV cache, as its peers receive it. Every rank holds its share of each group's heads."""

    block_size: int
    tp_size: int
    groups: tuple[GroupLayout, ...]
    states: tuple[StateLayout, ...] = ()
