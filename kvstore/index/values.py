"""Numbers and texts in the store, checked when they are read."""

from __future__ import annotations

import re

MAX_EPOCH = 2**42
"""Largest epoch, in milliseconds since 1970: the year 2109."""
MAX_SEQ = 2**53 - 1
"""Largest seq; beyond it Lua's numbers are not exact."""
MAX_NUMBER_BYTES = 16
"""Maximum digits of a number."""
MAX_NAME_BYTES = 256
"""Longest id of a worker or router, or name of a pool, in bytes."""
MAX_TEXT = 2**15
"""Longest address or finding of a self-check, in characters."""
MAX_LABEL = 64
"""Longest name of an engine or a sampler, in characters."""
_LABEL = re.compile(rf"[\w.+/:-]{{0,{MAX_LABEL}}}", re.ASCII)
_NATURAL = re.compile(rf"[0-9]{{1,{MAX_NUMBER_BYTES}}}".encode())


def natural(found: object, most: int) -> int:
    """Decode a number; raises ValueError unless the bytes are digits of a number from 0 to `most`."""
    if not isinstance(found, bytes) or not _NATURAL.fullmatch(found) or int(found) > most:
        raise ValueError(f"{found!r:.100} is not a number from 0 to {most}")
    return int(found)


def text(found: bytes) -> str:
    """Decode a name; raises ValueError unless the bytes are one."""
    if not 0 < len(found) <= MAX_NAME_BYTES:
        raise ValueError(f"a name has 1 to {MAX_NAME_BYTES} bytes, this one {len(found)}")
    return found.decode()


def label(found: object) -> str:
    """Return the name of an engine or a sampler, or an empty one; raises ValueError unless it has a name's form."""
    if not isinstance(found, str) or not _LABEL.fullmatch(found):
        raise ValueError(f"{found!r:.100} is no name of at most {MAX_LABEL} letters, digits and _ . + / : -")
    return found
