"""Small steps with random numbers by two ways to compute attention: they prove one on the device that is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from baton.blocks import num_blocks_for
from baton.sampling import SamplingParams
from engine.core.kv_spec import KVSpec, LayerGroup
from engine.core.runner import StepPart, ignore_layer
from engine.model.attention_step import Attention
from engine.model.kv_cache import KVCache
from engine.model.table_rows import TableRoom
from engine.uploads import StepNumbers

PROBES = (((9, 0, 0), (70, 0, 130), (1, 0, 0), (1, 0, 300)), ((1, 3, 40), (1, 5, 250)))
"""Known tokens, drafts and computed tokens of the parts of each step: a prompt, a prefix hit, decodes of short and long
contexts; drafts."""
CUTS = (
    ((130, 0, 0),),
    ((70, 0, 201), (5, 0, 95)),
    ((1, 0, 300), (1, 0, 127), (1, 0, 77), (1, 0, 0)),
    ((1, 3, 250), (1, 5, 128)),
)
"""Cuts of one sequence into parts that are attended beside others of it: chunks, decodes, and drafts."""
PROBE_ROOM, WINDOW = TableRoom(num_sequences=4, num_tokens=301), 37
_GREEDY = SamplingParams(temperature=0.0)


def probe_cache(spec: KVSpec, device: torch.device) -> KVCache:
    """Makes a small cache with the heads of each layer group of another one, a layer each."""
    groups = tuple(replace(group, layers=(number,)) for number, group in enumerate(spec.groups))
    num_blocks = PROBE_ROOM.num_sequences * max(
        num_blocks_for(PROBE_ROOM.num_tokens, group.block_size) for group in groups
    )
    return KVCache(KVSpec(groups), num_blocks, 1, device)


@torch.inference_mode()
def largest_difference(
    cache: KVCache, num_sharing: int, dtype: torch.dtype, ways: tuple[Attention, Attention]
) -> float:
    """Returns by how much the results of two ways differ at most; infinity: some are no numbers.

    All kernels of both are compiled by that: none is in the middle of serving.

    Args:
        cache: a `probe_cache`, which both ways use.
        num_sharing: query heads for each KV head.
        dtype: the type in which a model computes.
        ways: one, and the other.
    """
    generator = torch.Generator(cache.device).manual_seed(0)
    found = 0.0
    for shapes in PROBES:
        parts = [_part(cache, number, *shape) for number, shape in enumerate(shapes)]
        num_tokens = sum(len(part.token_ids) for part in parts)
        for layer, group in enumerate(cache.spec.groups):
            _fill(cache.groups[layer], generator)
            new = _drawn(group, num_sharing, num_tokens, dtype, generator)
            for window in (None, WINDOW):
                one, other = (_attended(cache, way, parts, layer, (new, window)) for way in ways)
                difference = (one - other).abs().amax().item()
                found = math.inf if math.isnan(difference) else max(found, difference)
    return found


@torch.inference_mode()
def is_batch_invariant(cache: KVCache, num_sharing: int, dtype: torch.dtype, way: Attention) -> bool:
    """Returns whether tokens come out the same to the bit in one prompt, in chunks, as decodes, as drafts and beside
    others.

    Args:
        cache: a `probe_cache`, which the way uses.
        num_sharing: query heads for each KV head.
        dtype: the type in which a model computes.
        way: the attention.
    """
    generator = torch.Generator(cache.device).manual_seed(0)
    for layer, group in enumerate(cache.spec.groups):
        _fill(cache.groups[layer], generator)
        new = _drawn(group, num_sharing, PROBE_ROOM.num_tokens, dtype, generator)
        for window in (None, WINDOW):
            whole = _attended(cache, way, [_part(cache, 0, PROBE_ROOM.num_tokens, 0, 0)], layer, (new, window))
            for shapes in CUTS:
                parts = [_part(cache, 0, *shape)._replace(sequence_key=key) for key, shape in enumerate(shapes)]
                tokens = torch.cat([torch.arange(part.num_computed_tokens, part.end) for part in parts])
                cut = [one[:, tokens.to(cache.device)] for one in new]
                if not _attended(cache, way, parts, layer, (cut, window)).equal(whole[tokens.to(cache.device)]):
                    return False
    return True


def _fill(pages: torch.Tensor, generator: torch.Generator) -> None:
    """Fills pages with random numbers; torch draws none of 8 bits."""
    pages.copy_(torch.randn(pages.shape, generator=generator, device=pages.device))


def _drawn(
    group: LayerGroup, num_sharing: int, num_tokens: int, dtype: torch.dtype, generator: torch.Generator
) -> list[torch.Tensor]:
    """Returns random queries, keys and values of some tokens, `[heads, T, dim]` each."""
    heads = (num_sharing * group.num_kv_heads, group.num_kv_heads, group.num_kv_heads)
    return [
        torch.randn(num_tokens, *size, generator=generator, dtype=dtype, device=generator.device).transpose(0, 1)
        for size in zip(heads, (group.k_dim, group.k_dim, group.v_dim), strict=True)
    ]


def _attended(
    cache: KVCache, way: Attention, parts: Sequence[StepPart], layer: int, asked: tuple[list[torch.Tensor], int | None]
) -> torch.Tensor:
    numbers = StepNumbers(cache.device)
    step = way.step(parts, ignore_layer, numbers)
    numbers.send()
    (query, key, value), window = asked
    return step.attend(layer, query, key, value, scaling=None, sliding_window=window).float()


def _part(cache: KVCache, number: int, num_known: int, num_drafts: int, num_computed: int) -> StepPart:
    end = num_computed + num_known + num_drafts
    tables = []
    for group in cache.spec.groups:
        each = cache.num_blocks // PROBE_ROOM.num_sequences
        tables.append(tuple(range(number * each, number * each + num_blocks_for(end, group.block_size))))
    return StepPart(
        sequence_key=number,
        token_ids=(0,) * (num_known + num_drafts),
        num_computed_tokens=num_computed,
        block_ids=tuple(tables),
        num_kv_tokens=(end,) * len(tables),
        sample=True,
        is_decoding=num_known == 1,
        sampling=_GREEDY,
        choice_index=0,
        num_prompt_tokens=num_computed,
        num_drafts=num_drafts,
    )
