"""Attention by the kernels against torch's own, in a process of its own: Triton interprets kernels or compiles them, as
the environment says when it is imported first.

The interpreter reckons with numpy, which has no bfloat16: products of such numbers are wrong there, and numbers are not
rounded to it but cut off, and to 8-bit floats without the carry into the exponent. Pages of these are tried with
numbers that are exact in them, or beyond the range of the latter.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest
import torch

from baton.blocks import num_blocks_for
from baton.sampling import SamplingParams
from engine.core.runner import EMPTY_PLACE, FP8, KVSpec, LayerGroup, StepPart, ignore_layer
from engine.model.attention import begun_blocks
from engine.model.attention_choice import TorchAttention
from engine.model.attention_step import Attention, AttentionTerms
from engine.model.kv_cache import KVCache, movable, torch_dtype
from engine.model.rank_step import order_for_packing
from engine.model.table_rows import TableRoom
from engine.uploads import StepNumbers
from tests.fakes import flashinfer

ROOM = TableRoom(num_sequences=8, num_tokens=2200)


@contextmanager
def process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """A process in which functions are called, with variables of the environment that are there before any import."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            pool.submit(multiply_rows_alike).result()
        yield pool


def multiply_rows_alike() -> None:
    """Has the interpreter, where there is one, multiply in float64. Of a product in float32 some libraries give a row
    other last bits by its place among the others (seen of OpenBLAS on a Zen 3), which no GPU does.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiplied = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        exact = multiplied(self, a, b, TensorHandle(np.zeros_like(d.data, np.float64), tl.float64), *options)
        return TensorHandle(exact.data.astype(d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


class Case(NamedTuple):
    """A step with random numbers."""

    lengths: tuple[tuple[int, int, int], ...]
    """Known tokens, drafts and computed tokens of each part."""
    dim: int = 64
    sharing: int = 1
    kv_heads: int = 2
    window: int | None = None
    pool: str = "float32"
    dtype: str = "float32"
    block_size: int = 16
    empty: int = 0
    """Blocks of the last part that have left the window."""
    softcap: float | None = None
    has_sinks: bool = False


def part_of(key: int, case: Case, lengths: tuple[int, int, int], blocks: list[int]) -> StepPart:
    num_known, num_drafts, begin = lengths
    end = begin + num_known + num_drafts
    table = [blocks.pop() for _ in range(num_blocks_for(end, case.block_size))]
    if key == len(case.lengths) - 1:
        table[: case.empty] = [EMPTY_PLACE] * case.empty
    return StepPart(
        sequence_key=key,
        token_ids=(0,) * (end - begin),
        num_computed_tokens=begin,
        block_ids=(tuple(table),),
        num_kv_tokens=(end,),
        sample=True,
        is_decoding=num_known == 1,
        sampling=SamplingParams(temperature=0.0),
        choice_index=0,
        num_prompt_tokens=begin,
        num_drafts=num_drafts,
    )


def difference(case: Case, *, by_flashinfer: bool = False, as_in_graphs: bool = False) -> float:
    """Returns by how much what the kernels write and what comes of it differs from torch's, beside the largest where
    that is above 1. Places that nobody has written are no numbers for the kernels.

    Args:
        by_flashinfer: decodes are what the fake of FlashInfer makes of them.
        as_in_graphs: by plans as a graph has them.
    """
    from engine.model.flashinfer_attention import FlashInferAttention
    from engine.model.kernel_attention import KernelAttention

    draw, generator = random.Random(3), torch.Generator().manual_seed(3)
    num_blocks = 3 + sum(num_blocks_for(sum(each), case.block_size) for each in case.lengths)
    blocks = draw.sample(range(num_blocks), num_blocks)
    parts = [part_of(key, case, each, blocks) for key, each in enumerate(case.lengths)]
    parts = [parts[index] for index in order_for_packing(parts)]
    group = LayerGroup(
        name="all", layers=(0, 1), block_size=case.block_size, num_kv_heads=case.kv_heads, k_dim=case.dim,
        v_dim=case.dim, dtype=case.pool,
    )  # fmt: skip
    caches = [KVCache(KVSpec((group,)), num_blocks, 8) for _ in range(2)]
    caches[0].groups[0].copy_(torch.randn(caches[0].groups[0].shape, generator=generator))
    caches[1].groups[0].copy_(caches[0].groups[0])
    caches[0].clear_blocks(begun_blocks(caches[0], parts))
    _spoil(caches[1], parts, blocks)
    num_tokens, dtype = sum(len(part.token_ids) for part in parts), torch_dtype(case.dtype)
    query, key, value = (
        torch.randn(num_tokens, heads, case.dim, generator=generator).to(torch_dtype(case.pool)).to(dtype)
        for heads in (case.kv_heads * case.sharing, case.kv_heads, case.kv_heads)
    )
    if case.pool == FP8:
        value[0], value[-1] = 449, -2000
    found = []
    by_kernels = FlashInferAttention if by_flashinfer else KernelAttention
    ways: tuple[Attention, ...] = (
        TorchAttention(caches[0]),
        by_kernels(caches[1], (case.sharing,), dtype, ROOM).ways()[as_in_graphs],
    )
    num_made = len(flashinfer.ARE_OF_GRAPHS)
    for cache, way in zip(caches, ways, strict=True):
        step = way.step(parts, ignore_layer, StepNumbers(cache.device))
        new = tuple(one.transpose(0, 1) for one in (query, key, value))
        sinks = torch.linspace(-1, 3, case.kv_heads * case.sharing) if case.has_sinks else None
        terms = AttentionTerms(None, case.window, case.softcap, sinks)
        with flashinfer.installed():
            found.append(step.attend(1, new[0], new[1], new[2], terms).float())
    is_planned = by_flashinfer and not any(num_drafts for _, num_drafts, _ in case.lengths)
    assert flashinfer.ARE_OF_GRAPHS[num_made:] == [as_in_graphs] * is_planned
    written = [_written(cache, parts) for cache in caches]
    assert written[0].equal(written[1]), "not what was to be written, or not there"
    largest = max(1.0, float(found[0].abs().max()))
    return float((found[0] - found[1]).abs().max().nan_to_num(torch.inf)) / largest


def difference_by(num_programs: int, case: Case) -> float:
    """Returns the `difference` where so many programs are enough: each computes several shares of a tile."""
    from engine.model import kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ENOUGH_PROGRAMS", num_programs)
        return difference(case)


def _spoil(cache: KVCache, parts: list[StepPart], unused: list[int]) -> None:
    """Writes no numbers where nobody may look: into unused blocks, and behind the last token."""
    group = cache.spec.groups[0]
    shape = (2, cache.num_blocks, group.num_kv_heads, 2, group.block_size, group.k_dim)
    pages, none = movable(cache.groups[0]).view(shape), 0x7F if group.dtype == FP8 else torch.nan
    pages[:, unused] = none
    for part in parts:
        if offset := part.end % group.block_size:
            pages[:, part.block_ids[0][-1], :, :, offset:] = none


def _written(cache: KVCache, parts: list[StepPart]) -> torch.Tensor:
    """K and V of the layer in the places of the parts' tokens, where they are not given back; bits of 8-bit floats."""
    group = cache.spec.groups[0]
    pages = movable(cache.groups[0][1]).view(cache.num_blocks, group.num_kv_heads, 2, group.block_size, group.k_dim)
    found = []
    for part in parts:
        table = [block for block in part.block_ids[0] if block != EMPTY_PLACE]
        num_tokens = part.end - (len(part.block_ids[0]) - len(table)) * group.block_size
        found.append(pages[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_tokens])
    return torch.cat(found, dim=2)


