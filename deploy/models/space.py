"""Detects a full disk in messages of pip, and of libraries without an errno."""

from __future__ import annotations

import errno
import os

FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def is_full(text: str) -> bool:
    """Return whether a message reports that there is no space: on the disk, in a quota, or within a process's limit."""
    return any(words in text for words in FULL)
