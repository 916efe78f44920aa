"""The folder in which `baton up` has its sockets and its copy of a password, as long as it runs."""

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
def own_folder(parent: Path | None = None) -> Generator[Path]:
    """A folder of this process, gone when the block ends. Folders that killed ones have left are removed first.

    Args:
        parent: by default the system's temporary folder.
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
            shutil.rmtree(folder, ignore_errors=True)


def _remove_left(parent: Path) -> None:
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.getuid():
                continue
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
