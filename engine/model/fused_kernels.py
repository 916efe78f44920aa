"""Triton kernels for the operations between a layer's matrix products and its attention, and their launches.

Transformers computes each of these with several operations, each of which is a kernel that reads and writes the whole
tensor. The numbers are the same except for the order of a sum, since intermediate results are rounded in the same
places. Imports Triton: only `fused_modules` imports it.

A program computes a row, or a piece of one, in an order that depends only on the row's length, so a token's result does
not depend on the batch. All lengths and strides are constants of a model.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LONGEST_ROW = 16384
"""Maximum number of elements in a row of `norm`."""
PIECE = 1024
"""Elements that a program of `gate` computes."""
HEADS = 8
"""Heads that a program of `rotate` rotates."""


@triton.jit
def _normed(row, weight, eps, LENGTH: tl.constexpr, INNER: tl.constexpr):
    """Return a row of float32 divided by its root mean square, times the weight, rounded to the type in between."""
    scale = tl.rsqrt(tl.sum(row * row, 0) / LENGTH + eps)
    return (row * scale).to(INNER).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def norm(
    x, weight, out, eps, ROW: tl.constexpr, HEAD: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Normalize each head of each row. Heads are `HEAD` elements apart, rows `ROW`; `out` may be `x`."""
    begin = tl.program_id(0).to(tl.int64) * ROW + tl.program_id(1) * HEAD
    place = tl.arange(0, WIDTH)
    mask = place < LENGTH
    row = tl.load(x + begin + place, mask=mask, other=0.0).to(tl.float32)
    scaled = _normed(row, tl.load(weight + place, mask=mask, other=0.0), eps, LENGTH, x.dtype.element_ty)
    tl.store(out + begin + place, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_norm(x, more, weight, total, out, eps, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Write `x + more` into `total`, and its norm into `out`; all are `[rows, LENGTH]`."""
    begin = tl.program_id(0).to(tl.int64) * LENGTH
    place = tl.arange(0, WIDTH)
    mask = place < LENGTH
    row = tl.load(x + begin + place, mask=mask, other=0.0).to(tl.float32)
    row = (row + tl.load(more + begin + place, mask=mask, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + begin + place, row, mask=mask)
    weights = tl.load(weight + place, mask=mask, other=0.0)
    scaled = _normed(row.to(tl.float32), weights, eps, LENGTH, x.dtype.element_ty)
    tl.store(out + begin + place, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotate(
    heads, cos, sin, ROW: tl.constexpr, NUM: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate the first `2 * HALF` dimensions of the first `NUM` heads of each row, in place.

    Each dimension of the first half is paired with the corresponding one of the second. `cos` and `sin` are `[rows, 2 *
    HALF]`. The rest is left unchanged.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, WIDTH)
    is_dim = dim < HALF
    mask = (head < NUM)[:, None] & is_dim[None, :]
    place = heads + row * ROW + head[:, None] * DIM + dim[None, :]
    turn = row * (2 * HALF) + dim
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    begin, end = tl.load(cos + turn, mask=is_dim, other=0.0), tl.load(cos + turn + HALF, mask=is_dim, other=0.0)
    rise, fall = tl.load(sin + turn, mask=is_dim, other=0.0), tl.load(sin + turn + HALF, mask=is_dim, other=0.0)
    tl.store(place, _turned(first, -second, begin, rise).to(heads.dtype.element_ty), mask=mask)
    tl.store(place + HALF, _turned(second, first, end, fall).to(heads.dtype.element_ty), mask=mask)


@triton.jit
def _turned(along, across, cos, sin):
    """Return a sum of two products, each rounded to the type of the cosines."""
    along = (along * cos.to(tl.float32)[None, :]).to(cos.dtype)
    across = (across * sin.to(tl.float32)[None, :]).to(sin.dtype)
    return along.to(tl.float32) + across.to(tl.float32)


@triton.jit
def gate(joined, out, LENGTH: tl.constexpr, PIECE: tl.constexpr):
    """Write `silu(first half) * second half` of each row of `joined`, `[rows, 2 * LENGTH]`, into `out`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = place < LENGTH
    begin = joined + row * (2 * LENGTH) + place
    opening = tl.load(begin, mask=mask, other=0.0).to(tl.float32)
    passing = tl.load(begin + LENGTH, mask=mask, other=0.0).to(tl.float32)
    opening = (opening / (1.0 + tl.exp(-opening))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * LENGTH + place, (opening * passing).to(out.dtype.element_ty), mask=mask)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of each row, `[..., length]`."""
    x = x.contiguous()
    out, length = torch.empty_like(x), x.shape[-1]
    _launch(norm, (x.numel() // length, 1), (x, weight, out, eps), {"ROW": length, "HEAD": 0} | row_of(length))
    return out


def norm_heads(rows: torch.Tensor, weight: torch.Tensor, eps: float, first: int, num_heads: int) -> None:
    """Normalize some heads of each row in place, starting at one.

    Args:
        rows: `[..., width]`, contiguous; a head has as many elements as the weight.
    """
    dim, width = len(weight), rows.shape[-1]
    heads = rows.view(-1, width)[:, first * dim :]
    constants = {"ROW": width, "HEAD": dim} | row_of(dim)
    _launch(norm, (len(heads), num_heads), (heads, weight, heads, eps), constants)


def sum_and_norm(
    x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x + more`, `[..., length]`, and its norm."""
    x, more = x.contiguous(), more.contiguous()
    total, out, length = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    _launch(add_norm, (x.numel() // length,), (x, more, weight, total, out, eps), row_of(length))
    return total, out


def rotate_heads(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int, num_heads: int) -> None:
    """Rotate the first heads of each row in place.

    Args:
        rows: `[1, T, width]`, contiguous.
        cos: `[1, T, rotated dimensions]`, in the rows' type or in float32, as `sin`.
        dim: dimensions of a head.
        num_heads: number of heads to rotate.
    """
    width = rows.shape[-1]
    grid = (rows.numel() // width, triton.cdiv(num_heads, HEADS))
    constants = turn_of(width, dim, num_heads, cos.shape[-1] // 2)
    _launch(rotate, grid, (rows, cos.contiguous(), sin.contiguous()), constants)


def gated(joined: torch.Tensor) -> torch.Tensor:
    """Return the product of the SiLU of the gate and the other half, which are concatenated in a row.

    Args:
        joined: `[..., 2 * length]`.

    Returns:
        `[..., length]`.
    """
    joined, length = joined.contiguous(), joined.shape[-1] // 2
    out = joined.new_empty(*joined.shape[:-1], length)
    grid = (out.numel() // length, triton.cdiv(length, PIECE))
    _launch(gate, grid, (joined, out), {"LENGTH": length, "PIECE": PIECE})
    return out


def row_of(length: int) -> dict[str, int]:
    """Return the constants of a kernel that computes one row of this length at a time."""
    width = triton.next_power_of_2(length)
    return {"LENGTH": length, "WIDTH": width, "num_warps": max(1, min(16, width // 512))}


def turn_of(width: int, dim: int, num_heads: int, half: int) -> dict[str, int]:
    """Return the constants of `rotate` for such rows and heads."""
    constants = {"ROW": width, "NUM": num_heads, "DIM": dim, "HALF": half}
    return constants | {"WIDTH": triton.next_power_of_2(half), "HEADS": HEADS}


def _launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel[grid](*args, **constants)
