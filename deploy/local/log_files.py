"""Log files of a cluster's parts on this machine: `CACHE/logs/DATE-TIME-PID/PART.log`, one folder per start."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from deploy.local.child_log import LOGS
from deploy.models import own_part

POLL_S = 0.3


def log_files(cache: Path, routers: Collection[int] = ()) -> dict[str, Path]:
    """Return the log file of each part that one `baton up` on this machine has started; empty if there is none.

    Args:
        cache: cache folder, which contains the log folders.
        routers: process ids of a cluster's routers, which select the `baton up` that started one of them. Empty: select
            the latest one.
    """
    folders = sorted(path for path in own_part(cache, LOGS).glob("*") if path.is_dir())
    if routers:
        starters = {_parent(pid) for pid in routers}
        folders = [path for path in folders if path.name.rpartition("-")[2] in starters]
    return {path.stem: path for path in sorted(folders[-1].glob("*.log"))} if folders else {}


def _parent(pid: int) -> str:
    """Return the parent's id of a process; "" if no process here has this id."""
    try:
        return str(psutil.Process(pid).ppid())
    except psutil.Error:
        return ""


def last_lines(path: Path, most: int) -> tuple[list[str], int]:
    """Return the last `most` lines of a file, and the file's size in bytes up to their end."""
    with path.open("rb") as file:
        lines = deque(file, most)
        return [_text(line) for line in lines], file.tell()


def follow(path: Path, begin: int) -> Iterator[str]:
    """Yield new lines of a file until the caller stops. If the file becomes shorter, read it again from its start.

    Args:
        path: log file.
        begin: number of bytes at its start that are skipped.
    """
    rest = b""
    while True:
        size = path.stat().st_size
        if size < begin:
            begin, rest = 0, b""
        if size > begin:
            with path.open("rb") as file:
                file.seek(begin)
                new = file.read()
            begin += len(new)
            *lines, rest = (rest + new).split(b"\n")
            yield from map(_text, lines)
        else:
            time.sleep(POLL_S)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")
