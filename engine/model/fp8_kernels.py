"""Triton kernel that quantizes rows to 8-bit floats, and its launch. Imports Triton: only `fp8_linear` imports it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PIECE = 4096
"""Columns that a program processes together."""


@triton.jit
def quantize(inputs, codes, scales, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Divide each row by its scale, which maps its largest magnitude to 448, and round it to 8-bit floats.

    The numbers are those of `fp8_linear.quantized_rows`, except on GPUs of capability 8.9, which round twice.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PIECE)
    largest = tl.zeros((PIECE,), tl.float32)
    for start in range(0, COLUMNS, PIECE):
        mask = start + place < COLUMNS
        values = tl.load(inputs + row * COLUMNS + start + place, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), 448.0), 1.1754943508222875e-38)
    tl.store(scales + row, scale)
    for start in range(0, COLUMNS, PIECE):
        mask = start + place < COLUMNS
        values = tl.load(inputs + row * COLUMNS + start + place, mask=mask, other=0.0).to(tl.float32)
        values = tl.clamp(tl.div_rn(values, scale), -448.0, 448.0)
        tl.store(codes + row * COLUMNS + start + place, values.to(tl.float8e4nv), mask=mask)


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `fp8_linear.quantized_rows` of rows, `[rows, columns]`."""
    out = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
    columns = rows.shape[1]
    piece = min(PIECE, triton.next_power_of_2(columns))
    quantize[(len(rows),)](rows.contiguous(), out, scales, columns, piece, num_warps=8 if piece > 2048 else 4)
    return out, scales
