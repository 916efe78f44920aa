"""Triton kernels that copy the runs of a chunk and compute its checksum in the same pass.

Importing this imports Triton, so only `kernel_choice` does.

A chunk's payload is cut into segments. A segment has the largest power of two of 8-byte words that divides a run, but
at most a tile. So each segment is read and written in one piece, and runs of any length share a few compiled kernels:

    payload   | layer 0: run 0 | run 1 | ... | layer 1: run 0 | ...
    segment     0   1   2   3    4 ...

A program processes tiles of segments at a fixed stride, and writes one sum. The host adds the sums up, since a sum of
words is the same in any order. Sums are written straight into main memory that the GPU reaches, so they need no copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

TILE = 1024
"""Words that a program copies at a time."""
NUM_SUMS = 1024
"""Maximum number of programs, each with a separate sum."""
WORD_BYTES = 8
_WEIGHT = tl.constexpr(0x1E3779B97F4A7C15)
_LOW_33_BITS = tl.constexpr((1 << 33) - 1)
_VARIED = ("first", "layer_lo", "layer_segments", "num_runs", "run_segments", "num_segments")
"""Numbers that differ between chunks; kernels are not recompiled for each value."""
_PLACES = ("index", "sums")


class ChunkRuns(NamedTuple):
    """Runs of a layer group in a chunk, for both kernels."""

    pages: torch.Tensor
    """The group, `[layers, blocks, row_numel]`, contiguous."""
    run_bytes: int
    places: torch.Tensor
    """Runs of the sequence, counted from the start of a layer, `int64`."""
    first: int
    num_runs: int
    """Runs of the chunk in each layer: `places[first : first + num_runs]`."""
    layer_lo: int


@triton.jit
def _weighed(words, place):
    """Return the weighted words, as `kvstore.transfer.copy.checksum.word_sum` weights them."""
    mixed = words ^ ((words >> 31) & _LOW_33_BITS)
    return mixed * ((place * _WEIGHT) | 1)


@triton.jit
def _segments_of(
    tile, index, first, layer_lo, layer_segments, num_runs, run_segments, num_segments, ROWS: tl.constexpr
):  # fmt: skip
    """Return the segments of a tile, which of them exist, and the position of each in the pages."""
    segment = tile * ROWS + tl.arange(0, ROWS)
    is_there = segment < num_segments
    run = segment // run_segments
    block = tl.load(index + first + run % num_runs, mask=is_there, other=0)
    layer = (layer_lo + run // num_runs).to(tl.int64)
    return segment.to(tl.int64), is_there, layer * layer_segments + block * run_segments + segment % run_segments


@triton.jit(do_not_specialize=_VARIED, do_not_specialize_on_alignment=_PLACES)
def gather(
    pages, payload, index, sums, first, layer_lo, layer_segments, num_runs, run_segments, num_segments,
    SEGMENT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy runs of `pages` into `payload`, and write each program's share of the checksum to `sums`."""
    word = tl.arange(0, SEGMENT)
    total = tl.zeros((ROWS, SEGMENT), tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(num_segments, ROWS), tl.num_programs(0)):
        segment, is_there, at = _segments_of(
            tile, index, first, layer_lo, layer_segments, num_runs, run_segments, num_segments, ROWS
        )
        mask = is_there[:, None] & (word >= 0)[None, :]
        words = tl.load(pages + (at * SEGMENT)[:, None] + word[None, :], mask=mask, other=0)
        place = (segment * SEGMENT)[:, None] + word[None, :]
        tl.store(payload + place, words, mask=mask)
        total += _weighed(words, place)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


@triton.jit(do_not_specialize=_VARIED, do_not_specialize_on_alignment=_PLACES)
def scatter(
    pages, payload, index, sums, first, layer_lo, layer_segments, num_runs, run_segments, num_segments,
    SEGMENT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy `payload` into runs of `pages`, and write each program's share of the checksum to `sums`."""
    word = tl.arange(0, SEGMENT)
    total = tl.zeros((ROWS, SEGMENT), tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(num_segments, ROWS), tl.num_programs(0)):
        segment, is_there, at = _segments_of(
            tile, index, first, layer_lo, layer_segments, num_runs, run_segments, num_segments, ROWS
        )
        mask = is_there[:, None] & (word >= 0)[None, :]
        place = (segment * SEGMENT)[:, None] + word[None, :]
        words = tl.load(payload + place, mask=mask, other=0)
        tl.store(pages + (at * SEGMENT)[:, None] + word[None, :], words, mask=mask)
        total += _weighed(words, place)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


def launch(kernel: Any, span: ChunkRuns, payload: torch.Tensor, sums: torch.Tensor) -> int:
    """Put a kernel into the calling thread's stream.

    Args:
        kernel: `gather` or `scatter`.
        payload: the chunk's, `int64`, aligned to 16 bytes.
        sums: receives the shares of the checksum, `int64[NUM_SUMS]`, in memory that the GPU reaches.

    Returns:
        The number of sums that it writes.
    """
    run_words = span.run_bytes // WORD_BYTES
    segment = min(run_words & -run_words, TILE)
    num_segments = len(payload) // segment
    rows = TILE // segment
    num_programs = min(NUM_SUMS, -(-num_segments // rows))
    layer_segments = span.pages.stride(0) * span.pages.itemsize // WORD_BYTES // segment
    kernel[(num_programs,)](
        span.pages.view(-1).view(payload.dtype), payload, span.places, sums, span.first, span.layer_lo, layer_segments,
        span.num_runs, run_words // segment, num_segments, SEGMENT=segment, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return num_programs