def far_block_is_found() -> bool:
    """Whether a decode reads and writes a block that begins behind 2^31 elements of its layer."""
    from engine.model.kernel_attention import KernelAttention

    group = LayerGroup(name="all", layers=(0,), block_size=16, num_kv_heads=1, k_dim=128, v_dim=128, dtype="float16")
    near = KVCache(KVSpec((group,)), 2, 1)
    num_blocks = 2**31 // group.row_numel + 2
    far = KVCache(KVSpec((group,)), 0, 1)
    far.num_blocks = num_blocks
    far.groups[0] = torch.empty(1, num_blocks, group.row_numel, dtype=torch.float16)  # of which few pages are touched
    case = Case(((1, 0, 20),), dim=128)
    new = [torch.randn(1, 1, 128) for _ in range(3)]
    found = []
    for cache, first in ((near, 0), (far, num_blocks - 2)):
        cache.groups[0][0, first : first + 2] = torch.linspace(-2, 2, 2 * group.row_numel).view(2, -1)
        part = part_of(0, case, case.lengths[0], [first + 1, first])
        step = KernelAttention(cache, (1,), torch.float32, ROOM).step([part], ignore_layer, StepNumbers(cache.device))
        found.append(step.attend(0, new[0], new[1], new[2], AttentionTerms()))
        found.append(cache.groups[0][0, first : first + 2].clone())
    return found[0].equal(found[2]) and found[1].equal(found[3])


def rows_become_8_bit_floats(num_columns: int) -> bool:
    """Whether the kernel finds torch's scales, and its numbers, where these are neither powers of 2 nor below the least
    of them: to such the interpreter does not round.
    """
    from engine.model.fp8_kernels import quantized
    from engine.model.fp8_linear import quantized_rows

    rows = torch.randn(5, 2, num_columns, generator=torch.Generator().manual_seed(4))[:, 0]
    rows[1] *= 1e4
    rows[2] = 0
    rows[3, -1] = -9e5
    found, expected = quantized(rows), quantized_rows(rows)
    bits, known = (codes.view(torch.uint8) for codes in (found[0], expected[0]))
    is_sure = ((known & 7) > 0) & ((known & 0x78) > 0)
    return found[1].equal(expected[1]) and bits[is_sure].equal(known[is_sure]) and not bits[2].any().item()


def padding_is_nobodys() -> bool:
    """Whether two tokens that are none, the first and the last of a batch, are neither written nor seen."""
    from engine.model.kernel_attention import KernelAttention, KernelIndex, KernelStep
    from engine.model.kernels import Tiles, WrittenTokens

    group = LayerGroup(name="all", layers=(0,), block_size=16, num_kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
    cache = KVCache(KVSpec((group,)), 3, 1)
    before = cache.groups[0].normal_().clone()
    new = WrittenTokens(torch.tensor([[0], [2], [0]]), torch.arange(3), torch.tensor([-1, 0, -1]))
    tiles = Tiles(torch.tensor([[0, 0, 1, -1], [1, 1, 1, 0], [2, 2, 1, -1]]), True, 16)
    step = KernelStep(KernelAttention(cache, (2,), torch.float32, ROOM), (KernelIndex(new, (tiles,)),), ignore_layer)
    query, key, value = (torch.randn(heads, 3, 64) for heads in (4, 2, 2))
    out = step.attend(0, query, key, value, AttentionTerms())
    is_left = cache.groups[0][0, :2].equal(before[0, :2])
    return is_left and not out[[0, 2]].any().item() and torch.allclose(out[1], value[:, 1].repeat_interleave(2, 0))
