"""Runs pytest beside other tests, so that it takes only the processor time that they leave.

    python -m tests.support.aside PYTEST-ARGUMENTS

A nice value is enough where all processes compete in one group. Where Linux groups processes by session
(`sched_autogroup`), it counts only within a session, and each session that a test starts (`baton up`, the pods of the
test Kubernetes) competes as an equal. So pytest gets a session of its own, and all sessions below this process are
lowered as they appear; a little, as each competes with all else on the machine, whatever priority that has within its
own session. Priority is only ever lowered, which needs no permission.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

NICE = 10
"""A ninth of the share that what has priority gets: it steps back, and does not starve where others work as well."""
SESSION_NICE = 5
"""A third of that share for each session."""
LOOK_EVERY_S = 1.0


def main() -> int:
    os.nice(NICE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    lowered = {os.getsid(0)}
    with subprocess.Popen([sys.executable, "-m", "pytest", *sys.argv[1:]], start_new_session=True) as tests:
        try:
            while tests.poll() is None:
                lower_sessions(os.getpid(), lowered)
                time.sleep(LOOK_EVERY_S)
        finally:
            tests.terminate()
    return tests.returncode


def lower_sessions(pid: int, lowered: set[int]) -> None:
    """Lowers the sessions that this process's descendants lead, except for those in `lowered`, and adds them to it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(OSError):  # it has ended, was lowered just now, or groups are not by session here
                session = os.getsid(child.pid)
                if session not in lowered:
                    Path(f"/proc/{session}/autogroup").write_text(str(SESSION_NICE))
                    lowered.add(session)


if __name__ == "__main__":
    sys.exit(main())
