"""`python -m tests.bench`: every benchmark, or those named with --only."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench.report import Report, as_json, show
from tests.bench.stats import OtherWork, machine

BENCHMARKS = (
    "adapters",
    "any_precision",
    "autoscale",
    "bookkeeping",
    "commands",
    "engine",
    "kv_transfer",
    "kv_dtypes",
    "leases",
    "members",
    "memory",
    "models",
    "overload",
    "permits",
    "placement",
    "recovery",
    "router",
    "routing",
    "sampling",
    "speculation",
    "threads",
)
ON_REQUEST = ("simulator", "vllm")
"""The first needs a machine that nobody else uses, the second an environment with vLLM; run with --only."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Ratios in one run on this machine.")
    parser.add_argument(
        "--only", action="append", choices=BENCHMARKS + ON_REQUEST, help="run this one; may be repeated"
    )
    parser.add_argument(
        "--part", action="append", metavar="PART", help="of those that --only names, this part; may be repeated"
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
    benchmarks = {name: importlib.import_module(f"tests.bench.{name}") for name in names}
    for name, benchmark in benchmarks.items() if options.part else ():
        known = getattr(benchmark, "PARTS", ())
        if unknown := set(options.part) - set(known):
            parser.error(f"{name} has no part {', '.join(sorted(unknown))}; it has {', '.join(known) or 'none'}")
    arguments = {"parts": options.part} if options.part else {}
    reports = [_run(benchmark.run, console, quick=options.quick, **arguments) for benchmark in benchmarks.values()]
    if options.json:
        result = {"started": started, "machine": machine(), "quick": options.quick}
        options.json.write_text(json.dumps({**result, "benchmarks": [as_json(r) for r in reports]}, indent=1) + "\n")


def _run(run: Callable[..., Report], console: Console, **arguments: Any) -> Report:
    start = time.monotonic()
    with OtherWork() as others:
        report = run(**arguments)
    report.seconds = time.monotonic() - start
    report.other_work_cores = others.cores
    show(report, console)
    return report


if __name__ == "__main__":
    main()
