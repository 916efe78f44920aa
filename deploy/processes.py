"""Child processes: the command that runs one, how it ends with its parent, what it reports, and its exit statuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable

from baton.parent import die_with

FENCED = 75
"""Exit status of a worker whose id belongs to a newer incarnation."""
UNJOINED = 69
"""Exit status of a controller that could not join its Ray cluster, or whose state file another controller holds. It has
touched no worker; an earlier controller may have left some."""
APART = 0
"""The argument `process_group` of a child that a terminal's Ctrl-C does not reach. It stays in our session: where Linux
schedules by session (`sched_autogroup`), a busy session holds small ones up, Redis' answers for up to a second."""
STABLE_S = 5.0
"""A process that ran for longer than this counts as started: its end is no failure to start."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a process of its own, by this Python.

    Without -P the working folder would come first of all where modules are looked for: a user's `router.py` would run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """A `preexec_fn` for subprocess.Popen: the child gets this signal when this process dies (`baton.parent`).

    None where there is no such thing.
    """
    if sys.platform != "linux":
        return None
    parent = os.getpid()
    return lambda: die_with(parent, number)


def writes_beside(before_exec: Callable[[], None] | None) -> Callable[[], None]:
    """A `preexec_fn` for a child in a process group of its own that writes to our terminal; calls another one first.

    The child ignores SIGTTOU, with which the kernel would stop it at its first line after `stty tostop`.
    """

    def run() -> None:
        if before_exec is not None:
            before_exec()
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    return run


def tell_parent(ready_fd: int, **values: object) -> None:
    """Reports to the parent: one line of JSON on an inherited descriptor, for which the parent waits."""
    with os.fdopen(ready_fd, "w") as reports:
        reports.write(json.dumps(values) + "\n")


def why_taken(host: str, port: int) -> str:
    """The reason why no process can listen on the port now; empty when it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
