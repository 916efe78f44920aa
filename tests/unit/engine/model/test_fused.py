"""Fused modules in Triton's interpreter: kernels against torch, models against themselves, and what is left alone."""

from __future__ import annotations

import importlib.util
import logging
from concurrent.futures import Executor
from typing import Any

import pytest
import torch

from engine.model import fused_model
from engine.model.fused_model import fuse, why_not_fused
from tests.support import fused, fused_cases, graphed
from tests.support.fused_cases import kernel_difference

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux")
CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "norm": ("norm", (2, 3, 64)),
    "norm of an odd length": ("norm", (1, 5, 1000)),
    "norm of heads": ("heads", (3, 6, 16)),
    "norm of odd heads": ("heads", (1, 5, 20)),
    "sum and norm": ("sum_and_norm", (1, 3, 96)),
    "rotate": ("rotate", (3, 6, 16, 16)),
    "rotate many heads": ("rotate", (2, 21, 8, 8)),
    "rotate some dimensions": ("rotate", (2, 5, 20, 12)),
    "gate": ("gate", (1, 3, 96)),
    "gate in pieces": ("gate", (2, 5004)),
}
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 2e-2}
"""The interpreter cuts numbers of bfloat16 off."""
ALL = {"FusedNorm": 5, "FusedAttention": 2, "FusedPerceptron": 2, "FusedLayer": 2, "FusedStack": 1}
BY_HEAD = ALL | {"FusedNorm": 9}
CLIPPED: dict[str, Any] = {"clip_qkv": 3.0}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("llama", {}, ALL),
    "one KV head": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}, ALL),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 16}, ALL),
    "qwen2": ("qwen2", {}, ALL),
    "qwen3": ("qwen3", {"head_dim": 16}, BY_HEAD),
    "phi3": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ALL,
    ),
    "no rotation": ("smollm3", {"no_rope_layers": [1, 0]}, ALL),
    "experts": ("mixtral", {"num_local_experts": 4}, ALL | {"FusedPerceptron": 0}),
    "other sums": ("granite", {"residual_multiplier": 0.7}, ALL | {"FusedLayer": 0, "FusedStack": 0}),
    "norms behind": ("exaone4", {}, BY_HEAD | {"FusedLayer": 0, "FusedStack": 0}),
    "norms of all heads": ("olmo2", {}, {"FusedNorm": 9, "FusedPerceptron": 2}),
    "norms about 1, another gate": ("gemma", {"head_dim": 16}, {"FusedAttention": 2}),
    "pairs of neighbours": ("glm", {"head_dim": 16}, ALL | {"FusedAttention": 0, "FusedStack": 0}),
    "clipped": ("olmo", CLIPPED, {"FusedPerceptron": 2}),
    "norms with biases": ("stablelm", {"use_qkv_bias": True}, {"FusedAttention": 2, "FusedPerceptron": 2}),
    "norms without a mean": ("cohere", {}, {"FusedPerceptron": 2}),
    "other perceptrons": ("nemotron", {}, {"FusedAttention": 2}),
}


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_torch_does(name: str, dtype: str, interpreter: Executor) -> None:
    assert interpreter.submit(kernel_difference, *CASES[name], dtype).result() <= TOLERANCE[dtype]


@needs_triton
def test_rows_have_nothing_to_do_with_each_other(interpreter: Executor) -> None:
    assert interpreter.submit(fused_cases.rows_are_their_own).result()


@needs_triton
@pytest.mark.parametrize("name", ["one KV head", "qwen3", "phi3", "experts"])
def test_adapters_are_added_to_the_slices_of_merged_projections(name: str, interpreter: Executor) -> None:
    kind, values, modules = MODELS[name]
    difference, found, left = interpreter.submit(fused.with_adapters, kind, {**fused.SIZES, **values}).result()
    assert found == {name: count for name, count in modules.items() if count}
    assert difference <= 1e-5
    assert left == 0.0


@needs_triton
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same(name: str, interpreter: Executor) -> None:
    """What looks alike and is not is left as it was."""
    kind, values, modules = MODELS[name]
    found = interpreter.submit(fused.whole, kind, {**fused.SIZES, **values}).result()
    assert found.modules == {name: count for name, count in modules.items() if count}, found.words
    assert found.difference <= 5e-6
    assert found.num_parameters[0] == found.num_parameters[1]


@needs_triton
@pytest.mark.slow
def test_halves_come_out_as_near_as_halves_are(interpreter: Executor) -> None:
    found = interpreter.submit(fused.whole, "llama", fused.SIZES, "float16").result()
    assert found.modules == ALL
    assert found.difference <= 5e-3


@needs_triton
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("tied", ["2 LlamaAttention, since its weights are others', too"]),
        ("quantized", ["1 LlamaAttention, since it has other parts"]),
        ("one bias", ["1 LlamaAttention, since it has other parts"]),
        ("limited gate", ["1 LlamaMLP, since its activation is not SiLU"]),
        ("other type", ["1 LlamaRMSNorm, since it has other parts"]),
        ("sinks", ["1 LlamaAttention, since it has other parts"]),
    ],
)
def test_a_part_that_is_not_what_it_seems_is_left(case: str, words: list[str], interpreter: Executor) -> None:
    left, is_fused = interpreter.submit(fused_cases.left_alone, case).result()
    assert is_fused
    assert left[: len(words)] == [f"by transformers' own: {word}" for word in words]


@needs_triton
def test_weights_move_and_are_there_once(interpreter: Executor) -> None:
    found = interpreter.submit(fused_cases.weights_have_moved).result()
    assert found["bias"]
    assert len(set(found["bytes"])) == 1
    assert "self_attn.qkv_proj.weight" in found["names"]
    assert not [name for name in found["names"] if ".q_proj" in name or ".gate_proj" in name]


@needs_triton
def test_another_model_is_untouched(interpreter: Executor) -> None:
    assert interpreter.submit(fused_cases.another_model_is_untouched).result()


def test_on_a_cpu_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = graphed.model_of()
    before = [(name, type(module)) for name, module in model.named_modules()]
    fuse(model, 1)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert "by transformers' own modules: the device is no NVIDIA GPU" in caplog.text


def test_kernels_that_do_not_run_leave_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused_model, "why_not_fused", lambda *args: None)
    monkeypatch.setattr("engine.model.fused_parts.norm_of", _failing)
    model = graphed.model_of()
    fuse(model, 1)
    assert "by transformers' own modules: RuntimeError: no C compiler" in caplog.text
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"


def _failing(*args: Any) -> None:
    raise RuntimeError("no C compiler")


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert why_not_fused(gpu, torch.bfloat16, 1) is None
    assert "several ranks" in (why_not_fused(gpu, torch.bfloat16, 2) or "")
    assert "do not support" in (why_not_fused(gpu, torch.float64, 1) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "older" in (why_not_fused(gpu, torch.bfloat16, 1) or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not_fused(gpu, torch.bfloat16, 1) == "Triton is not installed"
