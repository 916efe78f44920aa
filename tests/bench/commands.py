"""How long a `baton` command takes until it connects or has printed its help, against an interpreter that does nothing.

No router listens at the address that is asked, so what is measured ends where a command has tried to connect.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.bench.report import Report, Table
from tests.bench.stats import Spread, interleaved, spread

GATE_S = 0.5
NOTHING = "python -c pass"
NOWHERE = "--address 127.0.0.1:1"
COMMANDS = {
    NOTHING: ("-c", "pass"),
    **{
        f"baton {words}": ("-P", "-m", "deploy.cli", *words.split())
        for words in (
            "--version",
            "--help",
            "status --help",
            "generate --help",
            "up --help",
            f"status {NOWHERE}",
            f"generate Hello {NOWHERE}",
            f"requests {NOWHERE}",
            f"scale decode 2 {NOWHERE}",
            "config cluster",
        )
    },
}


def run(quick: bool) -> Report:
    num_rounds = 3 if quick else 15
    wall: dict[str, list[float]] = {name: [] for name in COMMANDS}
    cpu: dict[str, list[float]] = {name: [] for name in COMMANDS}
    _started(COMMANDS["baton --version"])  # the first one may write bytecode
    for name in interleaved(tuple(COMMANDS), num_rounds):
        wall_s, cpu_s = _started(COMMANDS[name])
        wall[name].append(wall_s)
        cpu[name].append(cpu_s)
    table = Table(f"Start of a command, {num_rounds} rounds", ("command", "CPU s", f"< {GATE_S}", "wall s"))
    for name in COMMANDS:
        table.rows.append((name, taken := spread(cpu[name]), _kept(taken), spread(wall[name])))
    return Report("commands", [table])


def _kept(taken: Spread) -> str:
    return "yes" if taken.median < GATE_S else "no"


def _started(words: tuple[str, ...]) -> tuple[float, float]:
    """Wall and CPU time of a process, in seconds."""
    began_s, cpu_s = time.perf_counter(), _children_cpu_s()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    subprocess.run([sys.executable, *words], capture_output=True, env=environment, check=False, timeout=60)
    return time.perf_counter() - began_s, _children_cpu_s() - cpu_s


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system
