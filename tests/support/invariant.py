"""Rows of products, means and whole models beside others and by themselves; for `interpreted.process`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from baton.errors import ModelLoadError
from baton.sampling import SamplingParams
from baton.scores import NO_SCORES
from engine.core.runner import KVSpec, LayerGroup, StepPart, ignore_layer
from engine.model.attention import ATTENTION_NAME, set_step
from engine.model.attention_probe import PROBE_ROOM, ProbedHeads, is_batch_invariant, probe_cache
from engine.model.batch_invariance import RowByRow, make_invariant
from engine.model.kv_cache import KVCache, torch_dtype
from engine.model.rank_step import RankStep, order_for_packing
from engine.sampling.pipeline import Sampler
from engine.sampling.scores import scores_of
from engine.sampling.steps import Row
from engine.uploads import StepNumbers
from tests.fakes.graphs import FakeCapture
from tests.support.graphed import ROOM, SHAPE
from tests.support.shapes import spec_of_model

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK = 32, 16


def product_differs_by(shape: tuple[int, int, int], dtype: str, has_bias: bool) -> tuple[float, list[str]]:
    """Returns by how much products differ from torch's at most, and which rows do not come out as by themselves.

    Args:
        shape: rows, inputs and outputs.
    """
    from engine.model.invariant_kernels import product

    num_rows, num_inputs, num_outputs = shape
    generator = torch.Generator().manual_seed(2)
    rows, weights = (
        torch.randn(number, num_inputs, generator=generator).to(torch_dtype(dtype))
        for number in (num_rows, num_outputs)
    )
    bias = torch.randn(num_outputs, generator=generator).to(torch_dtype(dtype)) if has_bias else None
    found = product(rows, weights, bias)
    expected = torch.nn.functional.linear(rows.double(), weights.double(), None if bias is None else bias.double())
    draw, others = random.Random(4), []
    for _ in range(12):
        places = draw.sample(range(num_rows), draw.choice((1, 2, 3, num_rows)))
        if not product(rows[places], weights, bias).equal(found[places]):
            others.append(f"{len(places)} rows from {places[0]} on")
    return float((found.double() - expected).abs().max()), others


def means_are_those_of_rows(width: int) -> tuple[float, bool]:
    """Returns by how much means differ from torch's, and whether each is that of its row alone."""
    numbers = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(2))
    with RowByRow():
        found = numbers.mean(-1, keepdim=True)
        alone = torch.stack([row.mean(-1, keepdim=True) for row in numbers.flatten(0, 1)]).view(found.shape)
    return float((found - numbers.double().mean(-1, keepdim=True)).abs().max()), bool(alone.equal(found))


SAMPLINGS = (
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, seed=2, top_p=0.9, logprobs=3),
    SamplingParams(temperature=1.3, seed=3, typical_p=0.8, repetition_penalty=1.2, logprobs=0),
    SamplingParams(temperature=1.0, seed=4, min_p=0.05, top_k=40, xtc_probability=0.9, xtc_threshold=0.01),
    SamplingParams(temperature=0.0, logprobs=5),
)


def samples_differ() -> list[str]:
    """Returns which answers' draws and scores are not those of torch's sums, or have other bits beside others."""
    logits = 4 * torch.randn(len(SAMPLINGS), 3001, generator=torch.Generator().manual_seed(5))
    rows = [Row(params, 0, 9, 4, tuple(range(9)), -1) for params in SAMPLINGS]
    sampler = Sampler()
    plain = sampler.sample_and_score(logits.double(), rows)  # a type of which nothing is drawn quickly
    with RowByRow():
        found = sampler.sample_and_score(logits.double(), rows)
        alone = [sampler.sample_and_score(logits[place : place + 1].double(), [row]) for place, row in enumerate(rows)]
        prompt = scores_of(logits, range(len(rows)), 2)
        one = scores_of(logits[2:3], [2], 2)
    wrong = [] if prompt.logprobs[2] == one.logprobs[0] else ["a prompt's score"]
    for place, of_row in enumerate(alone):
        if found.token_ids[place] != plain.token_ids[place]:
            wrong.append(f"{place}: another token than torch draws")
        scores = (of_row.scores or [NO_SCORES])[0], (found.scores or [NO_SCORES])[place]
        if of_row.token_ids[0] != found.token_ids[place] or scores[0] != scores[1]:
            wrong.append(f"{place}: {scores[0]} alone, {scores[1]} beside others")
    return wrong


def attention_is_invariant(dims: tuple[int, int], *, asked: bool, pages: str = "float32") -> bool:
    """Returns whether attention is found to depend on nothing beside a token.

    Args:
        dims: dimensions of a head, and query heads that share a KV head.
        asked: whether the kernels are to see to it.
        pages: the data type of the pages.
    """
    from engine.model.kernel_attention import KernelAttention

    dim, sharing = dims
    group = LayerGroup(name="all", layers=(0,), block_size=BLOCK, num_kv_heads=1, k_dim=dim, v_dim=dim, dtype=pages)
    cache = probe_cache(KVSpec((group,)), CPU)
    way = KernelAttention(cache, (sharing,), torch.float32, PROBE_ROOM, is_invariant=asked)
    return is_batch_invariant(cache, ProbedHeads((sharing,)), torch.float32, way)


