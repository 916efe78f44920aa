"""Types of KV pages against each other: what decoding with a long context costs, and how far predictions differ.

Pages and weights of 8-bit floats are for GPUs: here they are computed by torch, and compared alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.config import EngineConfig, ModelConfig, load
from deploy.models import cache_dir, resolve
from engine.core.runner import StepPart, ignore_layer
from engine.model.fp8_linear import quantize
from engine.model.logits_runner import NO_SAMPLING, LogitsRunner
from engine.model.rank_step import RankStep
from engine.model.transformers_runner import TransformersRunner
from engine.native.runner import NativeRunner
from router.prompt import Tokenizer
from tests.bench.report import Report, Table
from tests.bench.stats import interleaved, ratio, spread

ROOT = Path(__file__).parents[2]
KV_DTYPES = ("float32", "bfloat16", "int8")
FOR_GPUS = ("fp8", "fp8 weights")
CONTEXT, CHUNK = 1024, 512
NUM_STREAMS = (1, 8, 16)
PASSAGE_TOKENS = 768
"""Of a passage; what is compared are the predictions of its second half."""


@dataclass(frozen=True, slots=True)
class _Arm:
    """A runner over pages of one type. Each of its streams has blocks for the context, and one more for steps."""

    runner: LogitsRunner

    @classmethod
    def started(cls, path: Path, kv_dtype: str) -> _Arm:
        num_blocks = NUM_STREAMS[-1] * (CONTEXT // 16 + 1)
        config = EngineConfig(num_blocks=num_blocks, max_num_seqs=16, max_num_batched_tokens=CHUNK, kv_dtype=kv_dtype)
        return cls(
            NativeRunner(ModelConfig(path=str(path), device="cpu"), config, cache_dir(load().cluster) / "native")
        )

    @classmethod
    def for_gpus(cls, path: Path, name: str) -> _Arm:
        """In one stream, by transformers on this CPU."""
        config = EngineConfig(
            num_blocks=PASSAGE_TOKENS // 16 + 1,
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK,
            kv_dtype="fp8" if name == "fp8" else "auto",
        )
        runner = TransformersRunner(ModelConfig(path=str(path), device="cpu"), config)
        if name == "fp8 weights":
            quantize(runner.rank.model)
        return cls(runner)

    def fill(self, token_ids: list[int]) -> float:
        """Computes the first stream's context and copies it to the others. Returns the CPU time of the former."""
        began_s = time.process_time()
        for begin in range(0, CONTEXT, CHUNK):
            self.compute([self.part(token_ids, begin, begin + CHUNK, 0)])
        took_s = time.process_time() - began_s
        (group,), size = self.runner.caches[0].groups, CONTEXT // 16 + 1
        for stream in range(1, NUM_STREAMS[-1]):
            group[:, stream * size : (stream + 1) * size] = group[:, :size]
        return took_s

    def decode(self, token_ids: list[int], num_streams: int, num_steps: int) -> float:
        """Computes steps behind the context. Returns CPU seconds a token."""
        began_s = time.process_time()
        for at in range(CONTEXT, CONTEXT + num_steps):
            self.compute([self.part(token_ids, at, at + 1, stream) for stream in range(num_streams)])
        return (time.process_time() - began_s) / (num_streams * num_steps)

    def compute(self, parts: list[StepPart], num_scored: int = 0) -> torch.Tensor:
        step = RankStep(parts, range(len(parts)), (), [num_scored] if num_scored else [])
        return self.runner._compute(step, ignore_layer)

    def part(self, token_ids: list[int], begin: int, end: int, stream: int) -> StepPart:
        size = CONTEXT // 16 + 1
        return StepPart(
            sequence_key=stream,
            token_ids=tuple(token_ids[begin:end]),
            num_computed_tokens=begin,
            block_ids=(tuple(range(stream * size, (stream + 1) * size)),),
            num_kv_tokens=(end,),
            sample=True,
            is_decoding=begin + 1 == end,
            sampling=NO_SAMPLING,
            choice_index=0,
            num_prompt_tokens=end,
        )

    def predictions(self, token_ids: list[int]) -> torch.Tensor:
        """Returns log probabilities of what follows each token of the second half, `[tokens, vocabulary]`."""
        half = PASSAGE_TOKENS // 2
        self.compute([self.part(token_ids, 0, half, 0)])
        last, *others = self.compute([self.part(token_ids, half, PASSAGE_TOKENS, 0)], half - 1)
        return torch.stack([*others, last]).log_softmax(-1)


