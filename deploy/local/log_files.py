"""What parts of a cluster on this machine write: `CACHE/logs/DATE-TIME-PID/PART.log`, a folder for each start."""

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
    """Returns the log of each part that a `baton up` of this machine has started; empty: none was.

    Args:
        cache: the folder in which its starts keep their logs.
        routers: the process ids of a cluster's routers. The `baton up` is the one that has started one of them; without
            any, it is the latest.
    """
    folders = sorted(path for path in own_part(cache, LOGS).glob("*") if path.is_dir())
    if routers:
        starters = {_parent(pid) for pid in routers}
        folders = [path for path in folders if path.name.rpartition("-")[2] in starters]
    return {path.stem: path for path in sorted(folders[-1].glob("*.log"))} if folders else {}


def _parent(pid: int) -> str:
    """The id of the process that has started another one; empty: there is none of that id here."""
    try:
        return str(psutil.Process(pid).ppid())
    except psutil.Error:
        return ""


def last_lines(path: Path, most: int) -> tuple[list[str], int]:
    """The last lines of a file, and its size in bytes with them."""
    with path.open("rb") as file:
        lines = deque(file, most)
        return [_text(line) for line in lines], file.tell()


def follow(path: Path, begin: int) -> Iterator[str]:
    """Lines that are written from now on, until the caller stops. A file that becomes shorter is read anew.

    Args:
        path: the file.
        begin: the number of bytes that are known.
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
