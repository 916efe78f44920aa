"""The environment in which vLLM is installed, for tests with the mark `vllm`."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import pytest

GIVEN = "BATON_TEST_VLLM_PYTHON"
"""Variable with the interpreter of an environment that has a supported vLLM. `make test-vllm` sets it."""
KEPT = "TEST_VLLM_PYTHON"
"""Variable that has it during the tests: Baton refuses variables with its own prefix that are not settings."""


def keep_vllm_python(environ: MutableMapping[str, str] = os.environ) -> None:
    """Move the interpreter to a variable that processes of Baton accept. Processes of xdist inherit that one."""
    if python := environ.pop(GIVEN, ""):
        environ[KEPT] = python


def vllm_python() -> str:
    """Return the interpreter of an environment that has vLLM; skip the test if none is given."""
    python = os.environ.get(KEPT, "")
    if not python:
        pytest.skip(
            f"needs an environment with vLLM, 3 GB: run `make test-vllm`, or set {GIVEN} to the interpreter of yours"
        )
    return python


def is_left_out(marks: set[str], expression: str) -> bool:
    """Return whether a run leaves a test out because it needs vLLM, which the run's selection does not name.

    Args:
        marks: names of the test's marks.
        expression: the run's selection by marks (`-m`); empty: it has none, and the test says what it needs.
    """
    return "vllm" in marks and bool(expression) and "vllm" not in expression
