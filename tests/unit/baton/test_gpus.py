"""A GPU that is there and cannot be used is not passed over in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.config import EngineConfig, ModelConfig, TestingConfig
from baton.errors import ModelLoadError
from baton.gpus import refuse_silent_cpu, sign_of_gpu
from engine import runners
from engine.testing import arithmetic_runner


def test_device_files_and_the_tool_are_signs_of_a_gpu(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path)}
    (tmp_path / "nvidiactl").touch()
    assert sign_of_gpu(nowhere, tmp_path) == "", "that one is not a GPU's"
    (tmp_path / "nvidia-smi").touch(0o755)
    assert sign_of_gpu(nowhere, tmp_path) == str(tmp_path / "nvidia-smi")
    (tmp_path / "nvidia0").touch()
    assert sign_of_gpu(nowhere, tmp_path) == str(tmp_path / "nvidia0")
    assert sign_of_gpu(nowhere | {"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
    for hidden in ("", " ", "-1"):
        assert sign_of_gpu(nowhere | {"CUDA_VISIBLE_DEVICES": hidden}, tmp_path) == "", "somebody wants it so"


@pytest.mark.parametrize(
    ("device", "is_available", "sign"),
    [
        ("cpu", False, "/dev/nvidia0"),
        ("auto", True, "/dev/nvidia0"),
        ("auto", False, ""),
        ("cuda", False, "/dev/nvidia0"),
    ],
)
def test_a_cpu_computes_where_it_is_asked_to_or_alone(device: str, is_available: bool, sign: str) -> None:
    refuse_silent_cpu(device, is_available, sign)


@pytest.mark.parametrize("runner", ["auto", "native", "transformers"])
def test_a_worker_beside_a_gpu_that_it_cannot_use_does_not_start(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    model = ModelConfig(path=str(tmp_path))
    with pytest.raises(
        ModelLoadError, match=r"GPU of this machine \(/\S+\); .* `baton doctor` .* model\.device to cpu"
    ):
        runners.make_runner(model, EngineConfig(runner=runner), tmp_path)


def test_numbers_alone_need_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    arithmetic_runner(ModelConfig(), EngineConfig(), TestingConfig(arithmetic=True))
