"""Tensors of one rank's KV cache: blocks for each layer group, and a small named state per sequence.

Models whose layers differ in head shape have several groups; recurrent layers keep their state outside the blocks. For
every model family a KV transfer consists of the blocks of each group and the sequence's states.

Blocks are head-major, so that a tensor-parallel slice of a block is one contiguous run:

    group tensor   [layer][block][kv_head][ K page: token x k_dim | V page: token x v_dim ]
                           `------------------------- one row: row_numel elements ---------'
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
from typing import TYPE_CHECKING

import torch

from baton.errors import ModelLoadError
from engine.core.runner import FP8, KVSpec, PageOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.core.runner import BlockCopy


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the data type with this name, without `torch.`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in another data type, limited to the range of an 8-bit one.

    Not every version of torch limits them by itself; some return NaN.
    """
    if dtype.itemsize == 1 and dtype.is_floating_point and values.dtype is not dtype:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def movable_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a data type of the same width that torch can index on every device; 8-bit floats it cannot."""
    return torch.uint8 if dtype is torch_dtype(FP8) else dtype


def movable(values: torch.Tensor) -> torch.Tensor:
    """Return a view of values that can be indexed and zeroed: see `movable_dtype`."""
    return values.view(movable_dtype(values.dtype))


class KVCache:
    """Tensors of one rank's KV cache.

    Args:
        num_blocks: blocks of every layer group; or a number for each block table, of which that of the states' table
            counts rows.
        max_num_seqs: rows of the states' table if `num_blocks` is one number.
        shared: whether other processes receive it. On a CPU it is then created in shared memory, since it would be
            copied there otherwise; for GPU memory they receive a handle in any case.

    Attributes:
        groups: one tensor per layer group, `[layers, num_blocks, row_numel]`.
        states: one tensor per named state, `[rows, *shape]`.
        table_sizes: blocks of each block table of a sequence, and rows of the states' table; see `Runner.num_blocks`.

    Raises:
        ValueError: the spec has another page order than this cache, or gaps, or another number of tables.
        ModelLoadError: there is not enough memory.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int | Sequence[int],
        max_num_seqs: int,
        device: torch.device | None = None,
        shared: bool = False,
    ) -> None:
        for group in spec.groups:
            if group.page_order is not PageOrder.K_THEN_V or any(group.strides):
                raise ValueError(f"group {group.name!r} must have pages of K and of V without gaps")
        self.spec = spec
        if isinstance(num_blocks, int):
            num_blocks = (num_blocks,) * len(spec.groups) + (max_num_seqs,) * bool(spec.states)
        if len(num_blocks) != spec.num_tables:
            raise ValueError(f"a cache with {spec.num_tables} block tables got sizes for {len(num_blocks)}")
        self.table_sizes = tuple(num_blocks)
        self.num_blocks = self.table_sizes[0]
        self.device = device or torch.device("cpu")
        zeros: Callable[..., torch.Tensor] = torch.zeros
        if self.device.type == "cpu":
            zeros = _shared_zeros if shared else lazy_zeros
        self.groups = [
            zeros(len(g.layers), number, g.row_numel, dtype=torch_dtype(g.dtype), device=self.device)
            for g, number in zip(spec.groups, self.table_sizes, strict=False)
        ]
        num_rows = self.table_sizes[-1]
        self.states = {
            s.name: zeros(num_rows, *s.shape, dtype=torch_dtype(s.dtype), device=self.device) for s in spec.states
        }
        self._place = {layer: (g, i) for g, group in enumerate(spec.groups) for i, layer in enumerate(group.layers)}
        self._place |= {layer: self._place[source] for layer, source in spec.reads}
        self._readers = frozenset(layer for layer, _ in spec.reads)

    def layer(self, layer_index: int) -> torch.Tensor:
        """Return the pages that a layer reads, `[num_blocks * kv_heads, block_size * (k_dim + v_dim)]`, as a view."""
        group, index = self._place[layer_index]
        return self.groups[group][index].view(-1, self.spec.groups[group].page_numel)

    def group_of(self, layer_index: int) -> int:
        """Return the index of the layer's group."""
        return self._place[layer_index][0]

    def keeps(self, layer_index: int) -> bool:
        """Return whether a layer writes KV of its own; others read another layer's."""
        return layer_index not in self._readers

    def clear_blocks(self, tables: Sequence[Sequence[int] | torch.Tensor]) -> None:
        """Zero whole blocks of each group in every layer.

        Args:
            tables: block numbers of each group, as a list or as an int64 tensor on the cache's device, which avoids a
                wait.
        """
        for group, blocks in zip(self.groups, tables, strict=False):
            if len(blocks):
                movable(group).index_fill_(1, torch.as_tensor(blocks, device=self.device), 0)

    def clear_places(self, group: int, block: int, begin: int) -> None:
        """Zero the places of a block from `begin` on, in every layer of a group."""
        spec = self.spec.groups[group]
        pages = movable(self.groups[group])[:, block].view(len(spec.layers), spec.num_kv_heads, spec.page_numel)
        values = spec.block_size * spec.k_dim
        pages[..., begin * spec.k_dim : values] = 0
        pages[..., values + begin * spec.v_dim :] = 0

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks in every layer of their group, in order."""
        for copy in copies:
            self.groups[copy.group][:, copy.target] = self.groups[copy.group][:, copy.source]


def lazy_zeros(*shape: int, dtype: torch.dtype, device: torch.device, in_huge_pages: bool = True) -> torch.Tensor:
    """Return zeros on a CPU, page-aligned. Unlike `torch.zeros`, memory is allocated when it is first used.

    Args:
        in_huge_pages: whether it is allocated in pieces of megabytes, if the system can.

    Raises:
        ModelLoadError: the system does not promise so much.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(*shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ModelLoadError(
            f"this machine does not have {num_bytes / 2**30:.1f} GiB for KV or adapters ({error}); lower "
            "engine.kv_cache_gib or engine.max_adapters"
        ) from error
    with contextlib.suppress(AttributeError, OSError):  # not available on this system or kernel
        pages.madvise(mmap.MADV_HUGEPAGE if in_huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def _shared_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros on a CPU that processes may share. Unlike `lazy_zeros`, all memory is allocated at once."""
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)
