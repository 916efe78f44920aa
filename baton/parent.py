"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded beforehand: after a fork in a process with threads hardly anything may be done."""


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal when its parent, `parent`, dies, however it dies.

    Linux ties this to the *thread* that started this process, so that one has to live as long as the parent. Other
    systems have no such thing.
    """
    if _libc is None:
        return
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
