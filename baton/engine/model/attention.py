"""Paged attention for transformers' own model code.

`paged_attention` is registered under a name with transformers' AttentionInterface; a model loaded with that name calls
it in every layer with the packed batch's queries, keys and values. It writes K and V into the pages of the KV cache,
reports that they are there, and attends over the pages of each sequence. What it needs to know of the step travels in a
context variable, because some models drop unknown keyword arguments on the way (TGI drives transformers the same way).

The packed batch of a step, T tokens in one row:

    tokens   [ segment 0 | segment 1 | ... | decode 0 | decode 1 | ... ]      segment: several tokens of one sequence
    queries  [1, heads, T, dim]      keys, values  [1, kv_heads, T, dim]      decode:  one token of one sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name the field uses
from transformers import AttentionInterface

from baton.blocks import num_blocks_for
from baton.engine.core.kv_spec import EMPTY_PLACE, LayerGroup
from baton.engine.core.runner import OnLayerDone, StepPart
from baton.engine.model.kv_cache import KVCache

ATTENTION_NAME = "baton_paged"


@dataclass(frozen=True, slots=True)
class Segment:
    """Several tokens of one sequence: `num_tokens` queries from packed row `row` over `num_context` keys."""

    row: int
    num_tokens: int
    num_context: int
    pages: torch.Tensor
    """`[kv_heads * blocks]`: rows of the layer's page tensor, head by head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """A step's index tensors for one layer group: all its layers share them."""

    write_pages: torch.Tensor
    """`[T * kv_heads]`: page of each new token."""
    write_offsets: torch.Tensor
    """`[T * kv_heads]`: its place in the page."""
    segments: tuple[Segment, ...]
    decode_pages: torch.Tensor | None
    """`[decodes * kv_heads * blocks]`, padded with the sequence's own first block; None when there are no decodes."""
    decode_positions: torch.Tensor | None
    """`[decodes, 1, 1, 1]`: position of each decode's token, the last one it may see."""
    decode_mask: torch.Tensor | None
    """`[decodes, 1, 1, blocks * block_size]`: the places it may see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What the layers need to know of a step, made once."""

    cache: KVCache
    groups: tuple[GroupContext, ...]
    first_decode_row: int
    num_decodes: int
    on_layer_done: OnLayerDone

    def report_written(self, layer: int) -> None:
        """Reports that K and V of `layer` are in the pages, on a GPU as soon as the stream has come this far."""
        on_gpu = self.cache.device.type == "cuda"
        self.on_layer_done(layer, torch.cuda.current_stream(self.cache.device).record_event() if on_gpu else None)


_STEP: ContextVar[StepContext] = ContextVar("step")


def set_step(step: StepContext) -> None:
    """Makes `step` the one that this thread's next forward pass runs."""
    _STEP.set(step)


def step_context(cache: KVCache, parts: Sequence[StepPart], on_layer_done: OnLayerDone) -> StepContext:
    """Makes the index tensors of a step. `parts` are in packed order."""
    num_segments = sum(len(part.token_ids) > 1 for part in parts)
    return StepContext(
        cache=cache,
        groups=tuple(_group_context(cache, group, parts, num_segments) for group in range(len(cache.spec.groups))),
        first_decode_row=sum(len(part.token_ids) for part in parts[:num_segments]),
        num_decodes=len(parts) - num_segments,
        on_layer_done=on_layer_done,
    )


