"""A runner whose layers lie in two groups of unlike blocks, one of them in an order that only it knows.

It answers as the arithmetic one does, from what both groups hold: a block that is lost, stale or altered in either
changes the answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from baton.blocks import num_blocks_for
from engine.core.runner import BlockCopy, KVSpec, LayerGroup, PageOrder, StepPart
from engine.model.kv_cache import torch_dtype
from engine.testing import ArithmeticRunner, modulus

OPAQUE_TOKENS = 48
MASK = 0x5A5A5A5A


class PlainCache:
    """A rank's cache in any page order, for the KV transfer alone. Everything in it is junk at first."""

    def __init__(self, spec: KVSpec, num_blocks: Iterable[int]) -> None:
        self.spec = spec
        self.device = torch.device("cpu")
        self.table_sizes = tuple(num_blocks)
        self.groups = [
            torch.full((len(g.layers), n, g.row_numel), -1).to(torch_dtype(g.dtype))
            for g, n in zip(spec.groups, self.table_sizes, strict=True)
        ]
        self.states: dict[str, torch.Tensor] = {}

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            self.groups[copy.group][:, copy.target] = self.groups[copy.group][:, copy.source]


class GroupedRunner(ArithmeticRunner):
    """Layer 0 lies in pages of K and of V; layer 1 token after token, masked."""

    def __init__(self, num_tokens: int = 1536, block_size: int = 16, tag: str = "tests/masked") -> None:
        super().__init__(num_tokens // block_size, block_size)
        (pages,) = self.spec.groups
        common = {"num_kv_heads": 1, "k_dim": 1, "v_dim": 1, "dtype": "int64"}
        self.spec = KVSpec(
            (
                LayerGroup(name="pages", layers=(0,), block_size=pages.block_size, **common),  # type: ignore[arg-type]
                LayerGroup(
                    name="masked",
                    layers=(1,),
                    block_size=OPAQUE_TOKENS,
                    page_order=PageOrder.OPAQUE,
                    tag=tag,
                    **common,  # type: ignore[arg-type]
                ),
            )
        )
        self.num_blocks = (num_tokens // block_size, num_tokens // OPAQUE_TOKENS)
        self.own_cache = PlainCache(self.spec, self.num_blocks)
        self.cache = self.own_cache  # type: ignore[assignment]
        self.caches = (self.own_cache,)  # type: ignore[assignment]

    def _write(self, layer: int, part: StepPart) -> None:
        for position, token_id in enumerate(part.token_ids, part.num_computed_tokens):
            values = torch.tensor([token_id, (position + 1) * token_id])
            if layer == 0:
                size = self.spec.groups[0].block_size
                self.own_cache.groups[0][0, part.block_ids[0][position // size]].view(2, -1)[:, position % size] = (
                    values
                )
            else:
                row = self.own_cache.groups[1][0, part.block_ids[1][position // OPAQUE_TOKENS]]
                row.view(-1, 2)[position % OPAQUE_TOKENS] = values ^ MASK

    def _answer(self, part: StepPart, num_tokens: int) -> int:
        assert num_tokens == part.end, "no prompt is scored here"
        found: list[torch.Tensor] = []
        for group, cells, num_tokens in zip(self.spec.groups, self.own_cache.groups, part.num_kv_tokens, strict=True):
            table = part.block_ids[len(found)][: num_blocks_for(num_tokens, group.block_size)]
            rows = cells[0, list(table)]
            is_masked = group.page_order is PageOrder.OPAQUE
            pairs = rows.view(-1, 2).T ^ MASK if is_masked else rows.view(len(table), 2, -1).transpose(0, 1).flatten(1)
            found.append(pairs[:, :num_tokens])
        tokens = found[0][0]
        weighted = tokens * torch.arange(1, len(tokens) + 1)
        wanted = torch.stack((tokens, weighted))
        num_wrong = sum(int((pairs != wanted).sum()) for pairs in found)
        return (int(weighted.sum()) + num_wrong) % modulus(self.vocab_size)
