"""What parts of a cluster on this machine write: `CACHE/logs/DATE-TIME-PID/PART.log`, a folder for each start."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.3


def log_files(cache: Path) -> dict[str, Path]:
    """The log of each part that the latest `baton up` has started; empty: none was."""
    folders = sorted(path for path in (cache / "logs").glob("*") if path.is_dir())
    return {path.stem: path for path in sorted(folders[-1].glob("*.log"))} if folders else {}


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
