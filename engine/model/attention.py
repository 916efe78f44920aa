"""Paged attention for transformers' own model code.

`paged_attention` is registered under a name with transformers' AttentionInterface; a model loaded with that name calls
it in every layer with the packed batch's queries, keys and values. The current step writes K and V into the pages of
the KV cache, reports that they are there, and attends over the pages of each sequence. It is passed in a context
variable, because some models drop unknown keyword arguments on the way (TGI drives transformers the same way).

`StepContext` does this with torch's own operations, on any device, and is the reference for `kernel_attention`.

The packed batch of a step, T tokens in one row:

    tokens   [ segment 0 | segment 1 | ... | decode 0 | decode 1 | ... ]      segment: several tokens of one sequence
    queries  [1, heads, T, dim]      keys, values  [1, kv_heads, T, dim]      decode:  one token, followed by its drafts

Segments are attended one by one, each over its own keys. Decodes are attended in batches. On a GPU all decodes form one
batch, padded to the one with the most drafts, since launching a kernel takes longer than the wasted computation; on
other devices a batch contains decodes of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name the field uses
from transformers import AttentionInterface

from baton.blocks import num_blocks_for
from engine.core.runner import EMPTY_PLACE, LayerGroup, OnLayerDone, StepPart, ignore_layer
from engine.model.attention_step import AttentionStep, AttentionTerms
from engine.model.kv_cache import KVCache, movable, rounded
from engine.model.latent import LATENT, LatentHeads
from engine.uploads import StepNumbers

ATTENTION_NAME = "baton_paged"
WITHOUT_EFFECT = frozenset({
    "cache_position", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "use_cache",
})  # fmt: skip
"""Arguments that models pass on to attention and that do not change its result."""
PADDING_DEVICES = frozenset({"cuda"})
"""Device types on which all decodes of a step are attended as one padded batch."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Several tokens of one sequence: `num_tokens` queries from packed row `row` over `num_context` keys."""

    row: int
    num_tokens: int
    num_context: int
    pages: torch.Tensor
    """`[kv_heads * blocks]`: rows of the layer's page tensor, head by head."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Index tensors that pad the tokens of consecutive decodes to equal length and remove the padding again."""

    padded: torch.Tensor
    """`[decodes * longest]`: for each place its token; padding repeats the last token of the decode."""
    tokens: torch.Tensor
    """`[tokens]`: the place of each token."""

    @classmethod
    def of(cls, counts: torch.Tensor, numbers: StepNumbers) -> Padding | None:
        """Return the padding for decodes with these numbers of tokens, `[decodes]`; None: they have equal length."""
        longest, counts = int(counts.max()), counts[:, None]
        if longest == int(counts.min()):
            return None
        places = torch.arange(longest)
        padded = counts.cumsum(0) - counts + torch.minimum(places, counts - 1)
        return cls(numbers.put(padded.flatten()), numbers.put((places < counts).flatten().nonzero()[:, 0]))


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decodes that are attended together."""

    parts: Sequence[StepPart]
    tokens: slice
    """Range of their packed tokens."""
    padding: Padding | None
    positions: torch.Tensor
    """`[decodes, 1, tokens, 1]`: position of each token, the last one it may see, for as many tokens as the longest."""

    def rows(self, query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Return their queries from those of the step: `[heads, T, dim]` to `[decodes, kv_heads, rows, dim]`.

        Query heads that share a KV head are packed into rows, token by token: K and V are never repeated.
        """
        num_heads, _, dim = query.shape
        tokens = query[:, self.tokens].transpose(0, 1)
        if self.padding is not None:
            tokens = tokens.index_select(0, self.padding.padded)
        by_head = tokens.reshape(len(self.parts), -1, num_kv_heads, num_heads // num_kv_heads, dim)
        return by_head.transpose(1, 2).flatten(2, 3)

    def unpacked(self, rows: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return the results of the rows, `[decodes, kv_heads, rows, v_dim]`, as `[tokens, heads, v_dim]`."""
        _, num_kv_heads, _, dim = rows.shape
        by_token = rows.reshape(len(self.parts), num_kv_heads, -1, num_heads // num_kv_heads, dim).transpose(1, 2)
        tokens = by_token.reshape(-1, num_heads, dim)
        return tokens if self.padding is None else tokens.index_select(0, self.padding.tokens)


@dataclass(slots=True)
class DecodeIndex:
    """Index tensors of decodes for one layer group."""

    pages: torch.Tensor
    """`[decodes * kv_heads * blocks]`, padded with the sequence's own first block."""
    num_places: int
    """Number of token places in all blocks of a decode, including padding."""
    positions: torch.Tensor
    """See `Decodes.positions`."""
    _seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def seen(self, num_sharing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the position of each row's token, `[decodes, 1, rows, 1]`, and the mask of the places that the row may
        see, `[decodes, 1, rows, places]`. Decodes of one token have one row here, because all their rows are equal.

        Created when the first layer of the group needs them: the positions have been sent by then.

        Args:
            num_sharing: query heads per KV head.
        """
        if self._seen is None:
            is_one = self.positions.shape[2] == 1
            positions = self.positions if is_one else self.positions.repeat_interleave(num_sharing, dim=2)
            self._seen = positions, torch.arange(self.num_places, device=positions.device) <= positions
        return self._seen


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """Index tensors of a step for one layer group, shared by all its layers."""

    write_pages: torch.Tensor
    """`[T * kv_heads]`: page of each new token."""
    write_offsets: torch.Tensor
    """`[T * kv_heads]`: its place in the page."""
    segments: tuple[Segment, ...]
    decodes: tuple[DecodeIndex, ...]
    """One for each of `StepContext.decodes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """Data that the layers need of a step, created once."""

    cache: KVCache
    groups: tuple[GroupContext, ...]
    decodes: tuple[Decodes, ...]
    on_layer_done: OnLayerDone

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        index = self.cache.group_of(layer)
        group, context = self.cache.spec.groups[index], self.groups[index]
        pages = self.cache.layer(layer)
        key_pages = pages[:, : group.block_size * group.k_dim]
        value_pages = pages[:, group.block_size * group.k_dim :]
        # Rounded before it is attended: a token sees the same values in whatever chunks the step computes.
        key, value = rounded(key, pages.dtype), rounded(value, pages.dtype)
        if self.cache.keeps(layer):
            _write(context, key_pages.view(-1, group.block_size, group.k_dim), key)
            _write(context, value_pages.view(-1, group.block_size, group.v_dim), value)
            report_written(self.cache, layer, self.on_layer_done)

        num_heads, num_tokens = query.shape[0], query.shape[1]
        num_sharing = num_heads // group.num_kv_heads
        out = query.new_empty(num_tokens, num_heads, group.k_dim if terms.is_latent else group.v_dim)
        for segment in context.segments:
            rows = slice(segment.row, segment.row + segment.num_tokens)
            if segment.num_tokens == segment.num_context:  # nothing is cached before it: K and V are complete
                keys, values = key[:, rows], value[:, rows]
            else:
                of_head = (group.num_kv_heads, -1)
                keys = _gathered(key_pages, segment.pages).view(*of_head, group.k_dim)[:, : segment.num_context]
                values = _gathered(value_pages, segment.pages).view(*of_head, group.v_dim)
                values = values[:, : segment.num_context]
            keys, values = terms.given(keys.to(query.dtype), values.to(query.dtype))
            out[rows] = _attend_segment(query[:, rows], keys, values, segment, terms)
        for decodes, at in zip(self.decodes, context.decodes, strict=True):
            shape = (len(decodes.parts), group.num_kv_heads, -1)
            keys = _gathered(key_pages, at.pages).view(*shape, group.k_dim).to(query.dtype)
            values = _gathered(value_pages, at.pages).view(*shape, group.v_dim).to(query.dtype)
            keys, values = terms.given(keys, values)
            positions, mask = at.seen(num_sharing)
            if terms.sliding_window is not None:
                mask = mask & (torch.arange(keys.shape[2], device=keys.device) > positions - terms.sliding_window)
            queries = decodes.rows(query, group.num_kv_heads)
            of_rows = terms
            if terms.sinks is not None:  # in the order of the rows: token by token, and the heads that share within
                sinks = terms.sinks.view(group.num_kv_heads, 1, -1).expand(-1, queries.shape[2] // num_sharing, -1)
                of_rows = terms._replace(sinks=sinks.reshape(group.num_kv_heads, -1, 1))
            attended = _attended(queries, keys, values, mask, of_rows)
            out[decodes.tokens] = decodes.unpacked(attended, num_heads)
        return out


def report_written(cache: KVCache, layer: int, on_layer_done: OnLayerDone) -> None:
    """Report that K and V of `layer` are in the pages, on a GPU with an event in the current stream."""
    if on_layer_done is ignore_layer:  # an event per layer costs as much as a small kernel
        return
    on_gpu = cache.device.type == "cuda"
    on_layer_done(layer, torch.cuda.current_stream(cache.device).record_event() if on_gpu else None)


_STEP: ContextVar[AttentionStep] = ContextVar("step")


def set_step(step: AttentionStep) -> None:
    """Set the step for this thread's next forward pass."""
    _STEP.set(step)


def step_context(
    cache: KVCache, parts: Sequence[StepPart], on_layer_done: OnLayerDone, numbers: StepNumbers
) -> StepContext:
    """See `Attention.step`."""
    decodes = tuple(_decodes(parts, numbers))
    groups = range(len(cache.spec.groups))
    return StepContext(
        cache=cache,
        groups=tuple(_group_context(cache.spec.groups[group], group, parts, decodes, numbers) for group in groups),
        decodes=decodes,
        on_layer_done=on_layer_done,
    )


def _decodes(parts: Sequence[StepPart], numbers: StepNumbers) -> Iterator[Decodes]:
    """Yield the decodes of a step, grouped into batches that are attended together."""
    begin = 0
    for length, alike in groupby(parts, lambda part: _decode_length(part, numbers.device)):
        batch = list(alike)
        counts = torch.tensor([len(part.token_ids) for part in batch])
        end = begin + int(counts.sum())
        if length:
            positions = numbers.put(_positions(batch))
            yield Decodes(batch, slice(begin, end), Padding.of(counts, numbers), positions)
        begin = end


def _decode_length(part: StepPart, device: torch.device) -> int:
    """Return a number that is equal for decodes that may share a batch; 0: the part is a segment."""
    if part.num_known_tokens > 1:
        return 0
    return 1 if device.type in PADDING_DEVICES else len(part.token_ids)


def _group_context(
    layers: LayerGroup, group: int, parts: Sequence[StepPart], decodes: Sequence[Decodes], numbers: StepNumbers
) -> GroupContext:
    """Create the index tensors of one layer group."""
    heads = torch.arange(layers.num_kv_heads)
    tables = [blocks_of(part, group, layers) for part in parts]
    positions = torch.cat([torch.arange(p.num_computed_tokens, p.end) for p in parts])
    blocks = torch.cat(
        [
            torch.tensor(table)[torch.arange(p.num_computed_tokens, p.end) // layers.block_size]
            for p, table in zip(parts, tables, strict=True)
        ]
    )
    num_segments = len(parts) - sum(len(each.parts) for each in decodes)
    segments: list[Segment] = []
    row = 0
    for part, table in zip(parts[:num_segments], tables, strict=False):
        pages = (heads[:, None] + torch.tensor(table)[None] * layers.num_kv_heads).flatten()
        segments.append(Segment(row, len(part.token_ids), part.num_kv_tokens[group], numbers.put(pages)))
        row += len(part.token_ids)
    rest = iter(tables[num_segments:])
    return GroupContext(
        write_pages=numbers.put((blocks[:, None] * layers.num_kv_heads + heads[None]).flatten()),
        write_offsets=numbers.put((positions % layers.block_size).repeat_interleave(layers.num_kv_heads)),
        segments=tuple(segments),
        decodes=tuple(_decode_index(layers, list(islice(rest, len(each.parts))), each, numbers) for each in decodes),
    )


def _decode_index(
    layers: LayerGroup, tables: Sequence[tuple[int, ...]], decodes: Decodes, numbers: StepNumbers
) -> DecodeIndex:
    heads = torch.arange(layers.num_kv_heads)
    width = max(len(table) for table in tables)
    padded = torch.tensor([(*table, *table[:1] * (width - len(table))) for table in tables])
    pages = (padded[:, None, :] * layers.num_kv_heads + heads[None, :, None]).flatten()
    return DecodeIndex(numbers.put(pages), width * layers.block_size, decodes.positions)


def _positions(parts: Sequence[StepPart]) -> torch.Tensor:
    """Return `Decodes.positions`, on the CPU."""
    begins = torch.tensor([part.num_computed_tokens for part in parts])[:, None]
    ends = torch.tensor([part.end for part in parts])[:, None]
    longest = int((ends - begins).max())
    return torch.minimum(begins + torch.arange(longest), ends - 1)[:, None, :, None]


def blocks_of(part: StepPart, group: int, layers: LayerGroup) -> tuple[int, ...]:
    """Return the blocks of a part's tokens. Empty places contain the last block instead: they are masked anyway."""
    table = part.block_ids[group][: num_blocks_for(part.num_kv_tokens[group], layers.block_size)]
    return tuple(table[-1] if block == EMPTY_PLACE else block for block in table) if EMPTY_PLACE in table else table


def begun_blocks(cache: KVCache, parts: Sequence[StepPart]) -> tuple[list[int], ...]:
    """Return, for each layer group, the blocks whose first token this step writes and whose last it does not.

    They are zeroed first if an attention `needs_numbers`.
    """
    begun = tuple[list[int], ...]([] for _ in cache.spec.groups)
    for group, layers in enumerate(cache.spec.groups):
        for part in parts:
            place, offset = divmod(part.end, layers.block_size)
            if offset and place * layers.block_size >= part.num_computed_tokens:
                begun[group].append(part.block_ids[group][place])
    return begun


def entered_blocks(cache: KVCache, parts: Sequence[StepPart]) -> Iterator[tuple[int, int, int]]:
    """Yield layer group, block and first free place for each part that starts within a block."""
    for group, layers in enumerate(cache.spec.groups):
        for part in parts:
            place, offset = divmod(part.num_computed_tokens, layers.block_size)
            if offset:
                yield group, part.block_ids[group][place], offset


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer; the signature is transformers'.

    Queries, keys and values are the packed tokens of the step: `[1, heads, T, dim]`, or `[B, heads, 1, dim]` if its
    sequences are the rows of a batch.

    Returns:
        `[1, T, heads, v_dim]` or `[B, 1, heads, v_dim]`, and no attention weights.

    Raises:
        TypeError: it is asked for something that is not computed; a model was asked for that before (`asking`).
    """
    if unknown := unknown_terms(kwargs):
        raise TypeError(f"attention is asked for {', '.join(unknown)}, which is not computed here")
    layer: int = module.layer_idx  # type: ignore[assignment]
    latent: LatentHeads | None = module.__dict__.get(LATENT)
    terms = AttentionTerms(scaling, sliding_window, softcap, s_aux, latent is not None)
    rows = query.shape[0]
    query, key, value = (each.transpose(0, 1).flatten(1, 2) for each in (query, key, value))
    if latent is None:
        out = _STEP.get().attend(layer, query, key, value, terms)
    else:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = _STEP.get().attend(layer, latent.absorbed(query), key, value, terms._replace(scaling=scaling))
        out = latent.restored(out)
    return out.view(rows, -1, *out.shape[1:]), None


def unknown_terms(asked: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments of attention that would change its result and are not computed."""
    return sorted(name for name, value in asked.items() if value is not None and name not in WITHOUT_EFFECT)


def _write(context: GroupContext, pages: torch.Tensor, new: torch.Tensor) -> None:
    """Write the step's K or V, `[kv_heads, T, dim]`, into pages, `[pages, block_size, dim]`."""
    where = context.write_pages, context.write_offsets
    movable(pages).index_put_(where, movable(new.transpose(0, 1).flatten(0, 1)))


def _gathered(pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return some rows of pages, in their data type."""
    return movable(pages).index_select(0, rows).view(pages.dtype)


def _attend_segment(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, terms: AttentionTerms
) -> torch.Tensor:
    """Return the causal attention of one segment's queries, its last tokens: `[num_tokens, heads, v_dim]`.

    Each KV head is an entry of the batch, and is expanded to all of its query heads without a copy. With torch's own
    head sharing only cuDNN's GPU kernel would accept a mask, and without that kernel the scores of all tokens would be
    written to memory.
    """
    grouped = query.view(len(keys), -1, *query.shape[1:])
    keys, values = (side.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for side in (keys, values))
    mask = None
    window, is_whole = terms.sliding_window, segment.num_tokens == segment.num_context
    if not (is_whole and window is None and terms.is_plain):
        at = torch.arange(segment.num_context, device=query.device)
        query_at = at[segment.num_context - segment.num_tokens :, None]
        mask = at[None] <= query_at
        if window is not None:
            mask &= at[None] > query_at - window
    if terms.sinks is not None:
        terms = terms._replace(sinks=terms.sinks.view(*grouped.shape[:2], 1, 1))
    return _attended(grouped, keys, values, mask, terms).flatten(0, 1).transpose(0, 1)


def _attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Return the attention of queries, `[..., rows, k_dim]`, over keys, `[..., places, k_dim]`: `[..., rows, v_dim]`.

    Args:
        mask: places that each row may see; None: those up to its own, of as many rows as there are places.
        terms: how scores are computed; its sinks broadcast to `[..., rows, 1]`.
    """
    if terms.is_plain:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=terms.scaling
        )
    assert mask is not None
    scaling = queries.shape[-1] ** -0.5 if terms.scaling is None else terms.scaling
    scores = (queries @ keys.transpose(-2, -1)).float() * scaling
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if terms.sinks is not None:
        scores = torch.cat([scores, terms.sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    shares = scores.softmax(-1)[..., : keys.shape[-2]]
    return shares.to(values.dtype) @ values


AttentionInterface.register(ATTENTION_NAME, paged_attention)
