"""Files and folders that no other user of this machine can have written, for loaded code and trusted data.

A cache that several users share, or a folder below one that all may write to, may hold a file that another user has put
under the expected name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0


class ForeignFile(PermissionError):
    """Another user of this machine owns the file, or may have written it."""


@contextmanager
def open_own(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; it stays the checked file even if its path changes later.

    Raises:
        ForeignFile: another user may have written it, or it is a link or not a regular file.
        OSError: it does not exist, or may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ForeignFile(f"{path} is a link") from None
        raise
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise ForeignFile(f"{path} is not a regular file")
        _require_own(path, state)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def make_own(folder: Path) -> None:
    """Create a folder that only this user can write to. An own folder that others may write to is closed to them.

    Raises:
        ForeignFile: it exists, and belongs to another user, or belongs to root and others may write to it, or is a
            link.
        OSError: it cannot be created.
    """
    with suppress(FileExistsError):
        folder.mkdir(parents=True, mode=0o755)
    state = folder.lstat()
    if stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and state.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(state.st_mode) & ~OTHERS_WRITE)
        state = folder.lstat()
    _require_own_folder(folder, state)


def why_foreign(folder: Path) -> str:
    """Return why `make_own` would reject an existing folder; empty: it would not, or there is none."""
    try:
        state = folder.lstat()
        if state.st_uid == os.geteuid() and not stat.S_ISLNK(state.st_mode):
            return ""
        _require_own_folder(folder, state)
    except ForeignFile as error:
        return str(error)
    except OSError:
        pass
    return ""


def close_to_others(folder: Path) -> None:
    """Remove other users' write permission from a folder of this user and from the files in it. Raises OSError."""
    for path in (folder, *folder.iterdir()):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS_WRITE)


def _require_own_folder(folder: Path, state: os.stat_result) -> None:
    if stat.S_ISLNK(state.st_mode):
        raise ForeignFile(f"{folder} is a link")
    if not stat.S_ISDIR(state.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    _require_own(folder, state)


def _require_own(path: Path, state: os.stat_result) -> None:
    if state.st_uid not in (ROOT, os.geteuid()):
        raise ForeignFile(f"{path} belongs to user {state.st_uid}, and this process runs as {os.geteuid()}")
    if state.st_mode & OTHERS_WRITE:
        raise ForeignFile(f"others may write to {path} (its mode is {stat.S_IMODE(state.st_mode):04o})")
