"""What a rank says that it computes with, and what of it is slower than it could be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from baton.cluster import MAX_REASON, Computes
from engine.core.draft_runner import DraftedRunner
from engine.model.attention_choice import TorchAttention
from engine.model.fused_model import Fused, fuse
from engine.model.kv_cache import KVCache
from engine.model.transformers_model import chosen
from engine.testing import ArithmeticRunner
from tests.support import graphed
from tests.unit.engine.model.test_attention_choice import spec_of

TORCH = TorchAttention(KVCache(spec_of(), 4, 1), "the kernels do not run here: RuntimeError: no C compiler")
KERNELS: Any = SimpleNamespace(name="kernels")
GRAPHS: Any = SimpleNamespace(sizes=(1, 2, 4, 8))


def test_a_gpu_names_each_fallback_with_its_reason() -> None:
    fused = Fused(12, ("2 LlamaMLP, since it has a bias", "1 LlamaRMSNorm, since it differs"))
    assert chosen("Tesla T4", TORCH, "attention is torch's own", fused) == Computes(
        gpu="Tesla T4",
        attention="torch",
        num_fused=12,
        fallbacks=(
            "attention is by torch: the kernels do not run here: RuntimeError: no C compiler",
            "decode steps are no CUDA graphs: attention is torch's own",
            "layers are by transformers' own modules: 2 LlamaMLP, since it has a bias",
            "layers are by transformers' own modules: 1 LlamaRMSNorm, since it differs",
        ),
    )
    assert chosen("NVIDIA H200", KERNELS, GRAPHS, Fused(129, ())) == Computes(
        gpu="NVIDIA H200", attention="kernels", num_graphs=4, num_fused=129
    )


def test_a_cpu_has_nothing_to_fall_back_from() -> None:
    fused = fuse(graphed.model_of(), 1)
    assert fused == Fused(0, ("the device is no NVIDIA GPU",))
    assert chosen("", TORCH, "attention is torch's own", fused) == Computes(attention="torch")


def test_a_reason_is_short_and_safe_to_show() -> None:
    failed = TorchAttention(TORCH.cache, "\x1b[31m" + "x" * 1000)
    (said, *_) = chosen("L4", failed, GRAPHS, Fused(0, ())).fallbacks
    assert said == f"attention is by torch:  [31m{'x' * (MAX_REASON - 5)}"


def test_a_draft_models_fallbacks_are_told_as_its_own() -> None:
    target, draft = ArithmeticRunner(8), ArithmeticRunner(8)
    target.computes = Computes(gpu="L4", dtype="float16", attention="kernels", fallbacks=("a: b",))
    draft.computes = Computes(gpu="L4", dtype="float16", attention="torch", fallbacks=("attention is by torch: c",))
    found = DraftedRunner(target, draft).computes
    assert (found.attention, found.fallbacks) == ("kernels", ("a: b", "draft model, attention is by torch: c"))


def test_a_step_on_a_cpu_says_what_a_token_took(tmp_path: Any) -> None:
    """By which it is known how long a healthy step may take before any has ended."""
    from baton.config import EngineConfig, ModelConfig
    from engine.model.transformers_runner import TransformersRunner
    from tests.integration.test_engine_models import save_tiny

    save_tiny("llama", {}, tmp_path)
    runner = TransformersRunner(ModelConfig(path=str(tmp_path), device="cpu"), EngineConfig(num_blocks=8))
    assert 0 < runner.token_s < 10
    assert runner.computes == Computes(
        dtype="float32", weights="exact", kv_dtype="float32", attention="torch", num_ranks=1
    )
    assert torch.get_num_threads() == 1
