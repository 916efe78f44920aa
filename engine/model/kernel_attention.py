"""Attention of a step by the project's own kernels: see `kernels`. Imports Triton; `attention_choice` imports it.

A step needs a few integers for each of its sequences, and their block tables: no page is copied, and no data grows with
tokens times keys. Whole prompts, further chunks, prefix hits, decodes and drafts use the same kernel. Decodes have few
tokens and many keys, so their keys are divided into shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.core.runner import LayerGroup, OnLayerDone, StepPart, ignore_layer
from engine.model.attention import report_written
from engine.model.attention_step import AttentionTerms
from engine.model.kernels import (
    NO_WINDOW,
    HeadShape,
    Tiles,
    WrittenTokens,
    attend_tiles,
    num_shares_of,
    write_pages,
)
from engine.model.kv_cache import KVCache
from engine.model.table_rows import TableRoom, TableRows
from engine.model.tilings import WGMMA_CAPABILITY
from engine.uploads import StepNumbers


@dataclass(frozen=True, slots=True)
class KernelIndex:
    """Index tensors of a step for one layer group."""

    new: WrittenTokens
    tiles: tuple[Tiles, ...]


class DecodedTokens(Protocol):
    """Tokens at the end of a step, one of each sequence, that are attended by another library."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        ...

    def prepare(self, parts: Sequence[StepPart], rows: Sequence[int]) -> None:
        """Prepare a graph to decode these parts in its next replay.

        Args:
            rows: row of the block tables for each part. The tables must be up to date.
        """
        ...

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scaling: float, window: int | None) -> None:
        """Attend their queries in one layer, whose K and V are written; both tensors are `[T, heads, dim]`."""
        ...


