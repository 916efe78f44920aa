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
"""File that its owner holds locked; the lock ends with the owner, however that ends."""


@contextlib.contextmanager
def own_folder(parent: Path | None = None, *, stays: bool = False) -> Generator[Path]:
    """A folder of this process, which nobody else may look into. Folders that processes have left which have ended are
    removed first.

    Args:
        parent: by default the system's temporary folder.
        stays: whether it is left when the block ends, until the next one is made; otherwise it is gone then.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_left(parent)
    # Nobody looks into it before it is locked: it has another name until then.
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
