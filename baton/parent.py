"""Processes that must not outlive the one that started them.

As a script, this file becomes another program that ends with its parent (`deploy.processes.tied`):
`python -I -S parent.py PARENT SIGNAL IGNORED -- COMMAND...`, where IGNORED are the signals that the program ignores,
separated by commas. It imports only the standard library, and takes 15 ms.

A `preexec_fn` would do the same without a process in between, but not safely: after a fork the locks of a process with
threads (gRPC's, OpenMP's) are in the state in which those threads held them, and children died of segmentation faults.
Without one, subprocess needs no fork (it uses vfork).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_RUN = 127
"""Exit status of the script if the command could not be run, as in a shell."""


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make this process receive the signal when its parent, `parent`, dies for any reason.

    Linux ties this to the *thread* that started this process, so that thread must live as long as the parent. Other
    systems do not support this.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def _become(parent: str, number: str, ignored: str, _separator: str, *command: str) -> None:
    die_with(int(parent), signal.Signals(int(number)))
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and a program would inherit that
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    for each in filter(None, ignored.split(",")):
        signal.signal(int(each), signal.SIG_IGN)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(NOT_RUN)


if __name__ == "__main__":
    _become(*sys.argv[1:])
