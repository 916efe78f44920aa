"""K and V of a layer by position in a sequence, for models whose passes are not those of packed tokens."""

from __future__ import annotations

import torch

from engine.model.kv_cache import KVCache, rounded


class Pages:
    """K and V of one layer of a cache, by position in a sequence.

    Args:
        cache: cache with K and V pages that are not quantized.
        group: index of the layer's group, and so of its block table.
        index: index of the layer in the group.
    """

    def __init__(self, cache: KVCache, group: int, index: int) -> None:
        layers, self._size = cache.spec.groups[group], cache.spec.groups[group].block_size
        pages = cache.groups[group][index].view(-1, layers.num_kv_heads, layers.page_numel)
        keys, shape = self._size * layers.k_dim, (*pages.shape[:2], self._size)
        self._pages = (
            pages[..., :keys].view(*shape, layers.k_dim),
            pages[..., keys:].view(*shape, layers.v_dim),
        )

    def read(self, table: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return K and V of positions `begin` to `end`, each `[1, heads, tokens, dim]`.

        Args:
            table: the sequence's block table, `[blocks]`; entries before `begin` are not read.
        """
        first = begin // self._size
        blocks = table[first : -(-end // self._size)]
        within = slice(begin - first * self._size, end - first * self._size)
        return tuple(pages[blocks].transpose(0, 1).flatten(1, 2)[None, :, within] for pages in self._pages)

    def write(self, table: torch.Tensor, begin: int, *values: torch.Tensor) -> None:
        """Write K and V, each `[1, heads, tokens, dim]`, to the positions from `begin` on."""
        places = torch.arange(begin, begin + values[0].shape[2], device=table.device)
        blocks, within = table[places // self._size], places % self._size
        for pages, new in zip(self._pages, values, strict=True):
            pages[blocks, :, within] = rounded(new[0].transpose(0, 1), pages.dtype)