def _group_context(cache: KVCache, group: int, parts: Sequence[StepPart], num_segments: int) -> GroupContext:
    """Makes the index tensors of one layer group."""
    layers = cache.spec.groups[group]
    heads = torch.arange(layers.num_kv_heads)
    tables = [_table(part, group, layers) for part in parts]
    positions = torch.cat([torch.arange(p.num_computed_tokens, p.end) for p in parts])
    blocks = torch.cat(
        [
            torch.tensor(table)[torch.arange(p.num_computed_tokens, p.end) // layers.block_size]
            for p, table in zip(parts, tables, strict=True)
        ]
    )
    segments: list[Segment] = []
    row = 0
    for part, table in zip(parts[:num_segments], tables, strict=False):
        pages = (heads[:, None] + torch.tensor(table)[None] * layers.num_kv_heads).flatten()
        segments.append(Segment(row, len(part.token_ids), part.num_kv_tokens[group], pages.to(cache.device)))
        row += len(part.token_ids)
    decode_pages = decode_positions = decode_mask = None
    if decodes := tables[num_segments:]:
        width = max(len(table) for table in decodes)
        padded = torch.tensor([(*table, *table[:1] * (width - len(table))) for table in decodes])
        decode_pages = (padded[:, None, :] * layers.num_kv_heads + heads[None, :, None]).flatten().to(cache.device)
        at = torch.tensor([part.num_computed_tokens for part in parts[num_segments:]])
        decode_positions = at.view(-1, 1, 1, 1).to(cache.device)
        decode_mask = torch.arange(width * layers.block_size, device=cache.device) <= decode_positions
    return GroupContext(
        write_pages=(blocks[:, None] * layers.num_kv_heads + heads[None]).flatten().to(cache.device),
        write_offsets=(positions % layers.block_size).repeat_interleave(layers.num_kv_heads).to(cache.device),
        segments=tuple(segments),
        decode_pages=decode_pages,
        decode_positions=decode_positions,
        decode_mask=decode_mask,
    )


def _table(part: StepPart, group: int, layers: LayerGroup) -> tuple[int, ...]:
    """Returns the blocks of a part's tokens. In an empty place stands the last block instead: it is masked anyway."""
    table = part.block_ids[group][: num_blocks_for(part.num_kv_tokens[group], layers.block_size)]
    return tuple(table[-1] if block == EMPTY_PLACE else block for block in table) if EMPTY_PLACE in table else table


def begun_blocks(cache: KVCache, parts: Sequence[StepPart]) -> tuple[list[int], ...]:
    """Returns, for each layer group, the blocks whose first token this step writes and whose last it does not.

    They must be zeroed first: attention masks the places behind the last token, but a masked NaN or infinity that
    another request left there would still spoil the sum.
    """
    begun = tuple[list[int], ...]([] for _ in cache.spec.groups)
    for group, layers in enumerate(cache.spec.groups):
        for part in parts:
            place, offset = divmod(part.end, layers.block_size)
            if offset and place * layers.block_size >= part.num_computed_tokens:
                begun[group].append(part.block_ids[group][place])
    return begun


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of one layer; the signature is transformers'.

    Returns:
        `[1, T, heads, v_dim]`, and no attention weights.
    """
    step = _STEP.get()
    layer: int = module.layer_idx  # type: ignore[assignment]
    index = step.cache.group_of(layer)
    group, context = step.cache.spec.groups[index], step.groups[index]
    pages = step.cache.layer(layer)
    key_pages = pages[:, : group.block_size * group.k_dim]
    value_pages = pages[:, group.block_size * group.k_dim :]
    write = (context.write_pages, context.write_offsets)
    key_pages.view(-1, group.block_size, group.k_dim).index_put_(write, key[0].transpose(0, 1).flatten(0, 1))
    value_pages.view(-1, group.block_size, group.v_dim).index_put_(write, value[0].transpose(0, 1).flatten(0, 1))
    step.report_written(layer)

    num_heads, num_tokens = query.shape[1], query.shape[2]
    num_groups = num_heads // group.num_kv_heads
    out = query.new_empty(num_tokens, num_heads, group.v_dim)
    for segment in context.segments:
        rows = slice(segment.row, segment.row + segment.num_tokens)
        if segment.num_tokens == segment.num_context:  # nothing cached before it: K and V are at hand
            keys, values = key[:, :, rows], value[:, :, rows]
        else:
            shape = (1, group.num_kv_heads, -1)
            keys = key_pages.index_select(0, segment.pages).view(*shape, group.k_dim)[:, :, : segment.num_context]
            values = value_pages.index_select(0, segment.pages).view(*shape, group.v_dim)[:, :, : segment.num_context]
        out[rows] = _attend_segment(
            query[0, :, rows], keys[0], values[0], segment, scaling=scaling, sliding_window=sliding_window
        )
    if context.decode_pages is not None and context.decode_positions is not None and context.decode_mask is not None:
        shape = (step.num_decodes, group.num_kv_heads, -1)
        keys = key_pages.index_select(0, context.decode_pages).view(*shape, group.k_dim)
        values = value_pages.index_select(0, context.decode_pages).view(*shape, group.v_dim)
        mask = context.decode_mask
        if sliding_window is not None:
            at = torch.arange(keys.shape[2], device=keys.device)
            mask = mask & (at > context.decode_positions - sliding_window)
        # Query heads that share a KV head are packed into rows: K and V are never repeated.
        packed = query[0, :, step.first_decode_row :].transpose(0, 1).reshape(*shape[:2], num_groups, group.k_dim)
        decoded = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
        out[step.first_decode_row :] = decoded.reshape(step.num_decodes, num_heads, group.v_dim)
    return out.unsqueeze(0), None


def _attend_segment(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Returns the causal attention of one segment's queries, its last tokens: `[num_tokens, heads, v_dim]`.

    Each KV head is an entry of the batch, and is shown to all of its query heads without a copy. Were torch asked to
    share the heads out itself, none of its kernels for a GPU but cuDNN's would take a mask as well, and the scores of
    all tokens would be written out.
    """
    grouped = query.view(len(keys), -1, *query.shape[1:])
    keys, values = (side.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for side in (keys, values))
    mask = None
    is_causal = segment.num_tokens == segment.num_context and sliding_window is None
    if not is_causal:
        at = torch.arange(segment.num_context, device=query.device)
        query_at = at[segment.num_context - segment.num_tokens :, None]
        mask = at[None] <= query_at
        if sliding_window is not None:
            mask &= at[None] > query_at - sliding_window
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=is_causal, scale=scaling)
    return attended.flatten(0, 1).transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
