"""Reader of small untrusted files, such as a model's configuration.

Such a file may be a pipe that never ends, be longer than the memory, or hold a document that takes a hundred times its
size once it is parsed. So its kind and its size are checked before it is read, and the number of its parts before it is
parsed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 16 * 2**20
MAX_PARTS = 1_000_000
"""Maximum number of values in a document. The longest known list of a checkpoint's tensors has a tenth of them."""
MAX_DEPTH = 64
LFS_POINTER = b"version https://git-lfs"
"""Start of a Git LFS pointer: a small text in place of a large file that has not been fetched."""
NOT_FETCHED = "it is a pointer of Git LFS, whose file was not fetched: run `git lfs pull` in the folder"
SURROGATE = (b"\\ud", b"\\uD")


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, without waiting if it is a pipe.

    Raises:
        OSError: it does not exist, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_plain(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the contents of a file.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `most` bytes.
    """
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"it has more than {most:,} bytes")
    return content


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON document.

    Raises:
        ValueError: it is a Git LFS pointer, is not valid JSON in UTF-8, has more than `MAX_PARTS` parts, or more than
            `MAX_DEPTH` levels.
    """
    if content.startswith(LFS_POINTER):
        raise ValueError(NOT_FETCHED)
    if sum(content.count(mark) for mark in (b"[", b"{", b",")) > MAX_PARTS:
        raise ValueError(f"it has more than {MAX_PARTS:,} parts")
    try:
        value = json.loads(content.decode())
    except RecursionError:
        raise ValueError(f"it has more than {MAX_DEPTH} levels") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise ValueError(f"it has more than {MAX_DEPTH} levels")
    if any(mark in content for mark in SURROGATE):
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded: a ValueError
    return value


def _inside(value: Any) -> Any:
    match value:
        case dict():
            return value.values()
        case list():
            return value
    return ()
