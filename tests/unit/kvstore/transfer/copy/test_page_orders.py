"""Blocks in other orders than pages of K and of V, and groups of unlike blocks, from one cache to another."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.core.runner import BlockTables, KVSpec, LayerGroup, PageOrder
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.protocol.plan import WireOptions, layout_of, mismatch, plan, source_ranks
from tests.unit.engine.grouped import PlainCache

NUM_TOKENS = 150
POOL_TOKENS = 768
Caches = list[PlainCache]


def group(name: str, layers: tuple[int, ...], block_size: int, **changes: Any) -> LayerGroup:
    shape: dict[str, Any] = {"num_kv_heads": 2, "k_dim": 4, "v_dim": 6, "dtype": "float32"}
    return LayerGroup(name=name, layers=layers, block_size=block_size, **shape | changes)


def caches_of(spec: KVSpec, tp_size: int = 1) -> Caches:
    return [PlainCache(spec, [POOL_TOKENS // g.block_size for g in spec.groups]) for _ in range(tp_size)]


def tables_of(spec: KVSpec, seed: int) -> BlockTables:
    """Blocks in an order of their own for each group."""
    draw = random.Random(seed)
    return tuple(
        tuple(draw.sample(range(POOL_TOKENS // g.block_size), -(-NUM_TOKENS // g.block_size))) for g in spec.groups
    )


def move(src: Caches, dst: Caches, skip: int = 0, wire: str = "auto", chunk_bytes: int = 4096) -> None:
    here, there = layout_of(src[0].spec, len(src)), layout_of(dst[0].spec, len(dst))
    assert mismatch(here, there, wire) == ""
    for rank, cache in enumerate(dst):
        for source in source_ranks(here, there, rank):
            planned = plan(
                here, source, there, rank, NUM_TOKENS, (skip,) * len(here.groups), WireOptions(chunk_bytes, 64, wire)
            )
            ours = BlockCopier(src[source], planned, here, source, tables_of(src[0].spec, 1))
            theirs = BlockCopier(cache, planned, there, rank, tables_of(dst[0].spec, 2))
            for chunk in planned.chunks:
                payload = torch.empty(chunk.num_bytes, dtype=torch.uint8)
                ours.gather(chunk, payload)
                theirs.scatter(chunk, payload)


def fill(caches: Caches) -> None:
    generator = torch.Generator().manual_seed(5)
    for cache in caches:
        for tensor in cache.groups:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def values_of(caches: Caches, seed: int, index: int) -> torch.Tensor:
    """All K and V of a group, `[layers, heads, tokens, k_dim + v_dim]`, of all ranks; read without plan or runs."""
    spec, ranks = caches[0].spec.groups[index], []
    for cache in caches:
        rows = cache.groups[index][:, list(tables_of(cache.spec, seed)[index])]
        heads = rows.view(len(spec.layers), rows.shape[1], spec.num_kv_heads, -1)
        if spec.page_order is PageOrder.K_THEN_V:
            cut = spec.block_size * spec.k_dim
            parts = [(heads[..., :cut], spec.k_dim), (heads[..., cut:], spec.v_dim)]
            tokens = torch.cat([p.reshape(*p.shape[:3], spec.block_size, dim) for p, dim in parts], -1)
        else:
            tokens = heads.reshape(*heads.shape[:3], spec.block_size, -1)
        ranks.append(tokens.transpose(1, 2).flatten(2, 3)[:, :, :NUM_TOKENS])
    return torch.cat(ranks, dim=1)


@pytest.mark.parametrize("wire", ["auto", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_opaque_blocks_move_whole_and_bit_by_bit(wire: str, dtype: str) -> None:
    """Whatever the wire's data type, the places behind the last token included; between ranks of one number."""
    opaque = group("opaque", (0, 2), 48, dtype=dtype, page_order=PageOrder.OPAQUE, tag="vendor/1")
    spec = KVSpec((opaque, group("pages", (1,), 16)))
    src, dst = caches_of(spec, 2), caches_of(spec, 2)
    fill(src)
    for number, cache in enumerate(src):  # every pattern of bits, NaNs among them
        bits = cache.groups[0].view(torch.uint8)
        bits.random_(0, 256, generator=torch.Generator().manual_seed(number))
    move(src, dst, skip=48, wire=wire)
    ours, theirs = tables_of(spec, 1)[0], tables_of(spec, 2)[0]
    for one, other in zip(src, dst, strict=True):
        moved = other.groups[0][:, list(theirs[1:])].view(torch.uint8)
        assert torch.equal(moved, one.groups[0][:, list(ours[1:])].view(torch.uint8))
        assert torch.equal(other.groups[0][:, theirs[0]], caches_of(spec)[0].groups[0][:, theirs[0]]), "it was skipped"


@pytest.mark.parametrize(("sizes", "ranks"), [((16, 16), (1, 1)), ((32, 16), (1, 2)), ((16, 64), (2, 1))])
@pytest.mark.parametrize("wire", ["auto", "int8"])
def test_k_and_v_by_token_move_between_unlike_blocks_and_ranks(
    sizes: tuple[int, int], ranks: tuple[int, int], wire: str
) -> None:
    specs = [
        KVSpec((group("all", (0, 1), size, num_kv_heads=2 // tp_size, page_order=PageOrder.BY_TOKEN),))
        for size, tp_size in zip(sizes, ranks, strict=True)
    ]
    src, dst = (caches_of(spec, tp_size) for spec, tp_size in zip(specs, ranks, strict=True))
    fill(src)
    move(src, dst, wire=wire)
    want, got = values_of(src, 1, 0), values_of(dst, 2, 0)
    assert want.shape == got.shape == (2, 2, NUM_TOKENS, 10)
    if wire == "auto":
        assert torch.equal(want, got)
    else:
        assert bool(((want - got).abs() <= want.abs().max() / 127).all())


@pytest.mark.parametrize("ours", [(16, 16), (16, 64), (64, 16), (48, 32)])
@pytest.mark.parametrize("theirs", [(16, 16), (16, 64), (96, 32)])
@pytest.mark.parametrize("chunk_bytes", [8192, 65536])
def test_groups_of_unlike_blocks_are_bridged_group_by_group(
    ours: tuple[int, int], theirs: tuple[int, int], chunk_bytes: int
) -> None:
    def spec_of(sizes: tuple[int, int]) -> KVSpec:
        return KVSpec((group("narrow", (0, 2), sizes[0]), group("wide", (1, 3), sizes[1], num_kv_heads=1)))

    src, dst = caches_of(spec_of(ours)), caches_of(spec_of(theirs))
    layouts = layout_of(src[0].spec), layout_of(dst[0].spec)
    if difference := mismatch(*layouts, "auto"):
        assert "neither divides the other" in difference
        assert any(max(a, b) % min(a, b) for a, b in zip(ours, theirs, strict=True))
        return
    fill(src)
    skip = layouts[1].block_size if layouts[1].block_size < NUM_TOKENS else 0
    move(src, dst, skip=skip, chunk_bytes=chunk_bytes)
    for index in range(2):
        want, got = values_of(src, 1, index), values_of(dst, 2, index)
        assert torch.equal(want[:, :, skip:], got[:, :, skip:])
        assert bool((got[:, :, :skip] == -1).all()), "the receiver holds these already"
