"""Checks of the environment in which vLLM is installed (`engine.vllm_python`). They import none of its packages."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from baton.config import Config
from baton.errors import ModelLoadError
from deploy.doctor.checks import Check, judged, names
from engine.vllm.versions import ASKING_S, SUPPORTED, installed_version, require_supported

LEAST_PYTHON = (3, 11)
"""Oldest Python that runs Baton's modules, which vLLM's process imports."""
NEEDED = ("torch", "numpy", "llguidance")
"""Packages that vLLM's process needs for Baton's sampler. vLLM installs all of them on usual machines."""
FIX = (
    f"set engine.vllm_python to the interpreter of an environment with vLLM {' or '.join(SUPPORTED)}; docs/engines.md "
    "shows how to install it"
)
_ASK = f"""
import importlib.util, json, pathlib, re, sys
found = {{name: importlib.util.find_spec(name) for name in {NEEDED}}}
torch = found["torch"] and found["torch"].origin
text = pathlib.Path(torch).with_name("version.py").read_text() if torch else ""
def value(name):
    match = re.search(name + r"\\b.*= *'([^']+)'", text)
    return match[1] if match else ""
print(json.dumps({{"python": sys.version_info[:3], "torch": value("__version__"), "cuda": value("cuda"),
                  "missing": [name for name, spec in found.items() if not spec]}}))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """Properties of a Python environment that vLLM's process depends on."""

    python: tuple[int, ...]
    """Version of its interpreter."""
    torch: str
    """Version of torch; empty: torch is missing."""
    cuda: str
    """CUDA version that torch is built for; empty: a CPU build, or torch is missing."""
    missing: tuple[str, ...]
    """Names among `NEEDED` that are not installed."""


def checks(config: Config) -> Iterator[Check]:
    """Check that the interpreter runs, and that its environment has a supported vLLM and what Baton's sampler needs."""
    python = config.engine.vllm_python
    try:
        version = installed_version(python)
        require_supported(version)
    except ModelLoadError as error:
        if error.__cause__:
            yield Check("vllm", "fail", f"engine.vllm_python {python} does not run: {_reason(error.__cause__)}", FIX)
        else:
            found, _, fix = str(error).partition("; ")
            yield Check("vllm", "fail", found, f"{fix} ({python})")
        return
    asked = environment(python)
    if asked is None:
        yield Check("vllm", "fail", f"{python} has vLLM {version}, but does not report its other packages", FIX)
        return
    shown = ".".join(map(str, asked.python))
    if asked.python < LEAST_PYTHON:
        yield Check(
            "vllm",
            "fail",
            f"{python} is Python {shown}; vLLM's process imports modules of Baton, which need Python 3.11 or newer",
            FIX,
        )
        return
    yield judged(
        "vllm",
        not asked.missing,
        f"{version} in {python} (Python {shown}, torch {asked.torch})"
        if not asked.missing
        else f"{python} lacks {names(asked.missing)}, which Baton's sampler needs",
        f"{python} -m pip install {' '.join(asked.missing)}",
    )


def _reason(error: BaseException) -> str:
    """Return why an interpreter did not answer, without the text of the program that it ran."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr or "").strip().splitlines()
        return f"it ended with status {error.returncode}{f' ({lines[-1]})' if lines else ''}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it did not answer within {error.timeout:g} s"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def settings(config: Config, has_gpus: bool) -> Iterator[Check]:
    """Check settings that vLLM does not support, or that have not been run with it.

    Args:
        has_gpus: the workers compute on GPUs.
    """
    mode, num_ranks = config.router.mode, config.engine.tensor_parallel
    if mode == "aggregated" or (num_ranks == 1 and not has_gpus):
        return
    yield Check(
        "vllm and router.mode",
        "warn",
        f"router.mode is {mode}, and "
        + (
            f"vLLM workers with several ranks (engine.tensor_parallel is {num_ranks}) exchange no KV"
            if num_ranks > 1
            else "KV transfer between vLLM workers has not been run on GPUs"
        ),
        "set router.mode to aggregated (BATON_ROUTER_MODE) and the prefill pool to 0 workers, which would serve "
        "nothing",
    )


@cache
def environment(python: str) -> Environment | None:
    """Return the properties of an interpreter's environment; None: the interpreter does not report them."""
    try:
        command = (python, "-I", "-c", _ASK)
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=ASKING_S, check=True, stdin=subprocess.DEVNULL
        )
        said = json.loads(answer.stdout)
        return Environment(tuple(said["python"]), said["torch"], said["cuda"], tuple(said["missing"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def cuda_of(python: str) -> str:
    """Return the CUDA version that vLLM's torch is built for; empty: a CPU build, or it is unknown."""
    asked = environment(python)
    return asked.cuda if asked else ""
