"""Temporary folders that belong to one process: for sockets, a copy of a password, logs of libraries."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

PREFIX = "baton-"
LOCK = "in-use"
"""File that its owner keeps locked; the lock ends with the owner, however the owner ends."""


@contextlib.contextmanager
def own_folder(parent: Path | None = None, *, stays: bool = False) -> Generator[Path]:
    """Context manager: yield a private folder of this process. Removes folders of ended processes first.

    Args:
        parent: by default the system's temporary folder.
        stays: whether it stays after the context exits, until the next one is created; otherwise it is removed.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_left(parent)
    # No process checks it before it is locked: it has another name until then.
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    with (made / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(parent / made.name.removeprefix("."))
        try:
            yield folder
        finally:
            if not stays:
                shutil.rmtree(folder, ignore_errors=True)


def _remove_left(parent: Path) -> None:
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.getuid():
                continue
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
