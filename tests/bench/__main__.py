"""`python -m tests.bench`: every benchmark, or those named with --only."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path

from rich.console import Console

from tests.bench.report import Report, as_json, show
from tests.bench.stats import OtherWork, machine

BENCHMARKS = (
    "autoscale",
    "bookkeeping",
    "engine",
    "handover",
    "kv_dtypes",
    "overload",
    "placement",
    "recovery",
    "router",
    "routing",
    "sampling",
    "speculation",
)
ON_REQUEST = ("simulator",)
"""Needs a machine that nobody else uses; run with --only."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Ratios in one run on this machine.")
    parser.add_argument(
        "--only", action="append", choices=BENCHMARKS + ON_REQUEST, help="run this one; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter ones: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    # Before torch is imported. Two contended threads can be 40 times slower than one, and workers run with one.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # as in tests/conftest.py

    names = options.only or BENCHMARKS
    console = Console(width=None if os.isatty(1) else 160)
    started = time.strftime("%Y-%m-%d %H:%M")
    console.print(f"{started}  {machine()}  load average {os.getloadavg()[0]:.2f}", highlight=False)
    console.print("medians \\[min–max] of the rounds; ratios and differences are taken within a round\n", style="dim")
    reports = [_run(name, options.quick, console) for name in names]
    if options.json:
        result = {"started": started, "machine": machine(), "quick": options.quick}
        options.json.write_text(json.dumps({**result, "benchmarks": [as_json(r) for r in reports]}, indent=1) + "\n")


def _run(name: str, quick: bool, console: Console) -> Report:
    start = time.monotonic()
    with OtherWork() as others:
        report: Report = importlib.import_module(f"tests.bench.{name}").run(quick)
    report.seconds = time.monotonic() - start
    report.other_work_cores = others.cores
    show(report, console)
    return report


if __name__ == "__main__":
    main()
