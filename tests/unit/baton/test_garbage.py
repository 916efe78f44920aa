"""What is loaded before a process serves costs the garbage collector nothing afterwards."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from baton.garbage import THRESHOLDS, keep_what_is_loaded

loaded = [[] for _ in range(100_000)]
cycle = []
cycle.append(cycle)
del cycle
keep_what_is_loaded()
kept = gc.get_freeze_count()
assert kept > 100_000, kept
assert len(gc.get_objects()) < 1000
assert gc.get_threshold() == THRESHOLDS
gc.unfreeze()
assert gc.collect() < 10, "a cycle was kept for good"
"""


def test_what_is_loaded_is_kept_and_garbage_is_not() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