def run(quick: bool) -> Report:
    path = Path(resolve(ModelConfig(), cache_dir(load().cluster)).path)
    tokenizer = Tokenizer.load(path)
    passages = [
        tokenizer.encode(page.read_text()) for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    ]
    passages = [tokens[:PASSAGE_TOKENS] for tokens in passages if len(tokens) >= PASSAGE_TOKENS]
    arms = {name: _Arm.started(path, name) for name in KV_DTYPES}
    compared = arms | {name: _Arm.for_gpus(path, name) for name in FOR_GPUS}
    long = [token for passage in passages for token in passage]
    tables = [_speed(arms, long, 2 if quick else 5), _quality(compared, passages[: 4 if quick else 20])]
    return Report("kv_dtypes", tables)


def _speed(arms: dict[str, _Arm], token_ids: list[int], num_rounds: int) -> Table:
    table = Table(
        f"KV pages: SmolLM2-135M, native, 1 thread, CPU time, {CONTEXT} tokens of context, {num_rounds} rounds",
        ("", "streams", *(f"{name} tok/s" for name in arms), *(f"{name} / float32" for name in KV_DTYPES[1:])),
    )
    taken: dict[tuple[int, str], list[float]] = {}
    for round_, name in enumerate(interleaved(tuple(arms), num_rounds + 1)):
        filled_s = arms[name].fill(token_ids) / CONTEXT
        for streams in NUM_STREAMS:
            took_s = arms[name].decode(token_ids, streams, 16 if streams == 1 else 4)
            if round_ >= len(arms):  # the first round warms up
                taken.setdefault((streams, name), []).append(took_s)
        if round_ >= len(arms):
            taken.setdefault((0, name), []).append(filled_s)
    for streams in (*NUM_STREAMS, 0):
        rates = [spread([1 / took_s for took_s in taken[streams, name]]) for name in arms]
        gains = [ratio(taken[streams, KV_DTYPES[0]], taken[streams, name]) for name in KV_DTYPES[1:]]
        what = ("decode", str(streams)) if streams else (f"prefill of {CONTEXT}", "1")
        table.rows.append((*what, *rates, *gains))
    return table


def _quality(arms: dict[str, _Arm], passages: list[list[int]]) -> Table:
    table = Table(
        f"Narrower pages and fp8 weights against float32, {len(passages)} passages of {PASSAGE_TOKENS} tokens",
        ("", "KL divergence, nats a token", "largest of a passage", "same most probable token", "perplexity / float32"),
        note="of each passage's second half; means of the passages",
    )
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (*KV_DTYPES[1:], *FOR_GPUS)}
    for passage in passages:
        expected = arms[KV_DTYPES[0]].predictions(passage)
        follows = torch.tensor(passage[PASSAGE_TOKENS // 2 + 1 :])[:, None]
        for name, of_passages in found.items():
            got = arms[name].predictions(passage)
            divergence = (expected.exp() * (expected - got)).sum(-1).mean()
            agreement = (expected.argmax(-1) == got.argmax(-1)).float().mean()
            loss = (expected[:-1].gather(1, follows) - got[:-1].gather(1, follows)).mean()
            of_passages.append((float(divergence), float(agreement), float(loss.exp())))
    for name, of_passages in found.items():
        divergences, agreements, losses = zip(*of_passages, strict=True)
        means = [sum(values) / len(values) for values in (divergences, agreements, losses)]
        table.rows.append((name, f"{means[0]:.2e}", f"{max(divergences):.2e}", f"{means[1]:.4f}", f"{means[2]:.4f}"))
    return table
