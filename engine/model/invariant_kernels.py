"""Triton kernels with bit-identical results for a row, whatever other rows there are, and at any index.

Imports Triton: only `batch_invariance` imports it, if `engine.batch_invariant` is set.

A library of matrix products chooses tile sizes, and the number of partial sums, by the number of rows. Here a sum is
one chain over the inputs, in their order, by instructions of one kind. So tiles may have two sizes, for the few rows of
decodes and the many of prompts, and a row's sums are the same in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

SUMMED_NUMBERS = 1024
"""Numbers of a row that are processed together."""
ROW_TILES = 8
"""Tiles of rows that use the same weights in turn while these are in the cache."""


class ProductTiling(NamedTuple):
    """Compile-time parameters of `multiply`: no spilled registers from sm_80 on."""

    rows: int
    outputs: int
    inputs: int
    """Inputs that are processed together, the same number for few rows as for many."""
    num_warps: int
    num_stages: int


FEW_ROWS = 64
"""Up to this many rows, a product is limited by reading its weights once. No tile has fewer rows: for smaller tiles a
GPU uses other instructions, which may sum in another order."""


def tiling_of(num_rows: int, itemsize: int) -> ProductTiling:
    """Return the tiles of a product with this many rows, for numbers of this many bytes."""
    if itemsize > 2:
        return ProductTiling(32, 32, 32, 4, 2)
    return ProductTiling(FEW_ROWS, 32, 64, 4, 6) if num_rows <= FEW_ROWS else ProductTiling(128, 128, 64, 8, 3)


@triton.jit(do_not_specialize=("num_rows",))
def multiply(
    given, weights, bias, out, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Multiply `given`, `[num_rows, num_inputs]`, by weights, `[num_outputs, num_inputs]`, and add a bias."""
    tiles_down, tiles_across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, OUTPUTS)
    number = tl.program_id(0)
    group = number // (TILES * tiles_across)
    in_group = tl.minimum(tiles_down - group * TILES, TILES)
    within = number % (TILES * tiles_across)
    row = (group * TILES + within % in_group) * ROWS + tl.arange(0, ROWS)
    output = within // in_group * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    left_at = given + row.to(tl.int64)[:, None] * num_inputs
    right_at = weights + output.to(tl.int64)[None, :] * num_inputs
    total = tl.full((ROWS, OUTPUTS), 0.0, tl.float32)
    for begin in range(0, num_inputs, INPUTS):
        place = begin + tl.arange(0, INPUTS)
        mask, right_mask = is_row[:, None], is_output[None, :]
        if not IS_WHOLE:
            mask, right_mask = mask & (place < num_inputs)[None, :], right_mask & (place < num_inputs)[:, None]
        left = tl.load(left_at + place[None, :], mask=mask, other=0.0)
        right = tl.load(right_at + place[:, None], mask=right_mask, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    there = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(there, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def add_up(numbers, sums, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DIVISOR: tl.constexpr):
    """Write the divided sum of each row of `[rows, WIDTH]`, computed in the type of `sums`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), sums.dtype.element_ty)
    for begin in range(0, WIDTH, BLOCK):
        new = tl.load(numbers + row * WIDTH + begin + place, mask=begin + place < WIDTH, other=0.0)
        total += new.to(sums.dtype.element_ty)
    tl.store(sums + row, tl.sum(total, 0) / DIVISOR)


@triton.jit
def run_up(numbers, sums, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the running sums of each row of `[rows, WIDTH]`."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.zeros((1,), sums.dtype.element_ty)
    for begin in range(0, WIDTH, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        new = tl.load(numbers + row * WIDTH + place, mask=place < WIDTH, other=0.0).to(sums.dtype.element_ty)
        tl.store(sums + row * WIDTH + place, before + tl.cumsum(new, 0), mask=place < WIDTH)
        before += tl.sum(new, 0)


def product(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `torch.nn.functional.linear` of rows, `[..., inputs]`, and weights, `[outputs, inputs]`."""
    num_outputs, num_inputs = weights.shape
    given = rows.reshape(-1, num_inputs).contiguous()
    found = given.new_empty(len(given), num_outputs)
    tiling = tiling_of(len(given), given.element_size())
    grid = (triton.cdiv(len(given), tiling.rows) * triton.cdiv(num_outputs, tiling.outputs),)
    constants = {
        "HAS_BIAS": bias is not None,
        "IS_WHOLE": num_inputs % tiling.inputs == 0,
        "ROWS": tiling.rows,
        "OUTPUTS": tiling.outputs,
        "INPUTS": tiling.inputs,
        "TILES": ROW_TILES,
    }
    args = (given, weights, weights if bias is None else bias, found, len(given), num_outputs, num_inputs)
    _launch(multiply, grid, args, constants, num_warps=tiling.num_warps, num_stages=tiling.num_stages)
    return found.view(*rows.shape[:-1], num_outputs)


def row_sums(numbers: torch.Tensor, dtype: torch.dtype, divisor: int = 1) -> torch.Tensor:
    """Return the divided sums of rows, `[..., width]`, as `[..., 1]`, computed in `dtype`."""
    width = numbers.shape[-1]
    given = numbers.reshape(-1, width).contiguous()
    found = given.new_empty(len(given), dtype=dtype)
    constants = {"WIDTH": width, "BLOCK": _block_of(width), "DIVISOR": divisor}
    _launch(add_up, (len(given),), (given, found), constants)
    return found.view(*numbers.shape[:-1], 1)


def running_sums(numbers: torch.Tensor) -> torch.Tensor:
    """Return the running sums of rows, `[..., width]`, in their type."""
    width = numbers.shape[-1]
    given = numbers.reshape(-1, width).contiguous()
    found = torch.empty_like(given)
    _launch(run_up, (len(given),), (given, found), {"WIDTH": width, "BLOCK": _block_of(width)})
    return found.view(numbers.shape)


def _block_of(width: int) -> int:
    return min(SUMMED_NUMBERS, int(triton.next_power_of_2(width)))


def _launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], **options: int
) -> None:
    kernel[grid](*args, **constants, **options)
