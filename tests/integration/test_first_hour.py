"""`tests/gpu/first_hour.py` without a GPU: it ends with reasons, and what says something on a CPU is tried there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.gpu.hour.table import CHECKS

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "first_hour.py"
BARE = ROOT / "tests" / "support" / "bare"
FIELDS = {"check", "status", "seconds", "expected", "figures", "reason"}
PATIENCE_S = 280.0


def run(*arguments: str, timeout_s: float = PATIENCE_S) -> list[dict[str, Any]]:
    """Runs it from another folder, as a user may, with the packages of a bare machine without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(BARE)}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, timeout=timeout_s)
    assert not done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_check_and_every_part_ends_with_a_reason_where_there_is_no_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    lines = run("--budget", "540", "--report", str(report))
    chosen = [check for check in CHECKS.values() if check.group != "harness"]
    assert {line["check"] for line in lines} == {name for check in chosen for name in (check.name, *check.parts)}
    assert len(lines) == sum(1 + len(check.parts) for check in chosen)
    assert all(line.keys() == FIELDS for line in lines)
    if torch.version.cuda is None:
        assert {line["status"] for line in lines} == {"not run"}
        assert all(line["reason"].endswith("is a build without CUDA") for line in lines)
    written = json.loads(report.read_text())
    assert written["checks"] == lines
    assert (written["budget_s"], written["rehearsal"], written["machine"]["gpus"]) == (540.0, False, [])


def test_a_check_that_hangs_or_crashes_is_reported_and_stops_no_other() -> None:
    lines = {line["check"]: line for line in run("--group", "harness")}
    assert {name: line["status"] for name, line in lines.items()} == {
        "hang": "fail",
        "crash": "fail",
        "silent": "fail",
        "half-first": "pass",
        "half-second": "not run",
        "half": "fail",
        "wrong": "fail",
        "slower": "fail",
        "absent": "not run",
        "well": "pass",
    }
    assert lines["hang"]["reason"] == "not through after its limit of 3 s"
    assert lines["crash"]["reason"] == "the process was ended by SIGSEGV"
    assert lines["silent"]["reason"] == "the process ended with 3 and said nothing"
    assert lines["half-first"]["figures"] == {"answer": 21}
    assert lines["half-second"]["reason"] == lines["half"]["reason"] == "the process ended with 4 and said nothing"
    assert lines["wrong"]["reason"] == "ValueError: what was found is not what was looked for"
    assert "Traceback" in lines["wrong"]["figures"]["stderr"]
    assert lines["slower"]["reason"] == "silently slower: attention is by torch: Triton is not installed"
    assert lines["absent"]["reason"] == "there is nothing to look at"
    assert lines["well"]["figures"] == {"answer": 42}
    assert not list(left_behind())


def left_behind() -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        if "left by a check that hangs" in (process.info["cmdline"] or []):
            yield process


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_what_says_something_on_a_cpu_is_right_there_with_six_packages() -> None:
    lines = {line["check"]: line for line in run("--rehearse", "--budget", "1500", timeout_s=1700.0)}
    rehearsed = [check for check in CHECKS.values() if check.rehearses and check.group != "harness"]
    found = {
        name: (lines[name]["status"], lines[name]["reason"])
        for check in rehearsed
        for name in (check.name, *check.parts)
    }
    assert found == dict.fromkeys(found, ("pass", ""))
