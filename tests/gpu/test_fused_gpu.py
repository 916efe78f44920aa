"""Fused modules on a GPU, against transformers' own there; the kernels of a step with and without.

Of the project it needs what `first_hour.py` does, and pytest: `pytest --noconftest tests/gpu/test_fused_gpu.py -s`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.runner import ignore_layer
from engine.model import fused_model
from engine.model.rank_step import RankStep
from tests.gpu.hour.models import LLAMA_8B, make_folder, runner_of
from tests.support import fused
from tests.support.graphed import part_of

CUDA = torch.device("cuda")
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Over the largest logit."""
SHAPE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ALL = {"FusedNorm": 5, "FusedAttention": 2, "FusedPerceptron": 2, "FusedLayer": 2, "FusedStack": 1}
KINDS = {"llama": ALL, "qwen2": ALL, "qwen3": ALL | {"FusedNorm": 9}, "phi3": ALL, "gemma": {"FusedAttention": 2}}
NUM_LAYERS = 4
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    """Some layers of an 8B Llama, 1.8 GB."""
    return make_folder(LLAMA_8B | {"num_hidden_layers": NUM_LAYERS, "vocab_size": 2048}, dtype="bfloat16")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_the_same(kind: str, dtype: str) -> None:
    found = fused.whole(kind, SHAPE, dtype, CUDA)
    print(f"{kind}, {dtype}: {found.difference:.2g}; {'; '.join(found.words)}")
    assert found.difference <= TOLERANCE[dtype]
    assert found.modules == KINDS[kind], found.words


def test_a_step_has_few_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_kernels, logits = {}, {}
    for name in ("fused", "transformers"):
        if name == "transformers":
            monkeypatch.setattr(fused_model, "why_not_fused", lambda *args: "it is compared with")
        torch.cuda.empty_cache()
        rank = runner_of(folder, dtype="bfloat16").rank
        for group in rank.cache.groups:
            group.normal_(generator=torch.Generator(CUDA).manual_seed(1))
        assert rank._graphs is not None
        for batch in (1, 64):
            step = RankStep([part_of(key, 7 + key, 37 + key % 20) for key in range(batch)], range(batch))
            logits[name, batch] = rank.compute(step, ignore_layer).float()
            activities = [torch.profiler.ProfilerActivity.CUDA]
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=activities, acc_events=True) as profile:
                rank.compute(step, ignore_layer)
                torch.cuda.synchronize()
            num_kernels[name, batch] = sum(event.device_type.name == "CUDA" for event in profile.events())
            began = time.perf_counter()
            for _ in range(50):
                rank.compute(step, ignore_layer)
            torch.cuda.synchronize()
            ms = (time.perf_counter() - began) * 20
            print(
                f"{name}, {batch} streams, {NUM_LAYERS} layers: {num_kernels[name, batch]} kernels, {ms:.3f} ms a step"
            )
        del rank
    for batch in (1, 64):
        one, other = logits["fused", batch], logits["transformers", batch]
        assert (one - other).abs().max() <= TOLERANCE["bfloat16"] * other.abs().max()
        assert num_kernels["fused", batch] < 0.5 * num_kernels["transformers", batch]


def test_no_weights_are_there_twice(folder: Path) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    rank = runner_of(folder, dtype="bfloat16").rank
    torch.cuda.empty_cache()
    weights = sum(weight.nbytes for weight in rank.model.parameters())
    pages = sum(group.nbytes for group in rank.cache.groups)
    peak, held = torch.cuda.max_memory_reserved() - before, torch.cuda.memory_reserved() - before
    print(f"weights {weights >> 20}, pages {pages >> 20}, held {held >> 20}, at most {peak >> 20} MiB")
    assert held - weights - pages < (1 << 30)
