"""Output of a child process of `baton up`: all of it goes to a file, and its log lines also to the terminal.

Tracebacks and the output of libraries are only in the file, because they would hide the log lines on a terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

from baton.config import ClusterConfig
from baton.own_files import make_own
from baton.visible import in_line
from deploy.models import cache_dir, own_part
from deploy.processes import last_line

FOLLOW_S = 0.1
LOGS = "logs"
"""Folder in the cache for the logs."""
KEPT = 10
"""Number of log folders that are kept."""
LOG_LINE = re.compile(
    r'(\(\S+ pid=\d+[^)]*\) |\[[^\]\s]+\] )?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \d+ |\{"timestamp": )'
)
"""Start of a log line (`baton.telemetry.logs`). The node process or Ray prefixes a worker's lines with its id."""


def log_folder(cluster: ClusterConfig) -> Path:
    """Create the folder for the logs of this process's children, and remove the oldest folders of ended processes."""
    logs = own_part(cache_dir(cluster), LOGS)
    make_own(logs)
    made = logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    made.mkdir(mode=0o700)  # lines name tenants, requests and addresses
    ended = [path for path in sorted(logs.iterdir()) if not _is_running(path.name.rpartition("-")[2])]
    for path in ended[: -KEPT + 1]:
        shutil.rmtree(path, ignore_errors=True)
    return made


class ChildLog:
    """Log file of one child, over all of its starts.

    Args:
        path: log file; created if it is missing, otherwise appended to.
        terminal: stream on which log lines are shown; None: standard error.
        label: name that precedes each line of text on the terminal, for one of several children of a kind; empty: none.
    """

    def __init__(self, path: Path, terminal: TextIO | None = None, label: str = "") -> None:
        self.path = path
        self._prefix = f"[{label}] " if label else ""
        self._terminal = terminal
        self._unread = 0
        self._rest = b""
        self._following: asyncio.Task[None] | None = None

    @property
    def last_words(self) -> str:
        """Last log line and path of the log file, as the end of a sentence."""
        line = last_line(self.path)
        return f"{': ' if line else ''}{line}; its log: {self.path}"

    def follow(self) -> None:
        """Show new log lines until `end` is called."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow(), name=f"log of {self.path.stem}")

    async def end(self) -> None:
        """Stop following, and show the remaining log lines."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
            self._following = None
            self.show_new()

    def show_new(self) -> None:
        """Show the log lines that were written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._unread)
                new = file.read()
        except OSError:
            return
        self._unread += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        terminal = self._terminal or sys.stderr
        for line in lines:
            text = line.decode(errors="replace")
            if LOG_LINE.match(text):
                prefix = "" if text.startswith("{") else self._prefix  # a JSON document stays one
                terminal.write(f"{prefix}{in_line(text)}\n")
        terminal.flush()

    async def _follow(self) -> None:
        while True:
            self.show_new()
            await asyncio.sleep(FOLLOW_S)


def log_of(folder: Path | None, name: str, label: str = "") -> ChildLog | None:
    """Return the log of a child process in the folder; None without a folder: the child writes to our own output."""
    return ChildLog(folder / f"{name}.log", label=label) if folder else None


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
