"""Turns of the workers of one Ray node: only a few of them load their model at the same time.

A turn is the lock of one of a few files. It ends when its process closes the file, or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from baton.own_files import make_own

KEPT_S = 86_400.0
"""Time without use after which the folder of a Ray node is removed."""
POLL_S = 0.2
"""Interval at which a worker tries to get a turn."""


def folder_of(node_id: str) -> Path:
    """Return the folder with the locks of a Ray node. A machine may have several."""
    return Path(tempfile.gettempdir()) / f"baton-turns-{os.getuid()}" / node_id


async def wait_for_turn(folder: Path, limit: int) -> BinaryIO:
    """Wait until fewer than `limit` processes have a turn. The caller's turn ends when it closes the returned file.

    Raises:
        OSError: the folder cannot be created, or belongs to another user.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_own(folder.parent)
    make_own(folder)
    os.utime(folder)
    _remove_unused(folder.parent)
    while True:
        for number in range(limit):
            file = (folder / str(number)).open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
            else:
                return file
        await asyncio.sleep(POLL_S)


def _remove_unused(parent: Path) -> None:
    """Remove the folders of Ray nodes that have ended. Another process may do the same."""
    for folder in parent.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