@dataclass(frozen=True, slots=True)
class KernelStep:
    """`AttentionStep` by kernels."""

    attention: KernelAttention
    indices: tuple[KernelIndex, ...]
    """One for each layer group."""
    on_layer_done: OnLayerDone
    decoded: DecodedTokens | None = None
    """Tokens at its end that another library attends; None: the kernels attend all."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        cache = self.attention.cache
        group = cache.group_of(layer)
        shape, index, pages = self.attention.shapes[group], self.indices[group], cache.layer(layer)
        if cache.keeps(layer):
            write_pages(shape, pages, key, value, index.new)
            report_written(cache, layer, self.on_layer_done)
        out = query.new_empty(query.shape[1], query.shape[0], shape.v_dim)
        for tiles in index.tiles:
            attend_tiles(shape, pages, query, out, tables=index.new.tables, tiles=tiles, terms=terms)
        if self.decoded is not None:
            begin = len(out) - self.decoded.num_tokens
            scaling = 1 / math.sqrt(shape.k_dim) if terms.scaling is None else terms.scaling
            self.decoded.attend(layer, query.transpose(0, 1)[begin:], out[begin:], scaling, terms.sliding_window)
        return out


class KernelAttention:
    """`Attention` by kernels.

    Args:
        cache: this rank's cache.
        sharing: query heads per KV head, of each layer group.
        dtype: data type of the model's computation.
        room: maximum size of the block tables.
        is_invariant: see `HeadShape.is_invariant`.

    Attributes:
        rows: the block tables.
    """

    name = "kernels"
    needs_numbers = False  # masked values are not loaded

    def __init__(
        self, cache: KVCache, sharing: Sequence[int], dtype: torch.dtype, room: TableRoom, *, is_invariant: bool = False
    ) -> None:
        self.cache = cache
        self.rows = TableRows(cache.spec, cache.device, room)
        capability = _capability_of(cache.device)
        shapes = (
            _head_shape(group, shared, dtype, capability)
            for group, shared in zip(cache.spec.groups, sharing, strict=True)
        )
        self.shapes = tuple(replace(shape, is_invariant=is_invariant) for shape in shapes)

    def ways(self) -> Sequence[KernelAttention]:
        """Return itself and its variants for graphs: all of them must pass the probe."""
        return [self]

    def step(self, parts: Sequence[StepPart], on_layer_done: OnLayerDone, numbers: StepNumbers) -> KernelStep:
        """See `Attention.step`."""
        counts = torch.tensor([len(part.token_ids) for part in parts])
        rows = self.rows.of(parts, numbers)
        row_of_each = numbers.put(torch.tensor(rows).repeat_interleave(counts))
        num_segments = sum(part.num_known_tokens > 1 for part in parts)
        decoded = self.decoded(parts[num_segments:], rows[num_segments:])
        tiled = parts if decoded is None else parts[:num_segments]
        places = numbers.put(torch.cat([torch.arange(p.num_computed_tokens, p.end) for p in parts]))
        indices = []
        for tables, shape in zip(self.rows.tables, self.shapes, strict=True):
            tiles = tuple(_tiles(tiled, rows[: len(tiled)], shape, numbers))
            indices.append(KernelIndex(WrittenTokens(tables, row_of_each, places), tiles))
        return KernelStep(self, tuple(indices), on_layer_done, decoded)

    def graph_step(self, numbers: torch.Tensor) -> KernelStep:
        """Return the step that a graph of decodes attends by in every replay.

        Args:
            numbers: `[6, size]` on the device: the block table rows and the positions of its tokens, then its tiles
                (`kernels`). They change from replay to replay.
        """
        rows, places, tiles = numbers[0], numbers[1], numbers[2:].view(-1, 4)
        decoded = self.decoded_in_graph(len(tiles))
        indices = []
        for tables, shape in zip(self.rows.tables, self.shapes, strict=True):
            tiled = (Tiles(tiles, True, num_shares_of(NO_WINDOW, shape)),) if decoded is None else ()
            indices.append(KernelIndex(WrittenTokens(tables, rows, places), tiled))
        return KernelStep(self, tuple(indices), ignore_layer, decoded)

    def decoded(self, parts: Sequence[StepPart], rows: Sequence[int]) -> DecodedTokens | None:
        """Return the attention for the decodes of a step; None: the kernels.

        Args:
            parts: parts of one known token each.
            rows: row of the block tables for each part.
        """
        return None

    def decoded_in_graph(self, size: int) -> DecodedTokens | None:
        """Return the attention for the `size` tokens of a graph; None: the kernels."""
        return None


def _capability_of(device: torch.device) -> int:
    """Return a GPU's compute capability. On other devices the kernels are interpreted, as for a recent GPU."""
    if device.type != "cuda":
        return WGMMA_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _head_shape(group: LayerGroup, num_sharing: int, dtype: torch.dtype, capability: int) -> HeadShape:
    return HeadShape(
        num_kv_heads=group.num_kv_heads,
        num_sharing=num_sharing,
        block_size=group.block_size,
        k_dim=group.k_dim,
        v_dim=group.v_dim,
        itemsize=dtype.itemsize,
        capability=capability,
    )


def _tiles(parts: Sequence[StepPart], rows: Sequence[int], shape: HeadShape, numbers: StepNumbers) -> Iterator[Tiles]:
    """Yield the tiles of a step's segments, if it has any, and those of its decodes: see `attention`.

    Args:
        rows: row of the block tables for each part.
    """
    num_segments = sum(part.num_known_tokens > 1 for part in parts)
    begin = 0
    for alike, their_rows, is_shared in (
        (parts[:num_segments], rows[:num_segments], False),
        (parts[num_segments:], rows[num_segments:], True),
    ):
        if not alike:
            continue
        of_one_token = max(len(part.token_ids) for part in alike) == 1
        tiling = shape.tiling(of_one_token=of_one_token, is_shared=is_shared)
        most = 1 if of_one_token else tiling.rows // shape.num_sharing
        tiles, end = [], begin
        for row, part in zip(their_rows, alike, strict=True):
            for done in range(0, len(part.token_ids), most):
                count = min(most, len(part.token_ids) - done)
                tiles.append((row, end + done, count, part.num_computed_tokens + done))
            end += len(part.token_ids)
        num_shares = num_shares_of(max(part.end for part in alike), shape) if is_shared else 0
        yield Tiles(numbers.put(torch.tensor(tiles)), of_one_token, num_shares)
        begin = end
