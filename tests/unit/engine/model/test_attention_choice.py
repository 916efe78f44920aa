"""Which attention is taken, and why."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from baton.errors import ModelLoadError
from engine.core.runner import KVSpec, LayerGroup, OnLayerDone, StepPart
from engine.model import attention_choice
from engine.model.attention_choice import (
    AttentionWish,
    TorchAttention,
    attention_of,
    why_not_flashinfer,
    why_not_kernels,
)
from engine.model.attention_step import AttentionStep
from engine.model.kv_cache import KVCache
from engine.model.table_rows import TableRoom
from engine.uploads import StepNumbers
from tests.support.shapes import shape_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROOM = TableRoom(num_sequences=2, num_tokens=64)


def spec_of(dim: int = 64, dtype: str = "float32") -> KVSpec:
    values: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "k_dim": dim, "v_dim": dim, "dtype": dtype}
    return KVSpec((LayerGroup(name="all", layers=(0, 1), **values),))


SHAPE = shape_of(spec_of(), 2)


def why_not(spec: KVSpec, num_sharing: int, dtype: torch.dtype, device: torch.device) -> str | None:
    return why_not_kernels(spec, shape_of(spec, num_sharing), dtype, device)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return monkeypatch


def test_what_fits_is_for_the_kernels(on_gpu: pytest.MonkeyPatch) -> None:
    assert why_not(spec_of(), 4, torch.float32, GPU) is None
    assert why_not(spec_of(256, "bfloat16"), 16, torch.bfloat16, GPU) is None
    assert why_not(spec_of(128, "float8_e4m3fn"), 16, torch.bfloat16, GPU) is None


@pytest.mark.parametrize(
    ("spec", "num_sharing", "dtype", "device", "reason"),
    [
        (spec_of(), 4, torch.float32, CPU, "no NVIDIA GPU"),
        (spec_of(288), 4, torch.float32, GPU, "288 dimensions"),
        (spec_of(), 17, torch.float32, GPU, "17 query heads"),
        (spec_of(), 4, torch.bfloat16, GPU, "computes in bfloat16, its pages are of float32"),
        (spec_of(64, "float64"), 4, torch.float64, GPU, "do not support float64"),
    ],
)
def test_what_does_not_fit_is_named(
    spec: KVSpec, num_sharing: int, dtype: torch.dtype, device: torch.device, reason: str, on_gpu: pytest.MonkeyPatch
) -> None:
    assert reason in (why_not(spec, num_sharing, dtype, device) or "")


def test_what_is_missing_is_named(on_gpu: pytest.MonkeyPatch) -> None:
    on_gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability is 7.5" in (why_not(spec_of(), 4, torch.float32, GPU) or "")
    on_gpu.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert why_not(spec_of(), 4, torch.float32, GPU) is None
    assert "is 8.6, less than 8.9" in (why_not(spec_of(64, "float8_e4m3fn"), 4, torch.float32, GPU) or "")
    on_gpu.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not(spec_of(), 4, torch.float32, GPU) == "Triton is not installed"


def test_a_cpu_has_torchs_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(
        attention_of(KVCache(spec_of(), 4, 1), SHAPE, torch.float32, ROOM, AttentionWish()),
        TorchAttention,
    )
    assert "attention is torch's own: the device is no NVIDIA GPU" in caplog.text


class Off(TorchAttention):
    """Kernels that compute something else by a factor."""

    factor = 1.0

    def __init__(
        self, cache: KVCache, sharing: Sequence[int], dtype: torch.dtype, room: TableRoom, *, is_invariant: bool
    ) -> None:
        super().__init__(cache)

    def ways(self) -> Sequence[TorchAttention]:
        return [self]

    def step(self, parts: Sequence[StepPart], on_layer_done: OnLayerDone, numbers: StepNumbers) -> AttentionStep:
        return OffStep(super().step(parts, on_layer_done, numbers), self.factor)


class OffStep:
    def __init__(self, step: AttentionStep, factor: float) -> None:
        self.step = step
        self.factor = factor

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.step.attend(*args, **kwargs) * self.factor


class Failing(Off):
    def step(self, parts: Sequence[StepPart], on_layer_done: OnLayerDone, numbers: StepNumbers) -> AttentionStep:
        raise RuntimeError("no C compiler")


@pytest.mark.parametrize(
    ("factor", "is_taken", "words"),
    [(1.0, True, "own kernels"), (1.01, False, "differs from it by"), (float("nan"), False, "differs from it by inf")],
)
def test_kernels_are_taken_where_they_prove_right(
    factor: float, is_taken: bool, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kernels = ModuleType("kernels")
    kernels.KernelAttention = type("Scaled", (Off,), {"factor": factor})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine.model.kernel_attention", kernels)
    monkeypatch.setattr(attention_choice, "why_not_kernels", lambda *args: None)
    found = attention_of(KVCache(spec_of(), 4, 1), SHAPE, torch.float32, ROOM, AttentionWish())
    assert isinstance(found, Off) == is_taken
    assert words in caplog.text


def test_kernels_that_do_not_run_are_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kernels = ModuleType("kernels")
    kernels.KernelAttention = Failing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine.model.kernel_attention", kernels)
    monkeypatch.setattr(attention_choice, "why_not_kernels", lambda *args: None)
    assert type(attention_of(KVCache(spec_of(), 4, 1), SHAPE, torch.float32, ROOM, AttentionWish())) is TorchAttention
    assert "the kernels do not run here: RuntimeError: no C compiler" in caplog.text


@pytest.mark.parametrize(
    ("kernels_run", "words"), [(True, "the kernels' depends on what is beside a token"), (False, "no NVIDIA GPU")]
)
def test_what_must_not_depend_on_its_batch_is_not_torchs(
    kernels_run: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own stands in for kernels that do."""
    kernels = ModuleType("kernels")
    kernels.KernelAttention = Off  # type: ignore[attr-defined]
    if kernels_run:
        monkeypatch.setitem(sys.modules, "engine.model.kernel_attention", kernels)
        monkeypatch.setattr(attention_choice, "why_not_kernels", lambda *args: None)
    sentence = f"engine.batch_invariant is not supported by torch's attention: .*{words}"
    with pytest.raises(ModelLoadError, match=sentence):
        attention_of(KVCache(spec_of(), 4, 1), SHAPE, torch.float32, ROOM, AttentionWish(is_invariant=True))


