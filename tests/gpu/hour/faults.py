"""The harness itself. Checks that hang, crash, raise and say nothing, and one after them that is well."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

from tests.gpu.hour.checks import FALLBACKS, Found, NotRun, judged, report_part


def hang() -> Found:
    """Hangs beside a process of its own, which has to end with it."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "left by a check that hangs"])
    time.sleep(3600)
    return judged(True)


def crash() -> Found:
    ctypes.string_at(0)
    return judged(True)


def silent() -> Found:
    os._exit(3)


def wrong() -> Found:
    raise ValueError("what was found is not what was looked for")


def absent() -> Found:
    raise NotRun("there is nothing to look at")


def well() -> Found:
    return judged(True, answer=42)


def half() -> Found:
    """Reports a part, and ends before the other."""
    report_part("half-first", lambda: judged(True, answer=21))
    os._exit(4)


def slower() -> Found:
    """Finds what it should, with a runner that was given a slower way."""
    FALLBACKS.note(["attention is by torch: Triton is not installed"])
    return judged(True, answer=42)
