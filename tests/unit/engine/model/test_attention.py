"""The attention of a step's parts, each against its own keys computed one by one."""

from __future__ import annotations

import math
import random

import pytest
import torch

from baton.sampling import SamplingParams
from engine.core.runner import KVSpec, LayerGroup, StepPart, ignore_layer
from engine.model import attention
from engine.model.attention import begun_blocks, paged_attention, set_step, step_context
from engine.model.kv_cache import KVCache
from engine.model.rank_step import order_for_packing
from engine.uploads import StepNumbers

KV_HEADS, SHARING, DIM, BLOCK, NUM_BLOCKS = 2, 3, 8, 16, 40


def part_of(key: int, begin: int, num_known: int, num_drafts: int, blocks: list[int]) -> StepPart:
    end = begin + num_known + num_drafts
    return StepPart(
        sequence_key=key,
        token_ids=tuple(range(end - begin)),
        num_computed_tokens=begin,
        block_ids=(tuple(blocks.pop() for _ in range(-(-end // BLOCK))),),
        num_kv_tokens=(end,),
        sample=True,
        is_decoding=num_known == 1,
        sampling=SamplingParams(temperature=0.0),
        choice_index=0,
        num_prompt_tokens=begin,
        num_drafts=num_drafts,
    )


def pages_of(cache: KVCache, part: StepPart) -> torch.Tensor:
    """The part's pages, `[K or V, kv_heads, tokens, dim]`; shares no memory."""
    rows = cache.groups[0][0][list(part.block_ids[0])].view(-1, KV_HEADS, 2, BLOCK, DIM)
    return rows.permute(2, 1, 0, 3, 4).reshape(2, KV_HEADS, -1, DIM)


def expected(cache: KVCache, part: StepPart, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    """Each token's attention over the pages, by hand: `[tokens, heads, dim]`."""
    keys, values = pages_of(cache, part).double()
    found = []
    for at, token in zip(range(part.num_computed_tokens, part.end), queries.double().transpose(0, 1), strict=True):
        first = 0 if window is None else max(0, at - window + 1)
        for head, query in enumerate(token):
            seen = slice(first, at + 1)
            weights = torch.softmax(keys[head // SHARING, seen] @ query / math.sqrt(DIM), 0)
            found.append(weights @ values[head // SHARING, seen])
    return torch.stack(found).view(len(part.token_ids), -1, DIM).float()


@pytest.fixture(params=["as on a GPU", "as elsewhere"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the first dimension of what is attended, a call each; on a CPU, in either way."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(attention, "PADDING_DEVICES", frozenset({"cpu"}))
    sizes: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        sizes.append(len(query))
        return attend(query, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    return sizes


SHAPES = {
    "drafts behind some": [(1, 0, 20), (1, 3, 40), (5, 0, 0), (1, 5, 15), (1, 0, 1), (1, 3, 33), (7, 0, 9)],
    "as many behind each": [(1, 4, 20), (1, 4, 44), (1, 4, 3)],
    "behind none": [(1, 0, 20), (1, 0, 44), (3, 0, 5)],
    "one alone": [(1, 6, 12)],
    "prompts only": [(4, 0, 12), (9, 0, 0)],
}
NUM_CALLS = {"drafts behind some": (3, 5), "as many behind each": (1, 1), "behind none": (2, 2), "one alone": (1, 1)}


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("name", SHAPES)
def test_each_token_is_attended_over_what_is_before_it(name: str, window: int | None, calls: list[int]) -> None:
    draw = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    blocks = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    parts = [
        part_of(key, begin, num_known, num_drafts, blocks)
        for key, (num_known, num_drafts, begin) in enumerate(SHAPES[name])
    ]
    parts = [parts[index] for index in order_for_packing(parts)]
    group = LayerGroup(
        name="all", layers=(0,), block_size=BLOCK, num_kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, dtype="float32"
    )
    cache = KVCache(KVSpec((group,)), NUM_BLOCKS, 8)
    cache.groups[0].normal_(generator=generator)
    cache.clear_blocks(begun_blocks(cache, parts))
    num_tokens = sum(len(part.token_ids) for part in parts)
    query = torch.randn(1, KV_HEADS * SHARING, num_tokens, DIM, generator=generator)
    key, value = torch.randn(2, 1, KV_HEADS, num_tokens, DIM, generator=generator)
    layer = torch.nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    set_step(step_context(cache, parts, ignore_layer, StepNumbers(cache.device)))
    found, _ = paged_attention(layer, query, key, value, None, sliding_window=window)
    begin = 0
    for part in parts:
        end = begin + len(part.token_ids)
        assert pages_of(cache, part)[0, :, part.num_computed_tokens : part.end].equal(key[0, :, begin:end])
        torch.testing.assert_close(found[0, begin:end], expected(cache, part, query[0, :, begin:end], window))
        begin = end
    if name in NUM_CALLS:
        in_one, by_length = NUM_CALLS[name]
        assert len(calls) == (in_one if "cpu" in attention.PADDING_DEVICES else by_length)
