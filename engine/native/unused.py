"""Removes what nobody has used for a month from a cache: libraries of former sources, weights of models once tried.

The time of a file's last change says when it was last used: who is about to open it sets it. The two do not meet: the
one holds a shared lock on the file while it does so, the other an exclusive one while it looks and removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from pathlib import Path

from baton.own_files import open_own

logger = logging.getLogger(__name__)
UNUSED_S = 30 * 24 * 3600
"""Seconds after which a file that nobody has used is removed: a month."""


def claim(path: Path) -> bool:
    """Marks a file as used now, so that it stays for a month, and returns whether it is there.

    Where it cannot be marked, since the folder is read-only or the file is root's, it is as old as before.

    Raises:
        ForeignFile: another user may have written it.
        OSError: it may not be read.
    """
    try:
        with open_own(path) as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)
                os.utime(file.fileno())
            return path.exists()  # it may have been removed before it was locked
    except FileNotFoundError:
        return False


def remove_unused(folder: Path, names: re.Pattern[str], now_s: float) -> None:
    """Removes the files of a folder that nobody has used for a month.

    Args:
        names: pattern of the names of those that may go; links, folders and whatever else is there stays.
        now_s: seconds since the epoch.
    """
    for path in folder.iterdir():
        if names.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):  # another user's, or claimed at this moment
                _remove_if_unused(path, now_s)


def _remove_if_unused(path: Path, now_s: float) -> None:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if now_s - os.fstat(file.fileno()).st_mtime > UNUSED_S:
            path.unlink()
            logger.info("removed %s, which nobody has used for a month", path)
