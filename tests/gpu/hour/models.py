"""Models of random weights, and an engine that runs them as a worker does."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from engine.core.engine import Engine
from engine.core.outputs import Generated
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.model import decode_graphs
from engine.model.transformers_runner import TransformersRunner
from tests.gpu.hour.checks import FALLBACKS, is_rehearsal
from tests.gpu.hour.settings import engine_config, model_config

VOCABULARY = 2048
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 40_960,
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16_384,
}


class Shape(NamedTuple):
    """What attention depends on."""

    head_dim: int = 64
    heads: int = 8
    kv_heads: int = 2
    window: int = 0


def device_name() -> str:
    return "cpu" if is_rehearsal() else "cuda"


def synchronize() -> None:
    if not is_rehearsal():
        torch.cuda.synchronize()


def make_folder(fields: dict[str, Any] | None = None, window: int = 0, dtype: str = "float32", seed: int = 0) -> Path:
    """A model folder. The weights are as large as makes answers differ, and near ties rare."""
    folder = Path(tempfile.mkdtemp(prefix="baton-hour-"))
    common = {**SMALL, **(fields or {}), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = MistralConfig(sliding_window=window, **common) if window else LlamaConfig(**common)
    device = torch.device(device_name())
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        model: Any = (MistralForCausalLM if window else LlamaForCausalLM)(config)
    model = model.to(getattr(torch, dtype)).to_empty(device=device)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.fill_(1.0)
            else:
                weights.normal_(0.0, 1.5 * weights.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(folder, max_shard_size="4GB")
    return folder


def runner_of(
    folder: Path, *, device: str = "", dtype: str = "float32", weights: str = "exact", **engine: Any
) -> TransformersRunner:
    """A runner, whose silent fallbacks fail the check."""
    defaults: dict[str, Any] = {"num_blocks": 1024, "max_num_seqs": 64, "speculation": "off"}
    settings = engine_config(**defaults | engine)
    model = model_config(str(folder), dtype=dtype, device=device or device_name(), weights=weights)
    runner = TransformersRunner(model, settings)
    FALLBACKS.note(runner.computes.fallbacks)
    return runner


def few_graphs(*sizes: int) -> None:
    """Has runners of this process capture graphs for these numbers of sequences alone: each takes the card's time."""
    vars(decode_graphs)["graph_sizes"] = lambda most: sizes


def engine_of(
    runner: TransformersRunner, *, max_num_seqs: int = 64, step_tokens: int = 512, num_drafts: int = 0
) -> Engine:
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        output_reservation=8,
        max_draft_tokens=num_drafts,
    )
    return Engine(runner, limits)


def spec_of(
    name: str,
    prompt: Sequence[int],
    num_tokens: int,
    logprobs: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> SequenceSpec:
    sampling = SamplingParams(
        max_tokens=num_tokens, temperature=temperature, top_p=top_p, seed=0, ignore_eos=True, logprobs=logprobs
    )
    return SequenceSpec(
        request_id=name,
        choice_index=0,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        cache_seed=name.encode(),
    )


def prompts_of(lengths: Sequence[int], seed: int = 1, vocabulary: int = VOCABULARY) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


class Answer(NamedTuple):
    """The tokens of an answer, and where they were asked for the log probabilities of the two likeliest."""

    tokens: list[int]
    margins: list[float]
    logprobs: list[float]


def answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    scored: bool = False,
    temperature: float = 0.0,
) -> list[Answer]:
    """Runs prompts together, greedily if nothing else is asked for, to the end."""
    found = [Answer([], [], []) for _ in prompts]
    number_of: dict[int, int] = {}
    for number, prompt in enumerate(prompts):
        spec = spec_of(f"{time.monotonic_ns()}-{number}", prompt, num_tokens, 2 if scored else None, temperature)
        number_of[engine.add(spec, Purpose.GENERATE, now=0.0).key] = number
    while (batch := engine.schedule(0.0)[0]).parts:
        for output in engine.commit(batch, engine.runner.execute(batch), 0.0):
            if not isinstance(output, Generated):
                raise AssertionError(f"a sequence was not computed: {output}")
            answer = found[number_of[output.sequence_key]]
            answer.tokens.extend(output.token_ids)
            answer.logprobs.extend(output.scores.logprobs)
            tops = output.scores.top_logprobs
            answer.margins.extend(tops[place] - tops[place + 1] for place in range(0, len(tops), 2))
    return found


def parting(answer: Answer, reference: Answer) -> list[tuple[int, float]]:
    """Where two answers part, and the margin of the reference there; empty: they do not."""
    for place, (one, other) in enumerate(zip(answer.tokens, reference.tokens, strict=True)):
        if one != other:
            return [(place, reference.margins[place])]
    return []
