"""Child processes: the command that runs one, how it ends with its parent, what it reports, and its exit statuses."""

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
touched no worker; an earlier controller may have left some."""
APART = 0
"""The argument `process_group` of a child that a terminal's Ctrl-C does not reach. It stays in our session: where Linux
schedules by session (`sched_autogroup`), a busy session holds small ones up, Redis' answers for up to a second."""
TAIL_BYTES, MOST_CHARACTERS = 2**14, 500
"""Bytes at a log's end in which its last line is looked for, and characters of it that are shown."""
RAYS_OWN = (":actor_name:", ":job_id:", ":task_name:")
"""Beginnings of lines by which Ray marks its workers' files."""
PLACES = ('File "', "Current thread", "Thread 0x", "Extension modules:", "<no Python frame>", "...")
"""Beginnings of what `faulthandler` writes below the line that says how a process crashed."""
STABLE_S = 5.0
"""A process that ran for longer than this counts as started: its end is no failure to start."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a process of its own, by this Python.

    Without -P the working folder would come first of all where modules are looked for: a user's `router.py` would run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def tied(
    command: Sequence[str], number: signal.Signals = signal.SIGKILL, ignored: Collection[signal.Signals] = ()
) -> list[str]:
    """The command that runs another one so that it ends with this process (`baton.parent`).

    Args:
        command: the program and its arguments.
        number: the signal that it gets when this process, or the thread that started it, dies. Linux alone has that.
        ignored: signals that it ignores from its first instruction.
    """
    numbers = ",".join(str(int(each)) for each in ignored)
    wrapper = [sys.executable, "-I", "-S", parent.__file__, str(os.getpid()), str(int(number)), numbers, "--"]
    return [*wrapper, *command]


def tell_parent(ready_fd: int, **values: object) -> None:
    """Reports to the parent: one line of JSON on an inherited descriptor, for which the parent waits."""
    with os.fdopen(ready_fd, "w") as reports:
        reports.write(json.dumps(values) + "\n")


def last_line(log: Path) -> str:
    """Returns the last line that says something in a log, without its time and origin; empty: there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = (line.strip() for line in reversed(lines) if not line.strip().startswith((*RAYS_OWN, *PLACES)))
    found = next(filter(None, said), "")
    return re.sub(r"^\S+ \S+ [A-Z]+ \d+ [\w.]+: ", "", found)[:MOST_CHARACTERS]


def why_taken(host: str, port: int) -> str:
    """The reason why no process can listen on the port now; empty when it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
