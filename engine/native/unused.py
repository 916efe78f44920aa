"""Removes cached files that have not been used for a month: libraries of former sources, weights of models once tried.

The modification time of a file is the time of its last use: a process sets it before it opens the file. It holds a
shared lock on the file meanwhile, and the removal an exclusive one, so the two cannot interfere.
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
"""Seconds after which an unused file is removed: a month."""


def claim(path: Path) -> bool:
    """Mark a file as used now, so that it is kept for a month. Return whether it exists.

    If it cannot be marked, because the folder is read-only or the file is root's, its time stays as it is.

    Raises:
        ForeignFile: another user may have written it.
        OSError: it cannot be read.
    """
    try:
        with open_own(path) as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)
                os.utime(file.fileno())
            return path.exists()  # it may have been removed before the lock was acquired
    except FileNotFoundError:
        return False


def remove_unused(folder: Path, names: re.Pattern[str], now_s: float) -> None:
    """Remove the files of a folder that have not been used for a month.

    Args:
        names: pattern of the names of files that may be removed; links, folders and all others are kept.
        now_s: seconds since the epoch.
    """
    for path in folder.iterdir():
        if names.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):  # another user's file, or claimed at this moment
                _remove_if_unused(path, now_s)


def _remove_if_unused(path: Path, now_s: float) -> None:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if now_s - os.fstat(file.fileno()).st_mtime > UNUSED_S:
            path.unlink()
            logger.info("removed %s, which has not been used for a month", path)
