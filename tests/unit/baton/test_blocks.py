from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.blocks import block_keys, cache_seed, content_id, num_blocks_for, num_pullable
from baton.messages import Adapter, PlacedImage, SequenceSpec
from tests.support.builders import sequence_spec

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)
SEED = cache_seed(content_id("rev"), b"secret", "tenant")


@given(TOKENS, st.integers(0, 200))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens: list[int], length: int) -> None:
    keys = block_keys(SEED, tokens)
    assert len(keys) == len(tokens) // 16
    assert all(len(key) == 16 for key in keys)
    assert block_keys(SEED, tokens[:length]) == keys[: min(length, len(tokens)) // 16]


@given(TOKENS, st.data())
def test_a_changed_token_changes_its_block_and_all_that_follow(tokens: list[int], data: st.DataObject) -> None:
    keys = block_keys(SEED, tokens)
    if not keys:
        return
    index = data.draw(st.integers(0, len(keys) * 16 - 1))
    other = block_keys(SEED, [*tokens[:index], tokens[index] ^ 1, *tokens[index + 1 :]])
    assert other[: index // 16] == keys[: index // 16]
    assert not set(other[index // 16 :]) & set(keys)


@given(TOKENS)
def test_a_larger_block_is_named_by_its_last_granule(tokens: list[int]) -> None:
    keys = block_keys(SEED, tokens)
    for num_parts in (2, 3, 4):
        assert block_keys(SEED, tokens, 16 * num_parts) == keys[num_parts - 1 :: num_parts]


@given(TOKENS, st.integers(0, 200), st.sampled_from([16, 32, 48]))
def test_the_last_key_is_the_seed_of_what_follows(tokens: list[int], length: int, block_size: int) -> None:
    keys = block_keys(SEED, tokens[:length], block_size)
    new = block_keys(keys[-1] if keys else SEED, tokens[len(keys) * block_size :], block_size)
    assert keys + new == block_keys(SEED, tokens, block_size)


def test_keys_depend_on_model_tenant_and_secret() -> None:
    seeds = [
        cache_seed(content_id("rev"), b"secret", "tenant"),
        cache_seed(content_id("rev2"), b"secret", "tenant"),
        cache_seed(content_id("rev"), b"other", "tenant"),
        cache_seed(content_id("rev"), b"secret", "tenant2"),
        cache_seed(content_id("rev"), b"secret", ""),
    ]
    keys = {key for seed in seeds for key in block_keys(seed, list(range(64)))}
    assert len(keys) == 4 * len(seeds)


def spec_of(num_tokens: int, **values: Any) -> SequenceSpec:
    return sequence_spec(tuple(range(num_tokens)), **values)


def test_a_sequence_has_the_keys_of_its_scope_and_its_adapters_weights() -> None:
    tokens, adapter = range(40), Adapter(name="a", path="/a", digest="00", rank=4)
    plain = spec_of(40)
    assert plain.block_keys(tokens) == block_keys(plain.cache_seed, tokens)
    with_adapter = [replace(plain, adapter=each) for each in (adapter, replace(adapter, digest="01"))]
    firsts = {spec.block_keys(tokens)[0] for spec in (plain, *with_adapter)}
    assert len(firsts) == 3, "the same name with other weights hits nothing"
    moved = replace(plain, adapter=replace(adapter, name="b", path="/b", rank=8))
    assert moved.block_keys(tokens) == with_adapter[0].block_keys(tokens), "a name and a folder are not content"
    elsewhere = replace(with_adapter[0], cache_seed=b"another tenant's")
    assert elsewhere.block_keys(tokens)[0] not in firsts


def test_images_name_the_blocks_that_they_are_in_and_all_after_them() -> None:
    cat = PlacedImage(digest=b"c" * 16, offset=20, num_tokens=30, grid=(1, 4, 6))
    tokens = [1] * 20 + [9] * 30 + [2] * 30
    with_cat = replace(spec_of(80), images=(cat,))
    keys = with_cat.block_keys(tokens)
    assert keys[:1] == spec_of(80).block_keys(tokens)[:1]
    others = (replace(cat, digest=b"d" * 16), replace(cat, grid=(1, 6, 4)), replace(cat, offset=21))
    for other in others:
        found = replace(with_cat, images=(other,)).block_keys(tokens)
        assert found[:1] == keys[:1]
        assert not set(found[1:]) & set(keys[1:])
    assert keys[:3] + with_cat.block_keys(tokens, keys[:3]) == keys, "also where the known keys end in an image"
    assert with_cat.block_keys(tokens, end=40) == keys[:2]
    assert with_cat.prefix(40).block_keys(tokens[:40]) == keys[:2]
    assert with_cat.prefix(20).images == ()


def test_the_keys_of_a_sequence_go_on_after_the_known_ones() -> None:
    adapter = Adapter(name="a", path="/a", digest="00", rank=4)
    for spec in (spec_of(10), replace(spec_of(10), adapter=adapter)):
        keys = spec.block_keys(range(100))
        assert len(keys) == 6
        assert keys[:2] + spec.block_keys(range(100), keys[:2]) == keys
        assert spec.block_keys(range(100), end=50) == keys[:3]
        assert spec.block_keys(range(100), keys[1:2], block_size=32, end=64) == keys[3:4]


def test_the_last_token_is_never_pulled() -> None:
    assert [num_pullable(96, 96), num_pullable(97, 96), num_pullable(97, 40), num_pullable(0, 40)] == [95, 96, 40, 0]


def test_keys_never_change() -> None:
    """Routers and workers of different releases share an index: these bytes are part of the contract."""
    assert [key.hex() for key in block_keys(b"seed", list(range(32)))] == [
        "edd1e80a9beb3772c183c52e3987762c",
        "b1884964b09b466892546ef00c550e0d",
    ]


@pytest.mark.parametrize("block_size", [1, 8, 20])
def test_a_block_size_that_does_not_fit_the_chain_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 16, got {block_size}"):
        block_keys(SEED, [1] * 40, block_size)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_tokens(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_for(num_tokens, 16) == num_blocks
