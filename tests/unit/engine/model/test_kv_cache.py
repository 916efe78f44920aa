from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
import torch

from baton.errors import ModelLoadError
from engine.core.runner import BlockCopy, KVSpec, LayerGroup, StateSpec
from engine.model.kv_cache import KVCache, rounded

FULL = LayerGroup(name="full", layers=(0, 2), block_size=16, num_kv_heads=2, k_dim=4, v_dim=4, dtype="float32")
LATENT = LayerGroup(name="latent", layers=(1, 3, 4), block_size=16, num_kv_heads=1, k_dim=8, v_dim=2, dtype="bfloat16")
SPEC = KVSpec((FULL, LATENT), (StateSpec("conv", (3, 5), "float32"), StateSpec("sum", (1,), "int64")))


def test_sizes() -> None:
    assert FULL.page_numel == 16 * 8
    assert FULL.row_numel == 2 * 16 * 8
    assert FULL.row_bytes == 2 * 16 * 8 * 4
    assert LATENT.row_bytes == 16 * 10 * 2
    assert SPEC.block_bytes == 2 * FULL.row_bytes + 3 * LATENT.row_bytes
    assert [state.num_bytes for state in SPEC.states] == [60, 8]
    assert SPEC.num_layers == 5
    assert KVSpec((FULL,)).num_layers == 3, "the model's layer 1 has no KV"


def test_tensors_have_the_shapes_of_the_spec_and_start_at_zero() -> None:
    cache = KVCache(SPEC, 7, 3)
    assert [(tuple(group.shape), group.dtype) for group in cache.groups] == [
        ((2, 7, 256), torch.float32),
        ((3, 7, 160), torch.bfloat16),
    ]
    assert {name: tuple(state.shape) for name, state in cache.states.items()} == {"conv": (3, 3, 5), "sum": (3, 1)}
    assert not any(tensor.any() for tensor in (*cache.groups, *cache.states.values()))
    assert sum(group.numel() * group.element_size() for group in cache.groups) == 7 * SPEC.block_bytes


def test_memory_is_taken_as_it_is_used() -> None:
    """A new cluster on a laptop would otherwise hold the gigabytes of both pools before anybody asks for anything."""
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    cache = KVCache(KVSpec((FULL,)), (512 << 20) // (2 * FULL.row_bytes), 3)
    (group,) = cache.groups
    assert group.data_ptr() % 4096 == 0
    assert process.memory_info().rss - before < 64 << 20
    group[1, 100] = 7.0
    assert group[1, 100].eq(7).all()
    assert not group[1, 99].any()
    assert process.memory_info().rss - before < 64 << 20


def test_more_than_there_is_is_refused_in_a_sentence() -> None:
    for num_blocks in (2**40, 2**60):
        with pytest.raises(ModelLoadError, match=r"does not have \d+\.\d GiB for KV .*; lower engine\.kv_cache_gib"):
            KVCache(KVSpec((FULL,)), num_blocks, 3)


def test_a_layers_pages_are_its_rows_of_the_group() -> None:
    cache = KVCache(SPEC, 7, 3)
    assert [cache.group_of(layer) for layer in range(5)] == [0, 1, 0, 1, 1]
    for layer, (group, index) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]):
        pages = cache.layer(layer)
        heads = SPEC.groups[group].num_kv_heads
        assert tuple(pages.shape) == (7 * heads, SPEC.groups[group].page_numel)
        pages[5 * heads + heads - 1, 9] = layer + 1  # last head of block 5
        row = cache.groups[group][index, 5]
        assert row[(heads - 1) * SPEC.groups[group].page_numel + 9] == layer + 1, "the page is not a copy"
    assert [int(group.count_nonzero()) for group in cache.groups] == [2, 3]


