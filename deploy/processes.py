"""Child processes: their commands, lifetime, reports to the parent, and exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from baton import parent

FENCED = 75
"""Exit status of a worker whose id belongs to a newer incarnation."""
UNJOINED = 69
"""Exit status of a controller that could not join its Ray cluster, or whose state file another controller holds. It has
changed no worker; an earlier controller may have left workers running."""
APART = 0
"""Argument `process_group` of a child that does not get the terminal's Ctrl-C. The child stays in this process's
session: if Linux schedules by session (`sched_autogroup`), a busy session delays small ones, and Redis' replies by up
to a second."""
TAIL_BYTES, MOST_CHARACTERS = 2**14, 500
"""Bytes at the end of a log that are searched for its last line, and maximum characters of that line that are shown."""
RAYS_OWN = (":actor_name:", ":job_id:", ":task_name:")
"""Prefixes of the lines with which Ray marks its workers' files."""
PLACES = ('File "', "Current thread", "Thread 0x", "Extension modules:", "<no Python frame>", "...")
"""Prefixes of the lines that `faulthandler` writes below the reason of a crash."""
STABLE_S = 5.0
"""A process that ran for longer than this counts as started: its exit is not a failed start."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a separate process with this Python.

    Without -P the working folder would be the first in the module search path: a user's `router.py` would run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def tied(
    command: Sequence[str], number: signal.Signals = signal.SIGKILL, ignored: Collection[signal.Signals] = ()
) -> list[str]:
    """Return a command that runs `command` such that it dies with this process (`baton.parent`).

    Args:
        command: program and arguments.
        number: signal that the program gets when this process, or the thread that started it, dies; Linux only.
        ignored: signals that the program ignores from its first instruction.
    """
    numbers = ",".join(str(int(each)) for each in ignored)
    wrapper = [sys.executable, "-I", "-S", parent.__file__, str(os.getpid()), str(int(number)), numbers, "--"]
    return [*wrapper, *command]


def tell_parent(ready_fd: int, **values: object) -> None:
    """Write one line of JSON to an inherited descriptor, on which the parent waits for it."""
    with os.fdopen(ready_fd, "w") as reports:
        reports.write(json.dumps(values) + "\n")


def last_line(log: Path) -> str:
    """Return the last meaningful line of a log, without its time and origin; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return last_line_of(file.read())
    except OSError:
        return ""


def last_line_of(output: bytes) -> str:
    """Return the last meaningful line of a process's output, without its time and origin; "" if there is none."""
    lines = output.decode(errors="replace").splitlines()
    said = (line.strip() for line in reversed(lines) if not line.strip().startswith((*RAYS_OWN, *PLACES)))
    found = next(filter(None, said), "")
    return re.sub(r"^\S+ \S+ [A-Z]+ \d+ [\w.]+: ", "", found)[:MOST_CHARACTERS]


def why_taken(host: str, port: int) -> str:
    """Return the reason why no process can listen on the port now; "" if it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
