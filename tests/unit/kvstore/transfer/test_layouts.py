"""The real model's KV through other layouts: what one engine computed, another decodes, without a network between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.kv_layout import KvLayout
from baton.messages import SequenceSpec
from engine.core.engine import Engine
from engine.core.outputs import Generated, Reserved
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.core.sequence import Sequence as EngineSequence
from engine.model.kv_cache import KVCache
from engine.model.transformers_runner import TransformersRunner
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.protocol.plan import WireOptions, layout_of, plan, rank_spec, source_ranks
from router.prompt import Tokenizer
from tests.support.builders import sequence_spec

TEXT = (
    "The library of Alexandria was one of the largest and most significant libraries of the ancient world. It was part "
    "of a larger research institution, which was dedicated to the nine goddesses of the arts. Scholars came from "
) * 4
NUM_NEW_TOKENS = 16
OPTIONS = WireOptions(chunk_bytes=2**20, span_tokens=64, wire_dtype="auto")


@dataclass(frozen=True)
class Held:
    """A sequence's KV, spread over the ranks of a worker."""

    layout: KvLayout
    caches: Sequence[KVCache]
    block_ids: list[int]


def make_engine(model_dir: Path, block_size: int) -> Engine:
    config = EngineConfig(block_size=block_size, num_blocks=1024 // block_size, max_num_batched_tokens=64)
    runner = TransformersRunner(ModelConfig(path=str(model_dir), dtype="float32", device="cpu"), config)
    for group in runner.cache.groups:
        group.fill_(float("nan"))  # what others may have left
    return Engine(
        runner,
        SchedulerLimits(
            max_num_seqs=config.batch(on_gpu=False).max_num_seqs,
            max_num_batched_tokens=64,
            output_reservation=64,
        ),
    )


@pytest.fixture(scope="module")
def prefill(model_dir: Path) -> Engine:
    return make_engine(model_dir, 16)


@pytest.fixture(scope="module")
def decode(model_dir: Path, request: pytest.FixtureRequest) -> Engine:
    return make_engine(model_dir, request.param)


def make_spec(prompt: list[int], cache_seed: str) -> SequenceSpec:
    return sequence_spec(prompt, cache_seed=cache_seed.encode(), max_tokens=NUM_NEW_TOKENS)


def outputs_of(engine: Engine) -> Iterator[Generated | Reserved]:
    while True:
        batch, reserved = engine.schedule(0.0)
        yield from (output for output in reserved if isinstance(output, Reserved))
        if not batch:
            return
        for output in engine.commit(batch, engine.runner.execute(batch), 0.0):
            assert isinstance(output, Generated)
            yield output
        engine.check()


def tokens_of(engine: Engine, sequence: EngineSequence) -> list[int]:
    return [
        t
        for o in outputs_of(engine)
        if isinstance(o, Generated) and o.sequence_key == sequence.key
        for t in o.token_ids
    ]


def held_by(engine: Engine, sequence: EngineSequence) -> Held:
    return Held(layout_of(engine.runner.spec), engine.runner.caches, list(sequence.block_ids[0]))


def empty_worker(layout: KvLayout, num_tokens: int) -> Held:
    """Ranks with room for the sequence, and blocks in an order of their own."""
    num_blocks = -(-num_tokens // layout.block_size)
    caches = [KVCache(rank_spec(layout, rank), num_blocks + 3, 1) for rank in range(layout.tp_size)]
    for cache in caches:
        cache.groups[0].fill_(float("nan"))
    return Held(layout, caches, list(range(num_blocks + 2, 2, -1)))


def move(src: Held, dst: Held, num_tokens: int) -> None:
    for dst_rank in range(dst.layout.tp_size):
        for src_rank in source_ranks(src.layout, dst.layout, dst_rank):
            planned = plan(
                src.layout, src_rank, dst.layout, dst_rank, num_tokens, (0,) * len(src.layout.groups), OPTIONS
            )
            ours = BlockCopier(src.caches[src_rank], planned, src.layout, src_rank, (tuple(src.block_ids),))
            theirs = BlockCopier(dst.caches[dst_rank], planned, dst.layout, dst_rank, (tuple(dst.block_ids),))
            for chunk in planned.chunks:
                payload = torch.empty(chunk.num_bytes, dtype=torch.uint8)
                ours.gather(chunk, payload)
                theirs.scatter(chunk, payload)


def tokens_in(held: Held, num_tokens: int) -> torch.Tensor:
    """K and V of all heads, `[layers, K or V, heads, tokens, dim]`, read without plan or rows."""
    size, (group,) = held.layout.block_size, held.layout.groups
    ranks = []
    for cache in held.caches:
        blocks = cache.groups[0][:, held.block_ids[: -(-num_tokens // size)]]
        pages = blocks.view(len(group.layers), blocks.shape[1], -1, 2, size, group.k_dim)
        ranks.append(pages.permute(0, 3, 2, 1, 4, 5).flatten(3, 4)[:, :, :, :num_tokens])
    return torch.cat(ranks, dim=2)


ROUTES = {
    "straight": ((), (), 100),
    "over-three-ranks": ((3,), (16,), 128),
    "over-six-ranks-with-each-head-twice": ((6, 3), (16, 16), 100),
    "over-blocks-of-32": ((1,), (32,), 128),
    "over-everything": ((3, 1, 6), (32, 64, 16), 100),
    "over-everything-in-whole-blocks": ((3, 1, 6), (32, 64, 16), 128),
}
"""Tensor-parallel degrees and block sizes of the workers between, and the tokens that travel."""
OFTEN = {
    (32, "over-six-ranks-with-each-head-twice"),
    (16, "over-everything"),
}
"""One route to each block size of the receiver; the others are in `make chaos`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decode", "tp_sizes", "block_sizes", "num_tokens"),
    [
        pytest.param(
            block_size,
            *route,
            id=f"decode-in-blocks-of-{block_size}-{name}",
            marks=[] if (block_size, name) in OFTEN else [pytest.mark.chaos],
        )
        for block_size in (16, 32)
        for name, route in ROUTES.items()
    ],
    indirect=["decode"],
)
def test_kv_that_went_through_other_layouts_gives_the_same_tokens(
    prefill: Engine,
    decode: Engine,
    model_dir: Path,
    tp_sizes: tuple[int, ...],
    block_sizes: tuple[int, ...],
    num_tokens: int,
    request: pytest.FixtureRequest,
) -> None:
    prompt = Tokenizer.load(model_dir).encode(TEXT)[:num_tokens]
    assert len(prompt) == num_tokens
    expected = tokens_of(prefill, prefill.add(make_spec(prompt, f"{request.node.name} whole"), Purpose.GENERATE, 0.0))

    held = prefill.add(make_spec(prompt, request.node.name), Purpose.PREFILL, 0.0)
    (first,) = outputs_of(prefill)
    assert isinstance(first, Generated)
    receiver = decode.add(make_spec(prompt, request.node.name), Purpose.RECEIVE, 0.0)
    (reserved,) = outputs_of(decode)
    assert reserved == Reserved(
        sequence_key=receiver.key, block_ids=receiver.block_ids, num_tokens=len(prompt), num_cached_tokens=0
    )

    source, target = held_by(prefill, held), held_by(decode, receiver)
    at = source
    for tp_size, block_size in zip(tp_sizes, block_sizes, strict=True):
        following = empty_worker(replace(source.layout, tp_size=tp_size, block_size=block_size), num_tokens)
        move(at, following, num_tokens)
        at = following
    move(at, target, num_tokens)
    assert torch.equal(tokens_in(target, num_tokens), tokens_in(source, num_tokens))

    decode.insert(receiver, first.token_ids[0], 0.0)
    assert [first.token_ids[0], *tokens_of(decode, receiver)] == expected
    prefill.end(held)
    prefill.take_block_events()
    decode.take_block_events()