def test_one_heads_pages_of_a_block_are_one_contiguous_run() -> None:
    """What makes a tensor-parallel slice of a block one copy."""
    cache = KVCache(SPEC, 7, 3)
    head = cache.groups[0][1, 4].view(2, -1)[1]
    assert head.is_contiguous()
    assert head.data_ptr() == cache.layer(2)[4 * 2 + 1].data_ptr()


def test_what_is_beyond_8_bit_floats_becomes_their_largest() -> None:
    values = torch.tensor([0.0, 448, 449, 464, 465, 1e30, torch.inf, -500, -torch.inf, 1.0625, 1.1875])
    expected = [0.0, 448, 448, 448, 448, 448, 448, -448, -448, 1.0, 1.25]
    for dtype in (torch.float32, torch.bfloat16):
        found = rounded(values.to(dtype), torch.float8_e4m3fn)
        assert found.dtype is torch.float8_e4m3fn
        assert found.float().tolist() == expected
    assert rounded(found, torch.float8_e4m3fn) is found
    assert rounded(values, torch.bfloat16)[6] == torch.inf


def test_blocks_of_8_bit_floats_are_cleared_and_copied() -> None:
    cache = KVCache(KVSpec((replace(FULL, dtype="float8_e4m3fn"),)), 4, 1)
    (group,) = cache.groups
    assert group.element_size() * group.numel() == 4 * cache.spec.block_bytes == 4 * 2 * FULL.row_numel
    group.copy_(torch.randn(group.shape))
    before = group.float()
    cache.clear_blocks([[1, 3]])
    cache.copy_blocks([BlockCopy(0, 2, 1)])
    assert group[:, 1].float().equal(before[:, 2])
    assert group[:, [0, 2]].float().equal(before[:, [0, 2]])
    assert not group[:, 3].float().any()


def test_a_model_that_computes_whole_prompts_reuses_no_prefix() -> None:
    assert SPEC.supports_prefix_reuse
    assert not replace(SPEC, whole_prompts=True).supports_prefix_reuse


def test_each_table_may_have_a_size_of_its_own() -> None:
    cache = KVCache(SPEC, (7, 5, 4), 1)
    assert cache.table_sizes == (7, 5, 4)
    assert [tensor.shape[:2] for tensor in cache.groups] == [(2, 7), (3, 5)]
    assert [len(state) for state in cache.states.values()] == [4, 4]
    with pytest.raises(ValueError, match="a cache with 3 block tables got sizes for 2"):
        KVCache(SPEC, (7, 5), 1)


def test_a_group_without_layers_takes_no_bytes() -> None:
    cache = KVCache(KVSpec((replace(FULL, layers=()),), SPEC.states), 7, 3)
    (group,) = cache.groups
    assert (tuple(group.shape), group.numel(), cache.spec.block_bytes) == ((0, 7, 256), 0, 0)
    cache.clear_blocks([[1, 3]])
    cache.clear_places(0, 2, 5)
    cache.copy_blocks([BlockCopy(0, 2, 1)])


def test_a_spec_in_words() -> None:
    assert SPEC.describe() == (
        "block size 16; full: 2 layers x 2 heads x (4+4) float32; latent: 3 layers x 1 heads x (8+2) bfloat16; "
        "state conv[3, 5]; state sum[1]"
    )


def test_copies_take_whole_blocks_of_a_group_in_every_layer() -> None:
    cache = KVCache(SPEC, 7, 3)
    for tensor in (*cache.groups, *cache.states.values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    before = [group.clone() for group in cache.groups]
    states = {name: state.clone() for name, state in cache.states.items()}
    cache.copy_blocks([BlockCopy(0, 5, 2), BlockCopy(1, 0, 6), BlockCopy(0, 2, 3)])
    for group, (source, targets) in enumerate([(5, {2, 3}), (0, {6})]):
        for block in range(7):
            expected = before[group][:, source if block in targets else block]
            assert cache.groups[group][:, block].equal(expected), (group, block)
    assert all(state.equal(states[name]) for name, state in cache.states.items()), "a row is never changed"