def model_of(kind: str, **values: Any) -> Any:
    """A tiny model of random weights of a type that transformers knows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": 1} | values
    config = AutoConfig.for_model(kind, **shape, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    config._attn_implementation = ATTENTION_NAME
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()


def refusal_of(kind: str) -> str:
    """What is said of a model that cannot be made invariant; empty: it is."""
    try:
        make_invariant(model_of(kind))
    except ModelLoadError as error:
        return str(error)
    return ""


CUTS = {
    "at once": [[(0, 0, 40)], [(1, 0, 23)], [(2, 0, 9)]],
    "together": [[(0, 0, 40), (1, 0, 23), (2, 0, 9)]],
    "in chunks beside others": [
        [(1, 0, 7), (0, 0, 11)],
        [(0, 11, 33), (2, 0, 9), (1, 7, 20)],
        [(1, 20, 23), (0, 33, 40)],
    ],
    "token by token from the middle": [
        [(0, 0, 37), (1, 0, 22)],
        [(0, 37, 38), (1, 22, 23), (2, 0, 1)],
        *[[(2, place, place + 1), *([(0, 37 + place, 38 + place)] if place < 3 else [])] for place in range(1, 9)],
    ],
}  # fmt: skip
"""Ways to the same tokens: of each part of each step the sequence, the place of its first token, and its end."""


def ways_differ(kind: str) -> list[str]:
    """Returns the ways to the same tokens by which a model's last logits, or the KV of a sequence, have other bits."""
    from engine.model.kernel_attention import KernelAttention

    model = model_of(kind)
    make_invariant(model)
    spec = spec_of_model(model.config, block_size=BLOCK)
    found = {}
    for name, steps in CUTS.items():
        cache = KVCache(spec, NUM_BLOCKS, 8)
        cache.groups[0].zero_()
        attention = KernelAttention(cache, (2,), torch.float32, ROOM, is_invariant=True)
        logits: dict[int, torch.Tensor] = {}
        for step in steps:
            parts = [_part(*each) for each in step]
            parts = [parts[index] for index in order_for_packing(parts)]
            of_step = _computed(model, attention, parts)
            logits |= {part.sequence_key: row for part, row in zip(parts, of_step, strict=True)}
        found[name] = torch.cat([torch.cat([logits[key] for key in range(3)]), cache.groups[0].flatten()])
    return [name for name in CUTS if not found[name].equal(found["at once"])]


def graphs_differ(kind: str) -> bool:
    """Returns whether the logits of decodes from a graph, some of whose rows are nobody's, are not a prompt's."""
    from engine.model.decode_graphs import DecodeGraphs
    from engine.model.kernel_attention import KernelAttention

    model = model_of(kind)
    make_invariant(model)
    cache = KVCache(spec_of_model(model.config, block_size=BLOCK), NUM_BLOCKS, 8)
    attention = KernelAttention(cache, (2,), torch.float32, ROOM, is_invariant=True)
    expected = _computed(model, attention, [_part(0, 0, 40), _part(1, 0, 23), _part(2, 0, 9)])
    graphs = DecodeGraphs(model, attention, FakeCapture())
    parts = [_part(0, 39, 40), _part(1, 22, 23), _part(2, 8, 9)]
    found = graphs.compute(RankStep(parts, [0, 1, 2], is_ready=True), ignore_layer, None, StepNumbers(CPU))
    return found is None or not found.equal(expected)


@torch.inference_mode()
def _computed(model: Any, attention: Any, parts: Sequence[StepPart]) -> torch.Tensor:
    """Returns the logits behind each part, `[parts, vocabulary]`."""
    numbers = StepNumbers(CPU)
    set_step(attention.step(parts, ignore_layer, numbers))
    numbers.send()
    token_ids = torch.tensor([[token for part in parts for token in part.token_ids]])
    positions = torch.cat([torch.arange(part.num_computed_tokens, part.end) for part in parts])[None]
    rows = torch.tensor(RankStep(parts, range(len(parts))).logit_rows)
    found: torch.Tensor = model(
        input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows
    ).logits[0]  # fmt: skip
    return found


def _part(key: int, begin: int, end: int) -> StepPart:
    return StepPart(
        sequence_key=key,
        token_ids=tuple((7 * place + 11 * key) % SHAPE["vocab_size"] for place in range(begin, end)),
        num_computed_tokens=begin,
        block_ids=(tuple(range(4 * key + 3, 4 * key - 1, -1)),),
        num_kv_tokens=(end,),
        sample=True,
        is_decoding=end - begin == 1,
        sampling=SamplingParams(temperature=0.0),
        choice_index=0,
        num_prompt_tokens=end,
    )
