"""Makes the environment of a fake vLLM, and reads the report that a host in it has written."""

from __future__ import annotations

import json
import venv
from pathlib import Path
from typing import Any

from baton.config import ModelConfig
from tests.support.waiting import wait_until

VERSION, TORCH = "0.33.7", "0.1+of.the.host"
REPORT = "host.json"


def fake_vllm(folder: Path, version: str = VERSION, **given: Any) -> str:
    """Makes an environment in a folder, and returns its interpreter: the value of `engine.vllm_python`.

    Args:
        version: vLLM's; empty: the environment has no vLLM.
        given: how the fake behaves; see `hosted.Given`.
    """
    environment = folder / "vllm"
    venv.EnvBuilder(symlinks=True).create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    if version:
        (packages / f"vllm-{version}.dist-info").mkdir()
        (packages / f"vllm-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
    (packages / "torch.py").write_text(f"__version__ = {TORCH!r}\n")
    (packages / "fake_vllm").symlink_to(Path(__file__).parent)
    (packages / "fake_vllm.pth").write_text("import fake_vllm.redirect\n")
    behave(str(environment / "bin" / "python"), **given)
    return str(environment / "bin" / "python")


def model_without_weights(folder: Path) -> ModelConfig:
    """Writes the folder of a model that a fake serves."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "arithmetic", "eos_token_id": 0}))
    return ModelConfig(path=str(folder), revision="arithmetic")


def behave(python: str, **given: Any) -> None:
    """Changes how hosts behave that are started from now on."""
    (_environment(python) / "given.json").write_text(json.dumps(given))


def reported_by(python: str) -> dict[str, Any]:
    """Returns the report of the last host that started in this environment; see `hosted.write_report`."""
    path = _environment(python) / REPORT
    report: dict[str, Any] = wait_until(lambda: json.loads(path.read_text()), not_yet=(OSError, ValueError))
    return report


def _environment(python: str) -> Path:
    return Path(python).parents[1]
