"""Files and folders that no other user of this machine can have written: what is loaded as code, or believed, is there.

A cache that several users share, or a folder below one that all may write to, may hold what somebody else has put under
the name that is expected.
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
    """Another user of this machine owns it, or may have written it."""


@contextmanager
def open_own(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to be read, which stays the one that was looked at whatever its path leads to later.

    Raises:
        ForeignFile: another user may have written it, or it is a link or no regular file.
        OSError: it is not there, or may not be read.
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
            raise ForeignFile(f"{path} is no regular file")
        _require_own(path, state)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def make_own(folder: Path) -> None:
    """Makes a folder in which this user alone writes. One of its own that others may write to is closed to them.

    Raises:
        ForeignFile: it is there, and is another user's, or root's and others may write to it, or it is a link.
        OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        folder.mkdir(parents=True, mode=0o755)
    state = folder.lstat()
    if stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and state.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(state.st_mode) & ~OTHERS_WRITE)
        state = folder.lstat()
    _require_own_folder(folder, state)


def why_foreign(folder: Path) -> str:
    """Returns why `make_own` would refuse a folder that is there; empty: it would not, or there is none."""
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
    """Takes the right to write to a folder of this user's, and to the files in it, from all others. Raises OSError."""
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