FLASHINFER = AttentionWish(by_flashinfer=True)


def test_what_flashinfer_cannot_decode_is_named(on_gpu: pytest.MonkeyPatch) -> None:
    spec = spec_of(128, "bfloat16")
    uneven = KVSpec((dataclasses.replace(spec.groups[0], v_dim=64),))
    assert why_not_flashinfer(spec, SHAPE, torch.bfloat16) is None
    assert "does not compute in float32" in (why_not_flashinfer(spec_of(), SHAPE, torch.float32) or "")
    assert "keys and of values differ in size" in (why_not_flashinfer(uneven, SHAPE, torch.bfloat16) or "")
    assert "pages are not of the model's bfloat16" in (
        why_not_flashinfer(spec_of(128, "float8_e4m3fn"), SHAPE, torch.bfloat16) or ""
    )
    on_gpu.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed (pip install flashinfer-python)" in (why_not_flashinfer(spec, SHAPE, torch.bfloat16) or "")


@pytest.mark.parametrize(
    ("factor", "in_graphs", "is_taken"), [(1.0, 1.0, True), (1.01, 1.0, False), (1.0, 1.01, False)]
)
def test_flashinfer_is_taken_where_it_proves_right_and_else_refused(
    factor: float, in_graphs: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Scaled(Off):
        def __init__(self, *asked: Any) -> None:
            super().__init__(*asked, is_invariant=False)

        def ways(self) -> Sequence[TorchAttention]:
            return [self, InGraphs(self.cache, (2,), torch.float32, ROOM)]

    class InGraphs(Scaled):
        factor = in_graphs

    caplog.set_level(logging.INFO)
    Scaled.factor = factor
    decodes = ModuleType("decodes")
    decodes.FlashInferAttention = Scaled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine.model.flashinfer_attention", decodes)
    for name in ("why_not_kernels", "why_not_flashinfer"):
        monkeypatch.setattr(attention_choice, name, lambda *args: None)
    asked = KVCache(spec_of(), 4, 1), SHAPE, torch.float32, ROOM, FLASHINFER
    if is_taken:
        assert isinstance(attention_of(*asked), Scaled)
        assert "attention is by FlashInfer for decodes and the project's own kernels" in caplog.text
    else:
        with pytest.raises(ModelLoadError, match=r"attention flashinfer is not available: .* differs from it by"):
            attention_of(*asked)


def test_flashinfer_is_refused_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = KVCache(spec_of(), 4, 1), SHAPE, torch.float32, ROOM, FLASHINFER
    with pytest.raises(ModelLoadError, match="is not available: the device is no NVIDIA GPU; set it to auto"):
        attention_of(*asked)
    monkeypatch.setattr(attention_choice, "why_not_kernels", lambda *args: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="flashinfer is not available: it is not installed"):
        attention_of(*asked)
