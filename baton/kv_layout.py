"""Layout of a worker's KV cache as plain values, as its tickets and Hello messages carry it.

The transfer plan of two workers follows from their two layouts (`kvstore.transfer.protocol`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """A layer group of a cache: of the whole model, not of one rank."""

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    """Name of the data type in torch, without `torch.`."""
    block_size: int = 0
    """Tokens per block, if the groups of the layout differ; 0: the layout's."""
    page_order: str = ""
    """Order of a head's values in a block, as the name of a `PageOrder`; empty: K of all tokens, then V."""
    tag: str = ""
    """Name of an opaque page order; empty otherwise."""
    window: int = 0
    """Number of tokens that a token attends to, itself included; 0: all tokens before it."""
    is_replicated: bool = False
    """True if every rank holds all heads; else the heads are divided among the ranks."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Recurrent state of a cache: one tensor per sequence, whole on every rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of a worker's KV cache, as its peers receive it. A rank holds its share of a group's heads, or all."""

    block_size: int
    """Length in tokens of the shortest prefix that whole blocks of every group hold; a multiple of 16."""
    tp_size: int
    groups: tuple[GroupLayout, ...]
    states: tuple[StateLayout, ...] = ()
