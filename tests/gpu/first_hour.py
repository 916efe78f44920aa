"""The first hour on a GPU: six slots of checks, none longer than ten minutes.

    python tests/gpu/first_hour.py --slot 1              one line of JSON for each check, as soon as it is through
    python tests/gpu/first_hour.py --slot 1 2 3 4 5 6    one after the other
    python tests/gpu/first_hour.py --list
    python tests/gpu/first_hour.py --slot 0              the harness itself: only its last check is well

Needs torch, transformers, numpy, xxhash and pyyaml: no model, no network, no gRPC. `tests/gpu/README.md` says what each
figure should be and what a failure means. `--rehearse` tries on a CPU, in small, what says something there.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvstore.transfer.transport.nccl_log import private_log
from tests.gpu.hour.checks import REHEARSAL, run_here
from tests.gpu.hour.running import run_all
from tests.gpu.hour.settings import child_environment
from tests.gpu.hour.table import CHECKS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slot", type=int, nargs="+", choices=range(7), default=[], metavar="1..6")
    parser.add_argument("--check", default="", metavar="NAME", help="run one check in this process")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of the slots, these checks alone")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in small")
    args = parser.parse_args()
    if args.list:
        for check in CHECKS.values():
            print(f"{check.slot} {check.name:32} {check.limit_s:5g} s  {check.expected}")
        return 0
    if args.check:
        run_here(CHECKS[args.check])
    if not args.slot:
        parser.error("which slot?")
    if args.rehearse:
        os.environ[REHEARSAL] = "1"
    chosen = [check for check in CHECKS.values() if check.slot in args.slot]
    if args.only:
        chosen = [check for check in chosen if check.name in args.only]
    with private_log() as log:
        num_failed = run_all(chosen, child_environment() | log)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
