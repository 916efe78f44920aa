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
    """Name of the data type in torch, without `torch.`."""
    block_size: int = 0
    """Tokens per block, where the groups of the layout differ; 0: the layout's."""
    page_order: str = ""
    """How the values of a head lie in a block, by the name of a `PageOrder`; empty: K of all tokens, then V."""
    tag: str = ""
    """Name of an opaque page order; empty otherwise."""


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
    """Tokens of the shortest prefix that whole blocks of every group hold; a multiple of 16."""
    tp_size: int
    groups: tuple[GroupLayout, ...]
    states: tuple[StateLayout, ...] = ()
