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
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "first_hour.py"
CHECKS = yaml.safe_load((ROOT / "tests" / "gpu" / "hour" / "checks.yaml").read_text())
FIELDS = {"slot", "check", "status", "seconds", "expected", "figures", "reason"}
PATIENCE_S = 280.0


def run(*arguments: str) -> list[dict[str, Any]]:
    """Runs it from another folder, as a user may, on a machine without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, timeout=PATIENCE_S)
    assert not done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_of_the_six_slots_ends_with_reasons_where_there_is_no_gpu() -> None:
    lines = run("--slot", *"123456")
    assert [(line["slot"], line["check"]) for line in lines] == [(c["slot"], c["name"]) for c in CHECKS if c["slot"]]
    assert all(line.keys() == FIELDS for line in lines)
    if torch.version.cuda is None:
        assert {line["status"] for line in lines} == {"not run"}
        assert all(line["reason"].endswith("is a build without CUDA") for line in lines)


def test_a_check_that_hangs_or_crashes_is_reported_and_stops_no_other() -> None:
    lines = {line["check"]: line for line in run("--slot", "0")}
    assert {name: line["status"] for name, line in lines.items()} == {
        "hang": "fail",
        "crash": "fail",
        "silent": "fail",
        "wrong": "fail",
        "absent": "not run",
        "well": "pass",
    }
    assert lines["hang"]["reason"] == "not through after its limit of 3 s"
    assert lines["crash"]["reason"] == "the process was ended by SIGSEGV"
    assert lines["silent"]["reason"] == "the process ended with 3 and said nothing"
    assert lines["wrong"]["reason"] == "ValueError: what was found is not what was looked for"
    assert "Traceback" in lines["wrong"]["figures"]["stderr"]
    assert lines["absent"]["reason"] == "there is nothing to look at"
    assert lines["well"]["figures"] == {"answer": 42}
    assert not list(left_behind())


def left_behind() -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        if "left by a check that hangs" in (process.info["cmdline"] or []):
            yield process


ONE_OF_EACH_SLOT = [
    "pair-nonblocking-eager", "death-stop-receiving", "attention", "handover-small", "decode-64", "remove-8b",
    "invariance-bfloat16",
]  # fmt: skip
"""The others differ in their arguments."""


@pytest.mark.parametrize(
    "checks", [["handover-small"], pytest.param(ONE_OF_EACH_SLOT, marks=pytest.mark.chaos)], ids=len
)
@pytest.mark.chaos
def test_what_says_something_on_a_cpu_is_right_there(checks: list[str]) -> None:
    lines = run("--rehearse", "--slot", *"123456", "--only", *checks)
    assert {line["check"]: (line["status"], line["reason"]) for line in lines} == dict.fromkeys(checks, ("pass", ""))


def test_a_slot_takes_less_than_ten_minutes_whatever_hangs() -> None:
    from tests.gpu.hour.running import SLOT_S

    assert SLOT_S < 600
    assert all(check["limit_s"] <= 300 for check in CHECKS)


def test_gaps_between_steps_are_no_idle_time_within_them() -> None:
    from tests.gpu.hour.speed import MARK, Span, figures_of

    mark, attending, other = f"at::cuda::{MARK}(long)", "attend_kernel", "Memcpy HtoD"
    spans = [
        Span(0.0, 50.0, "of a step before"),
        Span(50.0, 51.0, mark), Span(60.0, 70.0, other), Span(68.0, 90.0, attending), Span(95.0, 100.0, other),
        Span(150.0, 152.0, mark), Span(155.0, 165.0, attending), Span(166.0, 200.0, other),
    ]  # fmt: skip
    figures = figures_of(spans, reading_s=8e-6)
    assert figures["kernels_a_step"] == 2
    assert (figures["gap_us"], figures["longest_gap_us"]) == ((9.0 + 53.0) / 2, 53.0)
    assert figures["idle_in_step_us"] == (5.0 + 1.0) / 2
    assert figures["kernels_ms"] == round((35.0 + 44.0) / 2 / 1e3, 3)
    assert figures["attention_share"] == 0.5
