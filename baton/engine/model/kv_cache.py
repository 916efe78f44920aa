"""The KV cache of one rank of a worker: layer groups of blocks, plus a small named state per sequence.

A dense model is the case with one group and no state. Models whose layers differ in head shape have several groups;
recurrent layers keep their state outside the blocks. What crosses a hand-over is, for every family, the blocks of
each group and the sequence's states.

Blocks are head-major, so that a tensor-parallel slice of a block is one contiguous run:

    group tensor   [layer][block][kv_head][ K page: token x k_dim | V page: token x v_dim ]
                           `------------------------- one row: row_numel elements ---------'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose KV has one shape. `layers` are the model's layer indices, in order."""

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    def page_numel(self, block_size: int) -> int:
        """Elements of one head's K and V pages of a block."""
        return block_size * (self.k_dim + self.v_dim)

    def row_numel(self, block_size: int) -> int:
        """Elements of one block of one layer."""
        return self.num_kv_heads * self.page_numel(block_size)

    def row_bytes(self, block_size: int) -> int:
        return self.row_numel(block_size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A named tensor that each sequence carries beside its blocks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of a KV cache: the same on every worker of a model with equal settings."""

    block_size: int
    groups: tuple[LayerGroup, ...]
    states: tuple[StateSpec, ...] = ()

    @property
    def num_layers(self) -> int:
        """The model's layers up to and including the last one with KV."""
        return 1 + max(layer for group in self.groups for layer in group.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of all groups."""
        return sum(len(g.layers) * g.row_bytes(self.block_size) for g in self.groups)

    @property
    def supports_prefix_reuse(self) -> bool:
        """A state cannot be cropped to a prefix, so blocks alone do not restore such a sequence."""
        return not self.states

    def describe(self) -> str:
        """One line in words: what two sides must agree on."""
        groups = "; ".join(
            f"{g.name}: {len(g.layers)} layers x {g.num_kv_heads} heads x ({g.k_dim}+{g.v_dim}) "
            f"{str(g.dtype).removeprefix('torch.')}"
            for g in self.groups
        )
        states = "".join(f"; state {s.name}{list(s.shape)}" for s in self.states)
        return f"block size {self.block_size}; {groups}{states}"


class KVCache:
    """The tensors of one rank's KV cache.

    Args:
        shared: other processes will get it. On a CPU it lies in shared memory from the first, since it would be copied
            there otherwise; of what is in a GPU's memory they get a handle anyway.

    Attributes:
        groups: one tensor a layer group, `[layers, num_blocks, row_numel]`.
        states: one tensor a named state, `[max_num_seqs, *shape]`.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        max_num_seqs: int,
        device: torch.device | None = None,
        shared: bool = False,
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = device or torch.device("cpu")
        zeros = _shared_zeros if shared and self.device.type == "cpu" else torch.zeros
        self.groups = [
            zeros(len(g.layers), num_blocks, g.row_numel(spec.block_size), dtype=g.dtype, device=self.device)
            for g in spec.groups
        ]
        self.states = {s.name: zeros(max_num_seqs, *s.shape, dtype=s.dtype, device=self.device) for s in spec.states}
        self._place = {layer: (g, i) for g, group in enumerate(spec.groups) for i, layer in enumerate(group.layers)}

    def layer(self, layer_index: int) -> torch.Tensor:
        """One layer's blocks as pages, `[num_blocks * kv_heads, block_size * (k_dim + v_dim)]`; shares memory."""
        group, index = self._place[layer_index]
        return self.groups[group][index].view(-1, self.spec.groups[group].page_numel(self.spec.block_size))

    def group_of(self, layer_index: int) -> LayerGroup:
        return self.spec.groups[self._place[layer_index][0]]

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zeroes whole blocks in every layer."""
        ids = torch.tensor(blocks, device=self.device)
        for group in self.groups:
            group.index_fill_(1, ids, 0)

    def clear_state(self, slots: Sequence[int]) -> None:
        """Zeroes the states of the given sequence slots."""
        for state in self.states.values():
            state[list(slots)] = 0


def _shared_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU. Unlike `zeros`, it takes all of its memory at once."""
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)
