"""The logic of `tests/gpu/first_hour.py`: its budget, what its checks are made of, and what profiles say."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from engine.model.decode_graphs import graph_sizes
from tests.gpu.hour import running
from tests.gpu.hour.checks import Check, Fallbacks, Group, judged
from tests.gpu.hour.kernels import MARK, Span, figures_of
from tests.gpu.hour.speed import DECODES, GRAPH_SIZES, MAX_SEQS, Decode, gates_missed
from tests.gpu.hour.table import CHECKS

ROOT = Path(__file__).parents[2]
A_GPU = {"torch": "2.11", "cuda": "13.0", "gpus": ["a GPU"]}


class Taking(running.Processes):
    """Processes that take what they are said to, by a clock of their own."""

    def __init__(self, took_s: dict[str, float]) -> None:
        super().__init__({})
        self.now = 1000.0
        self.limits: dict[str, float] = {}
        self._took_s = took_s

    def run(self, check: Check, limit_s: float, on_part: running.OnPart) -> running.Line:
        self.limits[check.name] = limit_s
        self.now += min(limit_s, self._took_s[check.name])
        return {"status": "pass", "figures": {}, "reason": ""}


def a_check(name: str, cost_s: float, limit_s: float = 100.0, **more: Any) -> Check:
    return Check(name=name, group="timed", proves="", cost_s=cost_s, limit_s=limit_s, where="faults:well", **more)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_an_8b_model_is_timed_in_small_with_the_packages_of_a_bare_machine() -> None:
    """By a user's command, from another folder: all of it imports, is given what it takes, and prints."""
    script, bare = ROOT / "tests/gpu/first_hour.py", ROOT / "tests/support/bare"
    command = [sys.executable, str(script), "--rehearse", "--budget", "240", "--only", "machine", "speed:all"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(bare)}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, timeout=280)
    assert not done.stderr, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    names = [*CHECKS["speed:all"].parts, "speed:all"]
    assert [(line["check"], line["status"], line["reason"]) for line in lines] == [
        ("machine", "not run", "says nothing on a CPU"), *((name, "pass", "") for name in names),
    ]  # fmt: skip
    ahead = {line["figures"]["ahead"] for line in lines if line["check"].startswith("decode-")}
    assert ahead == {"6 of 6"}
    assert done.stdout.splitlines()[-1].startswith("speed:all                pass"), "a table comes last"


def test_what_does_not_fit_into_the_budget_is_named_and_what_does_runs() -> None:
    taking = Taking({"first": 30.0, "second": 200.0, "short": 5.0})
    out = io.StringIO()
    run = running.Run(100.0, taking, A_GPU, out, lambda: taking.now)
    long = a_check("long", 60.0, parts={"of-long": "a figure"})
    run.run([a_check("first", 30.0), a_check("second", 20.0, 45.0), long, a_check("short", 10.0, 50.0)])
    assert taking.limits == {"first": 100.0, "second": 45.0, "short": 25.0}, "no limit goes beyond what is left"
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines == run.lines
    assert [(line["check"], line["status"]) for line in lines] == [
        ("first", "pass"), ("second", "pass"), ("of-long", "not run"), ("long", "not run"), ("short", "pass"),
    ]  # fmt: skip
    assert lines[2]["reason"] == lines[3]["reason"] == "budget: 25 s were left, and it takes 60"
    assert "budget: 25 s" in running.table(lines)


