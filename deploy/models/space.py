"""How a full disk shows in the words of others: pip's, or a library's that has no errno."""

from __future__ import annotations

import errno
import os

FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def is_full(text: str) -> bool:
    """Whether a message says that there is no space: on the disk, in a quota, or within a process's limit."""
    return any(words in text for words in FULL)
