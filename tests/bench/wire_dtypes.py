"""What a narrower wire costs in quality: the real model's predictions over a prefix that went through it.

Each passage is cut in half. The first half is computed in one cache and moved to another by the transfer's own plan and
rows; the second half is then predicted over the moved KV, teacher-forced: each position sees the text itself, not what
was predicted before. The float32 wire moves the very bits, so its predictions are those of a worker that computed the
prefix itself, and everything else is compared with them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.config import EngineConfig, ModelConfig, load
from baton.engine.core.runner import ignore_layer
from baton.engine.core.scheduler import Part
from baton.engine.model.attention import begun_blocks, set_step, step_context
from baton.engine.model.kv_cache import KVCache
from baton.engine.model.transformers_runner import TransformersRunner
from deploy.models import cache_dir, resolve
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.protocol.layout import layout_of
from kvstore.transfer.protocol.plan import WireOptions, plan
from router.prompt import Tokenizer
from tests.bench.report import Report, Table

WIRES = ("float32", "bfloat16", "float16", "int8")
NUM_NEXT = 64
"""Positions after the prefix whose logits are compared; the perplexity is over all of them."""
REPOSITORY = Path(__file__).parents[2]
TEXTS = (
    "README.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "tests/bench/README.md",
    "baton/engine/core/engine.py",
    "router/service.py",
)


@dataclass(frozen=True, slots=True)
class Found:
    """Of one passage over one wire."""

    logits: torch.Tensor
    """`[positions, vocabulary]`, of the second half but its last token's."""
    targets: torch.Tensor
    """`[positions]`: the tokens that follow."""
    num_bytes: int
    move_s: float

    @property
    def loss(self) -> float:
        """Mean negative log likelihood of a token, in nats."""
        return torch.nn.functional.cross_entropy(self.logits, self.targets).item()


class Model:
    """The runner's model over its own cache, which plays the destination; the source is another cache."""

    def __init__(self, path: Path, num_tokens: int) -> None:
        config = EngineConfig(num_threads=1, num_blocks=-(-num_tokens // 16), max_num_seqs=1)
        self._runner = TransformersRunner(ModelConfig(path=str(path), dtype="float32", device="cpu"), config)
        self._source = KVCache(self._runner.cache.spec, config.num_blocks, 1)
        self._layout = layout_of(self._runner.cache.spec)
        self._blocks = tuple(range(config.num_blocks))

    def predict(self, tokens: list[int], num_prefix: int) -> dict[str, Found]:
        """By wire data type; the prefix is computed once."""
        self._forward(self._source, tokens[:num_prefix], 0)
        found = {}
        for wire in WIRES:
            planned = plan(self._layout, 0, self._layout, 0, num_prefix, 0, WireOptions(4 * 2**20, 512, wire))
            ours, theirs = (
                BlockCopier(cache, planned, self._layout, 0, self._blocks, None)
                for cache in (self._source, self._runner.cache)
            )
            start = time.perf_counter()
            for chunk in planned.chunks:
                payload = torch.empty(chunk.num_bytes, dtype=torch.uint8)
                ours.gather(chunk, payload)
                theirs.scatter(chunk, payload)
            move_s = time.perf_counter() - start
            logits = self._forward(self._runner.cache, tokens[num_prefix:], num_prefix)
            found[wire] = Found(logits[:-1], torch.tensor(tokens[num_prefix + 1 :]), planned.num_bytes, move_s)
        return found

    @torch.inference_mode()
    def _forward(self, cache: KVCache, tokens: list[int], start: int) -> torch.Tensor:
        """Computes tokens at `start`, `start + 1`, ... and returns all their logits."""
        blocks = self._blocks[: -(-(start + len(tokens)) // cache.spec.block_size)]
        part = Part(tuple(tokens), start, blocks)
        if begun := begun_blocks(cache, [part]):
            cache.clear_blocks(begun)
        set_step(step_context(cache, [part], ignore_layer))
        positions = torch.arange(start, start + len(tokens))[None]
        logits: torch.Tensor = self._runner.rank.model(
            input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False
        ).logits[0]
        return logits


def passages(tokenizer: Tokenizer, num_tokens: int, num_texts: int) -> list[list[int]]:
    """The beginnings of files of this repository: prose, tables, a licence, code."""
    found = [tokenizer.encode((REPOSITORY / name).read_text(encoding="utf-8"))[:num_tokens] for name in TEXTS]
    assert all(len(tokens) == num_tokens for tokens in found)
    return found[:num_texts]


def run(quick: bool) -> Report:
    path = resolve(ModelConfig(), cache_dir(load().cluster)).path
    num_tokens, num_texts = (192, 2) if quick else (400, len(TEXTS))
    num_prefix = num_tokens // 2
    model = Model(path, num_tokens)
    found = [model.predict(tokens, num_prefix) for tokens in passages(Tokenizer.load(path), num_tokens, num_texts)]
    table = Table(
        f"Wire data types: SmolLM2-135M, float32 pools, {num_texts} passages of {num_tokens} tokens, half handed over",
        (
            "wire", "bytes/token", f"max |Δlogit|, next {NUM_NEXT}", f"mean |Δlogit|, next {NUM_NEXT}",
            "same best token", "perplexity", "to float32", "worst passage", "move ms",
        ),
        note="|Δlogit|: against the float32 wire, of the whole vocabulary. Same best token: of all predictions.",
    )  # fmt: skip
    for wire in WIRES:
        pairs = [(by_wire["float32"], by_wire[wire]) for by_wire in found]
        changes = torch.stack([(got.logits - base.logits)[:NUM_NEXT].abs() for base, got in pairs])
        num_same = sum(int((got.logits.argmax(1) == base.logits.argmax(1)).sum()) for base, got in pairs)
        losses = [(base.loss, got.loss) for base, got in pairs]
        base_loss, loss = (sum(side) / len(losses) for side in zip(*losses, strict=True))
        table.rows.append(
            (
                wire,
                f"{pairs[0][1].num_bytes / (-(-num_prefix // 16) * 16):,.0f}",
                f"{changes.max().item():.4f}",
                f"{changes.mean().item():.5f}",
                f"{num_same} of {sum(len(got.targets) for _, got in pairs)}",
                f"{math.exp(loss):.4f}",
                f"{math.expm1(loss - base_loss):+.3%}",
                f"{max((math.expm1(b - a) for a, b in losses), key=abs):+.3%}",
                f"{sum(got.move_s for _, got in pairs) / len(pairs) * 1e3:.1f}",
            )
        )
    return Report("wire_dtypes", [table])
