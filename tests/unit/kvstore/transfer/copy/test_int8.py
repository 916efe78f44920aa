"""Pages whose values are so small that their scale is not a normal number."""

from __future__ import annotations

import torch

from baton.kv_layout import GroupLayout, KvLayout
from kvstore.transfer.copy.blocks import dequantized, quantized
from kvstore.transfer.protocol.plan import WireOptions, plan

LAYOUT = KvLayout(16, 1, (GroupLayout(name="all", layers=(0,), num_kv_heads=1, k_dim=4, v_dim=0, dtype="float32"),))
SMALLEST = 2.0**-149


def test_a_page_of_subnormal_values_does_not_wrap_around() -> None:
    """A subnormal scale is rounded so much that the quotient would leave the range of int8."""
    planned = plan(LAYOUT, 0, LAYOUT, 0, 16, (0,) * len(LAYOUT.groups), WireOptions(4096, 16, "int8"))
    (chunk,) = planned.chunks
    for largest in (1, 100, 190, 300):
        values = torch.full((64,), largest * SMALLEST)
        payload = quantized(planned, chunk, values.clone())
        got = dequantized(planned, chunk, payload)
        assert bool(got.isfinite().all())
        assert float((got - values).abs().max()) <= largest * SMALLEST
