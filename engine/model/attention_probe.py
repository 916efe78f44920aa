"""Tests of an attention on the present device: small steps with random numbers, compared between two
implementations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from baton.blocks import num_blocks_for
from baton.sampling import SamplingParams
from engine.core.runner import KVSpec, LayerGroup, StepPart, ignore_layer
from engine.model.attention_step import Attention, AttentionTerms
from engine.model.kv_cache import KVCache
from engine.model.table_rows import TableRoom
from engine.uploads import StepNumbers

PROBES = (((9, 0, 0), (70, 0, 130), (1, 0, 0), (1, 0, 300)), ((1, 3, 40), (1, 5, 250)))
"""Numbers of known tokens, drafts and computed tokens of the parts of each step: a prompt, a prefix hit, and decodes of
short and long contexts; then drafts."""
CUTS = (
    ((130, 0, 0),),
    ((70, 0, 201), (5, 0, 95)),
    ((1, 0, 300), (1, 0, 127), (1, 0, 77), (1, 0, 0)),
    ((1, 3, 250), (1, 5, 128)),
)
"""Divisions of one sequence into parts that are attended together with others: chunks, decodes, and drafts."""
PROBE_ROOM = TableRoom(num_sequences=4, num_tokens=301)
WINDOW, CAP = 37, 2.0
_GREEDY = SamplingParams(temperature=0.0)


class ProbedHeads(NamedTuple):
    """Heads and terms with which a probe calls the attention of a model's layers."""

    sharing: tuple[int, ...]
    """Query heads per KV head, of each layer group."""
    honours: frozenset[str] = frozenset()
    """See `ModelShape.honours`."""

    def terms(self, num_heads: int, generator: torch.Generator) -> Iterator[AttentionTerms]:
        """Yield the terms of layers without and with a window."""
        sinks = (
            torch.randn(num_heads, generator=generator, device=generator.device) if "s_aux" in self.honours else None
        )
        for window in (None, WINDOW):
            yield AttentionTerms(None, window, CAP if "softcap" in self.honours else None, sinks)


def probe_cache(spec: KVSpec, device: torch.device) -> KVCache:
    """Create a small cache with the head shapes of each layer group of another one, with one layer per group."""
    groups = tuple(replace(group, layers=(number,)) for number, group in enumerate(spec.groups))
    num_blocks = PROBE_ROOM.num_sequences * max(
        num_blocks_for(PROBE_ROOM.num_tokens, group.block_size) for group in groups
    )
    return KVCache(KVSpec(groups), num_blocks, 1, device)


@torch.inference_mode()
def largest_difference(
    cache: KVCache, heads: ProbedHeads, dtype: torch.dtype, ways: tuple[Attention, Attention]
) -> float:
    """Return the largest difference between the results of two attentions; infinity: some results are not numbers.

    This also compiles all kernels of both, so that none is compiled while serving.

    Args:
        cache: a `probe_cache`, which both use.
        heads: see `ProbedHeads`.
        dtype: data type of the model's computation.
        ways: the two attentions.
    """
    generator = torch.Generator(cache.device).manual_seed(0)
    found = 0.0
    for shapes in PROBES:
        parts = [_part(cache, number, *shape) for number, shape in enumerate(shapes)]
        num_tokens = sum(len(part.token_ids) for part in parts)
        for layer, group in enumerate(cache.spec.groups):
            _fill(cache.groups[layer], generator)
            new = _drawn(group, heads.sharing[layer], num_tokens, dtype, generator)
            for terms in heads.terms(len(new[0]), generator):
                one, other = (_attended(cache, way, parts, layer, (new, terms)) for way in ways)
                difference = (one - other).abs().amax().item()
                found = math.inf if math.isnan(difference) else max(found, difference)
    return found


@torch.inference_mode()
def is_batch_invariant(cache: KVCache, heads: ProbedHeads, dtype: torch.dtype, way: Attention) -> bool:
    """Return whether tokens are bit-identical in one prompt, in chunks, as decodes, as drafts and in larger batches.

    Args:
        cache: a `probe_cache`, which the attention uses.
        heads: see `ProbedHeads`.
        dtype: data type of the model's computation.
        way: the attention.
    """
    generator = torch.Generator(cache.device).manual_seed(0)
    for layer, group in enumerate(cache.spec.groups):
        _fill(cache.groups[layer], generator)
        new = _drawn(group, heads.sharing[layer], PROBE_ROOM.num_tokens, dtype, generator)
        for terms in heads.terms(len(new[0]), generator):
            whole = _attended(cache, way, [_part(cache, 0, PROBE_ROOM.num_tokens, 0, 0)], layer, (new, terms))
            for shapes in CUTS:
                parts = [_part(cache, 0, *shape)._replace(sequence_key=key) for key, shape in enumerate(shapes)]
                tokens = torch.cat([torch.arange(part.num_computed_tokens, part.end) for part in parts])
                cut = [one[:, tokens.to(cache.device)] for one in new]
                if not _attended(cache, way, parts, layer, (cut, terms)).equal(whole[tokens.to(cache.device)]):
                    return False
    return True


def _fill(pages: torch.Tensor, generator: torch.Generator) -> None:
    """Fill pages with random numbers; torch cannot draw 8-bit floats."""
    pages.copy_(torch.randn(pages.shape, generator=generator, device=pages.device))


def _drawn(
    group: LayerGroup, num_sharing: int, num_tokens: int, dtype: torch.dtype, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return random queries, keys and values of some tokens, `[heads, T, dim]` each."""
    heads = (num_sharing * group.num_kv_heads, group.num_kv_heads, group.num_kv_heads)
    return [
        torch.randn(num_tokens, *size, generator=generator, dtype=dtype, device=generator.device).transpose(0, 1)
        for size in zip(heads, (group.k_dim, group.k_dim, group.v_dim), strict=True)
    ]


def _attended(
    cache: KVCache,
    way: Attention,
    parts: Sequence[StepPart],
    layer: int,
    asked: tuple[list[torch.Tensor], AttentionTerms],
) -> torch.Tensor:
    numbers = StepNumbers(cache.device)
    step = way.step(parts, ignore_layer, numbers)
    numbers.send()
    (query, key, value), terms = asked
    return step.attend(layer, query, key, value, terms).float()


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