def test_checks_that_are_right_or_wrong_run_beside_each_other_and_those_that_are_timed_alone() -> None:
    every: tuple[Group, ...] = get_args(Group)
    assert {group: running.num_beside(group, 16) for group in every} == dict.fromkeys(every, 1) | {"right": 4}
    assert [running.num_beside("right", num_cpus) for num_cpus in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert [check.name for check in CHECKS.values() if check.group == "memory"] == ["out-of-memory"]
    groups = list(dict.fromkeys(check.group for check in CHECKS.values()))
    assert groups == ["timed", "right", "memory", "last", "harness"]
    in_order = [check.group for check in CHECKS.values()]
    assert in_order == sorted(in_order, key=groups.index), "a group is in one piece"


def test_540_seconds_hold_what_is_timed_what_proves_most_and_the_memory() -> None:
    costs = {group: [check.cost_s for check in CHECKS.values() if check.group == group] for group in ("timed", "right")}
    assert sum(costs["timed"]) + sum(costs["right"][:16]) / 4 + CHECKS["out-of-memory"].cost_s < 540
    assert all(check.cost_s <= check.limit_s <= 300 for check in CHECKS.values())


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_calls_a_function_that_there_is_with_what_it_takes(name: str) -> None:
    check = CHECKS[name]
    module, _, function = check.where.partition(":")
    job = getattr(importlib.import_module(f"tests.gpu.hour.{module}"), function)
    assert len(inspect.signature(job).parameters) == bool(check.argument)
    assert check.proves
    assert bool(check.expected) or check.parts


def test_a_silent_fallback_fails_what_passed_and_a_wanted_one_does_not() -> None:
    fallbacks = Fallbacks()
    fallbacks.wanted.add("a sanitizer sees them once")
    fallbacks.note(["decode steps are no CUDA graphs: a sanitizer sees them once"])
    assert fallbacks.judge(judged(True, rate=1)) == judged(True, rate=1)
    fallbacks.note(["KV is copied by torch: Triton is not installed"])
    found = fallbacks.judge(judged(True, rate=1))
    assert (found.status, found.figures) == ("fail", {"rate": 1})
    assert found.reason == "silently slower: KV is copied by torch: Triton is not installed"
    assert fallbacks.judge(judged(False, "wrong bytes")).reason == "wrong bytes"


def test_graphs_that_are_left_out_are_none_that_a_step_of_the_check_needs() -> None:
    assert set(GRAPH_SIZES) <= set(graph_sizes(MAX_SEQS))
    assert {case.batch for case in DECODES.values()} == set(GRAPH_SIZES)


def test_gaps_between_steps_are_no_idle_time_within_them_and_kernels_are_of_three_kinds() -> None:
    marked, attending, product, other = f"at::cuda::{MARK}(long)", "attend_kernel", "nvjet_hsh_64x8", "Memcpy HtoD"
    spans = [
        Span(0.0, 50.0, "of a step before"),
        Span(50.0, 51.0, marked), Span(60.0, 70.0, product), Span(68.0, 90.0, attending), Span(95.0, 100.0, other),
        Span(150.0, 152.0, marked), Span(155.0, 165.0, attending), Span(166.0, 200.0, product),
    ]  # fmt: skip
    figures = figures_of(spans)
    assert figures["kernels_a_step"] == 2
    assert (figures["gap_us"], figures["longest_gap_us"]) == ((9.0 + 53.0) / 2, 53.0)
    assert figures["idle_in_step_us"] == (5.0 + 1.0) / 2
    assert figures["kernels_ms"] == round((35.0 + 44.0) / 2 / 1e3, 3)
    kinds = [figures[f"{kind}_ms"] for kind in ("products", "attention", "rest")]
    assert kinds == [round(us / 2 / 1e3, 3) for us in (10.0 + 34.0, 22.0 + 10.0, 5.0)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "products"),
        ("fmha_cutlassF_bf16_aligned_64x64_sm80", "attention"),
        ("combine", "attention"),
        ("add_norm", "rest"),
        ("rotate", "rest"),
    ],
)
def test_a_kernel_is_of_one_kind(name: str, kind: str) -> None:
    assert Span(0.0, 1.0, name).kind == kind


def test_gates_are_held_against_each_kind_of_kernel_by_itself() -> None:
    figures = {"products_share": 0.9, "attention_share": 0.8, "beyond_ms": 0.7}
    case = Decode(64, 4096, products=0.92, attention=0.85, rest_ms=0.6)
    assert gates_missed(case, figures) == [
        "products reach 0.9 of the device's rate, not 0.92",
        "attention reach 0.8 of the device's rate, not 0.85",
        "a step takes 0.7 ms beyond products and attention, not 0.6",
    ]
    assert not gates_missed(case, {"products_share": 0.92, "attention_share": 0.85, "beyond_ms": 0.6})
    assert not gates_missed(Decode(256, 512), figures), "figures alone"
