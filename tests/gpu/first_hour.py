"""What a GPU says of Baton, within a budget of time: what proves most a second comes first.

    python tests/gpu/first_hour.py --budget 540          one line of JSON for each check as it ends, and a table last
    python tests/gpu/first_hour.py --list                the checks in their order, what they cost, and what they prove
    python tests/gpu/first_hour.py --only speed ipc      these alone
    python tests/gpu/first_hour.py --rehearse            on a CPU, in small

Needs the six packages that `tests/gpu/README.md` names: no model, no network, no gRPC. That page says what each figure
should be and what a failure means.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvstore.transfer.transport.nccl_log import private_log
from tests.gpu.hour.checks import REHEARSAL, Group, run_here
from tests.gpu.hour.running import Line, Processes, Run, machine, scratch, table
from tests.gpu.hour.settings import child_environment
from tests.gpu.hour.table import CHECKS

ROOT = Path(__file__).resolve().parents[2]
HARNESS: Group = "harness"
"""Checks of the harness itself, of which all but the last fail: they run if they are named."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="for all together (540)")
    parser.add_argument("--group", nargs="+", choices=get_args(Group), default=[], help="checks of these groups alone")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=[], metavar="NAME", help="these checks alone")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write everything into one file of JSON, too")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in small")
    parser.add_argument("--check", choices=CHECKS, metavar="NAME", help="run one check in this process")
    args = parser.parse_args()
    groups = args.group or [group for group in get_args(Group) if group != HARNESS or args.only]
    chosen = [each for each in CHECKS.values() if each.group in groups and each.name in (args.only or CHECKS)]
    if args.list:
        for each in chosen:
            print(f"{each.group:7} {each.name:24} {each.cost_s:4g} s  {each.proves}")
        return 0
    if args.check:
        run_here(CHECKS[args.check])
    if args.rehearse:
        os.environ[REHEARSAL] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a model in shared memory goes, too
    began = time.time()
    with private_log() as log, scratch() as folder:
        found = machine()
        run = Run(
            args.budget - (time.time() - began), Processes({**child_environment(), **log, "TMPDIR": folder}), found
        )
        try:
            run.run(chosen)
        finally:
            if args.report is not None:
                args.report.write_text(json.dumps(report_of(run.lines, found, args, began), indent=1) + "\n")
    print(table(run.lines))
    return 1 if any(line["status"] == "fail" for line in run.lines) else 0


def report_of(lines: list[Line], found: Line, args: argparse.Namespace, began: float) -> Line:
    """Returns what there is to say of a run, as an issue takes it."""
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "commit": asked.stdout.strip(),
        "budget_s": args.budget,
        "seconds": round(time.time() - began, 1),
        "rehearsal": args.rehearse,
        "machine": found,
        "checks": lines,
    }


if __name__ == "__main__":
    sys.exit(main())
