"""Pages of K and V as int8 with a float32 scale each: their wire format if the wire's data type is int8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore.transfer.protocol.plan import SCALE_BYTES, page_dims

if TYPE_CHECKING:
    from kvstore.transfer.protocol.plan import Chunk, TransferPlan

INT8_MAX = 127


def quantized(plan: TransferPlan, chunk: Chunk, values: torch.Tensor) -> torch.Tensor:
    """Quantize one layer's units, in wire order, to int8 units: `uint8`. May change `values`.

    Values after the last token are zeroed first: they are undefined, and would widen the scale of their page without
    limit, or make it NaN.
    """
    wire = plan.groups[chunk.part]
    num_units, num_heads = chunk.unit_hi - chunk.unit_lo, wire.head_hi - wire.head_lo
    num_valid = plan.num_tokens - plan.begins[chunk.part] - (chunk.unit_hi - 1) * wire.unit_tokens
    out = torch.empty(num_units, wire.unit_bytes, dtype=torch.uint8, device=values.device)
    scales, pages_out = _parts(plan, chunk, out)
    widths = _page_widths(plan, chunk)
    pages = torch.split(values.view(num_units, num_heads, -1).float(), widths, 2)
    for number, (page, to) in enumerate(zip(pages, torch.split(pages_out, widths, 2), strict=True)):
        page[-1].view(num_heads, wire.unit_tokens, -1)[:, num_valid:] = 0
        # Neither 0 for a page of zeros, nor subnormal: a quotient could leave the range.
        scale = (page.abs().amax(2) / INT8_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
        scales[:, :, number] = scale
        to.copy_((page / scale[:, :, None]).round_())
    return out.view(-1)


def dequantized(plan: TransferPlan, chunk: Chunk, payload: torch.Tensor) -> torch.Tensor:
    """Return the units of all layers of an int8 payload, in wire order, as `float32`."""
    scales, pages = _parts(plan, chunk, payload.view(-1, plan.groups[chunk.part].unit_bytes))
    values = pages.float()
    for number, page in enumerate(torch.split(values, _page_widths(plan, chunk), 2)):
        page.mul_(scales[:, :, number, None])
    return values.view(-1)


def _parts(plan: TransferPlan, chunk: Chunk, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View int8 units `uint8[units, unit_bytes]` as their two parts.

    Returns:
        Scales, `float32[units, heads, pages]`, and values, `int8[units, heads, numel]`.
    """
    wire = plan.groups[chunk.part]
    num_heads, num_pages = wire.head_hi - wire.head_lo, len(_page_widths(plan, chunk))
    end = num_heads * num_pages * SCALE_BYTES
    scales = units[:, :end].view(torch.float32).view(-1, num_heads, num_pages)
    return scales, units[:, end:].view(torch.int8).view(len(units), num_heads, -1)


def _page_widths(plan: TransferPlan, chunk: Chunk) -> list[int]:
    """Return the number of elements of each page of a head of a unit."""
    unit_tokens = plan.groups[chunk.part].unit_tokens
    return [unit_tokens * dim for dim in page_dims(plan.src.groups[chunk.part])]
